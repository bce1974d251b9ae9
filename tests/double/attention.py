"""Attention: torch chooses a fused kernel by a table per device, which has no row for CUDA here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_fused = torch.nn.functional.scaled_dot_product_attention


def math_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **other: Any,
) -> Tensor:
    """torch's own unfused form, on any device."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = hidden.masked_fill_(~attn_mask, float("-inf"))
    result: Tensor = torch._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, **other
    )[0]
    return result


def replace(*, everywhere: bool = False) -> None:
    """everywhere: also on the CPU, for a run whose numbers are compared with the double's."""

    def attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        chosen = math_attention if everywhere or query.is_cuda else _fused
        result: Tensor = chosen(query, *args, **kwargs)
        return result

    torch.nn.functional.scaled_dot_product_attention = attention
