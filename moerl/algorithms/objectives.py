"""Policy objectives: the loss of each sampled token, to be minimised.

Every function has the signature `(Tokens, old, AlgorithmConfig) -> TokenLoss`.  `old` [N] is the
denominator of the ratio r = exp(logprob - old).  With `algorithm.ratio: engine` it is the engine's
recorded log-probability, so r contains staleness and engine mismatch.  With `proximal` it is the
log-probability under the weights at the start of the step, and a correction accounts for
proximal / engine.  `moerl.algorithms.loss` adds aggregation weights, corrections and the KL term.

Traps: sg() in a formula is a stop-gradient and changes the result.  Sequence forms average over all
sampled tokens of a sequence.  Log-ratios are clamped to +-20 before exp, as in verl: real ratios
stay far below this bound, and it keeps an inf out of 0 x inf.

Legend: N sampled tokens of a microbatch, Q sequences, A advantage, theta current policy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.algorithms.tokens import Tokens, bounded_exp
from moerl.config.schema import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss of each token, and the tokens whose gradient the objective removed or bounded."""

    loss: Tensor  # [N], in the graph
    low: Tensor  # [N] bool: bounded from below (usually A < 0 and a small ratio)
    high: Tensor  # [N] bool: bounded from above
    dual: Tensor  # [N] bool: bounded by the dual clip (A < 0 and the ratio is very large)


def ppo_clip(t: Tokens, old: Tensor, s: AlgorithmConfig) -> TokenLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    PPO (arXiv 1707.06347 eq. 7), GRPO (2402.03300 eq. 3) with clip_low = clip_high, DAPO's
    clip-higher (2503.14476 eq. 10) with clip_high = 0.28, DeepSeek-V3.2 (2512.02556 eq. 5) with
    `opsm` among the corrections.
    """
    return _clipped(_ratio(t.logprob, old), t.advantage, s)


def ppo_dual_clip(t: Tokens, old: Tensor, s: AlgorithmConfig) -> TokenLoss:
    """`ppo_clip`, and for A < 0 at most -dual_clip A (arXiv 1912.09729 eq. 5).

    Without this bound, a token with A < 0 and a huge ratio has an unbounded loss.  verl's `vanilla`
    always applies it, with dual_clip = 3.
    """
    base = _clipped(_ratio(t.logprob, old), t.advantage, s)
    bound = -s.dual_clip * t.advantage
    dual = (t.advantage < 0) & (base.loss > bound)
    return TokenLoss(torch.where(dual, bound, base.loss), base.low, base.high, dual)


def gspo(t: Tokens, old: Tensor, s: AlgorithmConfig) -> TokenLoss:
    """-min(s A, clip(s) A) with s = exp(mean over the sequence of logprob - old), s in the graph.

    GSPO (arXiv 2507.18071 eq. 5-7), sequence form.  The paper uses clip_low 3e-4 and clip_high
    4e-4, three orders of magnitude below the bounds of token ratios.  With seq_mean_token_mean each
    token carries 1/|o| of the loss.
    """
    ratio = bounded_exp(t.sequences.mean(t.logprob - old))
    return _clipped(ratio, t.advantage, s)


def gspo_token(t: Tokens, old: Tensor, s: AlgorithmConfig) -> TokenLoss:
    """-min(s_t A_t, clip(s_t) A_t), s_t = sg(s) theta / sg(theta).

    GSPO-token (arXiv 2507.18071 eq. 13-14): every token has the value of s and its own gradient.
    It is the gradient of `gspo` when A is constant in a sequence and the aggregation weights its
    tokens equally.  Unlike `gspo`, this form accepts advantages per token.
    """
    log_s = t.sequences.mean((t.logprob - old).detach()) + t.logprob - t.logprob.detach()
    return _clipped(bounded_exp(log_s), t.advantage, s)


def gmpo(t: Tokens, old: Tensor, s: AlgorithmConfig) -> TokenLoss:
    """-A exp(mean over the sequence of x), x = log r clipped pessimistically in log space.

    GMPO (arXiv 2507.20673 eq. 4): x is bounded by clip_high where A > 0 and by -clip_low where
    A < 0 (0.4 and 0.4 in the paper).  Trap: the settings themselves bound log r; the lower bound is
    not log(1 - clip_low).
    """
    log_r = t.logprob - old
    high = (t.advantage > 0) & (log_r > s.clip_high)
    low = (t.advantage < 0) & (log_r < -s.clip_low)
    bounded = torch.where(t.advantage > 0, log_r.clamp(max=s.clip_high), log_r)
    bounded = torch.where(t.advantage < 0, bounded.clamp(min=-s.clip_low), bounded)
    loss = -t.advantage * bounded_exp(t.sequences.mean(bounded))
    return TokenLoss(loss, low, high, torch.zeros_like(low))


def cispo(t: Tokens, old: Tensor, s: AlgorithmConfig) -> TokenLoss:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprob: every token keeps a gradient.

    CISPO (arXiv 2506.13585 eq. 4-5).  clip_low = 1 leaves the lower side open, as the paper does.
    Trap: TRL's setting is the upper bound itself (5.0); here, as in verl, it is 1 + clip_high.
    """
    ratio = _ratio(t.logprob, old).detach()
    weight = ratio.clamp(1.0 - s.clip_low, 1.0 + s.clip_high)
    return TokenLoss(
        loss=-weight * t.advantage * t.logprob,
        low=ratio < 1.0 - s.clip_low,
        high=ratio > 1.0 + s.clip_high,
        dual=_nowhere(ratio),
    )


