"""Gradients, gradient buffers, precision, memory, refusals; controls that show the checks can fail.

Values against all logits: tests/property/test_head_logprob_sweep.py; shards: tests/multi.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moerl.algorithms import head_plan
from moerl.algorithms.head_logprob import (
    Head,
    HeadFactors,
    SamplingMask,
    Scores,
    full_logprobs,
    kept_logprobs,
)
from moerl.core.errors import RecordError

S, V, H = 6, 16, 5
each = pytest.mark.parametrize("masked", [True, False], ids=["kept", "full"])
Case = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@pytest.fixture
def case() -> Case:
    torch.manual_seed(0)
    keep = torch.rand(S, V) < 0.4
    sampled = torch.randint(4, V, (S,))
    keep[:, 0] = False
    keep[torch.arange(S), sampled] = True
    hidden, weight = torch.randn(S, H).double() * 2, torch.randn(V, H).double()
    tau = torch.tensor([1.0, 0.5, 1.0, 2.0, 1.3, 0.7]).double()
    return hidden.requires_grad_(), weight.requires_grad_(), keep, sampled, tau


def csr(keep: Tensor) -> SamplingMask:
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), keep.sum(1).cumsum(0)])
    return SamplingMask(offsets, keep.nonzero()[:, 1])


def score(
    hidden: Tensor, head: Head, keep: Tensor, sampled: Tensor, tau: Tensor, *, masked: bool = True
) -> Scores:
    if masked:
        return kept_logprobs(hidden, head, sampled, csr(keep), temperature_S=tau)
    return full_logprobs(hidden, head, sampled, temperature_S=tau)


@each
def test_gradcheck(case: Case, masked: bool) -> None:
    hidden, weight, *record = case
    assert torch.autograd.gradcheck(
        lambda x, w: score(x, Head(w, V), *record, masked=masked).logprob, (hidden, weight)
    )


@pytest.mark.parametrize("broken", ["dropped id", "other temperature", "fp32 inside"])
def test_control_the_gradient_of_another_forward_fails_gradcheck(case: Case, broken: str) -> None:
    hidden, weight, keep, sampled, tau = case
    less = keep.clone()
    less[0, (keep[0] & (torch.arange(V) != sampled[0])).nonzero()[0]] = False
    assert 1 <= int(less[0].sum()) == int(keep[0].sum()) - 1

    def wrong(x: Tensor, w: Tensor) -> Tensor:
        if broken == "dropped id":
            return score(x, Head(w, V), less, sampled, tau).logprob
        if broken == "other temperature":
            return score(x, Head(w, V), keep, sampled, tau * 1.01).logprob
        return score(x.float(), Head(w.float(), V), keep, sampled, tau.float()).logprob.double()

    def mixed(x: Tensor, w: Tensor) -> Tensor:
        """The right value with the gradient of the wrong form."""
        other = wrong(x, w)
        return other + (score(x, Head(w, V), keep, sampled, tau).logprob - other).detach()

    function = wrong if broken == "fp32 inside" else mixed
    assert not torch.autograd.gradcheck(function, (hidden, weight), raise_exception=False)


def test_control_mask_temperature_and_rows_change_the_value(case: Case) -> None:
    hidden, weight, keep, sampled, tau = case
    head = Head(weight, V)
    right = score(hidden, head, keep, sampled, tau).logprob
    dropped = score(hidden, head, keep, sampled, tau, masked=False).logprob
    hot = score(hidden, head, keep, sampled, tau * 0 + 1).logprob
    shifted = score(hidden.roll(1, 0), head, keep, sampled, tau).logprob
    for wrong in (dropped, hot, shifted):
        assert float((wrong - right).abs().max()) > 1e-2
    assert (dropped <= right + 1e-12).all(), "the full vocabulary only adds to the denominator"


# --- gradient buffers -----------------------------------------------------------------------------
def buffered(weight: Tensor, tied: bool) -> torch.nn.Parameter:
    """A parameter as Megatron's data-parallel wrapper marks it."""
    marked: Any = torch.nn.Parameter(weight.detach().clone())
    marked.main_grad = torch.ones_like(marked)  # of earlier microbatches
    marked.grad_added_to_main_grad = False
    marked.zero_out_wgrad = tied
    return marked


