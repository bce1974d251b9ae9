"""Each condition that a run should not be in, met and not met."""

from __future__ import annotations

import pytest

from moerl.config.schema import Config, RolloutConfig
from moerl.observe.alerts import Alerts
from moerl.observe.console import alerts

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
    rows = [watch.look(HEALTHY) for _ in range(15)]
    assert not any(alerts(row) for row in rows)
    assert len(rows[-1]) == 10, "every question was asked"
    assert watch.look({}) == {}, "and none without data"


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("replay_cover", {"routing/replay_cover_frac": 0.9999}),
        ("replay_cover", {"routing/fallback_rows": 1.0}),
        ("replay_extreme", {"mismatch/extreme_frac_2/lag_0": 6e-4}),
        ("mask_cover", {"keep/cover_frac": 0.99}),
        ("sampling_mask", {"mismatch/ratio_mean/lag_0": 0.972}),  # the full vocabulary at top-p .95
        ("sampling_mask", {"mismatch/ratio_mean/lag_0": 1.01}),
        ("collapse", {"mismatch/ess_seq_frac": 0.2}),
        ("stale", {"async/lag_max": 5.0}),
        ("scorer", {"scorer/failed": 2.0}),
        ("grad_norm", {"loss/grad_norm": 5.1}),
        ("router_detached", {"loss/grad_norm_router": 0.0}),
    ],
)
def test_each_condition_has_its_alert(name: str, changed: dict[str, float]) -> None:
    watch = Alerts(CONFIG)
    for _ in range(12):
        watch.look(HEALTHY)
    assert alerts(watch.look(HEALTHY | changed)) == [f"alert/{name}"]


def test_small_numbers_prove_nothing() -> None:
    few = {"mismatch/tokens/lag_0": 1000.0, "mismatch/extreme_frac_2/lag_0": 2e-3}  # two tokens
    exact = {"mismatch/ratio_mean/lag_0": 1 - 5e-6, "mismatch/ratio_se/lag_0": 1e-7}  # rounding
    assert not alerts(Alerts(CONFIG).look(HEALTHY | few | exact | {"loss/grad_norm": 99.0}))


def test_rows_joined_over_an_update_are_no_sign_of_broken_replay() -> None:
    """Their prefix rows are of older weights: they have bins of their own."""
    far = {"extreme_frac_2": 9e-3, "ratio_mean": 1.2}
    fresh = {f"mismatch/{name}/lag_0": value for name, value in far.items()}
    judged = Alerts(CONFIG).look(HEALTHY | fresh | {"async/partial_frac": 0.01})
    assert alerts(judged) == ["alert/replay_extreme", "alert/sampling_mask"]
    joined = {f"mismatch/{name}/joined_lag_0": value for name, value in far.items()}
    assert not alerts(Alerts(CONFIG).look(HEALTHY | joined | {"async/partial_frac": 1.0}))


def test_silence_has_to_last() -> None:
    watch = Alerts(CONFIG)
    rows = [watch.look(HEALTHY) for _ in range(20)]
    assert [bool(alerts(row)) for row in rows] == [False] * 19 + [True]
    assert alerts(watch.look(HEALTHY | {"reward/zero_var_frac": 0.8})) == []
