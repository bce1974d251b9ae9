"""A trainer's step on one GPU with megatron-core's local layers: replay, speed, memory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.helpers.device_figures import Figure
from tests.helpers.device_trainer import (
    BOTH,
    LARGE,
    NONE,
    TINY,
    differs_by,
    gradients_of,
    make_learner,
    make_plan,
    planned,
    seconds_of,
)

ROOT = Path(__file__).resolve().parents[2]
# In fp32 without TF32.  Sums on a GPU have another order; routes of other tokens give above 0.1.
NEAR = 1e-5
COMPARED = ("loss/total", "loss/entropy", "loss/grad_norm", "loss/grad_norm_router")
PRODUCT = 8192  # a square matrix product fills an H100


def test_speed_of_the_device(figure: Figure, tiny: bool) -> None:
    """What other figures are compared with: a bf16 product, and a copy in device memory."""
    size = 64 if tiny else PRODUCT
    a, b = torch.randn(2, size, size, device="cuda", dtype=torch.bfloat16)
    figure("bf16 product", 2 * size**3 / _seconds(lambda: a @ b) / 1e12, "TFLOP/s")
    figure("copy, read and written", 4 * a.numel() / _seconds(lambda: b.copy_(a)) / 1e9, "GB/s")
    host = torch.empty_like(a, device="cpu", pin_memory=True)
    seconds = _seconds(lambda: host.copy_(a, non_blocking=True))
    figure("copy to pinned memory", a.nbytes / seconds / 1e9, "GB/s")
    assert torch.equal(host, a.cpu())


def test_a_step_is_that_of_the_cpu(tmp_path: Path, figure: Figure) -> None:
    """Same weights and records, both replays: gradients of all parameters, and metrics."""
    file = tmp_path / "step.pt"
    command = [sys.executable, "-m", "tests.helpers.device_step", str(file)]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    subprocess.run(command, cwd=ROOT, env=hidden, check=True)
    want = torch.load(file)
    learner = make_learner(TINY, tmp_path, dtype="fp32")
    plan = make_plan(TINY, learner)
    with torch.no_grad():
        for name, parameter in learner.model.gpt.named_parameters():
            parameter.copy_(want["weights"][name])
    gradients, metrics = gradients_of(learner, plan), learner.step(plan)
    assert metrics["routing/replay_cover_frac"] == metrics["keep/cover_frac"] == 1.0
    worst = differs_by(gradients, want["gradients"])
    figure("gradients, from the CPU's", worst, "of a tensor's largest")
    for name in COMPARED:
        gap = abs(metrics[name] / want["metrics"][name] - 1)
        figure(f"{name}, from the CPU's", gap, "of it")
        assert gap <= NEAR, name
    assert worst <= NEAR


@pytest.mark.parametrize("replayed", ["none", "both"])
def test_step(replayed: str, tmp_path: Path, figure: Figure, tiny: bool) -> None:
    """Tokens a second, share of a matrix product's speed, and memory beside the dry run's."""
    size, replay = TINY if tiny else LARGE, NONE if replayed == "none" else BOTH
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    learner = make_learner(size, tmp_path, replay)
    plan = make_plan(size, learner)
    seconds_of(learner, plan, 1)  # makes the optimizer's state
    static = torch.cuda.memory_allocated() - before
    seconds, metrics = seconds_of(learner, plan, 1 if tiny else 3)
    if replay is BOTH:
        assert metrics["routing/replay_cover_frac"] == metrics["keep/cover_frac"] == 1.0
    tokens = size.tokens * size.rollouts
    product = _product_speed(64 if tiny else PRODUCT)
    figure("tokens", tokens / seconds, "tokens/s")
    share = size.flops() * tokens / seconds / product
    figure("share of a bf16 product's speed", 100 * share, "%")
    said, peak = planned(size), torch.cuda.max_memory_allocated() - before
    figure("weights, gradients, optimizer", static / 1e9, "GB")
    figure("the same in a dry run", said.static / 1e9, "GB")
    figure("peak", peak / 1e9, "GB")
    figure("the same in a dry run, without the runtime", (said.total - said.runtime) / 1e9, "GB")
    assert abs(static - said.static) <= 0.05 * said.static


def test_routes_of_other_tokens_change_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: each route moved by one token."""
    from moerl.data.packing import Microbatch

    learner = make_learner(TINY, tmp_path)
    plan = make_plan(TINY, learner)
    right = gradients_of(learner, plan)
    assert differs_by(gradients_of(learner, plan), right) < 1e-2, (
        "sums on a GPU have no fixed order"
    )
    routes = Microbatch.routes

    def rotated(self: Microbatch, *args: object) -> dict[int, torch.Tensor]:
        found = routes(self, *args)  # type: ignore[arg-type]
        return {layer: rows.roll(1, 0) for layer, rows in found.items()}

    monkeypatch.setattr(Microbatch, "routes", rotated)
    assert differs_by(gradients_of(learner, plan), right) > 0.1


def test_grouped_experts_are_the_loop(
    tmp_path: Path, figure: Figure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same weights and records in bf16.  Control: each expert has a row of the next one."""
    loop, grouped = (make_learner(TINY, tmp_path, grouped=how) for how in (False, True))
    pairs = zip(loop.model.gpt.parameters(), grouped.model.gpt.parameters(), strict=True)
    for one, other in pairs:
        other.data.copy_(one.data)
    plan = make_plan(TINY, loop)
    want = gradients_of(loop, plan)
    worst = differs_by(gradients_of(grouped, plan), want)
    figure("gradients, from the loop's", worst, "of a tensor's largest")
    assert worst < 2e-2
    from moerl.trainer.model import grouped_experts

    right = grouped_experts.grouped_mm

    def moved(a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        return right(a, b, offs=torch.minimum(offs + 1, offs[-1]))

    monkeypatch.setattr(grouped_experts, "grouped_mm", moved)
    assert differs_by(gradients_of(grouped, plan), want) > 0.1


def _product_speed(size: int) -> float:
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    return 2 * size**3 / _seconds(lambda: a @ a)


def _seconds(work: object) -> float:
    """Of one call, after a first one; mean of ten."""
    assert callable(work)
    work()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(10):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / 10
