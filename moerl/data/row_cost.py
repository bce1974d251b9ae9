"""The cost of a row for a trainer rank: arithmetic that grows with its tokens, and with their
pairs.

A token passes the weights of the layers, of the experts as many as it is sent to: 2 operations per
weight.  In a layer of attention it meets each token before it: 2 heads (qk + v) operations per pair
(Megatron-LM, Narayanan et al., 2104.04473, appendix, without recomputation).  Backward passes take
twice as much of both, so only the ratio counts.  Left out: the output layer, which only sampled
tokens pass; attention within a window and gated delta nets, which cost the same per token.
"""

from __future__ import annotations

import math
from dataclasses import replace

from moerl.layout import ModelSpec, hf_shapes

_UNIT = 1024  # costs are whole numbers, equal on every rank
_OUTSIDE = ("embed_tokens.weight", "lm_head.weight")


def pair_cost(spec: ModelSpec) -> float:
    """Cost of one pair of tokens in all layers, in costs of one token's weights."""
    of_layer = spec.index_heads * spec.index_dim if spec.index_topk else _attention(spec)
    local = {*spec.linear_layers, *(spec.sliding_layers if spec.sliding_window else ())}
    return of_layer * (spec.layers - len(local)) / _weights_of_a_token(spec)


def row_cost(tokens: int, pair: float) -> int:
    """Cost of a row, in 1/1024 of a token's weights; pair: `pair_cost`, 0 counts tokens alone."""
    return _UNIT * tokens + math.floor(_UNIT * pair * tokens * (tokens + 1) / 2)


def _attention(spec: ModelSpec) -> int:
    if spec.kv_lora:
        return spec.heads * (spec.qk_nope + spec.qk_rope + spec.v_head)
    return 2 * spec.heads * spec.head_dim


def _weights_of_a_token(spec: ModelSpec) -> float:
    total = 0.0
    for name, shape in hf_shapes(replace(spec, mtp_layers=0)).items():
        if len(shape) < 2 or name.endswith(_OUTSIDE):
            continue
        share = spec.experts_per_token / spec.experts if ".experts." in name else 1.0
        total += share * math.prod(shape)
    return total
