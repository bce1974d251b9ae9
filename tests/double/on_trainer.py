"""Unmodified Megatron-core trains a tiny MoE on the double, with both replays."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moerl.data.packing import Microbatch
from moerl.types import PolicyVersion
from moerl.weight_sync.snapshot import WeightSnapshot
from tests.double.mutations import BLUNDERS, Blunder
from tests.double.train_once import (
    NUMBERS,
    Tensors,
    Trained,
    largest_difference,
    numbers,
    prepare,
    small_plan,
)
from tests.double.watch import OPS, PAGEABLE, WAITS, Watch, memory, purpose, watch

ROOT = Path(__file__).resolve().parents[2]
# Forward passes are equal bitwise.  In backward passes torch has other formulas for CUDA (in fp32:
# 7.3e-7 of a tensor's largest gradient measured), and Adam divides by gradients near zero (4.2e-5
# of its largest weight).
BOUNDS = {"gradients": 3e-6, "weights": 2e-4}
FROM_GRADIENTS = ("loss/grad_norm", "loss/grad_norm_router")
# Waits of lines of ours in one step.  A microbatch: the status of the compiled masked head.
PER_MICROBATCH = {"moerl/algorithms/masked_logprob.py": 1}
# A step: sums of the loss, the scores of all microbatches, the routers' norm.
PER_STEP = {"moerl/trainer/learner/step_sums.py": 1, "moerl/algorithms/device_copies.py": 1}
PER_STEP |= {"moerl/trainer/learner/optimizer.py": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the numbers of the same training on the CPU, from a process without the double."""
    made = tmp_path_factory.mktemp("cpu")
    command = [sys.executable, "-m", "tests.double.train_once", str(made)]
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return made


@pytest.fixture(scope="module")
def trained(folder: Path) -> Trained:
    with purpose("model"):
        return prepare("cuda", folder)


@pytest.fixture(scope="module")
def here(trained: Trained) -> dict[str, Any]:
    return numbers(trained)


@pytest.fixture(scope="module")
def on_cpu(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / NUMBERS)
    return found


def test_the_model_and_its_gradients_are_on_the_device(trained: Trained) -> None:
    parameters = dict(trained.learner.model.gpt.named_parameters())
    assert {str(p.device) for p in parameters.values()} == {"cuda:0"}
    num = sum(p.numel() for p in parameters.values())
    # fp32 weights and gradients, and two moments once the optimizer made a step
    assert memory("model").live >= 8 * num
    assert memory("model").live <= 8.2 * num


def test_a_step_is_that_of_the_cpu(here: dict[str, Any], on_cpu: dict[str, Any]) -> None:
    assert here["metrics"]["routing/replay_cover_frac"] == 1.0
    assert here["metrics"]["keep/cover_frac"] == 1.0
    for part, bound in BOUNDS.items():
        assert largest_difference(here[part], on_cpu[part]) <= bound, part
    mine, theirs = dict(here["metrics"]), dict(on_cpu["metrics"])
    for name in FROM_GRADIENTS:
        assert mine.pop(name) == pytest.approx(theirs.pop(name), rel=1e-6)
    assert mine == theirs


