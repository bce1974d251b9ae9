"""Gradients of one replayed step on two ranks against one rank, per family, in fp32.

Logits cannot see a gradient that is summed over the wrong ranks: two such faults of megatron-core's
local layer spec were found here (see moerl/trainer/model/family_modules.py).  Workers are
this file run as a program.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from moerl.layout import model_spec
from tests.helpers.layout_families import FAMILIES, MESHES, refusal, run
from tests.helpers.patience import patience

TOLERANCE = 1e-5  # of the largest gradient of the model
CHANGE = {
    "num_hidden_layers": 3,
    "layer_types": None,
    "first_k_dense_replace": 0,
    "moe_layer_start_index": 0,
    "moe_layer_end_index": 2,
}
# the synthetic records route every one of 3 layers to 2 of 8 experts
MORE = {"deepseek_v3": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}}
ROUTING = [  # in all 3 layers, and no sparse attention (its records are in test_replay_matrix)
    family
    for family, config in FAMILIES.items()
    if len(model_spec(config | CHANGE).moe_layers) == 3 and not model_spec(config).index_topk
]
CASES = [
    (family, mesh)
    for family in ROUTING
    for mesh in ("tp2-etp2", "tp2-ep2")
    if not refusal(family, MESHES[mesh])
]


def take_steps(work: Path, mesh: str) -> None:
    """Saves the gathered gradients of every family that this mesh can hold, and their norm."""
    from moerl.trainer.model import platform

    place = platform.prepare("cpu")
    import torch
    from safetensors.torch import save_file

    from moerl.config.schema import Config, OptimizerConfig, ParallelConfig, TrainerConfig
    from moerl.layout import hf_shapes
    from moerl.records.blob_store import BlobStore
    from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf
    from moerl.trainer.learner.step import Learner
    from moerl.trainer.model import parallel
    from moerl.trainer.model.gpt import build, live_tensors
    from tests.helpers.hf_gather import HfGather
    from tests.helpers.trainer_support import make_plan, replan

    ranks = parallel.start(ParallelConfig(**MESHES[mesh]), place, timeout_s=patience(60))
    optimizer = OptimizerConfig(lr=1.0, min_lr=1.0, eps=10.0, clip_grad=0.0, distributed=False)
    trainer = TrainerConfig(parallel=ranks.sizes, optimizer=optimizer)
    for family in sorted({f for f, m in CASES if mesh in (m, "tp1")}):
        config = FAMILIES[family] | CHANGE | MORE.get(family, {})
        folder = work / f"{family}.{mesh}.{ranks.rank}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        torch.manual_seed(0)
        shapes = hf_shapes(model_spec(config))
        tensors = {n: 0.15 * torch.randn(s) + ("norm" in n) for n, s in shapes.items()}
        save_file(tensors, folder / "model.safetensors")
        model = build(HfFolder(folder).spec, trainer, ranks, with_replay=True)
        load_hf(live_tensors(model.gpt), model.tiles, HfFolder(folder))
        learner = Learner(model, ranks, Config(trainer=trainer), BlobStore(folder / "blobs", "n0"))
        metrics = learner.step(replan(make_plan(learner.store), ranks.dp_size))
        bias = {n: t for n, t in model.gpt.named_buffers() if n.endswith("expert_bias")}
        grads = {name: param.main_grad for name, param in model.gpt.named_parameters()} | bias
        whole = HfGather(
            lambda grads=grads: grads,
            model.spec,
            ranks.sizes,
            ranks.rank,
            "local",
            ranks.control,
        ).gather()
        if whole is not None:
            whole["norm"] = torch.tensor(metrics["loss/grad_norm"])
            save_file(whole, work / f"{family}.{mesh}.grads")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    for mesh, axes in MESHES.items():
        run(str(folder), mesh, world=axes.get("tp", 1), program=__file__)
    return folder


@pytest.mark.full
@pytest.mark.parametrize(("family", "mesh"), CASES)
def test_two_ranks_have_the_gradients_of_one(work: Path, family: str, mesh: str) -> None:
    from safetensors.torch import load_file

    one, two = (load_file(work / f"{family}.{m}.grads") for m in ("tp1", mesh))
    largest = max(float(value.abs().max()) for name, value in one.items() if name != "norm")
    for name, want in one.items():
        gap = float((two[name] - want).abs().max())
        allowed = TOLERANCE * (float(want) if name == "norm" else largest)
        assert gap <= allowed, f"{name}: gradients differ by {gap:.1e}, largest is {largest:.1e}"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    take_steps(Path(sys.argv[1]), sys.argv[2])
