"""Corrections for staleness and for trainer/engine mismatch: one weight per token, 0 = rejected.

All are against mu, the engine's recorded log-probability.  With theta the current policy and prox
the weights at the start of the step, theta/mu = (theta/prox) (prox/mu): an objective with
`ratio: proximal` holds the first factor and a weighing correction (`importance`, `tis_*`,
`icepop`) the second, w = prox/mu; with `ratio: engine` the objective holds both, and only masks
(`mis_*`, `opsm`, `lag`) and a weight by age alone (`lag_decay`) may be added.
`moerl.config.algorithms` refuses a weight that counts twice.

Corrections multiply: weights as factors, masks as a logical and.  They are never in the graph.  A
rejected token still counts in every denominator, so rejecting shrinks a gradient and does not
scale up the rest.  Each correction reports its own `cut`: where the weight was truncated or
decayed, or the token rejected.

Legend: N sampled tokens, Q sequences, d = prox - mu in nats, w = exp(d).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.algorithms.tokens import Tokens, bounded_exp
from moerl.config.schema import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class Correction:
    """Result of one correction for each token."""

    weight: Tensor  # [N], detached, >= 0; 0 = rejected
    cut: Tensor  # [N] bool: truncated, decayed or rejected here


def importance(t: Tokens, s: AlgorithmConfig) -> Correction:
    """w itself: with `ppo_clip` and `ratio: proximal` this is decoupled PPO.

    arXiv 2110.00641 eq. 7 and AReaL (2505.24298 eq. 5): -sg(w) min(u A, clip(u) A), u =
    theta/prox.
    """
    w = bounded_exp(_d(t))
    return Correction(w, torch.zeros_like(w, dtype=torch.bool))


def tis_token(t: Tokens, s: AlgorithmConfig) -> Correction:
    """min(w, tis_cap) (truncated importance sampling, fengyao.notion.site/off-policy-rl; cap 2)."""
    return _truncated(bounded_exp(_d(t)), s.tis_cap)


def tis_sequence(t: Tokens, s: AlgorithmConfig) -> Correction:
    """min(W, tis_cap), W the product of w over the whole sequence (richardli.xyz/rl-collapse).

    Unbiased up to the cap, with a variance that grows with the length.
    """
    return _truncated(bounded_exp(t.sequences.spread(t.sequences.sum(_d(t)))), s.tis_cap)


def tis_geometric(t: Tokens, s: AlgorithmConfig) -> Correction:
    """min(W^(1/|o|), tis_cap): the geometric mean of w over the sequence.  Low variance, biased."""
    return _truncated(bounded_exp(t.sequences.mean(_d(t))), s.tis_cap)


def icepop(t: Tokens, s: AlgorithmConfig) -> Correction:
    """w where icepop_low <= w <= icepop_high, else 0 (IcePop, arXiv 2510.18855 eq. 4; .5 and 5)."""
    w = bounded_exp(_d(t))
    outside = (w < s.icepop_low) | (w > s.icepop_high)
    return Correction(w.masked_fill(outside, 0.0), outside)


def mis_token(t: Tokens, s: AlgorithmConfig) -> Correction:
    """Reject tokens with w outside mis_token_low .. mis_token_high (masked importance sampling).

    richardli.xyz/rl-collapse.  The mask alone: add a weighing correction for its factor w.
    """
    return _mask(_d(t), s.mis_token_low, s.mis_token_high)


def mis_sequence(t: Tokens, s: AlgorithmConfig) -> Correction:
    """Reject sequences whose product W lies outside mis_sequence_low .. mis_sequence_high."""
    whole = t.sequences.spread(t.sequences.sum(_d(t)))
    return _mask(whole, s.mis_sequence_low, s.mis_sequence_high)


def mis_geometric(t: Tokens, s: AlgorithmConfig) -> Correction:
    """Reject sequences whose exp(mean d) lies outside mis_geometric_low .. mis_geometric_high.

    About .999 and 1.001 in richardli.xyz/rl-collapse.  Trap: the bounds are on prox / mu; verl's
    `seq_mean_k1` bounds mu / prox, so its [lo, hi] is our [1 / hi, 1 / lo].
    """
    return _mask(t.sequences.mean(_d(t)), s.mis_geometric_low, s.mis_geometric_high)


def opsm(t: Tokens, s: AlgorithmConfig) -> Correction:
    """Off-policy sequence mask: reject where A < 0 and mean(mu - theta) > off_policy_delta.

    DeepSeek-V3.2 (arXiv 2512.02556 eq. 9).  Strict >, so that a tie is kept.  Trap: the drift is
    engine minus trainer, positive when the trainer likes the sample less; the current policy, not
    the proximal one, and the engine's own number, so staleness and mismatch are both in it.
    """
    drift = t.sequences.mean(t.engine - t.logprob.detach())
    cut = (t.advantage < 0) & (drift > s.off_policy_delta)
    return Correction((~cut).to(drift.dtype), cut)


def lag(t: Tokens, s: AlgorithmConfig) -> Correction:
    """Reject tokens sampled more than lag_cap versions before the weights they train.

    Finer than `rollout.max_lag`, which refuses whole groups before they are trained.
    """
    cut = t.lag > s.lag_cap
    return Correction((~cut).to(t.logprob.dtype), cut)


def lag_decay(t: Tokens, s: AlgorithmConfig) -> Correction:
    """lag_decay_base^lag: the older the weights that sampled a token, the less it counts.

    A factor of age alone, so it combines with a weight by prox / mu.  cut: tokens that have a lag.
    """
    weight = torch.pow(s.lag_decay_base, t.lag.to(t.engine.dtype))
    return Correction(weight, t.lag > 0)


def m2(t: Tokens, s: AlgorithmConfig) -> Correction:
    """Reject tokens whose d^2 lies above the batch's `m2_bound` (M2PO, arXiv 2510.01161 alg. 1)."""
    cut = _d(t).square() > t.m2_bound
    return Correction((~cut).to(t.engine.dtype), cut)


def m2_bound(d_N: Tensor, limit: float) -> Tensor:
    """Largest d^2 that M2PO keeps: a scalar, from ALL tokens of a batch.

    The tokens with the largest d^2 are left out until the mean of the rest is <= limit (.04 in the
    paper).  Over the batch, never over a microbatch, or the split would decide.  0 tokens: inf.
    """
    square = d_N.detach().square().sort().values
    if not len(square):
        return torch.tensor(torch.inf)
    mean = square.cumsum(0) / torch.arange(1, len(square) + 1, device=square.device)
    kept = int((mean <= limit).sum())  # the running mean of sorted values never falls
    return square[kept - 1] if kept else square.new_tensor(-1.0)


def _d(t: Tokens) -> Tensor:
    return t.prox - t.engine


def _truncated(w: Tensor, cap: float) -> Correction:
    return Correction(w.clamp(max=cap), w > cap)


def _mask(log_w: Tensor, low: float, high: float) -> Correction:
    w = log_w.exp()  # without a bound: any limit may be set, and w itself is not used
    cut = (w < low) | (w > high)
    return Correction((~cut).to(w.dtype), cut)
