"""DeepSeek sparse attention (DeepSeek-V3.2) on a plain CPU: the indexer, and attention over it.

SGLang's indexer has kernels only, with its keys in an fp8 cache of its own.  Here they are kept in
fp32 by cache slot; the Hadamard rotation of queries and keys is left out, because it changes only
how fp8 rounds.  The model's settings say that it has an indexer; pools, backends and checks of
arguments are told that it has none, so they stay those of latent attention.

Legend: T tokens of a batch, L tokens of a request, N index heads, D index head size, K positions
of a token, H query heads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moerl_cpu_sglang.request_attention import attend_by_request, requests

_MODELS = ("sglang.srt.models.", "sglang.srt.configs.model_config")


def in_models_only(original: Callable[[Any], bool], config: Any) -> bool:
    """AROUND is_deepseek_dsa: True for the model's modules alone, told by their frames."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals["__name__"].endswith("hook_registry"):
        frame = frame.f_back
    return frame.f_globals["__name__"].startswith(_MODELS) and original(config)


def capturer(_original: Callable[..., Any], *, model_config: Any, **sizes: Any) -> Any:
    """AROUND create_indexer_capturer: SGLang refuses other devices, as their indexers feed none."""
    from sglang.srt.configs.model_config import get_num_indexer_layers
    from sglang.srt.runtime_context import get_exec
    from sglang.srt.state_capturer import indexer_topk

    config = model_config.hf_text_config
    return indexer_topk._create_indexer_capturer_raw(
        enable=get_exec().features.enable_return_indexer_topk,
        num_indexer_layers=get_num_indexer_layers(config),
        index_topk=config.index_topk,
        **sizes,
    )


def choose(
    indexer: Any,
    x: Tensor,
    q_lora: Tensor,
    positions: Tensor,
    forward_batch: Any,
    layer_id: int,
    return_indices: bool = True,
    **_: Any,
) -> Tensor | None:
    """REPLACE Indexer.forward_native: [T, K] positions, -1 where a token has fewer."""
    from sglang.srt.model_executor.forward_context import get_attn_backend
    from sglang.srt.state_capturer.indexer_topk import maybe_capture_indexer_topk

    backend = get_attn_backend()
    query_TND, key_TD = _project(indexer, x, q_lora, positions)
    if not hasattr(indexer, "moerl_keys"):
        num_slots = len(backend.token_to_kv_pool.get_key_buffer(layer_id))
        indexer.moerl_keys = torch.zeros(num_slots, indexer.head_dim)
    indexer.moerl_keys[forward_batch.out_cache_loc] = key_TD
    if not return_indices:
        return None
    weight_TN = x.float() @ indexer.weights_proj.weight.float().T
    weight_TN *= indexer.n_heads**-0.5 * indexer.softmax_scale
    found = torch.full((len(x), indexer.index_topk), -1, dtype=torch.int32)
    for rows, slots in requests(backend, forward_batch):
        keys_LD = indexer.moerl_keys[slots]
        best = best_positions(query_TND[rows], keys_LD, weight_TN[rows], indexer.index_topk)
        found[rows, : best.shape[1]] = best
    chosen: Tensor = maybe_capture_indexer_topk(layer_id, found)
    return chosen


def best_positions(query_TND: Tensor, keys_LD: Tensor, weight_TN: Tensor, top_k: int) -> Tensor:
    """[T, up to K] i32; the T queries are those of the last tokens of the L keys."""
    length, tokens = len(keys_LD), len(query_TND)
    scores_TNL = torch.einsum("tnd,ld->tnl", query_TND, keys_LD).relu_()
    scores_TL = torch.einsum("tnl,tn->tl", scores_TNL, weight_TN)
    own_T1 = torch.arange(length - tokens, length)[:, None]
    scores_TL.masked_fill_(torch.arange(length) > own_T1, float("-inf"))
    value, at = scores_TL.topk(min(top_k, length), -1)
    return torch.where(value > float("-inf"), at, -1).int()


def forward(
    original: Callable[..., Tensor],
    backend: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Any,
    forward_batch: Any,
    topk_indices: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """AROUND TorchNativeAttnBackend.forward_extend and forward_decode: with `topk_indices`."""
    if topk_indices is None:
        return original(backend, q, k, v, layer, forward_batch, **options)

    def attend_chosen(rows: slice, q_THD: Tensor, k_LGD: Tensor, v_LGD: Tensor) -> Tensor:
        return attend(q_THD, k_LGD[:, 0], v_LGD[:, 0], topk_indices[rows], layer.scaling)

    return attend_by_request(attend_chosen, backend, q, k, v, layer, forward_batch, **options)


def attend(q_THD: Tensor, k_LD: Tensor, v_LD: Tensor, chosen_TK: Tensor, scale: float) -> Tensor:
    """Attention of each query to its positions; -1 = none.  All heads share one key."""
    length = len(k_LD)
    scores_HTL = torch.einsum("thd,ld->htl", q_THD, k_LD) * scale
    seen = torch.zeros(len(q_THD), length + 1, dtype=torch.bool)
    seen.scatter_(1, torch.where(chosen_TK >= 0, chosen_TK, length).long(), True)
    scores_HTL.masked_fill_(~seen[:, :length], float("-inf"))
    return torch.einsum("htl,ld->thd", scores_HTL.softmax(-1), v_LD)


def _project(indexer: Any, x: Tensor, q_lora: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Query [T, N, D] and key [T, D], the first part of D rotated by position, fp32."""
    tokens, heads, rope = len(x), indexer.n_heads, indexer.rope_head_dim
    query = indexer.wq_b(q_lora)[0].view(tokens, heads, indexer.head_dim)
    key = indexer.k_norm(indexer.wk(x)[0].float())
    q_rope, k_rope = indexer.rotary_emb(
        positions, query[..., :rope].contiguous(), key[:, None, :rope].contiguous()
    )
    query = torch.cat([q_rope.view(tokens, heads, rope), query[..., rope:]], -1)
    return query.float(), torch.cat([k_rope.view(tokens, rope), key[:, rope:]], -1).float()
