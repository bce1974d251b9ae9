"""Score centering and the KL over a support by exact sums over every action; fp64 throughout.

The expected gradient of an objective with a constant advantage is taken over all actions that the
engine may sample.  It must be zero with the term, and is not without it or with a wrong one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moerl.algorithms.head_logprob import Head, SamplingMask, full_logprobs, top_logprobs
from moerl.algorithms.loss import SUM_NAMES, policy_loss
from moerl.algorithms.support_losses import Support, centering, forward_kl, reverse_kl
from moerl.algorithms.tokens import Sequences, Tokens
from moerl.config.algorithms import RatioRule
from moerl.config.schema import AlgorithmConfig

V, K = 12, 5
EXACT = 1e-12
ALLOWED = {
    "none": {"objective": "reinforce"},
    "none, ratio at 1": {"objective": "ppo_clip", "ratio": "proximal"},
    "clamped": {"objective": "cispo", "clip_low": 0.3, "clip_high": 0.2},
    "clamped by a correction": {"objective": "reinforce", "corrections": ["tis_token"]}
    | {"tis_cap": 1.1},
    "masked": {"objective": "reinforce", "corrections": ["icepop"]}
    | {"icepop_low": 0.8, "icepop_high": 1.2},
    "masked by sign": {"objective": "ppo_clip", "clip_low": 0.1, "clip_high": 0.1},
    "masked on both sides": {"objective": "ppo_dual_clip", "clip_low": 0.1, "clip_high": 0.1}
    | {"dual_clip": 1.3},
    "by age": {"objective": "ppo_clip", "corrections": ["lag_decay"]},
}
each_rule = pytest.mark.parametrize("settings", ALLOWED.values(), ids=ALLOWED)
each_sign = pytest.mark.parametrize("advantage", [1.7, -0.6])


def algorithm(settings: dict[str, Any]) -> AlgorithmConfig:
    return AlgorithmConfig(centering=True, **settings)


class Decision:
    """A state with V actions: the engine's distribution is another than the trainer's."""

    def __init__(self, *, tail: float | None = None, apart: float = 0.6) -> None:
        """tail: the engine gives each action outside of the first K this times p."""
        g = torch.Generator().manual_seed(4)
        self.theta = torch.randn(V, generator=g, dtype=torch.float64).requires_grad_()
        self.p = self.theta.log_softmax(-1)
        noise = apart * torch.randn(V, generator=g, dtype=torch.float64)
        q = (self.theta.detach() + noise).softmax(-1)
        if tail is not None:
            rest = tail * self.p.detach().exp()[K:]
            q = torch.cat([q[:K] * (1 - rest.sum()) / q[:K].sum(), rest])
        self.q = q

    def support(self, size: int, *, is_whole: bool) -> Support:
        """The first `size` actions, of every token."""
        return Support(
            self.p[:size].repeat(V),
            self.q[:size].log().repeat(V),
            torch.full((V,), size),
            is_whole,
        )

    def tokens(self, advantage: float, term: Tensor | None) -> Tokens:
        return Tokens(
            self.p,
            self.q.log(),
            torch.full((V,), advantage).double(),
            Sequences(torch.arange(V), V),
            torch.arange(V) * 0 + 2,
            centering=term,
        )

    def expected(
        self, settings: dict[str, Any], advantage: float, support: Support | None
    ) -> float:
        """Norm of the expected gradient of the loss under the engine."""
        a, term = algorithm(settings), None
        if support is not None:
            rule = RatioRule.of(a)
            assert rule is not None
            term = centering(support, torch.full((V,), advantage).double(), rule)
        loss = policy_loss(a, self.tokens(advantage, term), self.q).loss
        return float(torch.autograd.grad(loss, self.theta, retain_graph=True)[0].norm())


@each_rule
@each_sign
def test_a_constant_advantage_teaches_nothing_with_the_term(
    settings: dict[str, Any], advantage: float
) -> None:
    d = Decision()
    assert d.expected(settings, advantage, d.support(V, is_whole=True)) < EXACT
    # without it, the constant alone moves the policy
    assert d.expected(settings, advantage, None) > 1e-2


@each_rule
@each_sign
def test_a_tail_that_the_engine_scales_is_taken_away(
    settings: dict[str, Any], advantage: float
) -> None:
    """Tails around 1: bounds on either side of 1 / rho are met."""
    without = []
    for tail in (0.4, 0.97, 1.3):
        d = Decision(tail=tail)
        top = d.support(K, is_whole=False)
        assert d.expected(settings, advantage, top) < EXACT, tail
        without.append(d.expected(settings, advantage, None))
    assert max(without) > 1e-2


@each_sign
def test_the_top_of_any_engine_leaves_less(advantage: float) -> None:
    """No tail is scaled exactly: what is left is the tail's own difference."""
    d, settings = Decision(), ALLOWED["none"]
    left = d.expected(settings, advantage, d.support(K, is_whole=False))
    assert left < 0.6 * d.expected(settings, advantage, None)
    assert d.expected(settings, advantage, d.support(V - 1, is_whole=False)) < EXACT


