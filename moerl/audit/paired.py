"""The mean difference of two models over the same prompts, with its interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

_Z = statistics.NormalDist().inv_cdf(0.975)


def paired(
    model: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, float]]:
    """Differences of mean rewards by task, and over all prompts under "".

    model, base: `prompts` of the findings.  A prompt without a reward under both is left out.
    """
    ours, theirs = ({(r["task"], r["index"]): r["rewards"] for r in rows} for rows in (model, base))
    found: dict[str, list[float]] = {"": []}
    for task, index in sorted(ours.keys() & theirs.keys()):
        key = task, index
        value = statistics.fmean(ours[key]) - statistics.fmean(theirs[key])
        for label in {"", task}:
            found.setdefault(label, []).append(value)
    return {label: difference(values) for label, values in found.items() if values}


def difference(values: Sequence[float]) -> dict[str, float]:
    """Mean over prompts, and from 4 prompts on its 95 % interval by Student's t."""
    count, mean = len(values), statistics.fmean(values)
    found = {"prompts": float(count), "mean": mean}
    if count < 4:
        return found
    reach = t_quantile(count - 1) * statistics.stdev(values) / math.sqrt(count)
    return found | {"low": mean - reach, "high": mean + reach}


def t_quantile(freedom: int) -> float:
    """97.5 % quantile of Student's t, by Fisher's expansion (Abramowitz and Stegun 26.7.5)."""
    z, n = _Z, float(freedom)
    first = (z**3 + z) / (4 * n)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    fourth = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4)
    return z + first + second + third + fourth
