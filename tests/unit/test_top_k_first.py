"""The hook of SGLang's sampler in torch: the k largest first, then its own filters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moerl.engine.plugin.top_k_first import sample
from tests.helpers.sampler_reference import sort_and_sample

ROWS, VOCAB = 24, 700


def original(*args: Any, **kwargs: Any) -> Any:
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    return top_k_top_p_min_p_sampling_from_probs_torch(*args, **kwargs)


def probabilities(*, ties: bool) -> Tensor:
    torch.manual_seed(0)
    logits = 3 * torch.randn(ROWS, VOCAB)
    return (logits.bfloat16() if ties else logits).float().softmax(-1)


def limits(top_k: int, top_p: float, min_p: float) -> tuple[Any, ...]:
    """Every other row has a smaller top_k."""
    top_ks = torch.full((ROWS,), top_k)
    top_ks[::2] = max(1, top_k // 2)
    like = torch.zeros(ROWS)
    return top_ks, like + top_p, like + min_p, min_p > 0, None, torch.arange(ROWS)


SWEEP = [
    (top_k, top_p, min_p)
    for top_k in (1, 2, 20, 512, VOCAB - 1)
    for top_p in (0.1, 0.9, 1.0)
    for min_p in (0.0, 0.05)
]


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), SWEEP)
def test_kept_weights_are_those_of_the_whole_sort(
    top_k: int, top_p: float, min_p: float, ties: bool
) -> None:
    probs, rest = probabilities(ties=ties), limits(top_k, top_p, min_p)
    _, want, want_ids, _ = original(probs.clone(), *rest, return_filtered_probs=True)
    token, weights, ids, selected = sample(
        original, probs.clone(), *rest, return_filtered_probs=True, max_top_k=top_k
    )
    assert weights.shape == ids.shape == (ROWS, top_k)
    assert torch.equal(weights, want[:, :top_k])
    assert not want[:, top_k:].any()
    kept = weights > 0
    assert torch.equal(probs.gather(1, ids.long())[kept], weights[kept]), "ids belong to weights"
    if not ties:  # of equal probabilities either may be kept
        assert torch.equal(ids[kept], want_ids[:, :top_k][kept])
    at = (ids == token[:, None]) & kept
    assert torch.equal(at.sum(1), torch.ones(ROWS, dtype=torch.long)), "the token is kept, once"
    assert torch.equal(weights[at], selected)
    assert (token.dtype, ids.dtype) == (torch.int32, torch.int32)


def test_other_requests_go_to_the_original() -> None:
    """With seeds, without weights, and where top-k is the vocabulary."""
    probs = probabilities(ties=False)
    *rest, _, positions = limits(20, 0.9, 0.0)
    for seed, own in (
        (torch.arange(ROWS), {"return_filtered_probs": True, "max_top_k": 20}),
        (None, {"return_filtered_probs": False, "max_top_k": 20}),
        (None, {"return_filtered_probs": True, "max_top_k": VOCAB}),
        (None, {"return_filtered_probs": True, "max_top_k": None}),
    ):
        seen: list[tuple[Any, ...]] = []

        def spy(*args: Any, seen: list[tuple[Any, ...]] = seen, **kwargs: Any) -> str:
            seen.append((args[0].shape, kwargs))
            return "original"

        assert sample(spy, probs, *rest, seed, positions, **own) == "original"
        assert seen == [((ROWS, VOCAB), own)]


def test_draws_follow_the_weights() -> None:
    """Frequencies of one row's draws; control: of another row they differ."""
    probs = probabilities(ties=False)[:1].expand(4000, -1)
    like = torch.zeros(len(probs))
    rest = (like.long() + 5, like + 1.0, like, False, None, like.long())
    torch.manual_seed(1)
    token, weights, ids, _ = sample(
        original, probs.clone(), *rest, return_filtered_probs=True, max_top_k=5
    )
    want = weights[0] / weights[0].sum()
    found = (token[:, None] == ids[0]).float().mean(0)
    assert (found - want).abs().max() < 0.03
    assert (found - want.roll(1)).abs().max() > 0.03


def test_the_restatement_is_sglangs() -> None:
    probs = probabilities(ties=True)
    for values in SWEEP[:12]:
        rest = limits(*values)
        found = []
        for function in (original, sort_and_sample):
            torch.manual_seed(3)
            found.append(function(probs.clone(), *rest, return_filtered_probs=True))
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
