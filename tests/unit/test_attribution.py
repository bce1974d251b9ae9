"""Shares of a made-up gap whose causes are known."""

from __future__ import annotations

import numpy as np

from moerl.audit.mismatch_page import CAUSES, attribute, by_lag, by_position, cause_of_tokens


def gaps(routing: float, mask: float, numerics: float, tokens: int = 4000) -> dict:
    rng = np.random.default_rng(0)
    parts = {
        "routing": routing * rng.standard_normal(tokens),
        "mask": np.full(tokens, -mask),
        "numerics": numerics * rng.standard_normal(tokens),
    }
    return {
        "both": parts["numerics"],
        "routing": parts["numerics"] + parts["mask"],
        "mask": parts["numerics"] + parts["routing"],
        "none": sum(parts.values()),
    }


def test_shares_add_up_and_name_the_cause() -> None:
    for cause in CAUSES:
        sizes = dict.fromkeys(CAUSES, 1e-4) | {cause: 0.2}
        found = gaps(**sizes)
        for shares in attribute(found).values():
            total = sum(shares[name] for name in (*CAUSES, "interaction"))
            assert abs(total - shares["total"]) < 1e-12
            assert shares[cause] > 0.9 * shares["total"]
        counts = np.bincount(cause_of_tokens(found), minlength=3)
        assert counts.argmax() == CAUSES.index(cause)


def test_a_replay_that_widens_the_gap_has_a_negative_share() -> None:
    found = gaps(0.0, 0.0, 0.01)
    found["both"] = found["both"] + 0.3  # wrong routes, replayed
    found["routing"] = found["both"]
    assert attribute(found)["k3"]["routing"] < -0.02


def test_a_seam_shows_where_it_is() -> None:
    position = np.tile(np.arange(100), 20)
    d = np.where(position >= 60, 0.5, 1e-6)
    rows = by_position(position, {"both": d})
    assert sum(row["tokens"] for row in rows) == 2000
    assert all((row["both_max"] == 0.5) == (row["step"] > 55) for row in rows)


def test_lags_are_kept_apart() -> None:
    lag = np.array([0, 0, 3, 3, 3])
    rows = by_lag(lag, {"both": np.array([0.0, 0.2, 1.0, 1.0, 1.0])})
    assert [(row["lag"], row["tokens"]) for row in rows] == [(0, 2), (3, 3)]
    assert (rows[0]["both"], rows[1]["both"]) == (0.1, 1.0)
