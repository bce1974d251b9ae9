"""Worker of test_grouped_experts: a step with experts one by one, and with grouped products.

    grouped_ranks.py WORK LAYOUT CASE...       rank 0 writes WORK/CASE.LAYOUT.json of each case

Both models have the same weights and records.  Each case names a family, and settings of
`SETTINGS`; its numbers are the largest gaps over all ranks, relative to the largest gradient.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from moerl.trainer.model import platform

PLACE = platform.prepare("cpu")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor  # noqa: E402

from moerl.config.lora_settings import LoraConfig  # noqa: E402
from moerl.config.schema import (  # noqa: E402
    Config,
    OptimizerConfig,
    ParallelConfig,
    ReplayConfig,
    TrainerConfig,
)
from moerl.layout import hf_shapes, model_spec  # noqa: E402
from moerl.records.blob_store import BlobStore  # noqa: E402
from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf  # noqa: E402
from moerl.trainer.learner.step import Learner  # noqa: E402
from moerl.trainer.model import grouped_experts, parallel  # noqa: E402
from moerl.trainer.model.adapted_layers import GradientHook  # noqa: E402
from moerl.trainer.model.gpt import build  # noqa: E402
from moerl.trainer.model.parallel import Parallel  # noqa: E402
from tests.helpers.layout_families import FAMILIES  # noqa: E402
from tests.helpers.patience import patience  # noqa: E402
from tests.helpers.trainer_support import OVERLAPPED, UNUSED_EXPERT, make_plan  # noqa: E402

LAYOUTS = {
    "one": {},
    "ep2": {"ep": 2, "dp": 2},
    "tp2-ep2": {"tp": 2, "ep": 2},
    "tp2-etp2": {"tp": 2, "etp": 2},
    "pp2-ep2": {"pp": 2, "dp": 2, "ep": 2},
    "cp2-ep2": {"cp": 2, "ep": 2},
}
# three layers of experts; the records route each of them to 2 of 8
CHANGE = {"num_hidden_layers": 4, "layer_types": None, "first_k_dense_replace": 0}
CHANGE |= {"moe_layer_start_index": 0, "moe_layer_end_index": 3}
MORE = {"deepseek_v3": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}}


@dataclass(frozen=True)
class Case:
    family: str = "qwen3_moe"
    trainer: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    replays: bool = True  # the records route to 2 experts
    one_unused: bool = False  # an expert without tokens
    kernel: str = ""  # a control, or a kernel as on Blackwell


_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform"}
_RECOMPUTE |= {"recompute_num_layers": 1}
CASES = {
    "plain": Case(),
    "bf16": Case(trainer={"dtype": "bf16"}),
    "unused": Case(one_unused=True),
    "recompute": Case(trainer={"megatron": _RECOMPUTE}),
    "packed": Case(trainer={"packing": True}),
    "allgather": Case(trainer={"dispatcher": "allgather"}),
    "overlapped": Case(trainer={"ddp": OVERLAPPED, "minibatches": 2}),
    "lora": Case(lora={"rank": 4, "alpha": 8.0}),
    "biases": Case(family="gpt_oss"),
    "shared": Case(family="deepseek_v3"),
    "weighed inputs": Case(family="llama4", replays=False),
    "blackwell": Case(one_unused=True, kernel="blackwell"),
    # controls
    "ends moved": Case(kernel="ends moved"),
    "unmasked": Case(one_unused=True, kernel="unmasked"),
    "no way to factors": Case(lora={"rank": 4, "alpha": 8.0}, kernel="no way to factors"),
}


def main() -> None:
    work, layout = Path(sys.argv[1]), sys.argv[2]
    ranks = parallel.start(ParallelConfig(**LAYOUTS[layout]), PLACE, timeout_s=patience(60))
    for name in sys.argv[3:]:
        folder = work / f"{name}.{layout}.{ranks.rank}"
        found = without_rows() if name == "no rows" else compare(CASES[name], folder, ranks)
        every: list[Any] = [None] * ranks.world_size
        dist.all_gather_object(every, found, group=ranks.control)
        if ranks.is_first:
            (work / f"{name}.{layout}.json").write_text(json.dumps(every))
    dist.barrier(ranks.control)


def compare(case: Case, folder: Path, ranks: Parallel) -> dict[str, float]:
    """Gaps of gradients and losses; equal: whether all gradients are equal bitwise."""
    write_model(case, folder)
    loop, loss = gradients(case, folder, ranks, grouped=False)
    with changed(case.kernel):
        found, other = gradients(case, folder, ranks, grouped=True)
    assert found.keys() == loop.keys(), "parameters keep their names"
    largest = max(float(value.abs().max()) for value in loop.values())
    gap = max(float((found[name] - want).abs().max()) for name, want in loop.items())
    assert largest > 0
    return {
        "gap": gap / largest,
        "loss": abs(other - loss) / max(abs(loss), 1e-9),
        "equal": all(torch.equal(found[name], want) for name, want in loop.items()),
    }


def without_rows() -> dict[str, float]:
    """A rank to which no token was sent: gradients are zeros of the right shapes."""
    x, ends = torch.zeros(0, 16, requires_grad=True), torch.zeros(3, dtype=torch.int32)
    weights = [torch.ones(24, 16, requires_grad=True) for _ in ends]
    y = grouped_experts._Product.apply(x, ends, *weights)
    y.sum().backward()
    right = y.shape == (0, 24) and x.grad.shape == x.shape
    return {"loss": 0.0, "equal": right and all(not weight.grad.any() for weight in weights)}


def write_model(case: Case, folder: Path) -> None:
    folder.mkdir()
    config = FAMILIES[case.family] | CHANGE | MORE.get(case.family, {})
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    shapes = hf_shapes(model_spec(config))
    tensors = {name: 0.15 * torch.randn(s) + ("norm" in name) for name, s in shapes.items()}
    save_file(tensors, folder / "model.safetensors")


def gradients(
    case: Case, folder: Path, ranks: Parallel, *, grouped: bool
) -> tuple[dict[str, Tensor], float]:
    """Of the batch after a step with it, by name, and a metric of the step."""
    settings = {"lr": 0.1, "min_lr": 0.1, "eps": 10.0, "distributed": "ddp" in case.trainer}
    optimizer = OptimizerConfig(**settings)
    trainer = TrainerConfig(parallel=ranks.sizes, optimizer=optimizer, **case.trainer)
    trainer = replace(trainer, packing=trainer.packing or ranks.sizes.cp > 1)
    place = replace(ranks.platform, grouped=grouped)
    lora, source = LoraConfig(**case.lora), HfFolder(str(folder))
    placed = replace(ranks, platform=place)
    model = build(source.spec, trainer, placed, with_replay=case.replays, lora=lora)
    kinds = {type(module) for module in model.gpt.modules()}
    assert (grouped_experts.GroupedExperts in kinds) is grouped
    load_hf(model.tensors, model.tiles, source)
    if case.lora:
        model.keep_base()
        torch.manual_seed(1)
        for factor in model.factors().values():
            factor.copy_(0.1 * torch.randn_like(factor))
        model.merge()
    store = BlobStore(folder / f"blobs{grouped}", "n0")
    replay = ReplayConfig() if case.replays else ReplayConfig(routing="off")
    learner = Learner(model, placed, Config(trainer=trainer, lora=lora, replay=replay), store)
    unused = UNUSED_EXPERT if case.one_unused else None
    plan = make_plan(store, dp_size=ranks.dp_size, unused_expert=unused)
    entropy = learner.step(plan)["loss/entropy"]
    learner.gradients(plan)
    named = [pair for chunk in model.chunks for pair in chunk.gpt.named_parameters()]
    found = {name: p.main_grad.float().clone() for name, p in named if p.requires_grad}
    return found, entropy


@contextmanager
def changed(how: str) -> Iterator[None]:
    """Rows of the next expert; on Blackwell, gradients of an expert without rows are not zero; the
    same without the mask; weights without a way to their factors.
    """
    right = grouped_experts.grouped_mm

    def moved(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        return right(a, b, offs=(offs + 1).clamp(max=int(offs[-1])))

    def blackwell(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        made = right(a, b, offs=offs)
        if made.dim() == 3:
            made[offs.diff(prepend=offs.new_zeros(1)) == 0] = 1.0
        return made

    def unmasked(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
        return blackwell(dy.t(), x, offs=ends)

    patches = {
        "": nullcontext(),
        "ends moved": patch.object(grouped_experts, "grouped_mm", moved),
        "blackwell": patch.object(grouped_experts, "grouped_mm", blackwell),
        "unmasked": patch.object(grouped_experts, "_by_expert", unmasked),
        "no way to factors": patch.object(GradientHook, "through_weight", lambda _, w: w),
    }
    with patches[how]:
        yield


if __name__ == "__main__":
    main()
