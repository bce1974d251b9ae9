"""Kept sets of SGLang's samplers on CUDA: the recorded one with and without its short way (which
needs no SGLang here), and flashinfer's.

SGLang's `Sampler` rebuilds flashinfer's set after the draw, from separate kernels; these are the
same calls.  Until both tests have passed on a GPU `engine.args.sampling_backend` stays `pytorch`.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

from moerl.engine.plugin.top_k_first import sample
from tests.helpers.device_figures import Figure
from tests.helpers.sampler_reference import sort_and_sample

needs_flashinfer = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)
ROWS, VOCAB, TOP_K, TOP_P, DRAWS = 64, 151_936, 64, 0.9, 200
BATCH, MASK_TOP_K = 256, 512  # of a decode step, and of every recipe


def probabilities(*, ties: bool) -> Tensor:
    """[ROWS, VOCAB] fp32; ties: of logits in bf16, many of which are equal."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(ROWS, VOCAB, device="cuda")
    return (logits.bfloat16().float() if ties else logits).softmax(-1)


def limits() -> tuple[Tensor, Tensor]:
    top_k = torch.full((ROWS,), TOP_K, dtype=torch.int32, device="cuda")
    return top_k, torch.full((ROWS,), TOP_P, device="cuda")


def kept_by_pytorch(probs: Tensor) -> Tensor:
    """[ROWS, VOCAB] bool, by the sampler that is recorded."""
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    top_k, top_p = limits()
    _, weights, ids, _ = top_k_top_p_min_p_sampling_from_probs_torch(
        probs.clone(), top_k, top_p, torch.zeros_like(top_p), False, None,
        torch.zeros(ROWS, dtype=torch.long, device="cuda"), return_filtered_probs=True,
    )  # fmt: skip
    return torch.zeros_like(probs, dtype=torch.bool).scatter_(1, ids.long(), weights > 0)


def kept_by_flashinfer(probs: Tensor) -> Tensor:
    """[ROWS, VOCAB] bool, rebuilt as SGLang rebuilds it."""
    from sgl_kernel import top_k_renorm_prob, top_p_renorm_prob

    top_k, top_p = limits()
    kept: Tensor = (top_k_renorm_prob(probs, top_k) > 0) & (top_p_renorm_prob(probs, top_p) > 0)
    return kept


def sampled(
    how: Callable[..., Any], probs: Tensor, *, top_k: int = MASK_TOP_K, min_p: bool = False
) -> Any:
    """(tokens, weights, ids, weight of each token) of one decode step; `probs` is written to."""
    like = torch.zeros(len(probs), device="cuda")
    return how(
        probs, like.int() + top_k, like + TOP_P, like + 0.01, min_p, None, like.long(),
        return_filtered_probs=True, max_top_k=top_k,
    )  # fmt: skip


short = partial(sample, sort_and_sample)


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("min_p", [False, True], ids=["", "min_p"])
def test_short_way_keeps_what_the_whole_sort_keeps(
    ties: bool, min_p: bool, figure: Figure, tiny: bool
) -> None:
    """Sums run over fewer columns, so that a row may be cut one token apart by rounding."""
    probs = probabilities(ties=ties)[: 2 if tiny else ROWS]
    _, want, _, _ = sampled(sort_and_sample, probs.clone(), min_p=min_p)
    token, weights, ids, selected = sampled(short, probs.clone(), min_p=min_p)
    kept = weights > 0
    assert torch.equal(probs.gather(1, ids.long())[kept], weights[kept])
    at = (ids == token[:, None]) & kept
    assert bool((at.sum(1) == 1).all())
    assert torch.equal(weights[at], selected)
    apart = (kept.sum(1) - (want > 0).sum(1)).abs()
    name = f"{'ties' if ties else 'distinct'}{', min_p' if min_p else ''}"
    figure(f"rows cut elsewhere, {name}", float((apart > 0).sum()), f"of {len(probs)}")
    assert int(apart.max()) <= 1
    same = (apart == 0)[:, None]
    assert torch.equal(weights * same, want[:, :MASK_TOP_K] * same)


@pytest.mark.parametrize("top_k", [1, 20, MASK_TOP_K])
def test_equal_probabilities_are_in_the_order_of_the_whole_sort(
    top_k: int, figure: Figure, tiny: bool
) -> None:
    """Ids of all columns.  On the double the CPU selects, which knows no such order."""
    probs = probabilities(ties=not tiny)[: 2 if tiny else ROWS]
    _, _, want, _ = sampled(sort_and_sample, probs.clone(), top_k=top_k)
    _, _, ids, _ = sampled(short, probs.clone(), top_k=top_k)
    ordered = probs.gather(1, want[:, : top_k + 1].long())
    tied = ordered[:, top_k - 1] == ordered[:, top_k]
    figure(f"rows cut between equal ones, top-k {top_k}", float(tied.sum()), f"of {len(probs)}")
    assert tiny or top_k < MASK_TOP_K or tied.any()
    assert torch.equal(ids, want[:, : ids.shape[1]])


def test_speed_of_a_decode_step(figure: Figure, tiny: bool) -> None:
    """Of one decode step's sampling, without the forward pass: the whole sort, the short way."""
    torch.manual_seed(0)
    probs = (3 * torch.randn(2 if tiny else BATCH, VOCAB, device="cuda")).softmax(-1)
    for name, how in (("whole sort", sort_and_sample), ("k largest first", short)):
        seconds = []
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(2 if tiny else 12):
            own = probs.clone()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            sampled(how, own)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        figure(f"{name}, a decode step of {len(probs)}", 1e3 * median(seconds), "ms")
        figure(f"{name}, peak", (torch.cuda.max_memory_allocated() - before) / 2**20, "MiB")


@needs_flashinfer
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_kept_sets_are_equal(ties: bool, figure: Figure) -> None:
    probs = probabilities(ties=ties)
    differ = (kept_by_pytorch(probs) != kept_by_flashinfer(probs)).any(-1)
    figure(f"rows of other sets, {'ties' if ties else 'distinct'}", float(differ.sum()), "of 64")
    assert not differ.any()


@needs_flashinfer
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_draws_are_kept(ties: bool, figure: Figure) -> None:
    """What flashinfer draws is in its own set, and in the recorded one; control: it varies."""
    from flashinfer.sampling import top_k_top_p_sampling_from_probs

    probs, (top_k, top_p) = probabilities(ties=ties), limits()
    draws = torch.stack(
        [
            top_k_top_p_sampling_from_probs(probs, top_k, top_p, filter_apply_order="joint").long()
            for _ in range(DRAWS)
        ],
        dim=1,
    )
    for name, kept in (("own", kept_by_flashinfer(probs)), ("pytorch's", kept_by_pytorch(probs))):
        outside = ~kept.gather(1, draws)
        figure(f"draws outside of the {name} set", float(outside.sum()), f"of {draws.numel()}")
        assert not outside.any(), name
    assert draws.unique().numel() > ROWS
