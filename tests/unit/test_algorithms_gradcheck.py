"""Finite differences in fp64 for every objective, correction, KL and aggregation of the tables.

A stop-gradient makes plain finite differences disagree with autograd by design.  `ref_models`
records what each detach returned at the point of interest and returns just that at every other
point, so the function that is differentiated numerically is the one autograd differentiates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moerl.algorithms.loss import policy_loss, value_loss
from moerl.algorithms.tokens import Sequences, Tokens
from moerl.config.algorithms import CORRECTIONS, KLS, OBJECTIVES
from moerl.config.schema import AlgorithmConfig

OF = torch.tensor([0, 0, 0, 1, 2, 2])


def inputs(seed: int) -> tuple[Tensor, Callable[[Tensor], Tokens]]:
    """A leaf of log-probabilities and a batch around it, away from every kink by chance."""
    g = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(6, generator=g, dtype=torch.float64)

    leaf = -torch.rand(6, generator=g, dtype=torch.float64) * 2 - 0.1
    engine, proximal = leaf + 0.3 * normal(), leaf + 0.2 * normal()
    advantage, reference, entropy = normal(), leaf + 0.3 * normal(), normal().abs()
    lag, teacher = torch.tensor([0, 1, 2, 0, 3, 3]), leaf + 0.3 * normal()

    def tokens(logprob: Tensor) -> Tokens:
        return Tokens(
            logprob,
            engine,
            advantage,
            Sequences(OF, 3),
            lag,
            proximal,
            reference,
            teacher,
            entropy,
            m2_bound=0.02,
        )

    return leaf.requires_grad_(), tokens


def ref_models(function: Callable[[Tensor], Tensor], point: Tensor) -> Callable[[Tensor], Tensor]:
    """`function` with the value of every detach held at what it was at `point`."""
    kept: list[Tensor] = []
    original = Tensor.detach

    def evaluate(x: Tensor) -> Tensor:
        values = iter(kept)
        recording = not kept

        def detach(self: Tensor) -> Tensor:
            if recording:
                kept.append(original(self).clone())
                return kept[-1]
            return next(values)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "detach", detach)
            return function(x)

    evaluate(point)
    return evaluate


def loss(config: AlgorithmConfig, tokens: Tokens) -> Tensor:
    weight = torch.tensor([0.1, 0.1, 0.1, 0.3, 0.2, 0.2], dtype=torch.float64)
    return policy_loss(config, tokens, weight).loss


def agrees(function: Callable[[Tensor], Tensor], leaf: Tensor) -> bool:
    return torch.autograd.gradcheck(function, (leaf,), eps=1e-6, atol=1e-7, raise_exception=False)


def check(config: AlgorithmConfig, seed: int) -> bool:
    leaf, tokens = inputs(seed)
    point = leaf.detach().clone().requires_grad_()
    return agrees(ref_models(lambda x: loss(config, tokens(x)), point), point)


@pytest.mark.parametrize("ratio", ["engine", "proximal"])
@pytest.mark.parametrize("objective", list(OBJECTIVES))
def test_objectives(objective: str, ratio: str) -> None:
    config = AlgorithmConfig(objective=objective, ratio=ratio)
    assert all(check(config, seed) for seed in range(3))


@pytest.mark.parametrize("correction", list(CORRECTIONS))
def test_corrections(correction: str) -> None:
    config = AlgorithmConfig(
        ratio="proximal",
        corrections=[correction],
        off_policy_delta=0.01,
        lag_cap=1,
        tis_cap=1.05,
        mis_token_low=0.9,
        mis_token_high=1.2,
        mis_geometric_low=0.9,
        mis_geometric_high=1.1,
    )
    assert all(check(config, seed) for seed in range(3))
    changed = [
        loss(config, tokens(leaf)).item()
        != loss(replace(config, corrections=[]), tokens(leaf)).item()
        for leaf, tokens in map(inputs, range(3))
    ]
    assert any(changed), "control: the correction does something"


@pytest.mark.parametrize("name", list(KLS))
def test_kl_terms(name: str) -> None:
    config = AlgorithmConfig(kl=name, kl_coef=0.3)
    assert all(check(config, seed) for seed in range(3))


def test_entropy_bonus() -> None:
    assert all(check(AlgorithmConfig(entropy_coef=0.3), seed) for seed in range(3))


def test_distillation() -> None:
    assert all(check(AlgorithmConfig(distill_coef=0.3), seed) for seed in range(3))


def test_everything_at_once() -> None:
    config = AlgorithmConfig(
        objective="gspo",
        ratio="proximal",
        corrections=["tis_token", "mis_geometric", "opsm", "lag"],
        off_policy_delta=0.05,
        lag_cap=2,
        kl="unbiased",
        kl_coef=0.1,
        entropy_coef=0.1,
    )
    assert all(check(config, seed) for seed in range(3))


def test_value_loss() -> None:
    for seed in range(4):
        leaf, tokens = inputs(seed)
        t = tokens(leaf)
        assert agrees(lambda v, t=t: value_loss(v, t.advantage).sum(), leaf)


def test_control_without_freezing_a_stop_gradient_is_seen() -> None:
    leaf, tokens = inputs(0)
    point = leaf.detach().clone().requires_grad_()
    config = AlgorithmConfig(objective="cispo")
    assert not agrees(lambda x: loss(config, tokens(x)), point)


def test_control_a_hidden_fp32_cast_is_seen() -> None:
    leaf, tokens = inputs(0)
    point = leaf.detach().clone().requires_grad_()
    config = AlgorithmConfig()
    assert agrees(lambda x: loss(config, tokens(x)), point)
    assert not agrees(lambda x: loss(config, tokens(x.float().double())), point)
