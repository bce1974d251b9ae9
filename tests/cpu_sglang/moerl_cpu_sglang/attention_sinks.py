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

from moerl_cpu_sglang.request_attention import attend_by_request

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
    sinks: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """AROUND TorchNativeAttnBackend.forward_extend and forward_decode: with `sinks`."""
    if sinks is None:
        return original(backend, q, k, v, layer, forward_batch, **options)

    def attend_with_sinks(_rows: slice, q_THD: Tensor, k_LGD: Tensor, v_LGD: Tensor) -> Tensor:
        sinks_H, window = sinks.to(q.dtype), layer.sliding_window_size
        return attend(q_THD, k_LGD, v_LGD, sinks_H, layer.scaling, window)

    return attend_by_request(attend_with_sinks, backend, q, k, v, layer, forward_batch, **options)


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
