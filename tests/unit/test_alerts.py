"""Each condition that a run should not be in, met and not met."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moerl.config.schema import Config, RolloutConfig
from moerl.observe.alerts import Alerts
from moerl.observe.console import alerts

RECORDED = json.loads((Path(__file__).parents[1] / "data/alert_rows.json").read_text())


def rows(run: str) -> list[dict[str, float]]:
    """Rows of a recorded run; a column of one number is the same in every row."""
    columns = dict(RECORDED[run])
    num = columns.pop("rows")
    columns = {name: c if isinstance(c, list) else [c] * num for name, c in columns.items()}
    return [
        {name: column[at] for name, column in columns.items() if column[at] is not None}
        for at in range(num)
    ]


CONFIG = Config(rollout=RolloutConfig(max_lag=4, groups_per_step=10, group_size=10))
HEALTHY = {
    "routing/replay_cover_frac": 1.0,
    "routing/fallback_rows": 0.0,
    "keep/cover_frac": 1.0,
    "mismatch/tokens/lag_0": 1e4,
    "mismatch/extreme_frac_2/lag_0": 1e-4,
    "mismatch/ratio_mean/lag_0": 0.999,
    "mismatch/ratio_se/lag_0": 3e-4,
    "mismatch/ess_seq_frac": 0.9,
    "loss/grad_norm": 1.0,
    "loss/grad_norm_router": 0.1,
    "reward/zero_var_frac": 0.95,
    "async/lag_max": 4.0,
    "scorer/failed": 1.0,
}


def test_a_healthy_run_raises_none() -> None:
    watch = Alerts(CONFIG)
    rows = [watch.check(HEALTHY) for _ in range(15)]
    assert not any(alerts(row) for row in rows)
    assert len(rows[-1]) == 10, "every question was asked"
    assert watch.check({}) == {}, "and none without data"


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("replay_cover", {"routing/replay_cover_frac": 0.9999}),
        ("replay_cover", {"routing/fallback_rows": 1.0}),
        ("replay_extreme", {"mismatch/extreme_frac_2/lag_0": 6e-4}),
        ("mask_cover", {"keep/cover_frac": 0.99}),
        ("sampling_mask", {"mismatch/ratio_mean/lag_0": 0.972}),  # the full vocabulary at top-p .95
        ("sampling_mask", {"mismatch/ratio_mean/lag_0": 1.01}),
        ("stale", {"async/lag_max": 5.0}),
        ("scorer", {"scorer/failed": 2.0}),
        ("router_detached", {"loss/grad_norm_router": 0.0}),
    ],
)
def test_each_condition_has_its_alert(name: str, changed: dict[str, float]) -> None:
    watch = Alerts(CONFIG)
    for _ in range(12):
        watch.check(HEALTHY)
    assert alerts(watch.check(HEALTHY | changed)) == [f"alert/{name}"]


@pytest.mark.parametrize(
    ("name", "bad"),
    [("grad_norm", {"loss/grad_norm": 5.1}), ("collapse", {"mismatch/ess_seq_frac": 0.2})],
)
def test_one_bad_batch_is_no_alert(name: str, bad: dict[str, float]) -> None:
    watch = Alerts(CONFIG, [HEALTHY] * 12)
    good = {"loss/grad_norm": 1.0, "mismatch/ess_seq_frac": 0.9}
    course = [bad, good, bad, bad, good, good, good, bad]
    raised = [alerts(watch.check(HEALTHY | {"reward/zero_var_frac": 0.5} | row)) for row in course]
    assert raised == [[], [], [], [f"alert/{name}"], [], [], [], []]


def test_a_norm_that_fell_may_rise_again_to_that_of_the_first_steps() -> None:
    watch = Alerts(CONFIG, [HEALTHY | {"loss/grad_norm": 0.1}] * 10)
    for norm in [0.003] * 90 + [0.02] * 5:
        found = watch.check(HEALTHY | {"loss/grad_norm": norm, "reward/zero_var_frac": 0.5})
        assert not alerts(found)
    far = [watch.check(HEALTHY | {"loss/grad_norm": 0.6}) for _ in range(3)]
    assert "alert/grad_norm" in alerts(far[-1]), "control"


@pytest.mark.parametrize("run", list(RECORDED))
def test_runs_that_learned_raise_none(run: str) -> None:
    """Rows of quickstarts and of runs of the pages, reduced to the fields that alerts read."""
    watch = Alerts(Config())
    raised = {
        step: found for step, row in enumerate(rows(run), 1) if (found := alerts(watch.check(row)))
    }
    assert not raised


def test_what_alerts_find_is_a_function_of_the_rows() -> None:
    every = rows("seed 0")
    whole = Alerts(Config())
    found = [whole.check(row) for row in every]
    resumed = Alerts(Config(), every[:60])
    assert [resumed.check(row) for row in every[60:]] == found[60:]
    assert Alerts(Config()).check(every[60]) != found[60], "control: without the rows before"


SEEDED: dict[str, dict[str, float]] = {
    "grad_norm": {"loss/grad_norm": 3.0},
    "collapse": {"mismatch/ess_seq_frac": 0.1},
    "no_signal": {"reward/zero_var_frac": 1.0, "reward/mean": 0.5},
    "cut": {"reward/zero_var_frac": 1.0, "reward/mean": 0.0, "sample/truncated_frac": 1.0},
    "mask_cover": {"keep/cover_frac": 0.0},
    "replay_extreme": {"mismatch/extreme_frac_2/lag_0": 0.01, "mismatch/tokens/lag_0": 1000.0},
    "stale": {"async/lag_max": 9.0},
    "entropy": {"loss/entropy": 0.01, "reward/mean": 0.01},
    "teacher": {"loss/kl_teacher": 6.0},
}


@pytest.mark.parametrize("name", list(SEEDED))
def test_a_seeded_fault_has_its_alert_within_20_steps(name: str) -> None:
    """The fault begins at step 31 of a run that learned."""
    watch = Alerts(Config(), rows("seed 1")[:30])
    begun = [row | SEEDED[name] for row in rows("seed 1")[30:50]]
    raised = [name for row in begun for name in alerts(watch.check(row))]
    assert f"alert/{name}" in raised


def test_small_numbers_prove_nothing() -> None:
    few = {"mismatch/tokens/lag_0": 1000.0, "mismatch/extreme_frac_2/lag_0": 2e-3}  # two tokens
    exact = {"mismatch/ratio_mean/lag_0": 1 - 5e-6, "mismatch/ratio_se/lag_0": 1e-7}  # rounding
    assert not alerts(Alerts(CONFIG).check(HEALTHY | few | exact | {"loss/grad_norm": 99.0}))


def test_rows_joined_over_an_update_are_no_sign_of_broken_replay() -> None:
    """Their prefix rows are of older weights: they have bins of their own."""
    far = {"extreme_frac_2": 9e-3, "ratio_mean": 1.2}
    fresh = {f"mismatch/{name}/lag_0": value for name, value in far.items()}
    judged = Alerts(CONFIG).check(HEALTHY | fresh | {"async/partial_frac": 0.01})
    assert alerts(judged) == ["alert/replay_extreme", "alert/sampling_mask"]
    joined = {f"mismatch/{name}/joined_lag_0": value for name, value in far.items()}
    assert not alerts(Alerts(CONFIG).check(HEALTHY | joined | {"async/partial_frac": 1.0}))


def test_silence_has_to_last() -> None:
    watch = Alerts(CONFIG)
    rows = [watch.check(HEALTHY) for _ in range(20)]
    assert [bool(alerts(row)) for row in rows] == [False] * 19 + [True]
    assert alerts(watch.check(HEALTHY | {"reward/zero_var_frac": 0.8})) == []