def sapo(t: Tokens, old: Tensor, s: AlgorithmConfig) -> TokenLoss:
    """-A (4 / k) sigmoid(k (r - 1)), k = sapo_tau_pos where A > 0, else sapo_tau_neg.

    SAPO (arXiv 2511.20347 eq. 5-6) replaces the clip by a soft gate.  At r = 1 its gradient is the
    gradient of r A.  The paper uses 1.0 and 1.05.
    """
    ratio = _ratio(t.logprob, old)
    k = torch.full_like(ratio, s.sapo_tau_neg).masked_fill(t.advantage > 0, s.sapo_tau_pos)
    loss = -t.advantage * torch.sigmoid(k * (ratio - 1.0)) * 4.0 / k
    return TokenLoss(loss, _nowhere(ratio), _nowhere(ratio), _nowhere(ratio))


def topr(t: Tokens, old: Tensor, s: AlgorithmConfig) -> TokenLoss:
    """-A logprob where A > 0, else -sg(min(R, 1)) A logprob, R the ratio of the whole sequence.

    TOPR (arXiv 2503.14286 eq. 8-9): positive sequences need no importance weight.  The weight of a
    negative sequence falls with R, so that a sequence which the policy has already left is not
    pushed further.  The paper reads the sign of the reward: use `advantage: reward`.  With a
    baseline the sign is the advantage's.  R underflows to 0 on long sequences, which is intended.
    """
    whole = t.sequences.spread(t.sequences.sum((t.logprob - old).detach()))
    return _tapered(t, bounded_exp(whole))


def topr_token(t: Tokens, old: Tensor, s: AlgorithmConfig) -> TokenLoss:
    """`topr` with the ratio of the token instead of the sequence, as in ROLL."""
    return _tapered(t, _ratio(t.logprob, old).detach())


def kimi(t: Tokens, old: Tensor, s: AlgorithmConfig) -> TokenLoss:
    """-A logprob + kimi_tau / 2 (sum over the sequence of logprob - old)^2, spread over its tokens.

    Kimi k1.5 (arXiv 2501.12599 eq. 3): A is the reward minus the group mean.  The square is of the
    sum X over the sequence; each token carries x_t X, and these terms sum to X^2.  Use
    seq_mean_token_sum, the paper's aggregation.
    """
    log_r = t.logprob - old
    penalty = log_r * t.sequences.spread(t.sequences.sum(log_r))
    return _penalised(t, 0.5 * s.kimi_tau * penalty)


def kimi_token(t: Tokens, old: Tensor, s: AlgorithmConfig) -> TokenLoss:
    """`kimi` with the square taken per token, as in ROLL; also verl's `dro`."""
    return _penalised(t, 0.5 * s.kimi_tau * (t.logprob - old).square())


