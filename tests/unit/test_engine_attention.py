"""Batched attention on a CPU equals attention of each request alone."""

from __future__ import annotations

import pytest
import torch

from moerl.engine.plugin import cpu_attention


def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """[H, D]: one query token over all tokens of its request, by the definition of attention."""
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[1], 1) for x in (k, v))
    weights = (torch.einsum("hd,khd->hk", q, k) * scale).softmax(-1)
    return torch.einsum("hk,khd->hd", weights, v)


@pytest.mark.parametrize("group_tokens", [8, 65536])
@pytest.mark.parametrize("seed", range(4))
def test_equals_each_request_alone(
    monkeypatch: pytest.MonkeyPatch, seed: int, group_tokens: int
) -> None:
    monkeypatch.setattr(cpu_attention, "_GROUP_TOKENS", group_tokens)
    torch.manual_seed(seed)
    lengths = torch.randint(1, 12, (7,))
    k_cache, v_cache = torch.full((2, 120, 2, 8), torch.nan).unbind()  # unused slots stay NaN
    slots = torch.randint(0, 120, (7, 16))
    free = torch.randperm(120)
    for i, length in enumerate(lengths.tolist()):
        slots[i, :length], free = free[:length], free[length:]
        k_cache[slots[i, :length]] = torch.randn(length, 2, 8)
        v_cache[slots[i, :length]] = torch.randn(length, 2, 8)
    query = torch.randn(7, 4, 8)
    got = cpu_attention.attend(
        query, torch.empty_like(query), k_cache, v_cache, slots, lengths, scale=0.3, gqa=True
    )
    own = [slots[i, :length] for i, length in enumerate(lengths)]
    want = [alone(q, k_cache[at], v_cache[at], 0.3) for q, at in zip(query, own, strict=True)]
    torch.testing.assert_close(got, torch.stack(want), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("group_tokens", [8, 65536])
@pytest.mark.parametrize("seed", range(4))
def test_prefill_equals_each_request_alone(
    monkeypatch: pytest.MonkeyPatch, seed: int, group_tokens: int
) -> None:
    monkeypatch.setattr(cpu_attention, "_GROUP_TOKENS", group_tokens)
    torch.manual_seed(seed)
    cached = [0, 3, 0, 3, 5, 0, 0]
    new = [4, 2, 4, 2, 1, 0, 6]
    k_cache, v_cache = torch.full((2, 120, 2, 8), torch.nan).unbind()  # unused slots stay NaN
    slots, free = torch.randint(0, 120, (7, 16)), torch.randperm(120)
    for i, length in enumerate(map(sum, zip(cached, new, strict=True))):
        slots[i, :length], free = free[:length], free[length:]
        k_cache[slots[i, :length]] = torch.randn(length, 2, 8)
        v_cache[slots[i, :length]] = torch.randn(length, 2, 8)
    query = torch.randn(sum(new), 4, 8)
    got = cpu_attention.prefill(
        query, torch.empty_like(query), k_cache, v_cache, slots, (cached, new), scale=0.3, gqa=True
    )
    want = []
    for i, (prefix, count) in enumerate(zip(cached, new, strict=True)):
        for end in range(prefix + 1, prefix + count + 1):
            at = slots[i, :end]
            want.append(alone(query[len(want)], k_cache[at], v_cache[at], 0.3))
    torch.testing.assert_close(got, torch.stack(want), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("encoder_lens", "cross", "window"), [(1, False, None), (None, True, None), (None, False, 4)]
)
def test_unusual_attention_is_left_to_sglang(
    encoder_lens: int | None, cross: bool, window: int | None
) -> None:
    def original(*_args: object, **_options: object) -> str:
        return "original"

    options: dict[str, object] = {"is_cross_attn": cross, "sliding_window_size": window}
    assert cpu_attention.decode(original, *range(8), encoder_lens, **options) == "original"
    options["causal"] = True
    assert cpu_attention.extend(original, *range(10), encoder_lens, **options) == "original"