@pytest.mark.parametrize("wrong", ["sign", "alpha", "m"])
def test_control_a_term_with_another_sign_alpha_or_m_leaves_a_gradient(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, settings = Decision(tail=0.4), ALLOWED["none"]
    top = d.support(K, is_whole=False)
    if wrong == "sign":
        right = centering
        monkeypatch.setitem(globals(), "centering", lambda *given: -right(*given))
    elif wrong == "alpha":
        monkeypatch.setattr(Support, "rest", lambda self, p: torch.ones(V).double())
    else:
        top = replace(top, other=top.logprob.detach())
    assert d.expected(settings, 1.0, top) > 1e-2


def test_a_ratio_without_bounds_needs_no_term() -> None:
    """Its rule is `plain`, which the configuration refuses as useless."""
    for settings in (
        {"objective": "importance"},
        {"objective": "reinforce", "corrections": ["importance"]},
    ):
        assert RatioRule.of(algorithm(settings)) == RatioRule("plain")
        assert Decision().expected(settings, 1.3, None) < EXACT


@pytest.mark.parametrize("other", ["gspo", "gmpo", "sapo", "topr_token", "kimi_token", "dppo_tv"])
def test_other_objectives_have_no_rule(other: str) -> None:
    assert RatioRule.of(algorithm({"objective": other})) is None
    with_mask = {"objective": "reinforce", "corrections": ["mis_token"]}
    assert RatioRule.of(algorithm(with_mask)) is None


def test_age_alone_scales_the_term_and_the_weight_by_ratio_does_not() -> None:
    d = Decision()
    a = algorithm(ALLOWED["clamped by a correction"])
    rule = RatioRule.of(a)
    assert rule is not None
    term = centering(d.support(V, is_whole=True), torch.ones(V).double(), rule)
    aged = replace(a, corrections=["tis_token", "lag_decay"], lag_decay_base=0.5)
    at = SUM_NAMES.index("centering")
    once, later = (policy_loss(x, d.tokens(1.0, term), d.q).sums[at] for x in (a, aged))
    assert float(later) == pytest.approx(0.25 * float(once), rel=1e-12)
    assert float(once) == pytest.approx(float((d.q * term).sum()), rel=1e-12)


def test_numbers_in_fp16_leave_less_than_two_thousandths() -> None:
    d, settings = Decision(), ALLOWED["none"]
    whole = d.support(V, is_whole=True)
    rounded = replace(whole, other=whole.other.half())
    left = d.expected(settings, 1.0, rounded)
    assert EXACT < left < 2e-3 * d.expected(settings, 1.0, None)


def test_an_empty_tail_divides_nothing() -> None:
    """p has all its mass in the list: 1 - sum of p is 0 by rounding, or below."""
    d = Decision()
    for size, is_whole in ((V, True), (V, False)):
        s = d.support(size, is_whole=is_whole)
        s = replace(s, logprob=s.logprob + 1e-9)
        for settings in ALLOWED.values():
            rule = RatioRule.of(algorithm(settings))
            assert rule is not None
            assert centering(s, torch.ones(V).double(), rule).isfinite().all()


# --- KL to a teacher ------------------------------------------------------------------------------
def two(seed: int = 5) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    theta = torch.randn(3, V, generator=g, dtype=torch.float64).requires_grad_()
    return theta, torch.randn(3, V, generator=g, dtype=torch.float64).log_softmax(-1)


def masked(theta: Tensor, teacher: Tensor) -> tuple[Support, Tensor, Tensor]:
    """Rows of 3, 1 and V entries, both policies over them; and the two as dense rows."""
    keep = torch.zeros(3, V, dtype=torch.bool)
    keep[0, [1, 4, 7]], keep[1, 2], keep[2] = True, True, True
    p, t = (one.masked_fill(~keep, -torch.inf).log_softmax(-1) for one in (theta, teacher.detach()))
    return Support(p[keep], t[keep], keep.sum(1), is_whole=True), p, t


def dense_kl(a: Tensor, b: Tensor) -> Tensor:
    absent = a.detach() == -torch.inf
    return (a.exp() * (a.masked_fill(absent, 0.0) - b.masked_fill(absent, 0.0))).sum(-1)


@pytest.mark.parametrize("forward", [False, True])
def test_the_kl_over_a_mask_is_that_of_the_truncated_distributions(forward: bool) -> None:
    theta, teacher = two()
    support, p, t = masked(theta, teacher)
    found = (forward_kl if forward else reverse_kl)(support)
    want = dense_kl(t, p) if forward else dense_kl(p, t)
    torch.testing.assert_close(found, want, rtol=EXACT, atol=EXACT)
    weights = torch.tensor([1.0, -2.0, 0.5]).double()
    mine, true = (
        torch.autograd.grad((value * weights).sum(), theta, retain_graph=True)[0]
        for value in (found, want)
    )
    torch.testing.assert_close(mine, true, rtol=EXACT, atol=EXACT)
    other = (reverse_kl if forward else forward_kl)(support)
    assert float((other - want).detach().abs().max()) > 1e-2


@pytest.mark.parametrize("kl", [forward_kl, reverse_kl])
def test_more_of_the_teachers_likeliest_come_closer_to_the_whole_kl(kl: Any) -> None:
    theta, teacher = two()
    p = theta.log_softmax(-1)
    true = dense_kl(teacher, p) if kl is forward_kl else dense_kl(p, teacher)
    before = torch.zeros(3).double()
    for k in range(1, V + 1):
        top, ids = teacher.topk(k)
        support = Support(p.gather(1, ids).flatten(), top.flatten(), torch.full((3,), k), False)
        value = kl(support)
        assert (value >= before - 1e-5).all(), k
        assert (value <= true + 1e-5).all(), k
        before = value.detach()
    torch.testing.assert_close(value, true, rtol=1e-5, atol=1e-5)
    mine, exact = (torch.autograd.grad(x.sum(), theta, retain_graph=True)[0] for x in (value, true))
    torch.testing.assert_close(mine, exact, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("kl", [forward_kl, reverse_kl])
@pytest.mark.parametrize("is_whole", [True, False])
def test_gradcheck_of_both_kls_through_the_head(kl: Any, is_whole: bool) -> None:
    torch.manual_seed(1)
    hidden = torch.randn(4, 3, dtype=torch.float64).requires_grad_()
    weight = torch.randn(V, 3, dtype=torch.float64).requires_grad_()
    tau, sampled = torch.tensor([1.0, 0.7, 1.3, 1.0]).double(), torch.tensor([1, 0, 5, 11])
    teacher = Head(torch.randn(V, 3, dtype=torch.float64), V)
    ids, top = top_logprobs(hidden.detach(), teacher, K, temperature_S=tau)
    mask = SamplingMask(torch.arange(5) * K, ids.flatten())
    assert (top.diff(dim=1) <= 0).all()

    def value(x: Tensor, w: Tensor) -> Tensor:
        scores = full_logprobs(x, Head(w, V), sampled, temperature_S=tau, support=mask)
        assert scores.support is not None
        s = Support(scores.support, top.flatten(), mask.offsets.diff(), is_whole)
        return kl(s) + scores.logprob

    assert torch.autograd.gradcheck(value, (hidden, weight))


def test_control_a_gradient_without_the_rest_of_the_vocabulary_is_another() -> None:
    theta, teacher = two()
    p = theta.log_softmax(-1)
    top, ids = teacher.topk(K)
    support = Support(p.gather(1, ids).flatten(), top.flatten(), torch.full((3,), K), False)
    closed = replace(support, is_whole=True)
    with_rest, without = (
        torch.autograd.grad(reverse_kl(s).sum(), theta, retain_graph=True)[0]
        for s in (support, closed)
    )
    assert float((with_rest - without).norm()) > 0.1 * float(with_rest.norm())


def test_the_loss_has_the_kl_and_no_advantage_of_it() -> None:
    d = Decision()
    kl = reverse_kl(d.support(V, is_whole=True))
    a = AlgorithmConfig(distill_coef=0.5, distill_over="support")
    result = policy_loss(a, replace(d.tokens(0.0, None), teacher_kl=kl), d.q)
    found = dict(zip(SUM_NAMES, result.sums.tolist(), strict=True))
    assert found["distill"] == pytest.approx(0.5 * float((d.q * kl).sum()), rel=1e-12)
    assert (found["pg"], found["teacher_kl"]) == (0.0, pytest.approx(float(kl.sum())))
    assert float(result.loss) == pytest.approx(found["distill"])
