"""Per-token policy objectives and the sequence mask of DeepSeek-V3.2, on flat tensors.

The ratio is always taken against the engine's own log-probability: the number the token was
sampled with, never recomputed.  A further objective is one function and one line of OBJECTIVES.

Legend: N sampled tokens of a microbatch, Q sequences of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.algorithms.registry import choose
from moerl.config.schema import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss of each token, to be minimised, and where clipping took its gradient away."""

    loss: Tensor  # [N]
    clipped_low: Tensor  # [N] bool: A < 0 and ratio < 1 - clip_low
    clipped_high: Tensor  # [N] bool: A > 0 and ratio > 1 + clip_high


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """What one microbatch adds to the loss of the step."""

    loss: Tensor  # scalar: sum of weight x mask x token loss
    sums: Tensor  # [len(SUM_NAMES)] f64 on the CPU; add over microbatches and ranks


SUM_NAMES = ("tokens", "loss", "clip_low", "clip_high", "sequences", "masked_sequences", "drift")


def ppo_clip(
    logprob_N: Tensor, old_logprob_N: Tensor, advantage_N: Tensor, clip_low: float, clip_high: float
) -> TokenLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprob - old_logprob)."""
    ratio = (logprob_N - old_logprob_N).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return TokenLoss(
        loss=-torch.minimum(ratio * advantage_N, clipped * advantage_N),
        clipped_low=(advantage_N < 0) & (ratio < 1.0 - clip_low),
        clipped_high=(advantage_N > 0) & (ratio > 1.0 + clip_high),
    )


Objective = Callable[[Tensor, Tensor, Tensor, AlgorithmConfig], TokenLoss]
OBJECTIVES: dict[str, Objective] = {
    "ppo_clip": lambda new, old, adv, cfg: ppo_clip(new, old, adv, cfg.clip_low, cfg.clip_high),
}


def sequence_drift(
    logprob_N: Tensor, old_logprob_N: Tensor, seq_N: Tensor, num_seqs: int
) -> Tensor:
    """Mean of (engine - trainer) log-probability over each sequence's sampled tokens, [Q]."""
    drift = old_logprob_N.detach() - logprob_N.detach()
    total = torch.zeros(num_seqs, dtype=drift.dtype, device=drift.device)
    count = torch.zeros_like(total)
    total.index_add_(0, seq_N, drift)
    count.index_add_(0, seq_N, torch.ones_like(drift))
    return total / count.clamp(min=1)


def off_policy_mask(drift_Q: Tensor, advantage_N: Tensor, seq_N: Tensor, delta: float) -> Tensor:
    """[N] bool, False = dropped: A < 0 and drift > delta (arXiv 2512.02556 eq. 9, strict >).

    A dropped sequence keeps its place in the denominator.  All sampled tokens of a sequence must
    be in this call: under context parallelism, gather the drift first.
    """
    return ~((advantage_N < 0) & (drift_Q[seq_N] > delta))


def policy_loss(
    config: AlgorithmConfig,
    logprob_N: Tensor,
    old_logprob_N: Tensor,
    advantage_N: Tensor,
    weight_N: Tensor,
    seq_N: Tensor,
    num_seqs: int,
) -> PolicyLoss:
    """Loss of one microbatch: objective, sequence mask, aggregation weights.

    seq_N: [N] i64, 0..num_seqs - 1, the sequence of each token.  Without sampled tokens the loss
    is a zero that is still connected to `logprob_N`, so that backward runs on every rank.
    Raises ConfigError for an unknown objective.
    """
    token = choose("algorithm.objective", config.objective, OBJECTIVES)(
        logprob_N, old_logprob_N, advantage_N, config
    )
    drift_Q = sequence_drift(logprob_N, old_logprob_N, seq_N, num_seqs)
    weighted = token.loss * weight_N
    masked_seqs = seq_N[:0]
    if config.off_policy_delta > 0:
        keep_N = off_policy_mask(drift_Q, advantage_N, seq_N, config.off_policy_delta)
        weighted = weighted * keep_N
        masked_seqs = seq_N[~keep_N].unique()
    loss = weighted.sum()
    sums = (  # in the order of SUM_NAMES
        torch.tensor(len(logprob_N)),
        loss.detach(),
        token.clipped_low.sum(),
        token.clipped_high.sum(),
        torch.tensor(len(seq_N.unique())),
        torch.tensor(len(masked_seqs)),
        drift_Q.sum(),
    )
    return PolicyLoss(loss, torch.stack([value.to(loss.device).double() for value in sums]).cpu())


def loss_metrics(sums: Tensor) -> dict[str, float]:
    """Metrics of a step from its added sums (names of docs/metrics.md); empty without tokens."""
    value = dict(zip(SUM_NAMES, sums.tolist(), strict=True))
    if not value["tokens"]:
        return {}
    return {
        "loss/pg": value["loss"],
        "loss/tokens": value["tokens"],
        "loss/clip_low_frac": value["clip_low"] / value["tokens"],
        "loss/clip_high_frac": value["clip_high"] / value["tokens"],
        "loss/opsm_frac": value["masked_sequences"] / value["sequences"],
        "loss/opsm_drift_mean": value["drift"] / value["sequences"],
    }
