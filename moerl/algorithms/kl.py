"""KL to a reference policy as a term of the loss, its estimators, and the entropy bonus.

d = reference - theta, so every estimator below is of KL(theta, reference).  Some estimators have
the right value and others the right gradient; this is checked by exact sums in
tests/unit/test_algorithms_exact.py:

| name     | per token                 | value            | gradient as a loss           |
|----------|---------------------------|------------------|------------------------------|
| k1       | -d                        | exact on policy  | zero                         |
| k2       | d^2 / 2                   | wrong            | exact on policy              |
| k3       | exp(d) - 1 - d            | exact on policy  | wrong                        |
| k3_plus  | value of k3, gradient k2  | exact on policy  | exact on policy              |
| unbiased | r (exp(d) - 1 - d)        | exact            | exact, off policy too        |

The gradient of `unbiased` takes r = theta / mu as IN the graph: detaching it keeps the value and
turns the gradient by 54% in the test.  r is over the policy the token was drawn from, so mu is the
engine.

Beyond LOG_BOUND nats exp(d) continues as its tangent, so that value and gradient stay finite and
the gradient still points to the reference.  A clamp of exp(d) alone would leave -d, whose gradient
points away from it.

Under a replayed sampling mask both policies must be scored over the same sampling mask: then k3 is
KL(theta^S, ref^S) exactly, while a reference scored over the full vocabulary makes it too low by
the mass it leaves outside.  k1 and k2 may be negative or biased on samples; see the table.
Estimators: joschu.net/blog/kl-approx.html; k3_plus: verl's straight-through; unbiased:
DeepSeek-V3.2 (arXiv 2512.02556 eq. 7).

Legend: N sampled tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moerl.algorithms.tokens import LOG_BOUND, Tokens, bounded_exp


def k1(t: Tokens) -> Tensor:
    """-d: [N].  As a loss its gradient is zero in expectation; a value only, or inside a reward."""
    return -_d(t)


def k2(t: Tokens) -> Tensor:
    """d^2 / 2: [N]."""
    return 0.5 * _d(t).square()


def k3(t: Tokens) -> Tensor:
    """exp(d) - 1 - d: [N], never negative."""
    return k3_of(_d(t))


def k3_of(d: Tensor) -> Tensor:
    """exp(d) - 1 - d, of the shape of d; beyond LOG_BOUND the tangent at LOG_BOUND."""
    near = d.clamp(max=LOG_BOUND)
    return torch.expm1(near) - near + math.expm1(LOG_BOUND) * torch.relu(d - LOG_BOUND)


def k3_plus(t: Tokens) -> Tensor:
    """The value of k3 with the gradient of k2: [N]."""
    return _with_gradient(k3(t), k2(t))


def unbiased(t: Tokens) -> Tensor:
    """r (exp(d) - 1 - d), r = theta / mu in the graph: [N] (DeepSeek-V3.2 eq. 7).

    Its gradient is -r d: the two terms with exp(d) cancel, which rounding would turn into noise of
    any sign beyond 16 nats in fp32.
    """
    ratio = _ratio(t)
    return _with_gradient(ratio * k3(t), ratio.detach() * k2(t))


def entropy_bonus(t: Tokens) -> Tensor:
    """[N]: an estimate of the policy's entropy with the exact expected gradient, off policy too.

    r (-logprob - H) + H, r = theta / mu in the graph and the rest detached.  Its expectation over
    a ~ mu is H, and the expectation of its gradient is E_theta[grad logprob (-logprob - H)] = grad
    H; H only lowers the variance.  No second pass over the vocabulary is differentiated.
    """
    assert t.entropy is not None, "the entropy bonus needs the entropy of each token"
    entropy = t.entropy.detach()
    return _ratio(t) * (-t.logprob.detach() - entropy) + entropy


def _d(t: Tokens) -> Tensor:
    assert t.reference is not None, "a KL term needs log-probabilities of the reference policy"
    return t.reference.detach() - t.logprob


def _ratio(t: Tokens) -> Tensor:
    return bounded_exp(t.logprob - t.engine)


def _with_gradient(value: Tensor, of: Tensor) -> Tensor:
    return value.detach() + (of - of.detach())
