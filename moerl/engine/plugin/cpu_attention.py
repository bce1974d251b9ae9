"""Attention for many requests of a batch at once, on a plain CPU.

SGLang's `torch_native` backend calls attention once per request and layer, so a decode step of many
short requests is mostly Python.  Here requests are padded to a common length and attended together,
in groups whose padded size is bounded: 3 x faster for 256 requests of 16 tokens, 1.7 x at 76.

A prefill groups the requests of one length and one cached prefix, without padding: attention is
causal, so its upper triangle is skipped as for a request alone.  Siblings of a prompt, and prompts
of tasks with one form, have such lengths.  Rejected: padding for prefill, which cannot skip the
triangle and takes twice as long at 1000 tokens.

Legend: B requests of a group, L tokens of the longest one, H query heads, G key-value heads, D head
size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_GROUP_TOKENS = 65536  # padded B x L of one group: bounds the gathered copy of the cache


def decode(original: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    """AROUND TorchNativeAttnBackend._run_sdpa_forward_decode.

    Takes the same arguments and returns the same result up to rounding.  Calls with encoders,
    cross attention or sliding windows are passed to the original.
    """
    _, query, output, k_cache, v_cache, req_to_token, pool_idx, seq_lens, encoder_lens = args
    unusual = options["is_cross_attn"] or options["sliding_window_size"] is not None
    if encoder_lens is not None or unusual:
        return original(*args, **options)
    return attend(
        query,
        output,
        k_cache,
        v_cache,
        req_to_token[pool_idx],
        seq_lens,
        scale=options["scaling"],
        gqa=options["enable_gqa"],
    )


def extend(original: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    """AROUND TorchNativeAttnBackend._run_sdpa_forward_extend.

    Takes the same arguments and returns the same result up to rounding.  Calls with encoders,
    cross attention, sliding windows or without a causal mask are passed to the original.
    """
    query, output, k_cache, v_cache, req_to_token, pool_idx, *lengths, encoder_lens = args[1:]
    unusual = options["is_cross_attn"] or options["sliding_window_size"] is not None
    if encoder_lens is not None or unusual or not options["causal"]:
        return original(*args, **options)
    _, prefix_lens, new_lens = lengths
    return prefill(
        query,
        output,
        k_cache,
        v_cache,
        req_to_token[pool_idx],
        (prefix_lens.tolist(), new_lens.tolist()),
        scale=options["scaling"],
        gqa=options["enable_gqa"],
    )


def prefill(
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    lengths: tuple[list[int], list[int]],
    *,
    scale: float | None,
    gqa: bool,
) -> Tensor:
    """Causal attention of the new tokens of each request to all its tokens.

    query, output [new tokens of all requests, H, D]; k_cache, v_cache [cache slots, G, D]; slots
    [requests, >= tokens], the cache slot of each token; lengths: cached and new tokens of each
    request.  Fills and returns output.
    """
    cached, new = lengths
    starts = torch.tensor([0, *new]).cumsum(0)[:-1]
    for (prefix, count), members in _of_one_length(cached, new):
        chosen = torch.tensor(members)
        rows = starts[chosen, None] + torch.arange(count)  # [B, new tokens]
        at = slots[chosen, : prefix + count]
        # SDPA aligns a causal mask at the first key, so rows of the cached prefix stand in front.
        query_BLHD = query.new_zeros(len(members), prefix + count, *query.shape[1:])
        query_BLHD[:, prefix:] = query[rows]
        out_BHLD = scaled_dot_product_attention(
            query_BLHD.transpose(1, 2),
            k_cache[at].transpose(1, 2).to(query.dtype),
            v_cache[at].transpose(1, 2).to(query.dtype),
            scale=scale,
            enable_gqa=gqa,
            is_causal=True,
        )
        output[rows] = out_BHLD[:, :, prefix:].transpose(1, 2).to(output.dtype)
    return output


def _of_one_length(
    cached: list[int], new: list[int]
) -> Iterator[tuple[tuple[int, int], list[int]]]:
    """Requests with equal numbers of cached and new tokens, in groups of a bounded size."""
    alike: dict[tuple[int, int], list[int]] = {}
    for request, key in enumerate(zip(cached, new, strict=True)):
        if key[1]:
            alike.setdefault(key, []).append(request)
    for key, members in alike.items():
        size = max(1, _GROUP_TOKENS // sum(key))
        for first in range(0, len(members), size):
            yield key, members[first : first + size]


def attend(
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None,
    gqa: bool,
) -> Tensor:
    """Attention of the last token of each request to all its tokens.

    query, output [requests, H, D]; k_cache, v_cache [slots, G, D]; seq_lens [requests];
    slots [requests, >= max(seq_lens)], the cache slot of each token.  Fills and returns output.
    """
    lengths = seq_lens.tolist()
    for first, last in _groups(lengths):
        length = max(lengths[first:last])
        seen = torch.arange(length) < seq_lens[first:last, None]  # [B, L]
        # Beyond its end a request reads its own first slot: masked, but never uninitialised.
        at = slots[first:last, :length]
        at = torch.where(seen, at, at[:, :1])
        out_BH1D = scaled_dot_product_attention(
            query[first:last, :, None],
            k_cache[at].transpose(1, 2).to(query.dtype),
            v_cache[at].transpose(1, 2).to(query.dtype),
            attn_mask=seen[:, None, None],
            scale=scale,
            enable_gqa=gqa,
        )
        output[first:last] = out_BH1D[:, :, 0]
    return output


def _groups(lengths: list[int]) -> Iterator[tuple[int, int]]:
    """Split consecutive requests into groups whose padded size stays within the bound."""
    first, longest = 0, 0
    for position, length in enumerate(lengths):
        longest = max(longest, length)
        if position > first and longest * (position + 1 - first) > _GROUP_TOKENS:
            yield first, position
            first, longest = position, length
    if lengths:
        yield first, len(lengths)
