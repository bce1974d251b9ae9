"""When the probe raises which alert: judged from sums, with and without tokens to judge."""

from __future__ import annotations

import torch

from moerl.algorithms.mismatch import MismatchSums
from moerl.config.schema import Config, EngineConfig, ReplayConfig, TrainerConfig
from moerl.observe.console import alerts
from moerl.trainer.passes.probe import Findings, RouteAgreement, exact_metrics, judge


def sums(gap: float, tokens: int = 100) -> MismatchSums:
    engine = -torch.ones(tokens)
    sign = torch.tensor([1.0, -1.0]).repeat(tokens)[:tokens]
    return MismatchSums.of(engine + gap * sign, engine, torch.zeros(tokens, dtype=torch.long))


def raised(**fields: object) -> list[str]:
    found = Findings(**fields)  # type: ignore[arg-type]
    return alerts({"step": 0} | exact_metrics(found.exact, Config()) | judge(found))


GOOD = RouteAgreement(pairs=1000, agree=950, clean=980, roots=10)


def test_nothing_to_judge_is_no_metric() -> None:
    assert judge(Findings()) == exact_metrics(Findings().exact, Config()) == {}
    bare = Config(replay=ReplayConfig(sampling_mask=False))
    assert exact_metrics(sums(0.2), bare) == {}, "without both replays nothing has to be exact"


def test_records_that_agree_raise_nothing_at_any_lag() -> None:
    assert raised(exact=sums(1e-5), replayed=sums(1e-5), live=sums(2e-2), routes=GOOD) == []
    stale = sums(0.2)  # older weights: both are off, the record no worse than the live router
    assert raised(replayed=stale, live=stale, routes=GOOD) == []
    aged = RouteAgreement(pairs=1000, agree=500, clean=600, roots=300)
    assert raised(replayed=stale, live=stale, routes=aged) == []
    fresh = sums(1e-6)
    routes = ["alert/replay_routes"]  # nothing excuses it where all weights are those of the step
    assert raised(exact=fresh, replayed=fresh, live=fresh, routes=aged) == routes


def test_each_question_has_its_alert() -> None:
    assert raised(exact=sums(2e-3)) == ["alert/replay_exact"]
    fp8 = Config(engine=EngineConfig(args={"quantization": "fp8"}))
    assert exact_metrics(sums(2e-3), fp8).keys() == {
        "probe/exact_tokens",
        "probe/exact_abs_dlogp_max",
        "probe/exact_abs_dlogp_p99",
    }, "an engine of rounded weights has no limit"
    shifted = RouteAgreement(pairs=1000, agree=100, clean=200, roots=150)
    assert raised(routes=shifted) == ["alert/replay_routes"]
    assert raised(replayed=sums(0.4), live=sums(0.1)) == ["alert/replay_worth"]
    assert raised(replayed=sums(0.4, 20), live=sums(0.1, 20)) == []  # too few tokens for a mean


def test_bf16_is_judged_by_most_tokens_and_fp32_by_each() -> None:
    one_far = sums(0.02, 999) + sums(2.0, 1)
    bf16 = Config(trainer=TrainerConfig(dtype="bf16"), engine=EngineConfig(dtype="bfloat16"))
    one_side = Config(engine=EngineConfig(dtype="bfloat16"))
    for rounded in (bf16, one_side):
        assert exact_metrics(one_far, rounded)["alert/replay_exact"] == 0
        wrong = sums(0.02, 980) + sums(0.4, 20)  # rows of other tokens in one rollout of fifty
        assert exact_metrics(wrong, rounded)["alert/replay_exact"] == 1
    assert exact_metrics(one_far, Config())["alert/replay_exact"] == 1


def test_differences_are_counted_where_they_begin() -> None:
    second = torch.tensor([False, True, False, False])
    real = torch.ones(4, dtype=torch.bool)
    found = RouteAgreement.of({0: second, 1: second}, real, rows_per_position=1)
    # Layer 1 reads positions 1 to 3 through layer 0's difference, so only position 0 is clean.
    assert found.counts() == [8.0, 6.0, 5.0, 1.0]
