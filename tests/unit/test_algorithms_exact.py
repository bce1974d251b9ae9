"""Claims of the algorithms by exact sums: every action of a small vocabulary, no sampling noise.

What is unbiased is compared with the derivative of the true expectation; what is not is a control
that has to be off.  fp64 throughout.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moerl.algorithms import kl
from moerl.algorithms.advantages import Outcomes, grpo_mean, grpo_std, rloo
from moerl.algorithms.loss import SUM_NAMES, policy_loss
from moerl.algorithms.tokens import Sequences, Tokens
from moerl.config.schema import AlgorithmConfig

V = 12
EXACT = 1e-12


class Enumerated:
    """One decision: every action once, weighted by the policy it is drawn from."""

    def __init__(self, keep: Tensor | None = None) -> None:
        g = torch.Generator().manual_seed(3)
        self.theta = torch.randn(V, generator=g, dtype=torch.float64).requires_grad_()
        old = self.theta.detach() + 0.5 * torch.randn(V, generator=g, dtype=torch.float64)
        ref = torch.randn(V, generator=g, dtype=torch.float64)
        self.reward = torch.randn(V, generator=g, dtype=torch.float64)
        kept = torch.ones(V, dtype=torch.bool) if keep is None else keep
        self.actions = kept.nonzero()[:, 0]
        closed = torch.where(kept, 0.0, -torch.inf)
        self.lp = (self.theta + closed).log_softmax(-1)[self.actions]
        self.mu = (old + closed).log_softmax(-1)[self.actions]
        self.ref = (ref + closed).log_softmax(-1)[self.actions]
        self.R = self.reward[self.actions]

    def tokens(self, engine: Tensor, proximal: Tensor | None = None) -> Tokens:
        """Each action a sequence of one token."""
        n = len(self.actions)
        return Tokens(
            self.lp,
            engine,
            self.R,
            Sequences(torch.arange(n), n),
            torch.zeros(n, dtype=torch.int64),
            proximal=proximal,
            reference=self.ref,
            entropy=self.entropy.detach().expand(n),
        )

    @property
    def entropy(self) -> Tensor:
        return -(self.lp.exp() * self.lp).sum()

    @property
    def true_kl(self) -> Tensor:
        return (self.lp.exp() * (self.lp - self.ref)).sum()

    def gradient(self, value: Tensor) -> Tensor:
        return torch.autograd.grad(value, self.theta, retain_graph=True)[0]

    def error(self, value: Tensor, true: Tensor) -> float:
        """Relative error of the gradient."""
        want = self.gradient(true)
        return float((self.gradient(value) - want).norm() / want.norm())


# --- KL and entropy ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "on_policy", "value_exact", "gradient_exact"),
    [
        ("k1", True, True, False),
        ("k2", True, False, True),
        ("k3", True, True, False),
        ("k3_plus", True, True, True),
        ("unbiased", True, True, True),
        ("unbiased", False, True, True),
        ("k3", False, False, False),
        ("k3_plus", False, False, False),
    ],
)
def test_kl_estimators(name: str, on_policy: bool, value_exact: bool, gradient_exact: bool) -> None:
    e = Enumerated()
    drawn = e.lp.detach() if on_policy else e.mu
    estimate = (drawn.exp() * getattr(kl, name)(e.tokens(drawn))).sum()
    error, gap = e.error(estimate, e.true_kl), abs(estimate.item() - e.true_kl.item())
    assert (gap < EXACT) == value_exact, gap
    assert (error < EXACT) == gradient_exact, error
    assert value_exact or gap > 1e-2
    assert gradient_exact or error > 1e-2


def test_control_the_kl_ratio_outside_the_graph_keeps_the_value_and_loses_the_gradient() -> None:
    e = Enumerated()
    detached = (e.lp - e.mu).exp().detach() * kl.k3(e.tokens(e.mu))
    estimate = (e.mu.exp() * detached).sum()
    assert abs(estimate.item() - e.true_kl.item()) < EXACT
    assert e.error(estimate, e.true_kl) > 0.1


@pytest.mark.parametrize("on_policy", [True, False])
def test_the_entropy_bonus_is_unbiased_in_value_and_gradient(on_policy: bool) -> None:
    e = Enumerated()
    drawn = e.lp.detach() if on_policy else e.mu
    estimate = (drawn.exp() * kl.entropy_bonus(e.tokens(drawn))).sum()
    assert abs(estimate.item() - e.entropy.item()) < EXACT
    assert e.error(estimate, e.entropy) < EXACT
    naive = -(drawn.exp() * e.lp).sum()
    assert e.error(naive, e.entropy) > 0.1, "control: -logprob of the samples as a loss"


def test_a_reference_over_the_same_kept_set_gives_the_kl_of_the_restricted_policies() -> None:
    keep = torch.arange(V) % 3 != 0
    e = Enumerated(keep)
    estimate = (e.mu.exp() * kl.unbiased(e.tokens(e.mu))).sum()
    assert abs(estimate.item() - e.true_kl.item()) < EXACT
    g = torch.Generator().manual_seed(3)
    for _ in range(2):
        torch.randn(V, generator=g, dtype=torch.float64)
    open_ref = torch.randn(V, generator=g, dtype=torch.float64).log_softmax(-1)[e.actions]
    mass_left_out = 1 - open_ref.exp().sum().item()
    e.ref = open_ref
    wrong = (e.mu.exp() * kl.unbiased(e.tokens(e.mu))).sum()
    assert mass_left_out > 0.1
    assert e.true_kl.item() - wrong.item() == pytest.approx(mass_left_out), "low by what is outside"


# --- policy gradient -----------------------------------------------------------------------------
def expected(e: Enumerated, drawn: Tensor, config: AlgorithmConfig, **more: Tensor) -> Tensor:
    """Expectation over a ~ drawn of the composed loss of one token."""
    return policy_loss(config, e.tokens(e.mu, **more), drawn.exp()).loss


UNBIASED: dict[str, AlgorithmConfig] = {
    "importance": AlgorithmConfig(objective="importance"),
    "ppo_clip, clip open": AlgorithmConfig(clip_low=1.0, clip_high=1e9),
    "gspo, clip open": AlgorithmConfig(objective="gspo", clip_low=1.0, clip_high=1e9),
    "gspo_token, clip open": AlgorithmConfig(objective="gspo_token", clip_low=1.0, clip_high=1e9),
    "cispo, clip open": AlgorithmConfig(objective="cispo", clip_low=1.0, clip_high=1e9),
    "dppo_tv, region open": AlgorithmConfig(
        objective="dppo_tv", clip_low=1.0, clip_high=1.0, dppo_cap=1e9
    ),
    "decoupled": AlgorithmConfig(
        ratio="proximal", corrections=["importance"], clip_low=1.0, clip_high=1e9
    ),
}
BIASED: dict[str, AlgorithmConfig] = {
    "reinforce without a correction": AlgorithmConfig(objective="reinforce"),
    "ppo_clip": AlgorithmConfig(),
    "cispo": AlgorithmConfig(objective="cispo"),
    "icepop": AlgorithmConfig(
        objective="reinforce", corrections=["icepop"], icepop_low=0.9, icepop_high=1.1
    ),
    "proximal ratio alone": AlgorithmConfig(ratio="proximal", clip_low=1.0, clip_high=1e9),
}


@pytest.mark.parametrize("name", [*UNBIASED, *BIASED])
def test_off_policy_gradient_against_the_derivative_of_the_expected_reward(name: str) -> None:
    """Actions drawn from mu; the exact gradient of E_theta[R], up to the sign of a loss."""
    e = Enumerated()
    config = (UNBIASED | BIASED)[name]
    value = expected(e, e.mu, config)
    error = e.error(value, -(e.lp.exp() * e.R).sum())
    assert (error < EXACT) == (name in UNBIASED), error
    assert name in UNBIASED or error > 1e-2


@pytest.mark.parametrize("correction", ["importance", "tis_token", "tis_sequence", "icepop"])
def test_reinforce_with_an_uncut_weight_is_unbiased(correction: str) -> None:
    """With theta = prox the weight prox / mu makes up for the behaviour policy."""
    e = Enumerated()
    config = AlgorithmConfig(
        objective="reinforce", corrections=[correction], tis_cap=1e9, icepop_low=0, icepop_high=1e9
    )
    value = expected(e, e.mu, config)
    assert e.error(value, -(e.lp.exp() * e.R).sum()) < EXACT


@pytest.mark.parametrize(
    "config",
    [
        AlgorithmConfig(),
        AlgorithmConfig(objective="ppo_dual_clip"),
        AlgorithmConfig(objective="gspo", clip_low=3e-4, clip_high=4e-4),
        AlgorithmConfig(objective="gspo_token", clip_low=3e-4, clip_high=4e-4),
        AlgorithmConfig(objective="gmpo"),
        AlgorithmConfig(objective="cispo"),
        AlgorithmConfig(objective="sapo"),
        AlgorithmConfig(objective="topr"),
        AlgorithmConfig(objective="topr_token"),
        AlgorithmConfig(objective="kimi"),
        AlgorithmConfig(objective="kimi_token"),
        AlgorithmConfig(objective="dppo_tv"),
        AlgorithmConfig(objective="dppo_kl"),
        AlgorithmConfig(objective="reinforce"),
        AlgorithmConfig(objective="importance"),
    ],
    ids=lambda config: config.objective,
)
def test_on_policy_every_objective_is_the_policy_gradient(config: AlgorithmConfig) -> None:
    e = Enumerated()
    e.mu = e.lp.detach()
    assert e.error(expected(e, e.mu, config), -(e.lp.exp() * e.R).sum()) < EXACT


def test_a_kept_set_gives_the_gradient_of_the_restricted_policy_and_another_support_does_not() -> (
    None
):
    keep = torch.arange(V) % 3 != 0
    e = Enumerated(keep)
    config = AlgorithmConfig(objective="importance")
    true = -(e.lp.exp() * e.R).sum()
    assert e.error(expected(e, e.mu, config), true) < EXACT
    assert (e.gradient(expected(e, e.mu, config))[~keep] == 0).all()
    recorded, e.lp = e.lp, e.theta.log_softmax(-1)[e.actions]
    wrong = expected(e, e.mu, config)
    assert e.error(wrong, true) > 0.05, "control: scored over the whole vocabulary"
    assert (e.mu.exp() * (e.lp - e.mu).exp()).sum().item() < 0.9, "E[ratio] is the mass of the set"
    assert (e.mu.exp() * (recorded - e.mu).exp()).sum().item() == pytest.approx(1.0)


# --- on-policy distillation ----------------------------------------------------------------------
@pytest.mark.parametrize("objective", ["importance", "ppo_clip", "cispo"])
def test_distillation_is_the_gradient_of_the_reverse_kl(objective: str) -> None:
    """Alone, with actions drawn from an older policy; the reference plays the teacher."""
    e = Enumerated()
    e.R = torch.zeros_like(e.R)
    clip = {} if objective == "importance" else {"clip_low": 1.0, "clip_high": 1e9}
    config = AlgorithmConfig(objective=objective, distill_coef=1.0, **clip)
    tokens = replace(e.tokens(e.mu), teacher=e.ref)
    result = policy_loss(config, tokens, e.mu.exp())
    assert e.error(result.loss, e.true_kl) < EXACT
    in_graph = (e.mu.exp() * (e.lp - e.ref)).sum()
    assert e.error(in_graph, e.true_kl) > 0.1, "control: the difference itself as a loss"


def test_distillation_adds_to_a_reward() -> None:
    e = Enumerated()
    config = AlgorithmConfig(objective="importance", distill_coef=0.3)
    tokens = replace(e.tokens(e.mu), teacher=e.ref)
    value = policy_loss(config, tokens, e.mu.exp()).loss
    true = 0.3 * e.true_kl - (e.lp.exp() * e.R).sum()
    assert e.error(value, true) < EXACT
    weighted = policy_loss(config, tokens, e.mu.exp() * V).sums
    names = dict(zip(SUM_NAMES, weighted.tolist(), strict=True))
    assert names["teacher_kl"] != 0


# --- group baselines: all groups of two actions --------------------------------------------------
@pytest.mark.parametrize(
    ("function", "scale"),
    [(rloo, 1.0), (grpo_mean, 0.5), (grpo_std, None)],
    ids=["rloo", "grpo_mean", "grpo_std"],
)
def test_group_baselines(function: Callable[[Outcomes], Tensor], scale: float | None) -> None:
    """Leave-one-out is unbiased, the group mean by (G - 1) / G, the standard deviation is not."""
    e = Enumerated()
    total = torch.zeros((), dtype=torch.float64)
    none = torch.zeros(0, dtype=torch.int64)
    probability = e.lp.detach().exp()
    for a, b in itertools.product(range(V), repeat=2):
        pair = torch.tensor([a, b])
        o = Outcomes(e.R[pair], none.new_zeros(2), none.new_ones(2), none.double(), none, none)
        surrogate = -(function(o) * e.lp[pair]).sum() / 2
        total = total + probability[a] * probability[b] * surrogate
    true = -(e.lp.exp() * e.R).sum()
    if scale is None:
        cosine = torch.nn.functional.cosine_similarity(e.gradient(total), e.gradient(true), dim=0)
        assert cosine < 1 - 1e-6, "control: dividing by the group's deviation turns the gradient"
    else:
        assert e.error(total / scale, true) < EXACT
