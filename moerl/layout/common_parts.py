"""Parts of every family: embedding and head, norms, prediction layers."""

from __future__ import annotations

from moerl.layout.rules import Part, Rule, flat

# --- outside the layers --------------------------------------------------------------------------
EMBED, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
FIRST = Part(
    {EMBED: ("vocab_size", "hidden")},
    (Rule("embedding.word_embeddings.weight", (EMBED,), cut=flat, pad_vocab=True),),
    (Rule("model.embed_tokens.weight", (EMBED,), cut=flat, pad_vocab=True),),
)
LAST = Part(
    {FINAL_NORM: ("hidden",), HEAD: ("vocab_size", "hidden")},
    (
        Rule("decoder.final_layernorm.weight", (FINAL_NORM,)),
        Rule("output_layer.weight", (HEAD,), cut=flat, pad_vocab=True),
    ),
    (
        Rule("model.norm.weight", (FINAL_NORM,)),
        Rule("lm_head.weight", (HEAD,), cut=flat, pad_vocab=True),
    ),
)
SCORE, SCORE_BIAS = "score.weight", "score.bias"
"""A value head, as transformers' classes for sequence and token classification name it."""
LAST_VALUES = Part(
    {FINAL_NORM: ("hidden",), SCORE: ("values", "hidden"), SCORE_BIAS: ("values",)},
    (
        Rule("decoder.final_layernorm.weight", (FINAL_NORM,)),
        Rule("output_layer.weight", (SCORE,)),
        Rule("output_layer.bias", (SCORE_BIAS,)),
    ),
    (),
)


# --- norms ---------------------------------------------------------------------------------------
def _norm(name: str, megatron: str, te: str = "") -> Part:
    return Part({name: ("hidden",)}, (Rule(megatron, (name,), te=te),), (Rule(name, (name,)),))


_NORM_1, _NORM_2 = "input_layernorm.weight", "post_attention_layernorm.weight"
# Transformer Engine fuses a norm into the projection behind it: QKV, and the dense fc1.
NORM_GQA = _norm(_NORM_1, _NORM_1, te="self_attention.linear_qkv.layer_norm_weight")
NORM_MLA = _norm(_NORM_1, _NORM_1)
NORM_DELTA = _norm(_NORM_1, _NORM_1, te="self_attention.in_proj.layer_norm_weight")
NORM_MOE = _norm(_NORM_2, "pre_mlp_layernorm.weight")
NORM_DENSE = _norm(_NORM_2, "pre_mlp_layernorm.weight", te="mlp.linear_fc1.layer_norm_weight")


# --- multi-token prediction: an ordinary layer behind a projection of (embedding, hidden) ---------
MTP_PREFIX = "mtp.layers.{i}."
MTP = Part(
    {
        "enorm.weight": ("hidden",),
        "hnorm.weight": ("hidden",),
        "eh_proj.weight": ("hidden", "wide"),
        "shared_head.norm.weight": ("hidden",),
    },
    (
        Rule("enorm.weight", ("enorm.weight",)),
        Rule("hnorm.weight", ("hnorm.weight",)),
        Rule("eh_proj.weight", ("eh_proj.weight",), cut=flat),
        Rule("final_layernorm.weight", ("shared_head.norm.weight",)),
    ),
    (),
)
MTP_COPIES = {"embed_tokens.weight": EMBED, "shared_head.head.weight": HEAD}
"""Tensors a file repeats in each prediction layer."""
