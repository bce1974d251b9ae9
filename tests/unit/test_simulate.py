"""The simulated pipeline against cases that can be computed by hand, and its laws."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.pipeline_simulation import MODES, Choice, Costs, Workload, advise, simulate

WORK = Workload(groups_per_step=2, group_size=2, lengths=[100], waits_s=(0.5,))
COSTS = Costs(
    train_s=[2.0], token_s=0.01, request_token_s=0.0, snapshot_s=0.1, transfer_s=0.2, pause_s=0.3
)


def test_a_synchronous_run_is_the_sum_of_its_parts() -> None:
    found = simulate(WORK, COSTS, Choice(1, 0), steps=5)
    # decode 100 x 0.01, wait 0.5, train 2; four publishes: snapshot, transfer, pause
    assert found.wall_s == pytest.approx(5 * (1.0 + 0.5 + 2.0) + 4 * (0.1 + 0.2 + 0.3))
    assert found.step_s == pytest.approx(1.5 + 2.0 + 0.6)
    assert found.trainer_idle == pytest.approx((1.5 + 0.5) / 4.1)
    assert found.lag_mean == found.lag_max == 0


def test_overlap_hides_generation_behind_training() -> None:
    found = simulate(WORK, COSTS, Choice(1, 1), steps=20)
    # only the first batch is waited for; the rest is training and freezing
    assert found.wall_s == pytest.approx(1.5 + 20 * 2.0 + 19 * 0.1)
    assert 0 < found.lag_mean <= 1


def test_a_decode_step_costs_more_with_more_requests() -> None:
    costs = Costs(train_s=[1.0], token_s=0.01, request_token_s=0.005)
    one = simulate(WORK, costs, Choice(1, 0), steps=1)
    two = simulate(WORK, costs, Choice(2, 0), steps=1)
    assert one.wall_s == pytest.approx(100 * (0.01 + 4 * 0.005) + 0.5 + 1.0)
    assert two.wall_s == pytest.approx(100 * (0.01 + 2 * 0.005) + 0.5 + 1.0)


def test_scorers_are_a_queue() -> None:
    costs = Costs(train_s=[1.0], token_s=0.01, request_token_s=0.0, scorers=1)
    assert simulate(WORK, costs, Choice(1, 0), 1).wall_s == pytest.approx(1.0 + 2 * 0.5 + 1.0)


def test_what_a_mode_costs() -> None:
    long = Workload(2, 2, lengths=[1000])
    costs = Costs(
        train_s=[2.0], token_s=0.01, request_token_s=0.0, prefill_token_s=0.001, pause_s=0.1
    )
    again = {mode: simulate(long, costs, Choice(1, 4, mode), 12) for mode in MODES}
    assert again["abort_resume"].recomputed_tokens > 0
    assert again["drain"].recomputed_tokens == again["in_place"].recomputed_tokens == 0
    assert again["in_place"].wall_s < again["abort_resume"].wall_s
    assert again["retract"] == again["abort_resume"], "the same prefill; pauses are given"


@settings(max_examples=30, deadline=None)
@given(
    depth=st.integers(0, 4),
    mode=st.sampled_from(MODES),
    engines=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=20),
    wait_s=st.floats(0, 3),
)
def test_no_run_beats_its_busier_side(
    depth: int, mode: str, engines: int, lengths: list[int], wait_s: float
) -> None:
    work = Workload(2, 3, lengths, (wait_s,))
    found = simulate(work, COSTS, Choice(engines, depth, mode), 6)  # type: ignore[arg-type]
    assert found.wall_s >= 6 * 2.0 + wait_s
    assert 0 <= found.trainer_idle < 1
    assert -1e-9 <= found.engine_idle < 1
    assert found.lag_max <= 2 * depth
    assert found == simulate(work, COSTS, Choice(engines, depth, mode), 6)  # type: ignore[arg-type]


def test_advice_takes_no_more_engines_and_lag_than_help() -> None:
    few = advise(WORK, COSTS, max_engines=16, max_lag=4)
    assert few.choice == Choice(1, 1, "abort_resume")
    slow = Workload(8, 4, lengths=[2000])
    costs = Costs(train_s=[2.0], token_s=0.01, request_token_s=0.001)
    assert advise(slow, costs, max_engines=16, max_lag=4).choice.engines > 4