def test_routes_of_other_tokens_are_not_that_step(
    trained: Trained,
    here: dict[str, Any],
    on_cpu: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: each route moved by one token; both after the same step."""
    assert here
    right = trained.gradients()
    routes = Microbatch.routes

    def rotated(self: Microbatch, *args: Any) -> dict[int, torch.Tensor]:
        return {layer: rows.roll(1, 0) for layer, rows in routes(self, *args).items()}

    monkeypatch.setattr(Microbatch, "routes", rotated)
    assert largest_difference(trained.gradients(), right) > 0.1


def test_scores_over_the_whole_vocabulary_are_not_that_step(
    trained: Trained, here: dict[str, Any]
) -> None:
    """Negative control: sampling masks dropped."""
    assert here
    learner = trained.learner
    right, kept = trained.gradients(), learner.config
    learner.config = replace(kept, replay=replace(kept.replay, sampling_mask=False))
    try:
        assert largest_difference(trained.gradients(), right) > 0.1
    finally:
        learner.config = kept


# --- waits and pageable copies of our own lines ---------------------------------------------------
def test_the_budget_of_host_waits(here: dict[str, Any], trained: Trained) -> None:
    assert here, "the first step also makes the optimizer's state"
    with watch() as seen:
        trained.learner.step(trained.plan)
    microbatches = trained.plan.num_microbatches
    assert microbatches > 1
    print("own:", seen.own_lines(*WAITS, PAGEABLE), "all:", seen.count(*WAITS, PAGEABLE))
    assert not seen.own_lines(PAGEABLE), "copies from pageable memory"
    allowed = {file: times * microbatches for file, times in PER_MICROBATCH.items()} | PER_STEP
    over = {
        file: times
        for file, times in seen.own_files(*WAITS).items()
        if times > allowed.get(file, 0)
    }
    assert not over, f"waits beyond {allowed}: {over}; by line {seen.own_lines(*WAITS)}"


# --- the weight snapshot of a publish -------------------------------------------------------------
def test_the_next_step_waits_for_the_snapshot_of_a_publish(
    here: dict[str, Any], trained: Trained
) -> None:
    """Control: with a step that does not, Megatron's optimizer writes under the copy."""
    assert here
    learner, snapshot = trained.learner, WeightSnapshot()
    before, peak = trained.weights(), memory().live
    OPS.reset_peak(0)
    with watch() as seen:
        snapshot.store(learner.model.tensors, PolicyVersion(0, 1))
    assert seen.count(*WAITS, PAGEABLE) == 0
    assert memory().peak == peak, "a copy of the weights on the device"
    learner.before_update = snapshot.before_write
    learner.step(trained.plan)
    snapshot.wait()
    kept = {name: snapshot[name] for name in before}
    assert largest_difference(kept, before) == 0
    assert largest_difference(trained.weights(), before) > 0
    learner.before_update = lambda: None
    snapshot.store(learner.model.tensors, PolicyVersion(0, 2))
    with pytest.raises(RuntimeError, match="no event orders them"):
        learner.step(trained.plan)
    torch.cuda.synchronize()


# --- seeded blunders ------------------------------------------------------------------------------
@dataclass(frozen=True)
class Result:
    """Of the gradients of one microbatch."""

    gradients: Tensors
    entropy: float
    waits: int
    pageable: int
    peak: int

    def same_numbers(self, other: Result) -> bool:
        equal = largest_difference(self.gradients, other.gradients) == 0
        return equal and self.entropy == other.entropy


def measured(trained: Trained) -> Result:
    small = Trained(trained.learner, small_plan(trained))
    torch.cuda.synchronize()
    OPS.reset_peak(0)
    before = memory().live
    with watch() as seen:
        sums = trained.learner.gradients(small.plan)
    return Result(
        small.current_gradients(), sums.counts["entropy"], *_own(seen), memory().peak - before
    )


def _own(seen: Watch) -> tuple[int, int]:
    return seen.count(*WAITS, own=True), seen.count(PAGEABLE, own=True)


@pytest.fixture
def sound(trained: Trained, here: dict[str, Any]) -> Iterator[Result]:
    assert here
    yield measured(trained)
    torch.cuda.set_stream(torch.cuda.default_stream())
    torch.cuda.synchronize()
    assert trained.learner.model.replay is not None
    trained.learner.model.replay.clear()


@pytest.mark.parametrize("blunder", BLUNDERS, ids=[blunder.name for blunder in BLUNDERS])
def test_blunders_are_caught(
    blunder: Blunder, trained: Trained, sound: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    caught = ""
    again = measured(trained)
    assert again.same_numbers(sound)
    assert (again.waits, again.pageable) == (sound.waits, sound.pageable)
    blunder.apply(monkeypatch)
    try:
        hurt = measured(trained)
    except Exception as error:
        caught = str(error).splitlines()[0]
    else:
        if hurt.waits > sound.waits:
            caught = f"{hurt.waits} waits, {sound.waits} before"
        if hurt.pageable > sound.pageable:
            caught = f"{hurt.pageable} pageable copies, {sound.pageable} before"
        if not hurt.same_numbers(sound):
            caught = f"entropy {hurt.entropy}, {sound.entropy} before"
        if hurt.peak > 2 * sound.peak:
            caught = f"peak {hurt.peak} bytes, {sound.peak} before"
    print(f"{blunder.name}: {caught or 'NOT CAUGHT'}")
    assert caught
