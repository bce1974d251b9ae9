"""The compiled masked log-softmax on CUDA, and the torch form of it, against fp64 on the CPU."""

from __future__ import annotations

from statistics import median

import pytest
import torch

from moerl.kernels.build import TARGETS
from tests.helpers import device_checks as checks
from tests.helpers.device_figures import Figure
from tests.helpers.kernel_implementations import implementations

IMPLEMENTATIONS = implementations("cuda") if torch.cuda.is_available() else ["torch", "built"]
each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])


def test_the_compiled_kernels_are_what_is_tested() -> None:
    assert "built" in IMPLEMENTATIONS, f"none of {TARGETS['cuda'].compilers} is on PATH"


@each
@dtypes
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (3, 33), (130, 1000), (64, 151_936)])
def test_values_and_gradients(
    implementation: str, dtype: torch.dtype, id_dtype: torch.dtype, rows: int, vocab: int
) -> None:
    case = checks.make_case("cuda", dtype, id_dtype, rows, vocab, 60)
    worst = checks.kernel_equals_fp64(case, implementation)
    print(f"{implementation} {dtype} {rows} x {vocab}: largest error {worst:.2e}")


@dtypes
@pytest.mark.parametrize("num_shards", [1, 2, 8])
def test_vocabulary_shards(dtype: torch.dtype, num_shards: int) -> None:
    checks.shards_join(checks.make_case("cuda", dtype, torch.int32, 50, 4000, 40), num_shards)


@each
def test_gradcheck_and_refusals(implementation: str) -> None:
    checks.gradcheck_and_its_controls("cuda", implementation)
    checks.broken_records_are_refused("cuda", implementation)


def test_full_entropy() -> None:
    checks.full_entropy_is_that_of_all_logits("cuda")


def test_more_rows_than_the_largest_grid() -> None:
    """300,000 rows of two ids: blocks take further turns."""
    rows = 300_000
    logits = torch.randn(rows, 4, device="cuda", dtype=torch.bfloat16)
    offsets = torch.arange(rows + 1, device="cuda") * 2
    ids = torch.tensor([1, 3], device="cuda").repeat(rows)
    sampled = torch.where(torch.arange(rows, device="cuda") % 2 == 0, 1, 3)
    case = checks.Case(logits, offsets, ids, sampled, torch.ones(rows, device="cuda"))
    checks.kernel_equals_fp64(case, "built")


def test_speed_beside_a_dense_mask(figure: Figure, tiny: bool) -> None:
    """At the vocabulary of Qwen3, forward and backward; the bench has memory too."""
    from bench import masked_logprob as bench

    record = bench.Record(8 if tiny else 4096, 64, "cuda")
    logits = bench.make_logits(len(record.sampled), torch.bfloat16, "cuda")
    names = ["dense", "torch", "built"]
    bench.check(logits, record, names)
    seconds = bench.measure_time(logits, record, names, 1 if tiny else 7)
    for name in names:
        figure(f"{name}, {len(record.sampled)} rows", 1e3 * median(seconds[name]), "ms")


@each
def test_another_stream(implementation: str) -> None:
    """Work queued on a side stream is seen by the kernel, which runs on that stream."""
    case = checks.make_case("cuda", torch.float32, torch.int32, 200, 30_000, 50)
    want = case.score(case.logits, implementation).logprob
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        big = torch.randn(4096, 4096, device="cuda")
        for _ in range(20):
            big = big @ big / 64  # keeps the stream busy
        late = case.logits + 0 * big[0, 0].nan_to_num()
        got = case.score(late, implementation).logprob
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(got, want)


@each
def test_memory_beyond_the_gradient_is_small(implementation: str) -> None:
    """512 rows of V = 151,936 in bf16: 8 and 64 bytes per kept id and row are the bounds."""
    rows, vocab = 512, 151_936
    case = checks.make_case("cuda", torch.bfloat16, torch.int32, rows, vocab, 200)
    leaf = case.logits.requires_grad_()
    case.score(leaf, implementation).logprob.sum().backward()
    leaf.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    case.score(leaf, implementation).logprob.sum().backward()
    extra = torch.cuda.max_memory_allocated() - before - leaf.nbytes
    per_id = extra / len(case.ids)
    print(f"{implementation}: {per_id:.1f} bytes per kept id beside the gradient")
    assert extra < (8 if implementation == "built" else 128) * len(case.ids) + 256 * rows
    dense = rows * vocab  # bytes of a boolean mask alone
    assert extra < dense
