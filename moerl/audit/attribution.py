"""Splits the gap between engine and trainer into routing, mask and numerics, by position and lag.

Four scores of the same tokens are compared: no replay, mask only, routes only, both.  The gap with
both is numerics (kernels, precision, reduction order) and, at lag > 0, staleness.  The reduction by
routing replay, with the mask replayed, is routing's share, and vice versa; the rest of the gap is
the interaction of the two.

Legend: S sampled tokens, d = trainer minus engine log-probability.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moerl.core.types import Array

VARIANTS = ("none", "routing", "mask", "both")
CAUSES = ("routing", "mask", "numerics")
NUM_POSITION_BINS = 16


def attribute(gaps: Mapping[str, Array]) -> dict[str, dict[str, float]]:
    """Shares of the gap by two measures: {measure: {cause or total: value}}.

    gaps: d [S] for each name of VARIANTS. Measures: `k3` (mean of exp(d) - 1 - d) and
    `abs_dlogp_mean`, both in nats.  A share is negative when replay widened the gap.
    """
    measures = {
        "k3": {name: float((np.expm1(d) - d).mean()) for name, d in gaps.items()},
        "abs_dlogp_mean": {name: float(np.abs(d).mean()) for name, d in gaps.items()},
    }
    result = {}
    for measure, value in measures.items():
        shares = {
            "total": value["none"],
            "routing": value["mask"] - value["both"],
            "mask": value["routing"] - value["both"],
            "numerics": value["both"],
        }
        shares["interaction"] = shares["total"] - sum(shares[cause] for cause in CAUSES)
        result[measure] = shares
    return result


def cause_of_tokens(gaps: Mapping[str, Array]) -> Array:
    """Index into CAUSES of the largest effect on each token, [S] i64."""
    both = gaps["both"]
    effects = np.stack([np.abs(gaps["mask"] - both), np.abs(gaps["routing"] - both), np.abs(both)])
    worst: Array = effects.argmax(0)
    return worst


def by_position(position: Array, gaps: Mapping[str, Array]) -> list[dict[str, Any]]:
    """Mean and largest |d| along the response: one row per position, or per run of positions.

    position: [S] index of the token in its response.  Rows: {"step": mean position, "tokens",
    "NAME" mean, "NAME_max"}.
    """
    values = np.unique(position)
    rows = []
    for run in np.array_split(values, min(NUM_POSITION_BINS, len(values))):
        part = (position >= run[0]) & (position <= run[-1])
        row: dict[str, Any] = {"step": float(position[part].mean()), "tokens": int(part.sum())}
        for name, d in gaps.items():
            row[name] = float(np.abs(d[part]).mean())
            row[f"{name}_max"] = float(np.abs(d[part]).max())
        rows.append(row)
    return rows


def by_lag(lag: Array, gaps: Mapping[str, Array]) -> list[dict[str, Any]]:
    """k3 and mean |d| per version lag: {"lag", "tokens", "NAME": mean, "NAME_k3"}."""
    rows = []
    for value in np.unique(lag):
        part = lag == value
        row: dict[str, Any] = {"lag": int(value), "tokens": int(part.sum())}
        for name, d in gaps.items():
            row[name] = float(np.abs(d[part]).mean())
            row[f"{name}_k3"] = float((np.expm1(d[part]) - d[part]).mean())
        rows.append(row)
    return rows