@each
@pytest.mark.parametrize("tied", [True, False])
def test_the_gradient_of_the_weight_goes_into_its_buffer(
    case: Case, masked: bool, tied: bool
) -> None:
    """Control: of tied weights the placeholder is zero, since an embedding's part is added."""
    hidden, weight, *record = case
    want = torch.autograd.grad(
        score(hidden, Head(weight, V), *record, masked=masked).logprob.sum(), weight
    )[0]
    marked: Any = buffered(weight, tied)
    loss = score(hidden, Head(marked, V), *record, masked=masked).logprob.sum()
    (loss + (3 * marked[2].sum() if tied else 0)).backward()
    torch.testing.assert_close(marked.main_grad - 1, want, rtol=1e-12, atol=1e-12)
    assert marked.grad_added_to_main_grad
    if tied:
        own = torch.zeros_like(want)
        own[2] = 3
        assert torch.equal(marked.grad, own)


def test_a_frozen_weight_gets_no_gradient(case: Case) -> None:
    hidden, weight, *record = case
    frozen: Any = buffered(weight, tied=False).requires_grad_(False)
    score(hidden, Head(frozen, V), *record).logprob.sum().backward()
    assert frozen.grad is None
    assert not frozen.grad_added_to_main_grad
    assert hidden.grad is not None
    assert hidden.grad.any()


# --- precision and memory -------------------------------------------------------------------------
def test_a_single_kept_token_is_certain_and_teaches_nothing() -> None:
    hidden = torch.tensor([[1e4, -1e4, 3.0]], requires_grad=True)
    mask = SamplingMask(torch.tensor([0, 1]), torch.tensor([1]))
    lp, entropy, *_ = kept_logprobs(
        hidden, Head(torch.eye(3), 3), torch.tensor([1]), mask, temperature_S=torch.ones(1)
    )
    lp.sum().backward()
    assert (lp.item(), entropy.item()) == (0.0, 0.0)
    assert not hidden.grad.any()


@each
def test_bf16_rounds_logits_once_and_sums_in_fp32(case: Case, masked: bool) -> None:
    hidden, weight, *record = case
    x, w = (t.detach().bfloat16().requires_grad_() for t in (hidden, weight))
    found = score(x, Head(w, V), *record, masked=masked)
    logits = (x @ w.T).detach().double()
    rounded = score(logits, Head(torch.eye(V).double(), V), *record, masked=masked)
    assert found.logprob.dtype == torch.float32
    assert float((found.logprob - rounded.logprob).detach().abs().max()) < 1e-5
    exact = score(x.detach().double(), Head(w.detach().double(), V), *record, masked=masked)
    assert float((found.logprob - exact.logprob).detach().abs().max()) > 1e-3, "the control"
    found.logprob.sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    assert (x.grad.dtype, w.grad.dtype) == (torch.bfloat16,) * 2


