"""Finite differences, shards, precision, refusals; and controls that show the checks can fail.

Masked log-probability goes through both implementations, torch and compiled.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
import torch
from torch import Tensor

from moerl.algorithms import masked_logprob
from moerl.algorithms.masked_logprob import (
    SamplingMask,
    Scores,
    VocabShard,
    full_logprobs,
    kept_logprobs,
)
from moerl.errors import ConfigError, RecordError
from tests.helpers.kernel_implementations import implementations

S, V = 6, 16
IMPLEMENTATIONS = implementations()
each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@pytest.fixture
def case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    keep = torch.rand(S, V) < 0.4
    keep[:, :4] = False  # the first of four shards keeps nothing
    sampled = torch.randint(4, V, (S,))
    keep[torch.arange(S), sampled] = True
    logits = torch.randn(S, V, dtype=torch.float64) * 2
    return logits, keep, sampled, torch.tensor([1.0, 0.5, 1.0, 2.0, 1.3, 0.7]).double()


def csr(keep: Tensor) -> SamplingMask:
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), keep.sum(1).cumsum(0)])
    return SamplingMask(offsets, keep.nonzero()[:, 1])


@each
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_gradcheck(case: tuple[Tensor, ...], implementation: str, id_dtype: torch.dtype) -> None:
    logits, keep, sampled, tau = case
    mask = csr(keep)
    mask = replace(mask, ids=mask.ids.to(id_dtype))
    assert torch.autograd.gradcheck(
        lambda z: kept_logprobs(
            z, sampled, mask, temperature_S=tau,
            implementation=implementation,
        )[0],
        (logits.requires_grad_(),),
    )  # fmt: skip


@each
@pytest.mark.parametrize("broken", ["dropped id", "other temperature", "fp32 inside"])
def test_control_the_gradient_of_another_forward_fails_gradcheck(
    case: tuple[Tensor, ...], implementation: str, broken: str
) -> None:
    logits, keep, sampled, tau = case
    less = keep.clone()
    less[0, (keep[0] & (torch.arange(V) != sampled[0])).nonzero()[0]] = False
    assert 1 <= int(less[0].sum()) == int(keep[0].sum()) - 1

    def score(z: Tensor, mask: Tensor, tau_S: Tensor) -> Tensor:
        return kept_logprobs(
            z, sampled, csr(mask), temperature_S=tau_S,
            implementation=implementation,
        )[0]  # fmt: skip

    wrong = {
        "dropped id": lambda z: score(z, less, tau),
        "other temperature": lambda z: score(z, keep, tau * 1.01),
        "fp32 inside": lambda z: score(z.float(), keep, tau.float()).double(),
    }[broken]

    def mixed(z: Tensor) -> Tensor:
        """The right value with the gradient of the wrong form."""
        other = wrong(z)
        return other + (score(z, keep, tau) - other).detach()

    function = wrong if broken == "fp32 inside" else mixed
    z = logits.requires_grad_()
    assert not torch.autograd.gradcheck(function, (z,), raise_exception=False)


def test_gradcheck_of_the_full_vocabulary(case: tuple[Tensor, ...]) -> None:
    logits, _, sampled, tau = case
    padded = torch.cat([logits.detach(), torch.ones(S, 2).double()], 1).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda z: full_logprobs(z, sampled, temperature_S=tau, vocab_size=V)[0],
        (padded,),
    )


def test_control_mask_temperature_and_rows_change_the_value(case: tuple[Tensor, ...]) -> None:
    logits, keep, sampled, tau = case
    mask = csr(keep)
    right, _, _ = kept_logprobs(logits, sampled, mask, temperature_S=tau)
    dropped, _, _ = full_logprobs(logits, sampled, temperature_S=tau, vocab_size=V)
    hot, _, _ = kept_logprobs(logits, sampled, mask, temperature_S=tau * 0 + 1)
    shifted, _, _ = kept_logprobs(
        logits, sampled, mask, temperature_S=tau,
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
        self.barrier.wait(60)
        stacked = torch.stack([self.values[key] for key in sorted(self.values)])
        maximum = op == masked_logprob.ReduceOp.MAX
        values.copy_(stacked.amax(0) if maximum else stacked.sum(0))
        self.barrier.wait(60)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("scored", ["full", *IMPLEMENTATIONS])
def test_vocabulary_shards_give_the_unsharded_result(
    case: tuple[Tensor, ...], size: int, scored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = scored == "full"
    logits, keep, sampled, tau = case
    mask = csr(keep)

    def run(z: Tensor, start: int, rank: int | None) -> tuple[Tensor, Tensor, Tensor]:
        z, shard = z.clone().requires_grad_(), VocabShard(start, rank)
        if full:
            lp, entropy, _ = full_logprobs(z, sampled, temperature_S=tau, vocab_size=V, shard=shard)
        else:
            lp, entropy, _ = kept_logprobs(
                z, sampled, mask, temperature_S=tau, shard=shard,
                implementation=scored,
            )  # fmt: skip
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


@each
def test_a_single_kept_token_is_certain_and_teaches_nothing(implementation: str) -> None:
    logits = torch.tensor([[1e4, -1e4, 3.0]], requires_grad=True)
    lp, entropy, _ = kept_logprobs(
        logits, torch.tensor([1]), SamplingMask(torch.tensor([0, 1]), torch.tensor([1])),
        temperature_S=torch.ones(1), implementation=implementation,
    )  # fmt: skip
    lp.sum().backward()
    assert (lp.item(), entropy.item()) == (0.0, 0.0)
    assert not logits.grad.any()


@each
def test_low_precision_logits_are_computed_in_fp32(
    case: tuple[Tensor, ...], implementation: str
) -> None:
    logits, keep, sampled, tau = case
    low = logits.bfloat16().requires_grad_()
    lp, entropy, _ = kept_logprobs(
        low, sampled, csr(keep), temperature_S=tau.float(),
        implementation=implementation,
    )  # fmt: skip
    want, _, _ = kept_logprobs(low.detach().double(), sampled, csr(keep), temperature_S=tau)
    lp.sum().backward()
    assert (lp.dtype, entropy.dtype, low.grad.dtype) == (torch.float32,) * 2 + (torch.bfloat16,)
    assert (lp - want).abs().max().item() < 1e-5, "as exact as fp32 allows from bf16 logits"


@pytest.mark.parametrize("scored", ["full", *IMPLEMENTATIONS])
def test_no_sampled_token_gives_empty_results_and_a_zero_gradient(scored: str) -> None:
    logits = torch.randn(1, 1, 5, requires_grad=True)
    none = torch.zeros(0, dtype=torch.long)
    common = {"temperature_S": torch.zeros(0), "rows_S": none}
    start = torch.zeros(1, dtype=torch.long)
    lp, entropy, _ = (
        full_logprobs(logits, none, vocab_size=5, **common)
        if scored == "full"
        else kept_logprobs(logits, none, SamplingMask(start, none), implementation=scored, **common)
    )
    lp.sum().backward()
    assert (len(lp), len(entropy), float(logits.grad.abs().sum())) == (0, 0, 0.0)


def test_rows_are_taken_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits = torch.randn(23, 7, dtype=torch.float64, requires_grad=True)
    sampled, tau = torch.randint(0, 7, (23,)), torch.ones(23).double()

    def run() -> tuple[Tensor, Tensor]:
        lp, _, _ = full_logprobs(logits, sampled, temperature_S=tau, vocab_size=7)
        return lp.detach(), torch.autograd.grad(lp.square().sum(), logits)[0]

    whole = run()
    monkeypatch.setattr(masked_logprob, "_CHUNK_ELEMENTS", 20)
    for a, b in zip(run(), whole, strict=True):
        assert torch.equal(a, b)


@each
def test_records_that_do_not_fit_are_refused(case: tuple[Tensor, ...], implementation: str) -> None:
    logits, keep, sampled, tau = case
    mask = csr(keep)
    offsets, ids = mask.offsets, mask.ids

    def refusal(sampled: Tensor, offsets: Tensor, ids: Tensor) -> tuple[str, str]:
        with pytest.raises(RecordError) as caught:
            kept_logprobs(
                logits, sampled, SamplingMask(offsets, ids), temperature_S=tau,
                implementation=implementation,
            )  # fmt: skip
        return caught.value.reason, str(caught.value)

    foreign = sampled.clone()
    foreign[2] = 0  # never kept
    reason, text = refusal(foreign, offsets, ids)
    assert reason == "mask_sampled"
    assert "row 2" in text
    empty = offsets.clone()
    empty[3:5] = empty[5]  # row 3 is empty, row 2 has its ids and row 4 none
    assert refusal(sampled, empty, ids)[0] in ("mask_sampled", "mask_duplicate")
    nothing = torch.zeros_like(offsets)
    assert refusal(sampled, nothing, ids[:0])[0] == "mask_sampled"
    two = (offsets[1:] - offsets[:-1] > 1).nonzero()[0, 0]  # a row with at least two ids
    swapped, repeated = ids.clone(), ids.clone()
    at = int(offsets[two])
    swapped[at], swapped[at + 1] = ids[at + 1], ids[at]
    other = at + (int(ids[at]) == int(sampled[two]))  # an id that is not the sampled one
    repeated[at] = repeated[at + 1] = ids[other]
    assert refusal(sampled, offsets, swapped)[0] == "mask_duplicate"
    assert refusal(sampled, offsets, repeated)[0] in ("mask_sampled", "mask_duplicate")
    assert "5 mask rows for 6" in refusal(sampled, offsets[:-1], ids)[1]
    for wrong in (offsets + 1, offsets.flip(0), offsets * 2):
        assert refusal(sampled, wrong, ids)[0] == "mask_rows"


def test_a_token_outside_the_vocabulary_is_refused(case: tuple[Tensor, ...]) -> None:
    logits, _, sampled, tau = case
    with pytest.raises(RecordError, match=r"outside 0\.\.9"):
        full_logprobs(logits, sampled.clamp(min=10), vocab_size=10, temperature_S=tau)


def test_rows_that_repeat_go_through_torch(case: tuple[Tensor, ...]) -> None:
    """Two tokens of one logits row: gradients add up, which the compiled passes do not do."""
    logits, keep, sampled, tau = case
    twice = torch.tensor([0, 0])
    keep, sampled, tau = keep[twice], sampled[twice], tau[twice]
    common = {"temperature_S": tau, "rows_S": twice}
    z = logits[:1].clone().requires_grad_()
    lp, _, _ = kept_logprobs(z, sampled, csr(keep), **common)
    assert torch.autograd.gradcheck(
        lambda z: kept_logprobs(z, sampled, csr(keep), **common)[0], (z,)
    )
    assert lp[0] == lp[1]
    with pytest.raises(ConfigError, match="rows that do not repeat"):
        kept_logprobs(z, sampled, csr(keep), **common, implementation="built")


@pytest.mark.parametrize("shards", [1, 3])
def test_full_entropy_comes_with_the_kept_one(
    case: tuple[Tensor, ...], shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, keep, sampled, tau = case
    plain = kept_logprobs(logits, sampled, csr(keep), temperature_S=tau)
    assert plain.full_entropy is None
    _, want, _ = full_logprobs(logits, sampled, temperature_S=tau, vocab_size=V)
    padded = torch.cat([logits, torch.full((S, 2), 50.0).double()], 1)
    monkeypatch.setattr(masked_logprob, "_CHUNK_ELEMENTS", 20)
    monkeypatch.setattr(masked_logprob, "_all_reduce", LockstepReduce(shards))

    def run(z: Tensor, rank: int) -> Scores:
        return kept_logprobs(
            z, sampled, csr(keep), temperature_S=tau,
            shard=VocabShard(6 * rank * (shards > 1), rank), full_entropy_of=V,
        )  # fmt: skip

    parts = padded.split(6, 1) if shards > 1 else [padded]
    with ThreadPoolExecutor(shards) as pool:
        for scores in pool.map(run, parts, range(shards)):
            torch.testing.assert_close(scores.full_entropy, want, rtol=1e-12, atol=1e-12)
            assert float((scores.entropy - want).abs().min()) > 0.1, "two different quantities"


@each
def test_memory_does_not_grow_with_the_vocabulary(implementation: str) -> None:
    """What is saved for backward is O(kept entries), whatever the vocabulary."""
    saved: list[int] = []
    for vocab in (64, 4096):
        logits = torch.randn(8, vocab, requires_grad=True)
        ids = torch.arange(16).remainder(2)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: saved.append(t.numel()) or t, lambda t: t
        ):
            kept_logprobs(
                logits, torch.zeros(8, dtype=torch.long), SamplingMask(torch.arange(0, 17, 2), ids),
                temperature_S=torch.ones(8), implementation=implementation,
            )  # fmt: skip
    assert saved
    assert max(saved) <= 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("threads", [1, 3])
def test_compiled_rows_do_not_depend_on_threads(dtype: torch.dtype, threads: int) -> None:
    """Uneven rows, enough ids for several threads; one row keeps the whole vocabulary."""
    if "built" not in IMPLEMENTATIONS:
        return
    torch.manual_seed(1)
    rows, vocab = 60, 30000
    keep = torch.rand(rows, vocab) < torch.rand(rows, 1) ** 4
    sampled = torch.randint(0, vocab, (rows,))
    keep[torch.arange(rows), sampled] = True
    keep[7] = True
    logits = (torch.randn(rows, vocab) * 3).to(dtype)
    tau = torch.rand(rows).double() + 0.5

    def score(logits: Tensor, implementation: str) -> tuple[Tensor, Tensor, Tensor]:
        z = logits.clone().requires_grad_()
        lp, entropy, _ = kept_logprobs(
            z, sampled, csr(keep), temperature_S=tau,
            implementation=implementation,
        )  # fmt: skip
        (lp * torch.linspace(-1, 2, rows)).sum().backward()
        return lp.detach(), entropy, z.grad

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        got = score(logits, "built")
    finally:
        torch.set_num_threads(before)
    once = score(logits, "built")
    exact = score(logits.double(), "torch")
    for a, b in zip(got, once, strict=True):
        assert torch.equal(a, b)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-6}[dtype]
    torch.testing.assert_close(got[0].double(), exact[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got[1].double(), exact[1], rtol=tolerance, atol=10 * tolerance)
    stored = 2.0**-8 if dtype == torch.bfloat16 else tolerance
    torch.testing.assert_close(got[2].double(), exact[2], rtol=stored + 1e-6, atol=tolerance)
    assert not got[2][~keep].any()
