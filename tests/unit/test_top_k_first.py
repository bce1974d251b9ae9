"""The hook of SGLang's sampler in torch: the k largest first, then its own filters."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moerl.engine.plugin.top_k_first import sample
from tests.helpers.sampler_reference import sort_and_sample

ROWS, VOCAB, WIDTH = 24, 700, 64  # the hook takes at least 64 columns


def original(*args: Any, **kwargs: Any) -> Any:
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    return top_k_top_p_min_p_sampling_from_probs_torch(*args, **kwargs)


def in_cudas_order(probs: Tensor, *rest: Any, **asked: Any) -> Any:
    """The original over a stable sort, as CUDA has it; the CPU's may exchange equal values."""

    def sort(*, dim: int, descending: bool) -> Any:
        return probs.sort(dim=dim, descending=descending, stable=True)

    rows = SimpleNamespace(shape=probs.shape, device=probs.device, sort=sort)
    return original(rows, *rest, **asked)


def probabilities(*, ties: bool) -> Tensor:
    torch.manual_seed(0)
    logits = 3 * torch.randn(ROWS, VOCAB)
    return ((8 * logits).round() / 8 if ties else logits).softmax(-1)


def limits(top_k: int, top_p: float, min_p: float, seed: Tensor | None = None) -> tuple[Any, ...]:
    """Every other row has a smaller top_k, every third another top_p and min_p."""
    top_ks = torch.full((ROWS,), top_k)
    top_ks[::2] = max(1, top_k // 2)
    top_ps, min_ps = torch.full((ROWS,), top_p), torch.full((ROWS,), min_p)
    top_ps[::3], min_ps[::3] = top_p / 2, min_p / 2
    return top_ks, top_ps, min_ps, min_p > 0, seed, torch.arange(ROWS)


SWEEP = [
    (top_k, top_p, min_p)
    for top_k in (1, 2, 20, 63, 64, 65, 512, VOCAB - 1)
    for top_p in (0.1, 0.9, 1.0)
    for min_p in (0.0, 0.05)
]


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), SWEEP)
def test_kept_weights_are_those_of_the_whole_sort(
    top_k: int, top_p: float, min_p: float, ties: bool
) -> None:
    probs, rest = probabilities(ties=ties), limits(top_k, top_p, min_p)
    token, weights, ids, selected = sample(
        original, probs.clone(), *rest, return_filtered_probs=True, max_top_k=top_k
    )
    columns = max(top_k, WIDTH)
    assert weights.shape == ids.shape == (ROWS, columns)
    for sort in (original, in_cudas_order):
        _, want, want_ids, _ = sort(probs.clone(), *rest, return_filtered_probs=True)
        assert torch.equal(weights, want[:, :columns])
        assert not want[:, columns:].any()
        if sort is in_cudas_order or not ties:  # the CPU's sort may keep any of equal ones
            assert torch.equal(ids, want_ids[:, :columns])
    kept = weights > 0
    assert torch.equal(probs.gather(1, ids.long())[kept], weights[kept]), "ids belong to weights"
    at = (ids == token[:, None]) & kept
    assert torch.equal(at.sum(1), torch.ones(ROWS, dtype=torch.long)), "the token is kept, once"
    assert torch.equal(weights[at], selected)
    assert (token.dtype, ids.dtype) == (torch.int32, torch.int32)


def cut_among_equals(top_k: int, top_p: float) -> tuple[int, int]:
    """Rows whose last kept and first dropped token are equally likely: by top-k, by top-p."""
    probs, rest = probabilities(ties=True), limits(top_k, top_p, 0.0)
    _, weights, ids, _ = in_cudas_order(probs.clone(), *rest, return_filtered_probs=True)
    kept = (weights > 0).sum(1, keepdim=True)
    ordered = probs.gather(1, ids.long())
    equal = ordered.gather(1, kept - 1) == ordered.gather(1, kept)
    by_top_k = kept == rest[0][:, None]
    return int((equal & by_top_k).sum()), int((equal & ~by_top_k).sum())


def test_the_sweep_cuts_between_equal_probabilities() -> None:
    """And in another order other tokens are kept, so that the sweep sees the order."""
    assert cut_among_equals(512, 1.0)[0] > ROWS // 2
    assert cut_among_equals(512, 0.9)[1] > 2
    probs = probabilities(ties=True)
    rest = limits(512, 1.0, 0.0)
    found = sample(original, probs.clone(), *rest, return_filtered_probs=True, max_top_k=512)[2]
    backwards = torch.topk(probs.flip(1), 512).indices
    assert not torch.equal(found.sort().values, (VOCAB - 1 - backwards).int().sort().values)


