"""Llama-4 on a plain CPU: its attention casts to bf16, its experts want their weight afterwards.

Outside CUDA SGLang norms queries and keys in bf16, whatever dtype is served.  Its torch path for
experts scales what an expert returns; Llama-4 scales what its one expert reads.

Legend: T tokens, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def attend(attention: Any, positions: Tensor, hidden_states: Tensor, forward_batch: Any) -> Tensor:
    """In place of Llama4Attention.forward: rotate, norm, scale, in the dtype that is served."""
    projected, _ = attention.qkv_proj(hidden_states)
    q, k, v = projected.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
    if attention.rotary_emb is not None:
        q, k = attention.rotary_emb(positions, q.contiguous(), k.contiguous())
    if attention.qk_norm is not None:
        q, k = (_norm(attention, x) for x in (q, k))
    if attention.attn_temperature_tuning and not attention.use_rope:
        q = attention._mul_attn_scale(positions=positions, q=q)
    output: Tensor
    output, _ = attention.o_proj(attention.attn(q, k, v, forward_batch))
    return output


def _norm(attention: Any, x: Tensor) -> Tensor:
    heads = x.reshape(-1, attention.head_dim).contiguous()
    normed: Tensor = attention.qk_norm(heads)
    return normed.view(len(x), -1)


def weigh_outside(_result: None, moe: Any, *_args: Any, **_options: Any) -> None:
    """AFTER Llama4MoE.__init__: the torch path refuses experts that scale their input."""
    moe.experts.moe_runner_config.apply_router_weight_on_input = False


def run_experts(moe: Any, hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
    """In place of Llama4MoE._forward_core_normal: (shared expert, routed expert)."""
    logits, _ = moe.router(hidden_TH)
    chosen = moe.topk(hidden_TH, logits)
    weights_T1 = chosen.topk_weights
    assert weights_T1.shape[1] == 1, "one expert a token"
    chosen = chosen._replace(topk_weights=torch.ones_like(weights_T1))
    routed = moe.experts(hidden_TH * weights_T1.to(hidden_TH.dtype), chosen)
    return moe.shared_expert(hidden_TH), routed
