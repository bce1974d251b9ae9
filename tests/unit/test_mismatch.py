"""Mismatch metrics against their formulas in numpy; adding parts; bins; what must stay absent."""

from __future__ import annotations

import numpy as np
import torch

from moerl.algorithms.mismatch import LAG_BINS, MismatchSums
from moerl.algorithms.tokens import Sequences


def sums(d: np.ndarray, lag: np.ndarray) -> MismatchSums:
    engine = -np.ones_like(d)
    return MismatchSums.of(
        torch.from_numpy(engine + d), torch.from_numpy(engine), torch.from_numpy(lag)
    )


def reference(d: np.ndarray) -> dict[str, float]:
    w = np.exp(d)
    return {
        "tokens": len(d),
        "k1": -d.mean(),
        "k3": (w - 1 - d).mean(),
        "k3_reverse": (w * d - w + 1).mean(),
        "m2": (d * d).mean(),
        "prob_error_mean": np.exp(np.abs(d)).mean(),
        "chi2_token": (w * w).mean() - 1,
        "abs_dlogp_mean": np.abs(d).mean(),
        "abs_dlogp_max": np.abs(d).max(),
        "ratio_mean": w.mean(),
        "ratio_se": w.std(ddof=1) / len(d) ** 0.5,
        "extreme_frac_1p1": (np.maximum(w, 1 / w) > 1.1).mean(),
        "extreme_frac_2": (np.maximum(w, 1 / w) > 2).mean(),
        "ess_token_frac": w.sum() ** 2 / (len(d) * (w * w).sum()),
    }


def test_every_metric_equals_its_formula_overall_and_per_bin() -> None:
    rng = np.random.default_rng(0)
    d = rng.normal(0, 0.4, 5000)
    lag = rng.integers(0, 12, 5000)
    metrics = sums(d, lag).metrics()
    edges = {"": (0, 99), "/lag_0": (0, 0), "/lag_1": (1, 1), "/lag_2_3": (2, 3),
             "/lag_4_7": (4, 7), "/lag_8": (8, 99)}  # fmt: skip
    for suffix, (low, high) in edges.items():
        part = d[(lag >= low) & (lag <= high)]
        for name, value in reference(part).items():
            got = metrics[f"mismatch/{name}{suffix}"]
            assert abs(got - value) < 1e-9 * max(1, abs(value)), (name, suffix)
        p99 = np.quantile(np.abs(part), 0.99)
        assert p99 * 0.99 <= metrics[f"mismatch/abs_dlogp_p99{suffix}"] <= p99 * 1.09
        for name, q in (("p001", 0.001), ("p50", 0.5), ("p999", 0.999)):
            want = np.quantile(part, q, method="inverted_cdf")
            got = np.log(metrics[f"mismatch/ratio_{name}{suffix}"])
            assert abs(got - want) <= 0.08 * abs(want) + 1e-6, (name, suffix, got, want)


def test_tokens_behind_a_change_of_weights_have_bins_of_their_own() -> None:
    rng = np.random.default_rng(2)
    d, lag, joined = rng.normal(0, 0.1, 900), rng.integers(0, 3, 900), rng.random(900) < 0.3
    engine = -torch.ones(900, dtype=torch.float64)
    logprob = engine + torch.from_numpy(d)
    metrics = MismatchSums.of(
        logprob, engine, torch.from_numpy(lag), joined_N=torch.from_numpy(joined)
    ).metrics()
    for prefix, chosen in (("", ~joined), ("joined_", joined)):
        for name, value in reference(d[chosen & (lag == 1)]).items():
            assert abs(metrics[f"mismatch/{name}/{prefix}lag_1"] - value) < 1e-9, name
    assert metrics["mismatch/tokens"] == 900, "the plain name covers all of them"


def test_parts_add_up_to_the_whole_however_they_are_cut() -> None:
    rng = np.random.default_rng(1)
    d, lag = rng.normal(0, 0.1, 999), rng.integers(0, 9, 999)
    whole = sums(d, lag).metrics()
    joined = MismatchSums.zero()
    for part in np.split(np.arange(999), [1, 1, 400]):
        joined = joined + sums(d[part], lag[part])
    for name, value in joined.metrics().items():
        assert abs(value - whole[name]) < 1e-12, name
    means = np.mean([sums(d[p], lag[p]).metrics()["mismatch/k3"] for p in ([0], range(1, 999))])
    assert abs(means - whole["mismatch/k3"]) > 1e-6, "control: a mean of means differs"


def test_a_tiny_mismatch_keeps_its_digits() -> None:
    d = np.tile([1e-6, -1e-6], 500)
    metrics = sums(d, np.zeros(1000, np.int64)).metrics()
    assert abs(metrics["mismatch/k3"] - 5e-13) < 1e-16
    assert abs(metrics["mismatch/ratio_se"] - 1e-6 / 1000**0.5) < 1e-10


def test_exact_agreement_is_zero_everywhere() -> None:
    metrics = sums(np.zeros(10), np.zeros(10, np.int64)).metrics()
    for name in ("k1", "k3", "abs_dlogp_mean", "abs_dlogp_max", "abs_dlogp_p99", "ratio_se"):
        assert metrics[f"mismatch/{name}"] == 0.0, name
    assert metrics["mismatch/ratio_mean"] == metrics["mismatch/ess_token_frac"] == 1.0


def test_what_cannot_be_computed_is_absent() -> None:
    assert MismatchSums.zero().metrics() == {}
    one = sums(np.array([0.1]), np.array([5])).metrics()
    assert "mismatch/ratio_se" not in one
    present = {name.rsplit("/", 1)[1] for name in one if name.count("/") == 2}
    assert present == {"lag_4_7"}
    assert set(LAG_BINS) - present, "control: other bins exist"


def test_the_direction_is_trainer_minus_engine() -> None:
    metrics = sums(np.full(4, 0.5), np.zeros(4, np.int64)).metrics()
    assert metrics["mismatch/k1"] == -0.5
    assert metrics["mismatch/ratio_mean"] > 1


def test_sequence_statistics_by_hand_and_in_parts() -> None:
    d, of = np.array([0.1, 0.3, -0.2, 0.0, 0.4]), np.array([0, 0, 1, 1, 1])
    engine, lag = -np.ones_like(d), np.zeros(5, np.int64)

    def part(rows: np.ndarray) -> MismatchSums:
        tensors = (torch.from_numpy(x[rows]) for x in (engine + d, engine, lag))
        index = torch.from_numpy(of[rows] - of[rows].min())
        return MismatchSums.of(*tensors, Sequences(index, int(index.max()) + 1))

    metrics = part(np.arange(5)).metrics()
    W = np.exp([0.4, 0.2])
    want = {
        "chi2_seq": (W**2).mean() - 1,
        "ess_seq_frac": W.sum() ** 2 / (2 * (W**2).sum()),
        "log_ppl_diff_mean": -(0.2 + 0.2 / 3) / 2,
        "log_ppl_diff_absmax": 0.2,
    }
    joined = (part(np.arange(2)) + part(np.arange(2, 5))).metrics()
    for name, value in want.items():
        assert abs(metrics[f"mismatch/{name}"] - value) < 1e-12, name
        assert abs(joined[f"mismatch/{name}"] - value) < 1e-12, name
    assert "mismatch/chi2_seq" not in sums(d, lag).metrics(), "absent without sequences"