@each
def test_an_fp32_head_gives_bf16_operands_the_precision_of_fp32(masked: bool) -> None:
    """Against the same operands in fp64; control: without it logits and gradients are rounded."""
    torch.manual_seed(1)
    rows, vocab = 24, 300
    keep, sampled = torch.rand(rows, vocab) < 0.3, torch.randint(0, vocab, (rows,))
    keep[torch.arange(rows), sampled] = True
    hidden, weight = torch.randn(rows, 64).bfloat16(), (torch.randn(vocab, 64) / 8).bfloat16()
    record = (keep, sampled, torch.full((rows,), 0.7))

    def found(dtype: torch.dtype, *, fp32: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities, gradient of hidden states, gradient of the weight in its buffer."""
        x, w = hidden.to(dtype).requires_grad_(), buffered(weight.to(dtype), tied=False)
        w.main_grad = torch.zeros(w.shape, dtype=torch.float64 if dtype == torch.float64 else None)
        scores = score(x, Head(w, vocab, fp32=fp32), *record, masked=masked)
        (scores.logprob * torch.linspace(-1, 2, rows)).sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == dtype
        return scores.logprob.detach().double(), x.grad.double(), w.main_grad.double()

    value, d_hidden, d_weight = found(torch.float64, fp32=False)
    assert all(map(torch.equal, found(torch.float64, fp32=True), (value, d_hidden, d_weight)))
    near, far = found(torch.bfloat16, fp32=True), found(torch.bfloat16, fp32=False)
    for want, close, rounded in ((value, near[0], far[0]), (d_weight, near[2], far[2])):
        largest = want.abs().max()
        assert float((close - want).abs().max() / largest) < 1e-6
        assert float((rounded - want).abs().max() / largest) > 1e-4
    once = 2**-8 * d_hidden.abs() + 1e-6  # one rounding to bf16
    assert bool(((near[1] - d_hidden).abs() <= once).all())
    assert not bool(((far[1] - d_hidden).abs() <= once).all())


def test_the_gradient_of_an_adapter_below_an_fp32_head_is_in_fp32() -> None:
    torch.manual_seed(2)
    hidden, weight = torch.randn(12, 32).bfloat16(), (torch.randn(90, 32) / 6).bfloat16()
    a, b = torch.randn(3, 32), torch.randn(90, 3)
    sampled, tau = torch.randint(0, 90, (12,)), torch.ones(12)

    def gradients(dtype: torch.dtype, *, fp32: bool) -> list[Tensor]:
        width = torch.float64 if dtype == torch.float64 else torch.float32  # of the factors
        factors = [t.to(width, copy=True).requires_grad_() for t in (a, b)]
        head = Head(weight.to(dtype), 90, adapter=HeadFactors(*factors, 0.5), fp32=fp32)
        scores = full_logprobs(hidden.to(dtype), head, sampled, temperature_S=tau)
        (scores.logprob * torch.linspace(-1, 2, 12)).sum().backward()
        return [t.grad for t in factors if t.grad is not None]

    want = gradients(torch.float64, fp32=False)
    near, far = gradients(torch.bfloat16, fp32=True), gradients(torch.bfloat16, fp32=False)
    for exact, close, rounded in zip(want, near, far, strict=True):
        assert float((close - exact).abs().max()) < 1e-5
        assert float((rounded - exact).abs().max()) > 1e-3


def largest_tensor(vocab: int, *, masked: bool) -> tuple[int, int]:
    """Elements: of what is saved for backward, and of what any operation makes."""
    saved, made = [0], [0]

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            for t in result if isinstance(result, tuple) else (result,):
                if isinstance(t, Tensor) and t.dim() == 2 and t.shape[1] != 4:
                    made[0] = max(made[0], t.numel())
            return result

    hidden = torch.randn(64, 4, requires_grad=True)
    head = Head(torch.randn(vocab, 4), vocab)
    mask = SamplingMask(torch.arange(0, 129, 2), torch.arange(128).remainder(2))
    sampled, tau = torch.zeros(64, dtype=torch.long), torch.ones(64)
    with (
        Sizes(),
        torch.autograd.graph.saved_tensors_hooks(
            lambda t: saved.append(t.numel()) or t, lambda t: t
        ),
    ):
        if masked:
            scores = kept_logprobs(hidden, head, sampled, mask, temperature_S=tau)
        else:
            scores = full_logprobs(hidden, head, sampled, temperature_S=tau)
        scores.logprob.sum().backward()
    return max(saved), made[0]


@each
def test_logits_exist_by_blocks(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved does not depend on the vocabulary, nor what is made beyond a block's size."""
    monkeypatch.setattr(head_plan, "_BLOCK", 64 * 32)
    saved, made = largest_tensor(4096, masked=masked)
    assert saved == 64 * 4
    assert made <= 64 * 32
    monkeypatch.setattr(head_plan, "_BLOCK", 64 * 4096)  # control: one block
    if not masked:
        assert largest_tensor(4096, masked=masked) == (64 * 4, 64 * 4096)


@each
def test_no_sampled_token_gives_empty_results_and_a_zero_gradient(masked: bool) -> None:
    hidden, weight = torch.randn(0, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    none = torch.zeros(0, dtype=torch.long)
    lp, entropy, *_ = score(
        hidden, Head(weight, 5), torch.zeros(0, 5, dtype=torch.bool), none, torch.zeros(0),
        masked=masked,
    )  # fmt: skip
    lp.sum().backward()
    assert (len(lp), len(entropy), tuple(hidden.grad.shape)) == (0, 0, (0, 4))
    assert not weight.grad.any()


def test_rows_without_an_entry_change_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces have multiples of rows; results are those of pieces with their own rows alone."""
    hidden, weight, keep, sampled, tau = case
    monkeypatch.setattr(head_plan, "_FEW", 1)  # every row is in the flat list
    monkeypatch.setattr(head_plan, "_PIECE_CPU", 5)  # rows are cut
    found = []
    for multiple in (1, 7, 256):
        monkeypatch.setattr(head_plan, "_ALIGNED", multiple)
        h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        scores = kept_logprobs(h, Head(w, V), sampled, csr(keep), temperature_S=tau)
        scores.logprob.sum().backward()
        found.append((scores.logprob.detach(), scores.entropy, h.grad, w.grad))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-6, atol=1e-6)


class Adds(torch.utils._python_dispatch.TorchDispatchMode):
    """The most rows, other than zeros, that one `index_add_` adds to a row of a weight."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.ops.aten.index_add_.default and len(args[0]) == V:
            _, _, index, source = args
            self.most = max(self.most, int(torch.bincount(index[source.any(1)]).max()))
        return func(*args, **(kwargs or {}))


def test_rows_of_one_entry_are_summed_in_a_fixed_order(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA adds rows of one `index_add_` in any order; only zeros may come beside a sum."""
    hidden, weight, keep, sampled, tau = case
    assert int(keep.sum(0).max()) > 2, "rows share an entry"
    monkeypatch.setattr(head_plan, "_FEW", 1)
    for size in (1024, 7):
        monkeypatch.setattr(head_plan, "_PIECE_CPU", size)
        with Adds() as seen:
            score(hidden, Head(weight, V), keep, sampled, tau).logprob.sum().backward()
        assert seen.most == 1


def test_entropy_over_the_whole_vocabulary_beside_the_mask(case: Case) -> None:
    hidden, weight, keep, sampled, tau = case
    head = Head(weight, V - 1)  # the last entry is padding
    sampled = sampled.clamp(max=V - 2)
    keep = keep & (torch.arange(V) < V - 1)
    keep[torch.arange(S), sampled] = True
    scores = kept_logprobs(hidden, head, sampled, csr(keep), temperature_S=tau, full_entropy=True)
    log_p = (hidden @ weight[: V - 1].T / tau[:, None]).log_softmax(-1)
    want = -(log_p.exp() * log_p).sum(-1).detach()
    torch.testing.assert_close(scores.full_entropy, want, rtol=1e-12, atol=1e-12)
    assert float((scores.entropy - want).abs().min()) > 0.05, "two different quantities"


# --- refusals -------------------------------------------------------------------------------------
def test_records_that_do_not_fit_are_refused(case: Case) -> None:
    hidden, weight, keep, sampled, tau = case
    mask = csr(keep)
    offsets, ids = mask.offsets, mask.ids

    def refusal(sampled: Tensor, offsets: Tensor, ids: Tensor) -> tuple[str, str]:
        with pytest.raises(RecordError) as caught:
            kept_logprobs(
                hidden, Head(weight, V), sampled, SamplingMask(offsets, ids), temperature_S=tau
            )
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


@pytest.mark.parametrize("token", [-1, V])
def test_a_token_outside_the_vocabulary_is_refused(case: Case, token: int) -> None:
    hidden, weight, _, sampled, tau = case
    sampled = sampled.clone()
    sampled[1] = token
    with pytest.raises(RecordError, match=r"outside 0\.\.15") as caught:
        full_logprobs(hidden, Head(weight, V), sampled, temperature_S=tau)
    assert caught.value.reason == "token_range"
