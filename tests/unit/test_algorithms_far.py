"""Every part of a loss at distances of 0 to 1,000 nats, against its formula in float64.

FORMULAS has the formula of each row of the tables in `moerl.config.algorithms`, written down again
from its paper without any bound; a new row fails until it has one here.  Up to 20 nats value and
gradient equal the formula's.  Beyond, both are finite and monotone in the distance, and no gradient
has the other sign.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from moerl.algorithms.advantages import Outcomes
from moerl.algorithms.kl import entropy_bonus
from moerl.algorithms.loss import distillation, loss_metrics, policy_loss
from moerl.algorithms.mismatch import MismatchSums
from moerl.algorithms.preference import pair_advantages
from moerl.algorithms.registry import choose
from moerl.algorithms.support_losses import Support, forward_kl, reverse_kl
from moerl.algorithms.tokens import Sequences, Tokens
from moerl.config.algorithms import CORRECTIONS, KLS, OBJECTIVES
from moerl.config.schema import AlgorithmConfig

NATS = (0.0, 1e-3, 1.0, 20.0, 100.0, 1000.0)
EQUAL = 4  # of NATS: the formula itself up to here
FLOOR = 1000 * math.exp(-20)
S = AlgorithmConfig(off_policy_delta=0.1, mis_sequence_high=1e12, mis_token_low=1e-30)
SEQUENCE = (S.mis_sequence_low, S.mis_sequence_high)
GEOMETRIC = (S.mis_geometric_low, S.mis_geometric_high)
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
Values = Callable[[Tokens], Tensor]


def _x(t: Tokens) -> Tensor:
    return t.logprob - t.engine


def _ref(t: Tokens) -> Tensor:
    assert t.reference is not None
    return t.reference - t.logprob


def _k3(t: Tokens) -> Tensor:
    return _ref(t).exp() - 1 - _ref(t)


def _plain(t: Tokens) -> Tensor:
    return -t.advantage * t.logprob


def _mean(t: Tokens, x: Tensor) -> Tensor:
    return t.sequences.mean(x)


def _sum(t: Tokens, x: Tensor) -> Tensor:
    return t.sequences.spread(t.sequences.sum(x))


def _clip(t: Tokens, r: Tensor) -> Tensor:
    a, bounded = t.advantage, r.clamp(1 - S.clip_low, 1 + S.clip_high)
    return -torch.minimum(r * a, bounded * a)


def _dual(t: Tokens) -> Tensor:
    loss, bound = _clip(t, _x(t).exp()), -S.dual_clip * t.advantage
    return torch.where(t.advantage < 0, torch.minimum(loss, bound), loss)


def _own(t: Tokens, weight: Tensor) -> Tensor:
    return -weight.detach() * t.advantage * t.logprob


def _gmpo(t: Tokens) -> Tensor:
    x = _x(t)
    top = x.minimum(torch.full_like(x, S.clip_high))
    x = torch.where(t.advantage > 0, top, x.maximum(torch.full_like(x, -S.clip_low)))
    return -t.advantage * _mean(t, x).exp()


def _sapo(t: Tokens) -> Tensor:
    k = torch.full_like(t.advantage, S.sapo_tau_neg)
    k[t.advantage > 0] = S.sapo_tau_pos
    return -t.advantage * 4 / k * torch.sigmoid(k * (_x(t).exp() - 1))


def _taper(t: Tokens, log_r: Tensor) -> Tensor:
    return _own(t, torch.where(t.advantage > 0, 1.0, log_r.exp().minimum(torch.tensor(1.0))))


def _dppo(t: Tokens, *, is_kl: bool) -> Tensor:
    p, mu = t.logprob.detach().exp(), t.engine.exp()
    rest = (1 - mu) * torch.log((1 - mu + 1e-8) / (1 - p + 1e-8))
    moved = mu * (t.engine - t.logprob.detach()) + rest if is_kl else (p - mu).abs()
    out = torch.where(
        t.advantage > 0, (p > mu) & (moved > S.clip_high), (p < mu) & (moved > S.clip_low)
    )
    return _own(t, torch.where(out, 0.0, _x(t).exp().minimum(torch.tensor(S.dppo_cap))))


def _within(w: Tensor, low: float, high: float) -> Tensor:
    return ((w >= low) & (w <= high)).to(w.dtype)


def _d(t: Tokens) -> Tensor:
    return _x(t).detach()


FORMULAS: Mapping[str, Mapping[str, Values]] = MappingProxyType({
    "kl": {
        "k1": lambda t: -_ref(t),
        "k2": lambda t: _ref(t) ** 2 / 2,
        "k3": lambda t: _k3(t),
        # its value is k3's: the one row of which value and gradient are two functions
        "k3_plus": lambda t: _k3(t).detach() + _ref(t) ** 2 / 2 - (_ref(t) ** 2 / 2).detach(),
        # multiplied out: its gradient does not cancel in float64 either
        "unbiased": lambda t: (t.reference - t.engine).exp() - _x(t).exp() * (1 + _ref(t)),
    },
    "objectives": {
        "ppo_clip": lambda t: _clip(t, _x(t).exp()),
        "ppo_dual_clip": _dual,
        "gspo": lambda t: _clip(t, _mean(t, _x(t)).exp()),
        "gspo_token": lambda t: _clip(t, (_mean(t, _d(t)) + t.logprob - t.logprob.detach()).exp()),
        "gmpo": _gmpo,
        "cispo": lambda t: _own(t, _x(t).exp().clamp(1 - S.clip_low, 1 + S.clip_high)),
        "sapo": _sapo,
        "topr": lambda t: _taper(t, _sum(t, _d(t))),
        "topr_token": lambda t: _taper(t, _d(t)),
        "kimi": lambda t: _plain(t) + S.kimi_tau / 2 * _x(t) * _sum(t, _x(t)),
        "kimi_token": lambda t: _plain(t) + S.kimi_tau / 2 * _x(t) ** 2,
        "dppo_tv": lambda t: _dppo(t, is_kl=False),
        "dppo_kl": lambda t: _dppo(t, is_kl=True),
        "importance": lambda t: -_x(t).exp() * t.advantage,
        "reinforce": lambda t: _plain(t),
    },
    "corrections": {
        "importance": lambda t: _d(t).exp(),
        "tis_token": lambda t: _d(t).exp().clamp(max=S.tis_cap),
        "tis_sequence": lambda t: _sum(t, _d(t)).exp().clamp(max=S.tis_cap),
        "tis_geometric": lambda t: _mean(t, _d(t)).exp().clamp(max=S.tis_cap),
        "icepop": lambda t: _d(t).exp() * _within(_d(t).exp(), S.icepop_low, S.icepop_high),
        "mis_token": lambda t: _within(_d(t).exp(), S.mis_token_low, S.mis_token_high),
        "mis_sequence": lambda t: _within(_sum(t, _d(t)).exp(), *SEQUENCE),
        "mis_geometric": lambda t: _within(_mean(t, _d(t)).exp(), *GEOMETRIC),
        "opsm": lambda t: 1.0 - ((t.advantage < 0) & (-_mean(t, _d(t)) > 0.1)).double(),
        "lag": lambda t: torch.ones_like(t.engine),
        "lag_decay": lambda t: torch.ones_like(t.engine),
        "m2": lambda t: (_d(t) ** 2 <= t.m2_bound).double(),
    },
    "terms": {
        "entropy_bonus": lambda t: _x(t).exp() * (-t.logprob.detach() - 2.0) + 2.0,
        "distillation": lambda t: _ref(t).detach(),
    },
})  # fmt: skip
TABLES: Mapping[str, Mapping[str, Any]] = {
    "kl": KLS,
    "objectives": OBJECTIVES,
    "corrections": CORRECTIONS,
    "terms": {"entropy_bonus": entropy_bonus, "distillation": distillation},
}
PARTS = [(table, name) for table, rows in TABLES.items() for name in rows]


def part(table: str, name: str) -> Values:
    """The code under test: per-token values of a row of a table."""
    if table == "terms":
        return TABLES[table][name]  # type: ignore[no-any-return]
    function = choose(f"algorithm.{table}", name, TABLES[table])
    if table == "kl":
        return function
    if table == "objectives":
        return lambda t: function(t, t.engine, S).loss
    return lambda t: function(t, S).weight


def batch(
    nats: Tensor, dtype: torch.dtype, side: int, advantage: float, num: int, ratio: float
) -> tuple[Tensor, Tokens]:
    """Sequences of `num` tokens that are together `nats` from the other policies: exact numbers.

    side: 1 where theta is the less likely.  ratio: theta - engine of the KL terms; 0: `nats`.
    """
    step = (nats / num).repeat_interleave(num).to(dtype)
    zero = torch.zeros_like(step)
    theta, other = (-step, zero) if side > 0 else (zero, -step)
    leaf = theta.clone().requires_grad_()
    engine = (theta.double() - ratio).to(dtype) if ratio else other
    of = torch.arange(len(nats)).repeat_interleave(num)
    tokens = Tokens(
        leaf, engine, torch.full_like(step, advantage), Sequences(of, len(nats)),
        torch.zeros_like(of), reference=other, teacher=other, entropy=zero + 2.0, m2_bound=0.5,
    )  # fmt: skip
    return leaf, tokens


def sweep(values: Values, nats: Tensor, *where: Any) -> tuple[Tensor, Tensor]:
    """Value and gradient, f64, of the first token of each sequence."""
    leaf, tokens = batch(nats, *where)
    found = values(tokens)
    grad = torch.zeros_like(leaf)
    if found.requires_grad:
        (grad,) = torch.autograd.grad(found.sum(), leaf)
    num = where[3]
    return found.detach().double()[::num], grad.double()[::num]


def is_monotone(values: Tensor) -> bool:
    """But for FLOOR: x exp(-x) falls, and its bounded form ends at 1,000 exp(-20)."""
    steps = values.diff()
    return bool((steps >= -FLOOR).all() or (steps <= FLOOR).all())


def test_each_row_has_a_formula() -> None:
    assert {name: set(rows) for name, rows in FORMULAS.items()} == {
        name: set(rows) for name, rows in TABLES.items()
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("table", "name"), PARTS, ids=[":".join(one) for one in PARTS])
def test_value_and_gradient_of_each_part_from_0_to_1000_nats(
    table: str, name: str, dtype: torch.dtype
) -> None:
    values, formula = part(table, name), FORMULAS[table][name]
    ratios = (0.0, 0.5, -0.5, 15.0, -15.0) if table == "kl" else (0.0,)
    nats = torch.tensor(NATS, dtype=torch.float64)
    wheres = [
        (side, advantage, num, ratio)
        for side in (1, -1)
        for advantage in (1.0, -1.0)
        for num in (1, 2)
        for ratio in ratios
    ]
    for where in wheres:
        value, grad = sweep(values, nats, dtype, *where)
        # the same numbers as `dtype` holds, and no further than exp reaches in f64
        held = nats.to(dtype).double().clamp(max=250.0)
        right, slope = sweep(formula, held, torch.float64, *where)
        assert torch.stack([value, grad]).isfinite().all(), where
        for got, want in ((value, right), (grad, slope)):
            bound = 6 * torch.finfo(dtype).eps * (want.abs() + max(1.0, math.exp(where[3])))
            assert ((got - want).abs() <= bound)[:EQUAL].all(), (where, got, want)
            assert is_monotone(got[EQUAL - 1 :]), (where, got)
        assert (grad * slope >= 0)[EQUAL:].all(), (where, grad, slope)


def test_beyond_20_nats_the_reference_still_pulls() -> None:
    """A zero has the right sign too; but a term that stops to pull loses the token for good."""
    nats = torch.tensor([100.0, 1000.0], dtype=torch.float64)
    for name in ("k2", "k3", "k3_plus", "unbiased"):
        for side in (1, -1):
            _, grad = sweep(part("kl", name), nats, torch.float32, side, 1.0, 1, 0.5)
            assert (grad * side < -0.1).all(), "theta rises where it is the less likely"


def test_values_below_20_nats_are_those_of_the_plain_formula_bit_for_bit() -> None:
    torch.manual_seed(0)
    theta, reference, engine = (-3 * torch.rand(10_000) for _ in range(3))
    of = torch.arange(10_000)
    t = Tokens(theta, engine, theta, Sequences(of, 10_000), of, reference=reference)
    d = reference - theta
    plain = torch.expm1(d) - d
    assert torch.equal(part("kl", "k3")(t), plain)
    assert torch.equal(part("kl", "unbiased")(t), (theta - engine).exp() * plain)
    near = d.abs() < 0.5
    assert torch.equal(part("kl", "k3_plus")(t)[near], (d**2 / 2 + (plain - d**2 / 2))[near])


# --- parts that are no row of a table -------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kl", "is_forward"), [(reverse_kl, False), (forward_kl, True)])
@pytest.mark.parametrize("is_whole", [True, False])
def test_kl_over_a_support(
    kl: Callable[[Support], Tensor], is_forward: bool, is_whole: bool, dtype: torch.dtype
) -> None:
    """Two actions and logits that are `nats` apart, of the policy or of the teacher."""
    size = 2 if is_whole else 1
    signs = [(1, 0), (-1, 0), (0, 1), (0, -1), (1, -1), (-1, 1)]
    for policy, teacher in [(one * n, other * n) for n in NATS for one, other in signs]:
        logits = torch.tensor([policy, 0.0], dtype=dtype).requires_grad_()
        other = torch.tensor([teacher, 0.0], dtype=dtype).log_softmax(-1)
        own, lengths = logits.log_softmax(-1)[:size], torch.tensor([size])
        found = kl(Support(own, other[:size], lengths, is_whole)).sum()
        (grad,) = torch.autograd.grad(found, logits)
        exact = torch.tensor([policy, 0.0], dtype=torch.float64).requires_grad_()
        p = exact.log_softmax(-1)
        t = torch.tensor([teacher, 0.0], dtype=torch.float64).log_softmax(-1)
        want = (t.exp() * (t - p)).sum() if is_forward else (p.exp() * (p - t)).sum()
        (slope,) = torch.autograd.grad(want, exact)
        eps = torch.finfo(dtype).eps
        assert torch.stack([found, *grad]).isfinite().all(), (policy, teacher)
        exact_to = 20.0 if is_whole else 1.0  # less: the rest has a floor
        if max(abs(policy), abs(teacher)) <= exact_to:
            bound = 8 * eps * (1 + abs(float(want)))
            assert abs(float(found - want)) <= bound, (policy, teacher)
            assert ((grad - slope).abs() <= bound).all(), (policy, teacher, grad, slope)
        # rounding of 1 - sum(p) is no sign
        assert (grad * slope >= -8 * eps * slope.abs()).all(), (policy, teacher, grad, slope)


def test_the_rest_outside_of_a_support_keeps_its_gradient() -> None:
    """The old clamp of one of the two terms: all mass inside, half of the teacher's outside."""
    logits = torch.tensor([15.0, 0.0], dtype=torch.float64).requires_grad_()
    half = torch.tensor([0.5], dtype=torch.float64).log()
    support = Support(logits.log_softmax(-1)[:1], half, torch.tensor([1]), is_whole=False)
    (grad,) = torch.autograd.grad(forward_kl(support).sum(), logits)
    assert 0.1 < grad[0] <= 0.5, "the formula's is 0.5: less of the action in the support"


