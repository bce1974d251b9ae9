"""The head by blocks against torch's own log_softmax over all logits with a dense -inf mask."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moerl.algorithms import head_plan
from moerl.algorithms.head_logprob import Head, SamplingMask, full_logprobs, kept_logprobs

# hidden [S, H], weight [V, H], keep [S, V], sampled [S], tau [S]
Case = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
blocks = st.fixed_dictionaries(
    {"_BLOCK": st.integers(1, 300), "_ROWS": st.integers(1, 9), "_PIECE": st.integers(1, 40)}
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    torch.manual_seed(draw(st.integers(0, 2**31)))
    rows = draw(st.integers(1, 7))
    vocab = draw(st.one_of(st.integers(1, 40), st.integers(600, 700)))  # many or few share blocks
    hidden = torch.randn(rows, 5, dtype=torch.float64) * draw(st.sampled_from([0.1, 3.0, 20.0]))
    weight = torch.randn(vocab, 5, dtype=torch.float64)
    keep = torch.rand(rows, vocab) < draw(st.sampled_from([0.0, 0.003, 0.2, 1.0]))
    sampled = torch.randint(0, vocab, (rows,))
    keep[torch.arange(rows), sampled] = True
    tau = torch.rand(rows, dtype=torch.float64) + 0.3
    return hidden.requires_grad_(), weight.requires_grad_(), keep, sampled, tau


def patched(sizes: dict[str, int], vocab: int) -> Any:
    """The head with these sizes and about 40 blocks at most: blocks of one are for few entries."""
    block = max(sizes["_BLOCK"], vocab // 40)
    return mock.patch.multiple(head_plan, **sizes | {"_BLOCK": block})


def csr(keep: Tensor) -> SamplingMask:
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), keep.sum(1).cumsum(0)])
    return SamplingMask(offsets, keep.nonzero()[:, 1])


def oracle(case: Case) -> tuple[Tensor, Tensor]:
    hidden, weight, keep, sampled, tau = case
    log_p = (hidden @ weight.T / tau[:, None]).masked_fill(~keep, -torch.inf).log_softmax(-1)
    entropy = -(log_p.exp() * log_p.masked_fill(~keep, 0.0)).sum(-1)
    return log_p.gather(1, sampled[:, None])[:, 0], entropy


def gradients(value: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    weights = torch.linspace(0.5, -1.5, len(value), dtype=value.dtype)
    return torch.autograd.grad((value * weights).sum(), leaves)


def close(found: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@settings(max_examples=150, deadline=None)
@given(case=cases(), sizes=blocks, fp32=st.booleans())
def test_kept_equals_the_dense_oracle(case: Case, sizes: dict[str, int], fp32: bool) -> None:
    """fp32: the head's runs are shorter; fp64 stays fp64."""
    hidden, weight, keep, sampled, tau = case
    want, want_entropy = oracle(case)
    with patched(sizes, len(weight)):
        head = Head(weight, len(weight), fp32=fp32)
        got, entropy, *_ = kept_logprobs(hidden, head, sampled, csr(keep), temperature_S=tau)
        found = gradients(got, hidden, weight)
    close((got, entropy, *found), (want, want_entropy, *gradients(want, hidden, weight)))
    assert not found[1][~keep.any(0)].any(), "a gradient reached an entry that nobody kept"


@settings(max_examples=80, deadline=None)
@given(case=cases(), sizes=blocks, padding=st.integers(0, 5), fp32=st.booleans())
def test_full_equals_the_dense_oracle_and_ignores_padding(
    case: Case, sizes: dict[str, int], padding: int, fp32: bool
) -> None:
    hidden, weight, keep, sampled, tau = case
    want, want_entropy = oracle((hidden, weight, torch.ones_like(keep), sampled, tau))
    padded = torch.cat([weight.detach(), torch.full((padding, 5), 1e3).double()]).requires_grad_()
    with patched(sizes, len(weight)):
        head = Head(padded, len(weight), fp32=fp32)
        got, entropy, *_ = full_logprobs(hidden, head, sampled, temperature_S=tau)
        d_hidden, d_padded = gradients(got, hidden, padded)
    d_weight, d_padding = d_padded.split([len(weight), padding])
    wanted = gradients(want, hidden, weight)
    close((got, entropy, d_hidden, d_weight), (want, want_entropy, *wanted))
    assert not d_padding.any()


@settings(max_examples=50, deadline=None)
@given(cases())
def test_a_set_of_everything_equals_no_set(case: Case) -> None:
    hidden, weight, keep, sampled, tau = case
    head, mask = Head(weight, len(weight)), csr(torch.ones_like(keep))
    kept = kept_logprobs(hidden, head, sampled, mask, temperature_S=tau).logprob
    full = full_logprobs(hidden, head, sampled, temperature_S=tau).logprob
    torch.testing.assert_close(kept, full, rtol=1e-13, atol=1e-13)


@settings(max_examples=60, deadline=None)
@given(case=cases(), shards=st.integers(1, 4))
def test_shards_score_their_own_entries(case: Case, shards: int) -> None:
    """Joined by hand from what each shard says of its entries, alone.

    Of a row, a shard is given its own kept ids, and the sampled token where it holds it; other
    shards are given one of theirs as if it had been sampled.  With lz = log-sum-exp of a shard:
    lp of any entry = z - lz, so lz = z - lp.
    """
    hidden, weight, keep, sampled, tau = case
    z = (hidden @ weight.T / tau[:, None]).detach()
    width = -(-len(weight) // shards)
    log_z, rows = (
        torch.full((shards, len(sampled)), -torch.inf).double(),
        torch.arange(len(sampled)),
    )
    for shard in range(-(-len(weight) // width)):
        part = torch.zeros_like(keep)
        part[:, shard * width : (shard + 1) * width] = True
        own = keep & part
        held = own.any(1).nonzero()[:, 0]
        picked = torch.where(part[rows, sampled], sampled, own.int().argmax(1))[held]
        head = Head(weight[shard * width : (shard + 1) * width], len(weight), shard * width)
        lp = kept_logprobs(
            hidden[held], head, picked, csr(own[held]), temperature_S=tau[held]
        ).logprob
        log_z[shard, held] = z[held, picked] - lp.detach()
    found = z[rows, sampled] - log_z.logsumexp(0)
    torch.testing.assert_close(found, oracle(case)[0].detach(), rtol=1e-11, atol=1e-11)
