"""Tables per model family: Hugging Face shapes, Megatron-core rules, SGLang rules.

Sizes in the shape tables are attributes of ModelSpec.  Names under a layer are relative to it.
Read at megatron-core 0.16.1, sglang 0.5.23 (srt/models/qwen3_moe.py), transformers 5.19.0.
Self-consistency cannot see a wrong table (a k/v swap passes every round trip): each family needs
an outside oracle, see docs/layout.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from moerl.layout.rules import Rule, Table, columns, concat, concat_heads, each, flat, qkv_grouped


@dataclass(frozen=True, slots=True)
class Family:
    root: dict[str, tuple[str, ...]]
    layer: dict[str, tuple[str, ...]]
    expert: dict[str, tuple[str, ...]]  # relative to the layer, one per {e}
    megatron: Table
    sglang: Table
    stacked: dict[str, tuple[str, ...]]
    """Other file form: [E, ...] tensor -> the per-expert tensors its rows hold, in order."""


EMBED, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
QKV = tuple(f"self_attn.{x}_proj.weight" for x in "qkv")
O_PROJ, ROUTER = ("self_attn.o_proj.weight",), ("mlp.gate.weight",)
NORM_1, NORM_2 = ("input_layernorm.weight",), ("post_attention_layernorm.weight",)
Q_NORM, K_NORM = ("self_attn.q_norm.weight",), ("self_attn.k_norm.weight",)
GATE_UP = tuple(f"mlp.experts.{{e}}.{x}_proj.weight" for x in ("gate", "up"))
DOWN = ("mlp.experts.{e}.down_proj.weight",)

QWEN3_MOE = Family(
    root={EMBED: ("vocab_size", "hidden"), FINAL_NORM: ("hidden",), HEAD: ("vocab_size", "hidden")},
    layer={
        NORM_1[0]: ("hidden",),
        QKV[0]: ("q_rows", "hidden"),
        QKV[1]: ("kv_rows", "hidden"),
        QKV[2]: ("kv_rows", "hidden"),
        O_PROJ[0]: ("hidden", "q_rows"),
        Q_NORM[0]: ("head_dim",),
        K_NORM[0]: ("head_dim",),
        NORM_2[0]: ("hidden",),
        ROUTER[0]: ("experts", "hidden"),
    },
    expert={
        GATE_UP[0]: ("moe_ffn", "hidden"),
        GATE_UP[1]: ("moe_ffn", "hidden"),
        DOWN[0]: ("hidden", "moe_ffn"),
    },
    megatron=Table(
        layer_prefix="decoder.layers.{l}.",
        first=(Rule("embedding.word_embeddings.weight", (EMBED,), cut=flat, pad_vocab=True),),
        layer=(
            Rule("input_layernorm.weight", NORM_1),
            Rule("self_attention.linear_qkv.weight", QKV, qkv_grouped, flat),
            Rule("self_attention.linear_proj.weight", O_PROJ, cut=columns),
            Rule("self_attention.q_layernorm.weight", Q_NORM),
            Rule("self_attention.k_layernorm.weight", K_NORM),
            Rule("pre_mlp_layernorm.weight", NORM_2),
            Rule("mlp.router.weight", ROUTER),
            Rule("mlp.experts.local_experts.{e}.linear_fc1.weight", GATE_UP, concat, each),
            Rule("mlp.experts.local_experts.{e}.linear_fc2.weight", DOWN, cut=columns),
        ),
        last=(
            Rule("decoder.final_layernorm.weight", (FINAL_NORM,)),
            Rule("output_layer.weight", (HEAD,), cut=flat, pad_vocab=True),
        ),
    ),
    sglang=Table(
        layer_prefix="model.layers.{l}.",
        first=(Rule("model.embed_tokens.weight", (EMBED,), cut=flat, pad_vocab=True),),
        layer=(
            Rule("self_attn.qkv_proj.weight", QKV, concat_heads, each),
            Rule("self_attn.o_proj.weight", O_PROJ, cut=columns),
            Rule("self_attn.q_norm.weight", Q_NORM),
            Rule("self_attn.k_norm.weight", K_NORM),
            Rule("mlp.experts.w13_weight", GATE_UP, concat, each),
            Rule("mlp.experts.w2_weight", DOWN, cut=columns),
            Rule("mlp.gate.weight", ROUTER),
            Rule("input_layernorm.weight", NORM_1),
            Rule("post_attention_layernorm.weight", NORM_2),
        ),
        last=(
            Rule("model.norm.weight", (FINAL_NORM,)),
            Rule("lm_head.weight", (HEAD,), cut=flat, pad_vocab=True),
        ),
    ),
    stacked={"mlp.experts.gate_up_proj": GATE_UP, "mlp.experts.down_proj": DOWN},
)

FAMILY_TABLES = {"qwen3_moe": QWEN3_MOE}

# Transformer Engine fuses the first norm into the QKV projection and groups the experts' GEMMs.
TE_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "mlp.experts.local_experts.{e}.linear_fc1.weight": "mlp.experts.linear_fc1.weight{e}",
    "mlp.experts.local_experts.{e}.linear_fc2.weight": "mlp.experts.linear_fc2.weight{e}",
}
