"""Attention of one request at a time, over the caches of SGLang's `torch_native` backend.

Legend: T new tokens of a request, L all its tokens, H query heads, G key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

# (rows of the batch, q [T, H, D], k [L, G, D], v [L, G, D]) -> [T, H, D]
Attend = Callable[[slice, Tensor, Tensor, Tensor], Tensor]


def attend_by_request(
    attend: Attend,
    backend: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
) -> Tensor:
    """What TorchNativeAttnBackend.forward_extend and forward_decode do, with another `attend`."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    pool = backend.token_to_kv_pool
    if save_kv_cache:
        where = KVWriteLoc(forward_batch.out_cache_loc, backend.swa_out_cache_loc)
        pool.set_kv_buffer(layer, where, k, v)
    q_THD = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
    caches = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    output = q.new_zeros(len(q_THD), layer.tp_q_head_num, layer.v_head_dim)
    for rows, slots in requests(backend, forward_batch):
        k_LGD, v_LGD = (cache[slots].to(q.dtype) for cache in caches)
        output[rows] = attend(rows, q_THD[rows], k_LGD, v_LGD)
    return output.flatten(1)


def requests(backend: Any, forward_batch: Any) -> Iterator[tuple[slice, Tensor]]:
    """Rows of each request's new tokens in the batch, and cache slots of all its tokens."""
    slots = backend.req_to_token_pool.req_to_token[forward_batch.req_pool_indices]
    lengths = forward_batch.seq_lens.tolist()
    decode = forward_batch.forward_mode.is_decode()
    counts = [1] * len(lengths) if decode else forward_batch.extend_seq_lens.tolist()
    first = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        yield slice(first, first + count), slots[row, :length]
        first += count
