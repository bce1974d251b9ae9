"""How far the trainer's log-probabilities are from the engine's, as sums that can be added.

d = trainer - engine, per sampled token; tokens are drawn by the engine, so mean(exp(d) - 1 - d)
estimates KL(engine, trainer).  Everything is kept as sums, counts and a histogram with fixed
edges, added over microbatches and ranks and divided once: a mean of means would depend on the
split.  Binned by token lag: bin 0 is pure engine mismatch, the others add staleness.

Sums are taken of exp(d) - 1 rather than exp(d), so that a standard error of 1e-6 survives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

LAG_BINS = ("lag_0", "lag_1", "lag_2_3", "lag_4_7", "lag_8")
_LAG_EDGES = (1, 2, 4, 8)
_FIELDS = ("tokens", "d", "abs_d", "k3", "u", "uu", "extreme_1p1", "extreme_2")
# Upper edges of |d| in nats: 32 per decade from 1e-9 to 1e2, so a quantile is at most 7.5% high.
_DECADES, _PER_DECADE, _FLOOR = 11, 32, -9.0
_EDGES = torch.logspace(_FLOOR, _FLOOR + _DECADES, _DECADES * _PER_DECADE + 1, dtype=torch.float64)


@dataclass(slots=True)
class MismatchSums:
    """Sums of one or more microbatches; `+` joins them, `all_reduce` joins ranks."""

    sums: Tensor  # [lag bins, fields] f64
    histogram: Tensor  # [lag bins, edges + 1] f64, counts of |d| <= edge
    peak: Tensor  # [lag bins] f64, max |d|

    @classmethod
    def zero(cls) -> MismatchSums:
        bins = len(LAG_BINS)
        return cls(
            torch.zeros(bins, len(_FIELDS), dtype=torch.float64),
            torch.zeros(bins, len(_EDGES) + 1, dtype=torch.float64),
            torch.zeros(bins, dtype=torch.float64),
        )

    @classmethod
    def of(cls, logprob_N: Tensor, engine_logprob_N: Tensor, lag_N: Tensor) -> MismatchSums:
        """Sums of one microbatch.  All [N]; lag in versions, >= 0."""
        d = (logprob_N.detach().double() - engine_logprob_N.double()).cpu()
        size, u = d.abs(), torch.expm1(d)
        ones = torch.ones_like(d)
        columns = torch.stack(
            [
                ones, d, size, u - d, u, u * u,
                (size > math.log(1.1)).double(), (size > math.log(2.0)).double(),
            ],
            dim=1,
        )  # fmt: skip
        lag_bin = torch.bucketize(lag_N.cpu(), torch.tensor(_LAG_EDGES), right=True)
        result = cls.zero()
        result.sums.index_add_(0, lag_bin, columns)
        cell = torch.bucketize(size, _EDGES)
        result.histogram.view(-1).index_add_(0, lag_bin * (len(_EDGES) + 1) + cell, ones)
        result.peak.scatter_reduce_(0, lag_bin, size, "amax")
        return result

    def __add__(self, other: MismatchSums) -> MismatchSums:
        return MismatchSums(
            self.sums + other.sums,
            self.histogram + other.histogram,
            torch.maximum(self.peak, other.peak),
        )

    def all_reduce(self, group: ProcessGroup | None, device: str = "cpu") -> MismatchSums:
        """Join over the ranks of `group` (each rank must hold different tokens)."""
        packed = torch.cat([self.sums, self.histogram], dim=1).to(device)
        peak = self.peak.to(device)
        dist.all_reduce(packed, ReduceOp.SUM, group=group)
        dist.all_reduce(peak, ReduceOp.MAX, group=group)
        sums, histogram = packed.cpu().split([self.sums.shape[1], self.histogram.shape[1]], dim=1)
        return MismatchSums(sums.contiguous(), histogram.contiguous(), peak.cpu())

    def metrics(self) -> dict[str, float]:
        """`mismatch/NAME` over all tokens and `mismatch/NAME/lag_*` per bin that has tokens.

        A number that could not be computed (no token, one token for a standard error) is absent.
        """
        result = _describe("", self.sums.sum(0), self.histogram.sum(0), float(self.peak.max()))
        for idx, name in enumerate(LAG_BINS):
            result |= _describe(
                f"/{name}", self.sums[idx], self.histogram[idx], float(self.peak[idx])
            )
        return result


def _describe(suffix: str, sums: Tensor, histogram: Tensor, peak: float) -> dict[str, float]:
    total = dict(zip(_FIELDS, sums.tolist(), strict=True))
    n = total["tokens"]
    if not n:
        return {}
    weight, weight_squares = n + total["u"], n + 2 * total["u"] + total["uu"]
    values = {
        "tokens": n,
        "k1": -total["d"] / n,
        "k3": total["k3"] / n,
        "abs_dlogp_mean": total["abs_d"] / n,
        "abs_dlogp_p99": min(_quantile(histogram, 0.99), peak),
        "abs_dlogp_max": peak,
        "ratio_mean": 1.0 + total["u"] / n,
        "extreme_frac_1p1": total["extreme_1p1"] / n,
        "extreme_frac_2": total["extreme_2"] / n,
        "ess_token_frac": weight * weight / (n * weight_squares),
    }
    if n > 1:
        variance = max(total["uu"] - total["u"] ** 2 / n, 0.0) / (n - 1)
        values["ratio_se"] = math.sqrt(variance / n)
    return {f"mismatch/{name}{suffix}": value for name, value in values.items()}


def _quantile(histogram: Tensor, q: float) -> float:
    """Upper edge of the cell that holds the q-th value."""
    reached = histogram.cumsum(0) >= q * histogram.sum()
    cell = int(reached.to(torch.int8).argmax())
    return float(_EDGES[cell]) if cell < len(_EDGES) else math.inf
