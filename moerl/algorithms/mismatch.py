"""How far the trainer's log-probabilities are from the engine's, as sums that can be added.

d = trainer - engine, per sampled token; tokens are drawn by the engine, so mean(exp(d) - 1 - d)
estimates KL(engine, trainer).  Everything is kept as sums, counts and a histogram with fixed
edges, added over microbatches and ranks and divided once: a mean of means would depend on the
split.  Binned by token lag: bin 0 is pure engine mismatch, the others add staleness.  Tokens behind
a change of weights inside their row have bins of their own, because the rows of their prefix come
from older weights and no forward pass reproduces them.

Sums are taken of exp(d) - 1 rather than exp(d), so that a standard error of 1e-6 survives.
Sequence statistics, W = exp(sum of d over a sequence) within +-20 nats as in verl, are sums over
tokens of value / length; they are not binned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from moerl.algorithms.tokens import Sequences, bounded_exp
from moerl.core.step_counts import LAGS

LAG_BINS = (*LAGS, *(f"joined_{name}" for name in LAGS))
_LAG_EDGES = [first for first, _ in LAGS.values()][1:]
_FIELDS = (
    "tokens", "d", "abs_d", "dd", "k3", "k3_reverse", "u", "uu", "prob_error",
    "extreme_1p1", "extreme_2",
)  # fmt: skip
_SEQ_FIELDS = ("sequences", "mean_d", "W", "WW")
_FAR = 300.0  # nats: beyond it exp(d) is taken as exp(+-_FAR), whose square is finite in f64
# Upper edges of |d| in nats: 32 per decade from 1e-9 to 1e2, so a quantile is at most 7.5% high.
_DECADES, _PER_DECADE, _FLOOR = 11, 32, -9.0
_EDGES = torch.logspace(_FLOOR, _FLOOR + _DECADES, _DECADES * _PER_DECADE + 1, dtype=torch.float64)


@dataclass(slots=True)
class MismatchSums:
    """Sums of one or more microbatches; `+` joins them, `all_reduce` joins ranks."""

    sums: Tensor  # [lag bins, fields] f64
    histogram: Tensor  # [2, lag bins, edges + 1] f64, counts of |d| <= edge for d <= 0 and d > 0
    peak: Tensor  # [2, lag bins] f64, largest -d and largest d, at least 0
    seq_sums: Tensor  # [sequence fields] f64
    seq_peak: Tensor  # [1] f64, largest |mean d| of a sequence

    @classmethod
    def zero(cls) -> MismatchSums:
        bins = len(LAG_BINS)
        return cls(
            torch.zeros(bins, len(_FIELDS), dtype=torch.float64),
            torch.zeros(2, bins, len(_EDGES) + 1, dtype=torch.float64),
            torch.zeros(2, bins, dtype=torch.float64),
            torch.zeros(len(_SEQ_FIELDS), dtype=torch.float64),
            torch.zeros(1, dtype=torch.float64),
        )

    @classmethod
    def of(
        cls,
        logprob_N: Tensor,
        engine_N: Tensor,
        lag_N: Tensor,
        sequences: Sequences | None = None,
        joined_N: Tensor | None = None,
    ) -> MismatchSums:
        """Sums of one microbatch.  All [N]; lag in versions, >= 0.

        Without `sequences` the statistics of sequences stay absent.  joined: bool, see above.
        """
        distance = logprob_N.detach().double() - engine_N.double()
        d = distance.cpu()
        size, u = d.abs(), torch.expm1(d.clamp(max=_FAR))
        ones = torch.ones_like(d)
        columns = torch.stack(
            [
                ones, d, size, d * d, u - d, (u + 1) * d - u, u, u * u, size.clamp(max=_FAR).exp(),
                (size > math.log(1.1)).double(), (size > math.log(2.0)).double(),
            ],
            dim=1,
        )  # fmt: skip
        lag_bin = torch.bucketize(lag_N.cpu(), torch.tensor(_LAG_EDGES), right=True)
        if joined_N is not None:
            lag_bin = lag_bin + len(LAGS) * joined_N.long()
        result = cls.zero()
        result.sums.index_add_(0, lag_bin, columns)
        sign_bin = (d > 0).long() * len(LAG_BINS) + lag_bin
        cell = torch.bucketize(size, _EDGES)
        result.histogram.view(-1).index_add_(0, sign_bin * (len(_EDGES) + 1) + cell, ones)
        result.peak.view(-1).scatter_reduce_(0, sign_bin, size, "amax")
        if sequences is not None and len(d):
            result._add_sequences(distance, sequences)
        return result

    def _add_sequences(self, d_N: Tensor, sequences: Sequences) -> None:
        whole = bounded_exp(sequences.spread(sequences.sum(d_N)))
        mean = sequences.mean(d_N)
        values = torch.stack([torch.ones_like(mean), mean, whole, whole.square()])
        self.seq_sums += (values * sequences.share()).sum(1).cpu()
        self.seq_peak[0] = float(mean.abs().max())

    def __add__(self, other: MismatchSums) -> MismatchSums:
        return MismatchSums(
            self.sums + other.sums,
            self.histogram + other.histogram,
            torch.maximum(self.peak, other.peak),
            self.seq_sums + other.seq_sums,
            torch.maximum(self.seq_peak, other.seq_peak),
        )

    def all_reduce(self, group: ProcessGroup | None, device: str = "cpu") -> MismatchSums:
        """Join over the ranks of `group` (each rank must hold different tokens)."""
        added = [self.sums, self.histogram, self.seq_sums]
        largest = [self.peak, self.seq_peak]
        sums, histogram, seq_sums = _reduced(added, ReduceOp.SUM, group, device)
        peak, seq_peak = _reduced(largest, ReduceOp.MAX, group, device)
        return MismatchSums(sums, histogram, peak, seq_sums, seq_peak)

    def metrics(self) -> dict[str, float]:
        """`mismatch/NAME` over all tokens and `mismatch/NAME/BIN` per bin that has tokens.

        A number that could not be computed (no token, one token for a standard error) is absent.
        """
        result = _describe("", self.sums.sum(0), self.histogram.sum(1), self.peak.amax(1))
        for idx, name in enumerate(LAG_BINS):
            result |= _describe(
                f"/{name}", self.sums[idx], self.histogram[:, idx], self.peak[:, idx]
            )
        return result | self._sequence_metrics()

    def _sequence_metrics(self) -> dict[str, float]:
        count, mean_d, whole, squares = self.seq_sums.tolist()
        if not count:
            return {}
        return {
            "mismatch/chi2_seq": squares / count - 1.0,
            "mismatch/ess_seq_frac": whole * whole / (count * squares),
            "mismatch/log_ppl_diff_mean": -mean_d / count,
            "mismatch/log_ppl_diff_absmax": float(self.seq_peak),
        }


def _reduced(
    tensors: list[Tensor], op: ReduceOp.RedOpType, group: ProcessGroup | None, device: str
) -> list[Tensor]:
    packed = torch.cat([part.reshape(-1) for part in tensors]).to(device)
    dist.all_reduce(packed, op, group=group)
    split = packed.cpu().split([part.numel() for part in tensors])
    return [new.view(part.shape) for new, part in zip(split, tensors, strict=True)]


def _describe(suffix: str, sums: Tensor, histogram: Tensor, peaks: Tensor) -> dict[str, float]:
    """sums [fields], histogram [2, edges + 1], peaks [2]: of one lag bin or of all."""
    total = dict(zip(_FIELDS, sums.tolist(), strict=True))
    n = total["tokens"]
    if not n:
        return {}
    weight, weight_squares = n + total["u"], n + 2 * total["u"] + total["uu"]
    below, above = peaks.tolist()
    peak = max(below, above)
    values = {
        "tokens": n,
        "k1": -total["d"] / n,
        "k3": total["k3"] / n,
        "k3_reverse": total["k3_reverse"] / n,
        "m2": total["dd"] / n,
        "prob_error_mean": total["prob_error"] / n,
        "abs_dlogp_mean": total["abs_d"] / n,
        "abs_dlogp_p99": min(_quantile(histogram.sum(0), 0.99), peak),
        "abs_dlogp_max": peak,
        "ratio_mean": 1.0 + total["u"] / n,
        "ratio_p001": _ratio_quantile(histogram, peaks, 0.001),
        "ratio_p50": _ratio_quantile(histogram, peaks, 0.5),
        "ratio_p999": _ratio_quantile(histogram, peaks, 0.999),
        "extreme_frac_1p1": total["extreme_1p1"] / n,
        "extreme_frac_2": total["extreme_2"] / n,
        "chi2_token": (2 * total["u"] + total["uu"]) / n,
        "ess_token_frac": weight * weight / (n * weight_squares),
    }
    if n > 1:
        variance = max(total["uu"] - total["u"] ** 2 / n, 0.0) / (n - 1)
        values["ratio_se"] = math.sqrt(variance / n)
    return {f"mismatch/{name}{suffix}": value for name, value in values.items()}


def _ratio_quantile(histogram: Tensor, peaks: Tensor, q: float) -> float:
    """exp of the q-th value of d, from the outer edge of its cell, never beyond the largest |d|."""
    below, above = histogram
    edges = torch.cat([_EDGES, torch.tensor([math.inf], dtype=torch.float64)])
    signed = torch.cat([-edges.flip(0), edges])  # outer edge of each cell, rising
    reached = torch.cat([below.flip(0), above]).cumsum(0) >= q * histogram.sum()
    d = float(signed[int(reached.to(torch.int8).argmax())])
    return math.exp(min(max(d, -float(peaks[0])), float(peaks[1]), _FAR))


def _quantile(histogram: Tensor, q: float) -> float:
    """Upper edge of the cell that holds the q-th value."""
    reached = histogram.cumsum(0) >= q * histogram.sum()
    cell = int(reached.to(torch.int8).argmax())
    return float(_EDGES[cell]) if cell < len(_EDGES) else math.inf
