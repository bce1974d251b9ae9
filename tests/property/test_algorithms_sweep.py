"""A loss that is composed from any parts does not know how the batch was cut or ordered."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moerl.algorithms.loss import policy_loss
from moerl.algorithms.registry import choose
from moerl.algorithms.tokens import Sequences, Tokens
from moerl.config.algorithms import AGGREGATIONS, CORRECTIONS, KLS, OBJECTIVES
from moerl.config.schema import AlgorithmConfig

MASKS = [name for name, line in CORRECTIONS.items() if not line.reweighs]
WEIGHTS = [name for name, line in CORRECTIONS.items() if line.reweighs]


@st.composite
def configs(draw: st.DrawFn) -> AlgorithmConfig:
    weighing = draw(st.lists(st.sampled_from(WEIGHTS), max_size=1))
    masks = draw(st.lists(st.sampled_from(MASKS), unique=True, max_size=3))
    return AlgorithmConfig(
        objective=draw(st.sampled_from(sorted(OBJECTIVES))),
        ratio=draw(st.sampled_from(["engine", "proximal"])),
        corrections=weighing + masks,
        kl=draw(st.sampled_from(["off", *sorted(KLS)])),
        kl_coef=0.1,
        entropy_coef=draw(st.sampled_from([0.0, 0.1])),
        distill_coef=draw(st.sampled_from([0.0, 0.5])),
        aggregation=draw(st.sampled_from(sorted(AGGREGATIONS))),
        constant_tokens=9,
        off_policy_delta=0.02,
        lag_cap=1,
    )


def batch(lengths: list[int], seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    n = sum(lengths)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(n, generator=g, dtype=torch.float64)

    lp = -torch.rand(n, generator=g, dtype=torch.float64) - 0.1
    of = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return {
        "logprob": lp,
        "engine": lp + normal(0.3),
        "advantage": torch.randn(len(lengths), generator=g, dtype=torch.float64)[of],
        "lag": torch.randint(0, 4, (n,), generator=g),
        "proximal": lp + normal(0.1),
        "reference": lp + normal(0.2),
        "teacher": lp + normal(0.2),
        "entropy": normal(1.0).abs(),
        "of": of,
    }


def loss_and_gradient(
    config: AlgorithmConfig, lengths: list[int], data: dict[str, Tensor], parts: list[list[int]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Microbatches of whole sequences, in any order: summed loss, sums, gradient of each token."""
    per_seq = choose("algorithm.aggregation", config.aggregation, AGGREGATIONS)(lengths, config)
    weight = torch.tensor(per_seq, dtype=torch.float64)[data["of"]]
    leaf = data["logprob"].clone().requires_grad_()
    total, sums = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for part in parts:
        rows = torch.cat([(data["of"] == seq).nonzero()[:, 0] for seq in part])
        of = torch.arange(len(part)).repeat_interleave(torch.tensor([lengths[s] for s in part]))
        fields = {k: v[rows] for k, v in data.items() if k not in ("of", "logprob")}
        tokens = Tokens(logprob=leaf[rows], sequences=Sequences(of, len(part)), **fields)
        result = policy_loss(config, tokens, weight[rows])
        result.loss.backward()
        total, sums = total + result.loss.detach(), sums + result.sums
    return total, sums, leaf.grad


@settings(max_examples=120, deadline=None)
@given(
    config=configs(),
    lengths=st.lists(st.integers(1, 6), min_size=2, max_size=6),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_microbatches_and_their_order_do_not_matter(
    config: AlgorithmConfig, lengths: list[int], seed: int, data: st.DataObject
) -> None:
    values = batch(lengths, seed)
    whole = loss_and_gradient(config, lengths, values, [list(range(len(lengths)))])
    order = data.draw(st.permutations(range(len(lengths))))
    cut = data.draw(st.integers(1, len(lengths) - 1))
    parts = loss_and_gradient(config, lengths, values, [list(order[:cut]), list(order[cut:])])
    for mine, want in zip(parts, whole, strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-12, atol=1e-13)


@settings(max_examples=30, deadline=None)
@given(objective=st.sampled_from(sorted(OBJECTIVES)), seed=st.integers(0, 10**6))
def test_no_advantage_no_gradient(objective: str, seed: int) -> None:
    lengths = [3, 1, 4]
    config = AlgorithmConfig(objective=objective, kimi_tau=0.0)
    values = batch(lengths, seed)
    silent = {**values, "advantage": torch.zeros_like(values["advantage"])}
    *_, gradient = loss_and_gradient(config, lengths, silent, [[0, 1, 2]])
    assert (gradient == 0).all()
    *_, gradient = loss_and_gradient(
        replace(config, clip_low=1.0, clip_high=1e9), lengths, values, [[0, 1, 2]]
    )
    assert gradient.abs().max() > 0, "control: an advantage gives one"


def test_control_a_sequence_cut_without_its_group_changes_sequence_objectives() -> None:
    """What context parallelism must join: halves of a sequence scored as two sequences."""
    lengths, values = [6, 6], batch([6, 6], 0)
    config = AlgorithmConfig(objective="gspo", clip_low=1.0, clip_high=1e9)
    _, _, whole = loss_and_gradient(config, lengths, values, [[0, 1]])
    halves = {**values, "of": torch.arange(4).repeat_interleave(3)}
    _, _, wrong = loss_and_gradient(config, [3, 3, 3, 3], halves, [[0, 1, 2, 3]])
    assert float((whole - wrong).norm() / whole.norm()) > 1e-2
