"""Unmodified Megatron-core trains a tiny MoE on the double, with both replays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from moerl.core.types import PolicyVersion
from moerl.data.packing import Microbatch
from moerl.weight_sync.snapshot import WeightSnapshot
from tests.double.mutations import BLUNDERS, Blunder
from tests.double.outcome import Work, caught, check_repeats, outcome, stop_streams
from tests.double.train_once import (
    BOUNDS,
    Numbers,
    Tensors,
    Trained,
    largest_difference,
    other_metrics,
    small_plan,
)
from tests.double.watch import OPS, PAGEABLE, WAITS, memory, watch

pytest_plugins = ("tests.double.trainer_fixtures",)

# Waits of lines of ours in one step: sums of the loss, the scores of all microbatches, the routers'
# norm; none in a microbatch.
PER_STEP = {"moerl/trainer/learner/step_sums.py": 1, "moerl/algorithms/device_copies.py": 1}
PER_STEP |= {"moerl/trainer/learner/optimizer.py": 1}
REPLAY_FILE = "moerl/trainer/model/replay.py"


def test_the_model_and_its_gradients_are_on_the_device(trained: Trained) -> None:
    parameters = dict(trained.learner.model.gpt.named_parameters())
    assert {str(p.device) for p in parameters.values()} == {"cuda:0"}
    num = sum(p.numel() for p in parameters.values())
    # fp32 weights and gradients, and two moments once the optimizer made a step
    assert memory("model").live >= 8 * num
    assert memory("model").live <= 8.2 * num


def test_a_step_is_that_of_the_cpu(here: Numbers, on_cpu: Numbers) -> None:
    assert here["metrics"]["routing/replay_cover_frac"] == 1.0
    assert here["metrics"]["keep/cover_frac"] == 1.0
    for part, bound in BOUNDS.items():
        assert largest_difference(here[part], on_cpu[part]) <= bound, part
    assert other_metrics(here["metrics"], on_cpu["metrics"]) == []


def test_routes_of_other_tokens_are_not_that_step(
    trained: Trained,
    here: Numbers,
    on_cpu: Numbers,
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
    trained: Trained, here: Numbers
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
def test_the_budget_of_host_waits(here: Numbers, trained: Trained) -> None:
    assert here, "the first step also makes the optimizer's state"
    with watch() as seen:
        trained.learner.step(trained.plan)
    assert trained.plan.num_microbatches > 1
    print("own:", seen.own_lines(*WAITS, PAGEABLE), "all:", seen.count(*WAITS, PAGEABLE))
    assert not seen.own_lines(PAGEABLE), "copies from pageable memory"
    assert dict(seen.own_files(*WAITS)) == PER_STEP, seen.own_lines(*WAITS)


def test_a_value_read_in_each_layer_exceeds_the_budget(
    here: Numbers, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: one wait for each layer and microbatch."""
    assert here
    (blunder,) = (one for one in BLUNDERS if one.name == "a value read in each layer")
    blunder.apply(monkeypatch)
    with watch() as seen:
        trained.learner.step(trained.plan)
    more = Counter(seen.own_files(*WAITS)) - Counter(PER_STEP)
    layers = len(trained.learner.model.spec.moe_layers)
    assert more == {REPLAY_FILE: layers * trained.plan.num_microbatches}


# --- the weight snapshot of a publish -------------------------------------------------------------
def test_the_next_step_waits_for_the_snapshot_of_a_publish(here: Numbers, trained: Trained) -> None:
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
@pytest.fixture
def one_microbatch(trained: Trained, here: Numbers) -> Iterator[Work]:
    assert here
    plan = small_plan(trained)

    def gradients() -> Tensors:
        sums = trained.learner.gradients(plan)
        return trained.current_gradients() | {"entropy": torch.tensor(sums.counts["entropy"])}

    yield gradients
    stop_streams()
    assert trained.learner.model.replay is not None
    trained.learner.model.replay.clear()


@pytest.mark.parametrize("blunder", BLUNDERS, ids=[blunder.name for blunder in BLUNDERS])
def test_blunders_are_caught(
    blunder: Blunder, one_microbatch: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = outcome(one_microbatch)
    check_repeats(one_microbatch, sound)
    blunder.apply(monkeypatch)
    found = caught(one_microbatch, sound)
    print(f"{blunder.name}: {found or 'NOT CAUGHT'}")
    assert found