# --- seeds ----------------------------------------------------------------------------------------
SEEDS = torch.arange(ROWS) * 7919


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's draw, uncompiled, over a hash in torch: its own for CPUs is in no wheel here."""
    from sglang.srt.layers import sampler

    def mixed(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
        found = (seed.long() * 31 + positions)[:, None] * 0x9E3779B1 + columns * 0x85EBCA6B
        for _ in range(3):
            found = ((found ^ (found >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
        return found

    monkeypatch.setattr(sampler, "murmur_hash32", mixed)
    draw = sampler.multinomial_with_seed
    monkeypatch.setattr(sampler, "multinomial_with_seed", draw._torchdynamo_orig_callable)


def seeded(how: Any, probs: Tensor, *, top_k: int, **asked: Any) -> Any:
    return how(probs.clone(), *limits(top_k, 0.9, 0.0, SEEDS), **asked)


@pytest.mark.usefixtures("hashed")
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("top_k", [1, 20, 64, 512])
def test_seeds_draw_the_tokens_of_the_whole_sort(top_k: int, ties: bool) -> None:
    probs = probabilities(ties=ties)
    want = seeded(in_cudas_order, probs, top_k=top_k, return_filtered_probs=True)
    for most in (top_k, 600):  # another request of the batch may have more
        found = seeded(
            lambda *a, **k: sample(original, *a, **k),
            probs, top_k=top_k, max_top_k=most, return_filtered_probs=True,
        )  # fmt: skip
        assert torch.equal(found[0], want[0])
        assert torch.equal(found[3], want[3])
    alone = sample(original, probs.clone(), *limits(top_k, 0.9, 0.0, SEEDS), max_top_k=top_k)
    assert torch.equal(alone, want[0])
    if top_k > 1:
        other = in_cudas_order(probs.clone(), *limits(top_k, 0.9, 0.0, SEEDS + 1))
        assert not torch.equal(other, want[0]), "seeds matter"


@dataclass(frozen=True)
class OneRank:
    """The fields of SGLang's sampler that its record reads."""

    sampling_mask_max_tokens: int = 4096
    tp_sync_group: None = None
    cp_sync_group: None = None


def recorded(found: Any) -> Any:
    from sglang.srt.layers.sampler import Sampler, _SamplingMaskCapture

    token, weights, ids, selected = found
    rows = torch.arange(ROWS)
    capture = _SamplingMaskCapture(weights, ids, selected, rows)
    record: Any = Sampler._build_sampling_mask_output
    return record(OneRank(), token, capture, rows)


@pytest.mark.usefixtures("hashed")
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_records_of_a_step_are_those_of_the_whole_sort(ties: bool) -> None:
    """Masks are equal; log-probabilities are sums over fewer columns, and differ by rounding."""
    probs, rest = probabilities(ties=ties), limits(64, 0.9, 0.0, SEEDS)
    asked = {"return_filtered_probs": True}
    want = recorded(in_cudas_order(probs.clone(), *rest, **asked))
    found = recorded(sample(original, probs.clone(), *rest, max_top_k=64, **asked))
    assert not found.statuses.any()
    assert torch.equal(found.statuses, want.statuses)
    assert torch.equal(found.lengths, want.lengths)
    for row, length in enumerate(found.lengths.tolist()):
        assert torch.equal(found.token_ids[row, :length], want.token_ids[row, :length])
        own, whole = (one.support_logprobs[row, :length] for one in (found, want))
        torch.testing.assert_close(own, whole, rtol=0, atol=5e-7)
    torch.testing.assert_close(found.selected_logprobs, want.selected_logprobs, rtol=0, atol=5e-7)


# --- other calls ----------------------------------------------------------------------------------
def test_other_requests_go_to_the_original() -> None:
    """Where one row of the batch samples from the whole vocabulary."""
    probs, rest = probabilities(ties=False), limits(20, 0.9, 0.0)
    for asked in ({"return_filtered_probs": True}, {}):
        for most in (None, VOCAB):
            seen: list[tuple[Any, ...]] = []

            def spy(*args: Any, seen: list[tuple[Any, ...]] = seen, **kwargs: Any) -> str:
                seen.append((args[0].shape, kwargs))
                return "original"

            assert sample(spy, probs, *rest, max_top_k=most, **asked) == "original"
            assert seen == [((ROWS, VOCAB), {**asked, "max_top_k": most})]


def test_draws_follow_the_weights() -> None:
    """Frequencies of one row's draws; control: of another row they differ."""
    probs = probabilities(ties=False)[:1].expand(4000, -1)
    like = torch.zeros(len(probs))
    rest = (like.long() + 5, like + 1.0, like, False, None, like.long())
    torch.manual_seed(1)
    token, weights, ids, _ = sample(
        original, probs.clone(), *rest, return_filtered_probs=True, max_top_k=5
    )
    want = weights[0, :5] / weights[0].sum()
    found = (token[:, None] == ids[0, :5]).float().mean(0)
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
