"""The head by blocks on CUDA, against all logits in fp64 on the CPU."""

from __future__ import annotations

from statistics import median

import pytest
import torch

from tests.helpers import device_checks as checks
from tests.helpers.device_figures import Figure

dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)


@dtypes
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (3, 33), (130, 1000), (64, 151_936)])
def test_values_and_gradients(
    dtype: torch.dtype, id_dtype: torch.dtype, rows: int, vocab: int
) -> None:
    worst = checks.head_equals_fp64(checks.make_case("cuda", dtype, id_dtype, rows, vocab, 60))
    print(f"{dtype} {rows} x {vocab}: largest error {worst:.2e}")


def test_gradcheck_and_refusals() -> None:
    checks.gradcheck_and_its_controls("cuda")
    checks.broken_records_are_refused("cuda")


def test_full_entropy() -> None:
    checks.full_entropy_is_that_of_all_logits("cuda")


@pytest.mark.parametrize("masked", [True, False], ids=["kept", "full"])
def test_speed_beside_all_logits(masked: bool, figure: Figure, tiny: bool) -> None:
    """At the vocabulary of Qwen3, forward and backward; the bench has the same on the CPU."""
    from bench import head_logprob as bench

    shape = bench.Shape(64, 16, 8, masked) if tiny else bench.Shape(8192, 2048, 64, masked)
    inputs = bench.Inputs(shape, torch.bfloat16, "cuda")
    names = ("logits", "blocks")
    bench.check(inputs, names)
    seconds = bench.measure_time(inputs, names, 1 if tiny else 5)
    for name in names:
        figure(f"{name}, {shape.tokens} tokens", 1e3 * median(seconds[name]), "ms")
        figure(f"{name}, peak", bench.cuda_peak(inputs, name) / 2**20, "MiB")


def test_another_stream() -> None:
    """Work queued on a side stream is seen by the head, which runs on that stream."""
    case = checks.make_case("cuda", torch.float32, torch.int32, 200, 30_000, 50)
    head = checks.Head(case.weight, len(case.weight))
    want = case.score(case.hidden, head).logprob
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        big = torch.randn(4096, 4096, device="cuda")
        for _ in range(20):
            big = big @ big / 64  # keeps the stream busy
        late = case.hidden + 0 * big[0, 0].nan_to_num()
        got = case.score(late, head).logprob
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(got, want)
