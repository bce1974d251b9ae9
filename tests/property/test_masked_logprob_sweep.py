"""Masked and full log-probability against torch's own log_softmax over dense -inf masked logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moerl.algorithms.masked_logprob import SamplingMask, VocabShard, full_logprobs, kept_logprobs
from tests.helpers.kernel_implementations import implementations

IMPLEMENTATIONS = implementations()
each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)

Case = tuple[Tensor, Tensor, Tensor, Tensor]  # logits [S, V], keep [S, V], sampled [S], tau [S]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    torch.manual_seed(draw(st.integers(0, 2**31)))
    rows, vocab = draw(st.integers(1, 7)), draw(st.integers(1, 40))
    logits = torch.randn(rows, vocab, dtype=torch.float64) * draw(st.sampled_from([0.1, 3.0, 40.0]))
    keep = torch.rand(rows, vocab) < draw(st.sampled_from([0.0, 0.2, 1.0]))  # 0.0: singletons
    sampled = torch.randint(0, vocab, (rows,))
    keep[torch.arange(rows), sampled] = True
    return logits, keep, sampled, torch.rand(rows, dtype=torch.float64) + 0.3


def csr(keep: Tensor) -> SamplingMask:
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), keep.sum(1).cumsum(0)])
    return SamplingMask(offsets, keep.nonzero()[:, 1])


def oracle(logits: Tensor, keep: Tensor, sampled: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    log_p = (logits / tau[:, None]).masked_fill(~keep, -torch.inf).log_softmax(-1)
    entropy = -(log_p.exp() * log_p.masked_fill(~keep, 0.0)).sum(-1)
    return log_p.gather(1, sampled[:, None])[:, 0], entropy


def gradient(value: Tensor, logits: Tensor) -> Tensor:
    weights = torch.linspace(0.5, -1.5, len(value), dtype=value.dtype)
    return torch.autograd.grad((value * weights).sum(), logits)[0]


@each
@settings(max_examples=120, deadline=None)
@given(case=cases())
def test_kept_equals_the_dense_oracle(implementation: str, case: Case) -> None:
    logits, keep, sampled, tau = case
    logits.requires_grad_()
    want, want_entropy = oracle(logits, keep, sampled, tau)
    got, entropy, _ = kept_logprobs(
        logits, sampled, csr(keep), temperature_S=tau,
        implementation=implementation,
    )  # fmt: skip
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, want_entropy, rtol=1e-10, atol=1e-10)
    grad = gradient(got, logits)
    torch.testing.assert_close(grad, gradient(want, logits), rtol=1e-10, atol=1e-12)
    assert not grad[~keep].any(), "a gradient reached an entry that was not kept"


@settings(max_examples=80, deadline=None)
@given(cases(), st.integers(0, 5))
def test_full_equals_the_dense_oracle_and_ignores_padding(case: Case, padding: int) -> None:
    logits, keep, sampled, tau = case
    want_logits = logits.clone().requires_grad_()
    want, want_entropy = oracle(want_logits, torch.ones_like(keep), sampled, tau)
    padded = torch.cat([logits, torch.full((len(logits), padding), 1e3).double()], 1)
    padded.requires_grad_()
    got, entropy, _ = full_logprobs(padded, sampled, temperature_S=tau, vocab_size=logits.shape[1])
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, want_entropy, rtol=1e-10, atol=1e-10)
    grad = gradient(got, padded)
    torch.testing.assert_close(
        grad[:, : logits.shape[1]], gradient(want, want_logits), rtol=1e-10, atol=1e-12
    )
    assert not grad[:, logits.shape[1] :].any()


@settings(max_examples=50, deadline=None)
@given(cases())
def test_a_set_of_everything_equals_no_set(case: Case) -> None:
    logits, keep, sampled, tau = case
    everything = torch.ones_like(keep)
    kept, _, _ = kept_logprobs(logits, sampled, csr(everything), temperature_S=tau)
    full, _, _ = full_logprobs(logits, sampled, temperature_S=tau, vocab_size=logits.shape[1])
    torch.testing.assert_close(kept, full, rtol=1e-13, atol=1e-13)


@each
@settings(max_examples=60, deadline=None)
@given(case=cases(), extra=st.integers(1, 9), shards=st.integers(1, 4))
def test_rows_and_shards_of_a_larger_matrix(
    implementation: str, case: Case, extra: int, shards: int
) -> None:
    """Rows of more logits in any order, and the entries of each shard alone."""
    logits, keep, sampled, tau = case
    rows = torch.randperm(len(logits) + extra)[: len(logits)]
    larger = torch.randn(len(logits) + extra, logits.shape[1], dtype=torch.float64)
    larger[rows] = logits
    larger.requires_grad_()
    common = {"temperature_S": tau, "implementation": implementation}
    want, _, _ = kept_logprobs(logits, sampled, csr(keep), **common)
    got, _, _ = kept_logprobs(larger, sampled, csr(keep), rows_S=rows, **common)
    assert torch.equal(got, want)
    grad = gradient(got, larger)
    untouched = torch.ones(len(larger), dtype=torch.bool)
    untouched[rows] = False
    assert not grad[untouched].any()

    width = -(-logits.shape[1] // shards)
    parts = [part.detach().clone().requires_grad_() for part in larger.split(width, 1)]
    joined = sharded(parts, width, rows, sampled, csr(keep), common)
    torch.testing.assert_close(joined, want, rtol=1e-12, atol=1e-12)


def sharded(
    parts: list[Tensor], width: int, rows: Tensor, sampled: Tensor, mask: SamplingMask,
    common: dict,
) -> Tensor:  # fmt: skip
    """Log-probability joined by hand from what each shard alone says of its own kept entries.

    Of a row, a shard is given its own kept ids, and the sampled token where it holds it; other
    shards are given one of theirs as if it had been sampled.  With lz = log-sum-exp of a shard:
    lp of any entry = z - lz, so lz = z - lp.
    """
    ids, owner = mask.ids, torch.repeat_interleave(mask.offsets.diff())
    tau = common["temperature_S"]
    log_z, picked = torch.full((len(parts), len(rows)), -torch.inf).double(), tau * 0
    for shard, part in enumerate(parts):
        start = shard * width
        mine = (ids >= start) & (ids < start + part.shape[1])
        held = [row for row in range(len(rows)) if bool((mine & (owner == row)).any())]
        for row in held:
            own = ids[mine & (owner == row)]
            pick = sampled[row] if bool((own == sampled[row]).any()) else own[0]
            lp, _, _ = kept_logprobs(
                part, pick[None], SamplingMask(torch.tensor([0, len(own)]), own),
                shard=VocabShard(start),
                rows_S=rows[row : row + 1], temperature_S=tau[row : row + 1],
                implementation=common["implementation"],
            )  # fmt: skip
            z = part.detach()[rows[row], pick - start] / tau[row]
            log_z[shard, row] = z - lp.detach()[0]
            if pick == sampled[row]:
                picked[row] = z
    return picked - log_z.logsumexp(0)
