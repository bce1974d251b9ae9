"""Attention with a learned sink per head and, on some layers, a window (gpt-oss) on a plain CPU.

SGLang's `torch_native` backend has no sinks, so SGLang refuses the model with it.  A sink is one
more score in the softmax of its head, with no value behind it.

Legend: T new tokens of a request, L all its tokens, H query heads, G key-value heads, D head size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_ASKING = "sglang.srt.arg_groups.model_hook"


def name_backend(found: tuple[str, str], *_args: Any, **_options: Any) -> tuple[str, str]:
    """AFTER attention_backends_of: names a backend with sinks to the check of server arguments.

    Others who ask get the backend that runs.  SGLang replaces a hooked function in all modules that
    imported it, so the frame of the caller names the module that asks.
    """
    caller = sys._getframe(2)  # 0 is this function, 1 is SGLang's wrapper of it
    return ("triton", "triton") if caller.f_globals.get("__name__") == _ASKING else found


def full_sinks(_result: None, attention: Any, *_args: Any, **_options: Any) -> None:
    """AFTER GptOssAttention.__init__: sinks in the dtype that is served.

    SGLang keeps them in bf16, and the trainer's fp32 sinks would be rounded by every publish.
    """
    if attention.qkv_proj.weight.dtype == torch.float32:
        attention.sinks = torch.nn.Parameter(attention.sinks.float(), requires_grad=False)


def forward(
    original: Callable[..., Tensor],
    backend: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    sinks: Tensor | None = None,
) -> Tensor:
    """AROUND TorchNativeAttnBackend.forward_extend and forward_decode: with `sinks`."""
    if sinks is None:
        return original(backend, q, k, v, layer, forward_batch, save_kv_cache)
    pool = backend.token_to_kv_pool
    if save_kv_cache:
        _write_cache(backend, layer, forward_batch, k, v)
    q_THD = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    slots = backend.req_to_token_pool.req_to_token[forward_batch.req_pool_indices]
    lengths = forward_batch.seq_lens.tolist()
    decode = forward_batch.forward_mode.is_decode()
    counts = [1] * len(lengths) if decode else forward_batch.extend_seq_lens.tolist()
    outputs = [
        attend(
            q_part,
            keys[slots[row, :length]].to(q.dtype),
            values[slots[row, :length]].to(q.dtype),
            sinks.to(q.dtype),
            layer.scaling,
            layer.sliding_window_size,
        )
        for row, (q_part, length) in enumerate(
            zip(q_THD[: sum(counts)].split(counts), lengths, strict=True)
        )
    ]
    padding = q.new_zeros(len(q_THD) - sum(counts), q_THD.shape[1], layer.v_head_dim)
    return torch.cat([*outputs, padding]).flatten(1)


def _write_cache(backend: Any, layer: Any, forward_batch: Any, k: Tensor, v: Tensor) -> None:
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    where = KVWriteLoc(forward_batch.out_cache_loc, backend.swa_out_cache_loc)
    backend.token_to_kv_pool.set_kv_buffer(layer, where, k, v)


def attend(
    q_THD: Tensor, k_LGD: Tensor, v_LGD: Tensor, sinks_H: Tensor, scale: float, window: int | None
) -> Tensor:
    """The T queries are those of the last tokens of k and v.  Returns [T, H, D].

    window: tokens before its own that a query sees; None or negative: all.
    """
    (tokens, heads, _), length = q_THD.shape, len(k_LGD)
    k_LHD, v_LHD = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k_LGD, v_LGD))
    scores_HTL = torch.einsum("thd,lhd->htl", q_THD, k_LHD) * scale
    own_T1 = torch.arange(length - tokens, length)[:, None]
    other_L = torch.arange(length)
    seen_TL = other_L <= own_T1
    if window is not None and window >= 0:
        seen_TL &= other_L >= own_T1 - window
    scores_HTL.masked_fill_(~seen_TL, float("-inf"))
    sinks_HT1 = sinks_H[:, None, None].expand(heads, tokens, 1)
    weights_HTL = torch.cat([scores_HTL, sinks_HT1], -1).softmax(-1)[..., :-1]
    return torch.einsum("htl,lhd->thd", weights_HTL, v_LHD)