def dppo_tv(t: Tokens, old: Tensor, s: AlgorithmConfig) -> TokenLoss:
    """-sg(min(r, dppo_cap)) A logprob on tokens whose probability has not moved too far already.

    DPPO with binary total variation (arXiv 2602.04879): a token is dropped when A > 0 and
    p_theta - p_mu > clip_high, or A <= 0 and p_theta - p_mu < -clip_low.  Bounds are probabilities,
    not ratios.  DPPO compares with the engine only: it has no proximal policy.
    """
    rise = (t.logprob.exp() - old.exp()).detach()
    high = (t.advantage > 0) & (rise > s.clip_high)
    low = (t.advantage <= 0) & (rise < -s.clip_low)
    return _trust_region(t, old, s.dppo_cap, low, high)


def dppo_kl(t: Tokens, old: Tensor, s: AlgorithmConfig) -> TokenLoss:
    """`dppo_tv` with the KL between the two-point distributions {token, rest} as the distance.

    DPPO with binary KL (arXiv 2602.04879): KL(mu, theta) over {a, not a} above clip_high (A > 0
    and the token rose) or above clip_low (A <= 0 and it fell) drops the token.
    """
    new, before = t.logprob.detach().exp(), old.exp()
    rest = torch.log((1.0 - before + 1e-8) / (1.0 - new + 1e-8))
    distance = before * (old - t.logprob.detach()) + (1.0 - before) * rest
    high = (t.advantage > 0) & (distance > s.clip_high) & (new > before)
    low = (t.advantage <= 0) & (distance > s.clip_low) & (new < before)
    return _trust_region(t, old, s.dppo_cap, low, high)


def importance(t: Tokens, old: Tensor, s: AlgorithmConfig) -> TokenLoss:
    """-r A without a clip: the importance-weighted policy gradient, unbiased for each token.

    This is the policy term of M2PO (arXiv 2510.01161), whose trust region is a mask, and of losses
    like Kimi-K2's, which reject tokens instead of clipping.  Combine it with a correction that
    bounds it.
    """
    ratio = _ratio(t.logprob, old)
    return TokenLoss(-ratio * t.advantage, _nowhere(ratio), _nowhere(ratio), _nowhere(ratio))


def reinforce(t: Tokens, old: Tensor, s: AlgorithmConfig) -> TokenLoss:
    """-A logprob (Williams 1992), as verl's `gpg`: without a ratio, so exact only on policy."""
    nowhere = _nowhere(t.logprob)
    return TokenLoss(-t.advantage * t.logprob, nowhere, nowhere, nowhere)


def _ratio(logprob: Tensor, old: Tensor) -> Tensor:
    return bounded_exp(logprob - old)


def _clipped(ratio: Tensor, advantage: Tensor, s: AlgorithmConfig) -> TokenLoss:
    clipped = ratio.clamp(1.0 - s.clip_low, 1.0 + s.clip_high)
    return TokenLoss(
        loss=-torch.minimum(ratio * advantage, clipped * advantage),
        low=(advantage < 0) & (ratio < 1.0 - s.clip_low),
        high=(advantage > 0) & (ratio > 1.0 + s.clip_high),
        dual=_nowhere(ratio),
    )


def _tapered(t: Tokens, ratio: Tensor) -> TokenLoss:
    negative = t.advantage <= 0
    weight = torch.where(negative, ratio.clamp(max=1.0), torch.ones_like(ratio))
    nowhere = _nowhere(ratio)
    return TokenLoss(-weight * t.advantage * t.logprob, nowhere, negative & (ratio > 1.0), nowhere)


def _penalised(t: Tokens, penalty: Tensor) -> TokenLoss:
    nowhere = _nowhere(t.logprob)
    return TokenLoss(-t.advantage * t.logprob + penalty, nowhere, nowhere, nowhere)


def _trust_region(t: Tokens, old: Tensor, cap: float, low: Tensor, high: Tensor) -> TokenLoss:
    ratio = _ratio(t.logprob, old).detach()
    inside = ~(low | high)
    loss = -ratio.clamp(max=cap) * t.advantage * t.logprob * inside
    return TokenLoss(loss, low, high, inside & (ratio > cap))


def _nowhere(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool)