@pytest.mark.parametrize("side", [1, -1])
def test_preference_pairs(side: int) -> None:
    """d/dh of -log sigmoid(beta h), over gains of 0 to 1,000 nats on both sides."""
    pushes = []
    for nats in NATS:
        gains = torch.tensor([side * nats, 0.0], dtype=torch.float64)
        of, ones, none = torch.tensor([0, 0]), torch.tensor([1, 1]), torch.zeros(0)
        reward = torch.tensor([1.0, 0.0], dtype=torch.float64)
        pair = Outcomes(reward, of, ones, none.double(), none.long(), none.long())
        advantage, margin = pair_advantages(pair, gains, S.dpo_beta)
        want = S.dpo_beta / (1 + math.exp(S.dpo_beta * side * nats)) * 2
        assert advantage.tolist() == pytest.approx([want, -want], rel=1e-12)
        assert torch.nn.functional.logsigmoid(margin).isfinite().all()
        pushes.append(float(advantage[0]))
    assert is_monotone(torch.tensor(pushes))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_metrics_of_mismatch_and_loss(dtype: torch.dtype) -> None:
    """Each metric of a batch with one far token is finite; up to 20 nats k3 is the formula's."""
    settings = AlgorithmConfig(kl="unbiased", kl_coef=0.1, distill_coef=0.1)
    for nats in NATS:
        for side in (1, -1):
            leaf, t = batch(torch.tensor([nats, 0.5]), dtype, side, 1.0, 1, 0.0)
            found = MismatchSums.of(leaf, t.engine, t.lag, t.sequences).metrics()
            sums = policy_loss(settings, t, torch.ones_like(leaf)).sums
            found |= loss_metrics(settings, sums, num_steps=2)
            assert all(map(math.isfinite, found.values())), (nats, side, found)
            if nats <= 20:
                both = [-side * float(torch.tensor(one).to(dtype)) for one in (nats, 0.5)]
                want = sum(math.expm1(d) - d for d in both) / 2
                assert found["mismatch/k3"] == pytest.approx(want, rel=1e-9)
