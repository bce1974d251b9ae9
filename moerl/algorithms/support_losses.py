"""Sums over a support of each token: score centering and the KL to a teacher, exact per token.

A support lists entries of the vocabulary for each sampled token, with their log-probabilities under
the trained policy p (in the graph) and under another policy: the engine q, or the teacher t.  It is
whole where nothing lies outside: under truncated sampling, the recorded sampling mask, over which
both are normalised.  Otherwise it is a list of the likeliest entries and the rest of the
vocabulary counts as one more outcome.

Score centering.  Tokens come from q, so the expected gradient of an objective with weight w(p / q)
and a constant advantage is the sum over v of q(v) w grad log p(v): not zero where q is not p, as it
would be on policy, and every advantage is multiplied with it.  C has this expected gradient, and
the loss A C takes it away from -A w log p.  Of a token in the tail only q = rho p is assumed,
so C = sum over the support of sg(m - alpha p) log p, with the tail's alpha p moved to the support
(sums of p grad log p over the vocabulary are zero):

| weight w         | m                      | alpha                          |
|------------------|------------------------|--------------------------------|
| 1                | q                      | rho                            |
| clamp(p/q, l, h) | clamp(p, l q, h q)     | clamp(1, l rho, h rho)         |
| p/q in l..h or 0 | p where l q <= p <= h q| 1 where l rho <= 1 <= h rho    |
| p/q              | C = 0                  |                                |

tests/unit/test_support_losses.py decides signs and alpha by exact sums.

Legend: N tokens, Z entries of all supports, row after row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.algorithms.head_logprob import sum_of_rows
from moerl.config.algorithms import RatioRule

_REST = 1e-6  # least probability outside of a support


@dataclass(frozen=True, slots=True, eq=False)
class Support:
    """Entries of the vocabulary with their log-probabilities under two policies."""

    logprob: Tensor  # [Z] trained policy, in the graph
    other: Tensor  # [Z] engine or teacher
    lengths: Tensor  # [N] i64
    is_whole: bool  # nothing lies outside

    def sum(self, values_Z: Tensor) -> Tensor:
        """[N]"""
        return sum_of_rows(values_Z, self.lengths)

    def spread(self, values_N: Tensor) -> Tensor:
        """[Z]: at each entry, the value of its token."""
        return values_N.repeat_interleave(self.lengths, output_size=len(self.logprob))

    def rest(self, p_Z: Tensor) -> Tensor:
        """[N]: probability outside."""
        return 1.0 - self.sum(p_Z)


def centering(s: Support, advantage_N: Tensor, rule: RatioRule) -> Tensor:
    """C of score centering, [N], in the graph; the loss gains A C.  `other` is the engine."""
    p, q = s.logprob.detach().exp(), s.other.to(s.logprob.dtype).exp()
    if s.is_whole:  # the engine's numbers are rounded
        q, rho = q / s.spread(s.sum(q)), torch.zeros_like(advantage_N)
    else:
        rho = s.rest(q).clamp(min=0) / s.rest(p).clamp(min=_REST)
    if rule.kind == "none":
        m, alpha = q, rho
    else:
        positive, (low, high) = advantage_N > 0, rule.negative
        low_N = torch.full_like(advantage_N, low).masked_fill(positive, rule.positive[0])
        high_N = torch.full_like(advantage_N, high).masked_fill(positive, rule.positive[1])
        low_q, high_q = s.spread(low_N) * q, s.spread(high_N) * q
        low_rho, high_rho = low_N * rho, high_N * rho
        if rule.kind == "clamped":
            m = p.maximum(low_q).minimum(high_q)
            alpha = low_rho.clamp(min=1.0).minimum(high_rho)
        else:
            m = p * ((low_q <= p) & (p <= high_q))
            alpha = ((low_rho <= 1.0) & (high_rho >= 1.0)).to(rho.dtype)
    return s.sum((m - s.spread(alpha) * p) * s.logprob)


def reverse_kl(s: Support) -> Tensor:
    """KL(p, teacher), [N], in the graph: of the truncated distributions where the support is whole.

    Otherwise the rest of the vocabulary is one outcome, so this is at most the KL over the
    vocabulary and equals it when the support is all of it.
    """
    p, t = s.logprob.exp(), s.other
    return _with_rest(s, s.sum(p * (s.logprob - t)), p, t.exp())


def forward_kl(s: Support) -> Tensor:
    """KL(teacher, p), as `reverse_kl`."""
    t = s.other.exp()
    return _with_rest(s, s.sum(t * (s.other - s.logprob)), t, s.logprob.exp())


def _with_rest(s: Support, inside: Tensor, of: Tensor, to: Tensor) -> Tensor:
    """KL(of, to) with the outcome outside of the support."""
    if s.is_whole:
        return inside
    of_rest, to_rest = s.rest(of), s.rest(to)
    rest, other = of_rest.clamp(min=_REST), to_rest.clamp(min=_REST)
    # Below _REST the tangents: bounded, and their gradient still moves mass out of the support
    below = torch.relu(_REST - of_rest) * ((rest / other).log() + 1.0)
    return inside + rest * (rest / other).log() - below + rest * torch.relu(_REST - to_rest) / _REST
