"""Worker of test_lora_routers: gradients of a router's factors under Keep Routing, from one rank.

    router_adapter_ranks.py --model DIR --work DIR

Prints a line of JSON: for each way to route, the largest gap between a gradient of the factors and
what the gradient of the whole weight gives, and between that gradient and the one with replay.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from moerl.trainer.model import platform

PLACE = platform.prepare("cpu")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from moerl.config.lora_settings import LoraConfig  # noqa: E402
from moerl.config.schema import Config, ModelConfig, ParallelConfig, ReplayConfig, TrainerConfig  # noqa: E402
from moerl.layout import hf_shapes  # noqa: E402
from moerl.layout.adapters import adapter_shapes  # noqa: E402
from moerl.records.blob_store import BlobStore  # noqa: E402
from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf  # noqa: E402
from moerl.trainer.learner.step import Learner  # noqa: E402
from moerl.trainer.model import parallel  # noqa: E402
from moerl.trainer.model.gpt import build  # noqa: E402
from tests.helpers.patience import patience  # noqa: E402
from tests.helpers.trainer_support import LAYERS, make_plan  # noqa: E402

LORA = LoraConfig(rank=4, alpha=8, targets=["*.mlp.gate"])


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--work"):
        parser.add_argument(name, type=Path, required=True)
    options = parser.parse_args()
    ranks = parallel.start(ParallelConfig(), PLACE, timeout_s=patience(60))
    store, folder = BlobStore(options.work / "blobs", "n0"), HfFolder(str(options.model))
    plan, found, replayed = make_plan(store, groups=2), {}, {}
    for routing in ("R3", "off"):
        adapted = make_learner(folder, ranks, store, routing, LORA)
        whole = make_learner(folder, ranks, store, routing, LoraConfig())
        for name, tensor in whole.model.tensors.items():
            tensor.data.copy_(adapted.model.tensors[name])
        for learner in (adapted, whole):
            learner.gradients(plan)
        by_layer = [gradients(adapted, whole, layer) for layer in range(LAYERS)]
        replayed = replayed or dict(enumerate(by_layer))
        found[routing] = {
            "gap": max(gap(own, want) for own, want in by_layer),
            "moved": max(gap(own, replayed[i][0]) for i, (own, _) in enumerate(by_layer)),
        }
    print(json.dumps(found))


def make_learner(
    folder: HfFolder, ranks: parallel.Parallel, store: BlobStore, routing: str, lora: LoraConfig
) -> Learner:
    config = Config(
        model=ModelConfig(path=str(folder.path)),
        trainer=TrainerConfig(),
        replay=ReplayConfig(routing=routing),
        lora=lora,
    )
    with_replay = routing != "off"
    model = build(folder.spec, config.trainer, ranks, with_replay=with_replay, lora=lora)
    load_hf(model.tensors, model.tiles, folder)
    model.keep_base()
    chance = torch.Generator().manual_seed(3)
    for adapters in model.adapters:
        shapes = adapter_shapes(hf_shapes(folder.spec), lora.rank_of)
        adapters.set_factors(
            {name: 0.2 * torch.randn(shape, generator=chance) for name, shape in shapes.items()}
        )
    return Learner(model, ranks, config, store)


def gradients(adapted: Learner, whole: Learner, layer: int) -> tuple[list[Tensor], list[Tensor]]:
    """(gradients of A and B, the same by the chain rule from the gradient of the weight)."""
    module = f"lora.model/layers/{layer}/mlp/gate"
    a, b = (adapted.model.gpt.get_parameter(f"{module}/lora_{x}") for x in "AB")
    dw = whole.model.gpt.decoder.layers[layer].mlp.router.weight.main_grad
    want = [LORA.scale * (b.detach().T @ dw), LORA.scale * (dw @ a.detach().T)]
    return [a.main_grad.clone(), b.main_grad.clone()], want


def gap(found: list[Tensor], want: list[Tensor]) -> float:
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(found, want, strict=True))


if __name__ == "__main__":
    main()
