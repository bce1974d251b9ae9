"""Worker of test_dithered_layouts: optimizer steps of one size; rank 0 writes the bf16 weights.

    dithered_cast_ranks.py --model DIR --out FILE --settings JSON

settings: `parallel`, `rounding`, `distributed` (optimizer), `steps`, `lr`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from moerl.trainer.model import platform

PLACE = platform.prepare("cpu")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from moerl.config.schema import Config, OptimizerConfig, ParallelConfig, TrainerConfig  # noqa: E402
from moerl.layout import at, hf_shapes  # noqa: E402
from moerl.records.blob_store import BlobStore  # noqa: E402
from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf  # noqa: E402
from moerl.trainer.learner.optimizer import take_step  # noqa: E402
from moerl.trainer.learner.step import Learner  # noqa: E402
from moerl.trainer.model import parallel  # noqa: E402
from moerl.trainer.model.gpt import build  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--out", "--settings"):
        parser.add_argument(name, required=True)
    options = parser.parse_args()
    settings = json.loads(options.settings)
    ranks = parallel.start(ParallelConfig(**settings["parallel"]), PLACE, timeout_s=60)
    learner = make_learner(Path(options.model), ranks, settings)
    for _ in range(settings["steps"]):
        for ddp in learner.ddp:
            for param in ddp.parameters():
                param.main_grad.fill_(-1.0)  # Adam's step is the learning rate, everywhere
        take_step(learner.optimizer, "a test")
    whole = gather(learner)
    if ranks.is_first:
        torch.save(whole, options.out)
    dist.barrier()


def make_learner(folder: Path, ranks: parallel.Parallel, settings: dict) -> Learner:
    optimizer = OptimizerConfig(
        lr=settings["lr"],
        min_lr=settings["lr"],
        clip_grad=0.0,
        distributed=settings["distributed"],
        rounding=settings["rounding"],
    )
    trainer = TrainerConfig(dtype="bf16", parallel=ranks.sizes, optimizer=optimizer)
    source = HfFolder(folder)
    model = build(source.spec, trainer, ranks, with_replay=False)
    load_hf(model.tensors, model.tiles, source)
    learner = Learner(model, ranks, Config(trainer=trainer), BlobStore(folder / "none", "none"))
    learner.optimizer.reload_model_params()
    learner.schedule.step(1)
    return learner


def gather(learner: Learner) -> dict[str, torch.Tensor]:
    """By Hugging Face name; copies of one part must be equal."""
    model = learner.model
    mine = [
        (tile.hf, tile.hf_box, tensor.detach()[at(tile.box)].clone())
        for name, tensor in model.tensors.items()
        for tile in model.tiles[name].tiles
    ]
    every: list[list[tuple[str, tuple[range, ...], torch.Tensor]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    whole = {name: torch.full(shape, float("nan")) for name, shape in hf_shapes(model.spec).items()}
    for hf, box, value in (part for parts in every for part in parts):
        place = whole[hf][at(box)]
        value = value.float().view(place.shape)
        assert place.isnan().all() or torch.equal(place, value), f"copies of {hf}"
        place.copy_(value)
    return whole


if __name__ == "__main__":
    main()
