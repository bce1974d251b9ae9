"""Decode attention and expert parallelism on a plain CPU, in place of slow or missing torch paths.

Attention: SGLang's `torch_native` backend calls attention once per request and layer, so a decode
step of many short requests is mostly Python.  `decode` pads requests to a common length and attends
to them together, in groups whose padded size is bounded: 3 x faster for 256 requests of 16 tokens,
1.7 x at 76.  Rejected: the same for prefill.  Its padded form cannot skip the upper triangle, so it
gains only on very short prompts and takes twice as long at 1000 tokens.

Experts: with experts spread over ranks SGLang numbers the experts of other ranks -1 and sums the
outputs of the ranks afterwards.  Its kernels for GPUs skip the entries of -1; the torch path takes
them for an index and fails.  `run_experts` passes the (token, expert) pairs of its rank to that
path, one expert per token.  SGLang still routes, records the routes, maps experts to ranks and sums
over ranks.  Rejected: a local expert with weight 0 (the torch path needs distinct experts per
token).

Legend: B requests of a group, L tokens of the longest one, H query heads, G key-value heads, D head
size; T tokens, K experts of a token, P pairs of this rank, C hidden size.
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


def run_experts(
    original: Callable[..., Tensor], layer: Any, x: Tensor, topk_output: Any, config: Any
) -> Tensor:
    """AROUND moe_forward_native: x [T, C], its experts [T, K], -1 where another rank has them."""
    ids_TK = topk_output.topk_ids
    token_P, choice_P = (ids_TK >= 0).nonzero(as_tuple=True)
    if len(token_P) == ids_TK.numel():
        return original(layer, x, topk_output, config)
    output_TC = x.new_zeros(x.shape)
    if not len(token_P):
        return output_TC
    pairs = topk_output._replace(
        topk_ids=ids_TK[token_P, choice_P, None],
        topk_weights=topk_output.topk_weights[token_P, choice_P, None],
    )
    return output_TC.index_add_(0, token_P, original(layer, x[token_P], pairs, config))
