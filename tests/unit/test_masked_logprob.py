"""Finite differences, shards, precision, refusals; and controls that show the checks can fail."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import Tensor

from moerl.algorithms import masked_logprob
from moerl.algorithms.masked_logprob import full_logprobs, kept_logprobs
from moerl.errors import RecordError

S, V = 6, 16


@pytest.fixture
def case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    keep = torch.rand(S, V) < 0.4
    keep[:, :4] = False  # the first of four shards keeps nothing
    sampled = torch.randint(4, V, (S,))
    keep[torch.arange(S), sampled] = True
    logits = torch.randn(S, V, dtype=torch.float64) * 2
    return logits, keep, sampled, torch.tensor([1.0, 0.5, 1.0, 2.0, 1.3, 0.7]).double()


def csr(keep: Tensor) -> tuple[Tensor, Tensor]:
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), keep.sum(1).cumsum(0)])
    return offsets, keep.nonzero()[:, 1]


def test_gradcheck(case: tuple[Tensor, ...]) -> None:
    logits, keep, sampled, tau = case
    logits.requires_grad_()
    offsets, ids = csr(keep)
    assert torch.autograd.gradcheck(
        lambda z: kept_logprobs(z, sampled, offsets, ids, temperature_S=tau, vocab_start=0)[0],
        (logits,),
    )
    padded = torch.cat([logits.detach(), torch.ones(S, 2).double()], 1).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda z: full_logprobs(z, sampled, temperature_S=tau, vocab_start=0, vocab_size=V)[0],
        (padded,),
    )


def test_control_a_hidden_fp32_cast_fails_gradcheck(
    case: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, keep, sampled, tau = case
    monkeypatch.setattr(masked_logprob, "_compute_dtype", lambda logits: torch.float32)
    assert not torch.autograd.gradcheck(
        lambda z: kept_logprobs(z, sampled, *csr(keep), temperature_S=tau, vocab_start=0)[0],
        (logits.requires_grad_(),),
        raise_exception=False,
    )


def test_control_mask_temperature_and_rows_change_the_value(case: tuple[Tensor, ...]) -> None:
    logits, keep, sampled, tau = case
    offsets, ids = csr(keep)
    right, _ = kept_logprobs(logits, sampled, offsets, ids, temperature_S=tau, vocab_start=0)
    dropped, _ = full_logprobs(logits, sampled, temperature_S=tau, vocab_start=0, vocab_size=V)
    hot, _ = kept_logprobs(logits, sampled, offsets, ids, temperature_S=tau * 0 + 1, vocab_start=0)
    shifted, _ = kept_logprobs(
        logits, sampled, offsets, ids, temperature_S=tau, vocab_start=0,
        rows_S=torch.arange(S).roll(1),
    )  # fmt: skip
    for wrong in (dropped, hot, shifted):
        assert float((wrong - right).abs().max()) > 1e-2
    assert (dropped <= right + 1e-12).all(), "the full vocabulary only adds to the denominator"


class LockstepReduce:
    """All-reduce between threads that each play one tensor-parallel rank."""

    def __init__(self, size: int) -> None:
        self.barrier, self.values = Barrier(size), {}

    def __call__(self, values: Tensor, op: object, rank: int | None) -> None:
        self.values[rank] = values.clone()
        self.barrier.wait(10)
        stacked = torch.stack([self.values[key] for key in sorted(self.values)])
        maximum = op == masked_logprob.ReduceOp.MAX
        values.copy_(stacked.amax(0) if maximum else stacked.sum(0))
        self.barrier.wait(10)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("full", [False, True])
def test_vocabulary_shards_give_the_unsharded_result(
    case: tuple[Tensor, ...], size: int, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, keep, sampled, tau = case
    offsets, ids = csr(keep)

    def run(z: Tensor, start: int, rank: int | None) -> tuple[Tensor, Tensor, Tensor]:
        z = z.clone().requires_grad_()
        if full:
            lp, entropy = full_logprobs(
                z, sampled, temperature_S=tau, vocab_start=start, vocab_size=V, tp_group=rank
            )
        else:
            lp, entropy = kept_logprobs(
                z, sampled, offsets, ids, temperature_S=tau, vocab_start=start, tp_group=rank
            )
        lp.sum().backward()
        return lp.detach(), entropy, z.grad

    monkeypatch.setattr(masked_logprob, "_all_reduce", lambda *_: None)
    want_lp, want_entropy, want_grad = run(logits, 0, None)
    padded = torch.cat([logits, torch.full((S, 4), 50.0).double()], 1) if full else logits
    shards = padded.chunk(size, 1)
    monkeypatch.setattr(masked_logprob, "_all_reduce", LockstepReduce(size))
    width = shards[0].shape[1]
    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(run, shards, [rank * width for rank in range(size)], range(size)))
    for lp, entropy, _ in results:
        torch.testing.assert_close(lp, want_lp, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(entropy, want_entropy, rtol=1e-12, atol=1e-12)
    grad = torch.cat([grad for _, _, grad in results], 1)[:, :V]
    torch.testing.assert_close(grad, want_grad, rtol=1e-13, atol=1e-14)


def test_a_single_kept_token_is_certain_and_teaches_nothing() -> None:
    logits = torch.tensor([[1e4, -1e4, 3.0]], requires_grad=True)
    lp, entropy = kept_logprobs(
        logits, torch.tensor([1]), torch.tensor([0, 1]), torch.tensor([1]),
        temperature_S=torch.ones(1), vocab_start=0,
    )  # fmt: skip
    lp.sum().backward()
    assert (lp.item(), entropy.item()) == (0.0, 0.0)
    assert not logits.grad.any()


def test_low_precision_logits_are_computed_in_fp32(case: tuple[Tensor, ...]) -> None:
    logits, keep, sampled, tau = case
    low = logits.bfloat16().requires_grad_()
    lp, entropy = kept_logprobs(low, sampled, *csr(keep), temperature_S=tau.float(), vocab_start=0)
    want, _ = kept_logprobs(
        low.detach().double(), sampled, *csr(keep), temperature_S=tau, vocab_start=0
    )
    lp.sum().backward()
    assert (lp.dtype, entropy.dtype, low.grad.dtype) == (torch.float32,) * 2 + (torch.bfloat16,)
    assert (lp - want).abs().max().item() < 1e-5, "as exact as fp32 allows from bf16 logits"


@pytest.mark.parametrize("full", [False, True])
def test_no_sampled_token_gives_empty_results_and_a_zero_gradient(full: bool) -> None:
    logits = torch.randn(1, 1, 5, requires_grad=True)
    none = torch.zeros(0, dtype=torch.long)
    common = {"temperature_S": torch.zeros(0), "vocab_start": 0, "rows_S": none}
    lp, entropy = (
        full_logprobs(logits, none, vocab_size=5, **common)
        if full
        else kept_logprobs(logits, none, torch.zeros(1, dtype=torch.long), none, **common)
    )
    lp.sum().backward()
    assert (len(lp), len(entropy), float(logits.grad.abs().sum())) == (0, 0, 0.0)


def test_rows_are_taken_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits = torch.randn(23, 7, dtype=torch.float64, requires_grad=True)
    sampled, tau = torch.randint(0, 7, (23,)), torch.ones(23).double()

    def run() -> tuple[Tensor, Tensor]:
        lp, _ = full_logprobs(logits, sampled, temperature_S=tau, vocab_start=0, vocab_size=7)
        return lp.detach(), torch.autograd.grad(lp.square().sum(), logits)[0]

    whole = run()
    monkeypatch.setattr(masked_logprob, "_CHUNK_ELEMENTS", 20)
    for a, b in zip(run(), whole, strict=True):
        assert torch.equal(a, b)


def test_records_that_do_not_fit_are_refused(case: tuple[Tensor, ...]) -> None:
    logits, keep, sampled, tau = case
    offsets, ids = csr(keep)
    common = {"temperature_S": tau, "vocab_start": 0}
    foreign = sampled.clone()
    foreign[2] = 0  # never kept
    with pytest.raises(RecordError, match="mask row 2 keeps its own token 0 times") as caught:
        kept_logprobs(logits, foreign, offsets, ids, **common)
    assert caught.value.reason == "mask_sampled"
    with pytest.raises(RecordError, match="5 mask rows for 6"):
        kept_logprobs(logits, sampled, offsets[:-1], ids, **common)
    with pytest.raises(RecordError, match=r"outside 0\.\.9"):
        full_logprobs(logits, sampled.clamp(min=10), vocab_size=10, **common)


def test_memory_does_not_grow_with_the_vocabulary() -> None:
    """What is saved for backward is O(kept entries), whatever the vocabulary."""
    saved: list[int] = []
    for vocab in (64, 4096):
        logits = torch.randn(8, vocab, requires_grad=True)
        ids = torch.arange(16).remainder(2)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: saved.append(t.numel()) or t, lambda t: t
        ):
            kept_logprobs(
                logits, torch.zeros(8, dtype=torch.long), torch.arange(0, 17, 2), ids,
                temperature_S=torch.ones(8), vocab_start=0,
            )  # fmt: skip
    assert saved
    assert max(saved) <= 16
