"""The simulated steps against cases that can be computed by hand, and their laws."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.planning.step_simulation import Costs, Topology, Workload, simulate

WORK = Workload(groups_per_step=2, group_size=2, lengths=[100], waits_s=(0.5,))
COSTS = Costs(
    train_s=[2.0], token_s=0.01, request_token_s=0.0, snapshot_s=0.1, transfer_s=0.2, pause_s=0.3
)
TURN = replace(COSTS, close_s=0.4, open_s=0.6)


def test_a_synchronous_run_is_the_sum_of_its_parts() -> None:
    found = simulate(WORK, COSTS, Topology(1, 0), steps=5)
    # decode 100 x 0.01, wait 0.5, train 2; four publishes: snapshot, transfer, pause
    assert found.wall_s == pytest.approx(5 * (1.0 + 0.5 + 2.0) + 4 * (0.1 + 0.2 + 0.3))
    assert found.step_s == pytest.approx(1.5 + 2.0 + 0.6)
    assert found.trainer_idle == pytest.approx((1.5 + 0.5) / 4.1)


def test_overlap_hides_generation_behind_training() -> None:
    found = simulate(WORK, COSTS, Topology(1, 1), steps=20)
    # only the first batch is waited for; the rest is training and freezing
    assert found.wall_s == pytest.approx(1.5 + 20 * 2.0 + 19 * 0.1)


def test_a_decode_step_costs_more_with_more_requests() -> None:
    costs = Costs(train_s=[1.0], token_s=0.01, request_token_s=0.005)
    one = simulate(WORK, costs, Topology(1, 0), steps=1)
    two = simulate(WORK, costs, Topology(2, 0), steps=1)
    assert one.wall_s == pytest.approx(100 * (0.01 + 4 * 0.005) + 0.5 + 1.0)
    assert two.wall_s == pytest.approx(100 * (0.01 + 2 * 0.005) + 0.5 + 1.0)


def test_scorers_are_a_queue() -> None:
    costs = Costs(train_s=[1.0], token_s=0.01, request_token_s=0.0, scorers=1)
    assert simulate(WORK, costs, Topology(1, 0), 1).wall_s == pytest.approx(1.0 + 2 * 0.5 + 1.0)


def test_a_publish_drops_the_cache_of_running_requests() -> None:
    long = Workload(2, 2, lengths=[1000])
    costs = Costs(
        train_s=[2.0], token_s=0.01, request_token_s=0.0, prefill_token_s=0.001, pause_s=0.1
    )
    again = simulate(long, costs, Topology(1, 4), 12)
    assert again.recomputed > 0
    free = simulate(long, replace(costs, prefill_token_s=0.0), Topology(1, 4), 12)
    assert free.wall_s < again.wall_s


# --- turns ---------------------------------------------------------------------------------------
def test_a_synchronous_run_in_turns_is_the_sum_of_its_parts() -> None:
    found = simulate(WORK, TURN, Topology(0, 0, shared=1), steps=5)
    # each step falls asleep; four times weights are handed over and engines wake up
    assert found.wall_s == pytest.approx(5 * (1.5 + 0.4 + 2.0) + 4 * (0.6 + 0.6))


def test_engines_generate_nothing_in_a_turn_of_the_trainer() -> None:
    """With a batch more in flight a division hides training; turns do not, but for the waits."""
    step_s = {
        name: simulate(WORK, TURN, topology, 20).step_s
        for name, topology in (("divided", Topology(1, 1)), ("turns", Topology(0, 1, shared=1)))
    }
    assert step_s["divided"] == pytest.approx(2.1)
    assert step_s["turns"] >= 2.0 + 1.0


def test_batches_that_are_ready_share_a_turn() -> None:
    """The second switch is saved; groups of a slow reward become ready while the trainer trains."""
    slow = replace(WORK, waits_s=(2.0,), lengths=[10])
    shared = simulate(slow, TURN, Topology(0, 3, shared=1), 24)
    alone = simulate(slow, TURN, Topology(0, 0, shared=1), 24)
    assert shared.step_s < alone.step_s - 1.0


def test_kept_tails_are_prefilled_again_when_engines_wake_up() -> None:
    tails = Workload(2, 2, lengths=[10, 10, 10, 400])
    costs = replace(TURN, prefill_token_s=0.001)
    assert simulate(tails, costs, Topology(0, 2, shared=1), 12).recomputed > 0
    assert simulate(tails, costs, Topology(0, 0, shared=1), 12).recomputed == pytest.approx(0.0)


def test_an_engine_that_stays_awake_goes_on_while_others_sleep() -> None:
    costs = replace(TURN, train_s=[20.0])
    hybrid = simulate(WORK, costs, Topology(1, 2, shared=1), 12)
    turns = simulate(WORK, costs, Topology(0, 2, shared=2), 12)
    assert hybrid.trainer_idle < turns.trainer_idle


class LongTails(Workload):
    """Answers of 2,000 tokens, lognormal."""

    def group(self, index: int) -> tuple[list[int], float]:
        draw, middle = random.Random(index), 2000 / 2.718281828**0.32
        drawn = (round(middle * draw.lognormvariate(0, 0.8)) for _ in range(self.group_size))
        return [max(1, min(8192, length)) for length in drawn], 0.0


@pytest.mark.parametrize(
    ("topology", "train_s", "switch_s", "seconds"),
    [
        (Topology(2, 0), 60.0, 0.0, 224),
        (Topology(2, 1), 60.0, 0.0, 135),
        (Topology(2, 3), 60.0, 0.0, 90),
        (Topology(0, 1, shared=4), 30.0, 2.0, 104),
        (Topology(0, 3, shared=4), 30.0, 2.0, 86),
        (Topology(0, 1, shared=4), 30.0, 15.0, 130),
        (Topology(0, 3, shared=4), 30.0, 15.0, 112),
        (Topology(1, 1, shared=3), 40.0, 2.0, 111),
        (Topology(1, 3, shared=3), 40.0, 2.0, 89),
    ],
)
def test_the_steps_of_another_simulation(
    topology: Topology, train_s: float, switch_s: float, seconds: float
) -> None:
    """Eight GPUs, engines of two, 240 GPU seconds of training; the figures are of a simulation that
    was written apart from this one, event by event.
    """
    costs = Costs([train_s], 0.012, 0.00025, 2e-5, pause_s=0.5, close_s=switch_s, open_s=switch_s)
    found = simulate(LongTails(32, 8, (), prompt_tokens=500), costs, topology, 14)
    assert found.step_s == pytest.approx(seconds, rel=0.06)


@settings(max_examples=40, deadline=None)
@given(
    depth=st.integers(0, 4),
    engines=st.integers(0, 3),
    shared=st.integers(0, 2),
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=20),
    wait_s=st.floats(0, 3),
    scorers=st.integers(0, 2),
)
def test_no_run_beats_its_busier_side(
    depth: int, engines: int, shared: int, lengths: list[int], wait_s: float, scorers: int
) -> None:
    work = Workload(2, 3, lengths, (wait_s,))
    topology = Topology(engines or 1 - bool(shared), depth, shared)
    costs = replace(TURN, scorers=scorers)
    found = simulate(work, costs, topology, 6)
    assert found.wall_s >= 6 * 2.0 + wait_s
    assert 0 <= found.trainer_idle < 1
    assert found == simulate(work, costs, topology, 6)
