"""Parts of attention: grouped-query, gated, latent, sparse, and the gated delta net."""

from __future__ import annotations

from dataclasses import replace

from moerl.layout.rules import (
    Part,
    Rule,
    columns,
    concat,
    concat_heads,
    copy,
    delta_conv,
    delta_heads,
    each,
    each_rotary,
    flat,
    head_groups,
    qkv_grouped,
    qkv_grouped_gate,
    whole,
)


# --- attention -----------------------------------------------------------------------------------
def _qkv(kind: str) -> tuple[str, ...]:
    return tuple(f"self_attn.{x}_proj.{kind}" for x in "qkv")


_Q, _K, _V = _qkv("weight")
_O = "self_attn.o_proj.weight"
GQA = Part(
    {
        _Q: ("q_rows", "hidden"),
        _K: ("kv_rows", "hidden"),
        _V: ("kv_rows", "hidden"),
        _O: ("hidden", "o_cols"),
    },
    (
        Rule("self_attention.linear_qkv.weight", _qkv("weight"), qkv_grouped, flat),
        Rule("self_attention.linear_proj.weight", (_O,), cut=columns),
    ),
    (
        Rule("self_attn.qkv_proj.weight", _qkv("weight"), concat_heads, each),
        Rule("self_attn.o_proj.weight", (_O,), cut=columns),
    ),
)
# Llama-4 rotates pairs of neighbours, SGLang's class for it the two halves of a head.
GQA_REORDERED = replace(
    GQA,
    sglang=(
        Rule("self_attn.qkv_proj.weight", _qkv("weight"), concat_heads, each_rotary),
        *GQA.sglang[1:],
    ),
)
QKV_BIAS = Part(
    dict(zip(_qkv("bias"), (("q_rows",), ("kv_rows",), ("kv_rows",)), strict=True)),
    (Rule("self_attention.linear_qkv.bias", _qkv("bias"), qkv_grouped, flat),),
    (Rule("self_attn.qkv_proj.bias", _qkv("bias"), concat_heads, each),),
    when="qkv_bias",
)


def _qk_norm(when: str, sizes: tuple[str, str], *, sglang_cuts: bool = False) -> Part:
    """Cut over heads in Megatron if it covers all heads; in SGLang whole, or cut as q and k."""
    names = {x: f"self_attn.{x}_norm.weight" for x in "qk"}
    cut = flat if sizes[0] == "q_rows" else whole
    fuse, sglang_cut = (concat_heads, each) if sglang_cuts else (copy, whole)
    return Part(
        {names["q"]: (sizes[0],), names["k"]: (sizes[1],)},
        tuple(
            Rule(f"self_attention.{x}_layernorm.weight", (hf,), cut=cut) for x, hf in names.items()
        ),
        tuple(Rule(hf, (hf,), fuse, sglang_cut) for hf in names.values()),
        when=when,
    )


QK_NORM = _qk_norm("qk_norm", ("head_dim", "head_dim"))
QK_NORM_ALL_HEADS = _qk_norm("qk_norm_all_heads", ("q_rows", "kv_rows"))
QK_NORM_CUT = _qk_norm("qk_norm_all_heads", ("q_rows", "kv_rows"), sglang_cuts=True)
O_BIAS = Part(
    {"self_attn.o_proj.bias": ("hidden",)},
    (Rule("self_attention.linear_proj.bias", ("self_attn.o_proj.bias",)),),
    (Rule("self_attn.o_proj.bias", ("self_attn.o_proj.bias",)),),
    when="o_bias",
)
SINKS = Part(
    {"self_attn.sinks": ("heads",)},
    (Rule("self_attention.core_attention.softmax_offset", ("self_attn.sinks",), cut=flat),),
    (Rule("self_attn.sinks", ("self_attn.sinks",), cut=flat),),
    when="sinks",
)


# --- Qwen3-Next: gated attention in some layers, a gated delta net in the others ------------------
def _without_module(part: Part) -> tuple[Rule, ...]:
    """SGLang's rules where its layer is the attention: names without self_attn."""
    return tuple(replace(rule, local=rule.local.removeprefix("self_attn.")) for rule in part.sglang)


GQA_GATED = replace(
    GQA,
    megatron=(
        Rule("self_attention.linear_qkv.weight", _qkv("weight"), qkv_grouped_gate, flat),
        *GQA.megatron[1:],
    ),
    sglang=_without_module(GQA),
)
QK_NORM_GATED = replace(QK_NORM, sglang=_without_module(QK_NORM))
_DELTA, _STEP, _CONV, _DECAY, _DT, _DELTA_NORM, _DELTA_OUT = (
    f"linear_attn.{name}"
    for name in (
        "in_proj_qkvz.weight",
        "in_proj_ba.weight",
        "conv1d.weight",
        "A_log",
        "dt_bias",
        "norm.weight",
        "out_proj.weight",
    )
)
DELTA_NET = Part(
    {
        _DELTA: ("delta_rows", "hidden"),
        _STEP: ("step_rows", "hidden"),
        _CONV: ("conv_rows", "one", "conv_width"),
        _DECAY: ("linear_value_heads",),
        _DT: ("linear_value_heads",),
        _DELTA_NORM: ("linear_value_dim",),
        _DELTA_OUT: ("hidden", "delta_values"),
    },
    (
        Rule("self_attention.in_proj.weight", (_DELTA, _STEP), delta_heads, head_groups),
        Rule("self_attention.conv1d.weight", (_CONV,), delta_conv, each),
        Rule("self_attention.A_log", (_DECAY,), cut=flat),
        Rule("self_attention.dt_bias", (_DT,), cut=flat),
        Rule("self_attention.out_norm.weight", (_DELTA_NORM,)),
        Rule("self_attention.out_proj.weight", (_DELTA_OUT,), cut=columns),
    ),
    (
        Rule(_DELTA, (_DELTA,), cut=flat),
        Rule(_STEP, (_STEP,), cut=flat),
        Rule(_CONV, (_CONV,), delta_conv, each),
        Rule(_DECAY, (_DECAY,), cut=flat, dtype="float32"),
        Rule(_DT, (_DT,), cut=flat),
        Rule(_DELTA_NORM, (_DELTA_NORM,)),
        Rule(_DELTA_OUT, (_DELTA_OUT,), cut=columns),
    ),
)


# --- latent attention ----------------------------------------------------------------------------
# The down projections are whole on every rank, as in Transformer Engine; the column-parallel ones
# of the stock local spec have a wrong gradient (trainer/model/family_modules.py) and are not used.
def _mla(name: str) -> str:
    return f"self_attn.{name}.weight"


_Q_A, _Q_B, _KV_A, _KV_B = map(_mla, ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"))
_Q_A_NORM, _KV_A_NORM = _mla("q_a_layernorm"), _mla("kv_a_layernorm")


def _down(megatron: str, hf: str) -> Rule:
    return Rule(f"self_attention.{megatron}.weight", (hf,))


def _up(megatron: str, hf: str) -> Rule:
    return Rule(f"self_attention.{megatron}.weight", (hf,), cut=flat)


def _latent_norm(megatron: str, hf: str, up: str) -> Rule:
    te = f"self_attention.{up}.layer_norm_weight"
    return Rule(f"self_attention.{megatron}.weight", (hf,), te=te)


MLA = Part(
    {
        _KV_A: ("kv_a_rows", "hidden"),
        _KV_A_NORM: ("kv_lora",),
        _KV_B: ("kv_b_rows", "kv_lora"),
        _O: ("hidden", "o_cols"),
    },
    (
        _down("linear_kv_down_proj", _KV_A),
        _latent_norm("kv_layernorm", _KV_A_NORM, "linear_kv_up_proj"),
        _up("linear_kv_up_proj", _KV_B),
        Rule("self_attention.linear_proj.weight", (_O,), cut=columns),
    ),
    (
        Rule(_KV_A_NORM, (_KV_A_NORM,)),
        Rule(_KV_B, (_KV_B,), cut=flat),
        Rule(_O, (_O,), cut=columns),
    ),
)
MLA_Q_LORA = Part(
    {_Q_A: ("q_lora", "hidden"), _Q_A_NORM: ("q_lora",), _Q_B: ("q_rows", "q_lora")},
    (
        _down("linear_q_down_proj", _Q_A),
        _latent_norm("q_layernorm", _Q_A_NORM, "linear_q_up_proj"),
        _up("linear_q_up_proj", _Q_B),
    ),
    (
        Rule("self_attn.fused_qkv_a_proj_with_mqa.weight", (_Q_A, _KV_A), concat),
        Rule(_Q_A_NORM, (_Q_A_NORM,)),
        Rule(_Q_B, (_Q_B,), cut=flat),
    ),
    when="q_lora",
)
MLA_DIRECT_Q = Part(
    {_Q: ("q_rows", "hidden")},
    (_up("linear_q_proj", _Q),),
    (Rule(_Q, (_Q,), cut=flat), Rule(_KV_A, (_KV_A,))),
    when="direct_q",
)


# --- sparse attention over latent keys ------------------------------------------------------------
def own_norms(part: Part) -> Part:
    """Norms stay modules of their own: the indexer reads the normalised query."""
    return replace(part, megatron=tuple(replace(rule, te="") for rule in part.megatron))


def _indexer(name: str) -> str:
    return f"self_attn.indexer.{name}"


_INDEX_WEIGHTS = {
    "wq_b.weight": ("index_rows", "q_lora"),
    "wk.weight": ("index_dim", "hidden"),
    "k_norm.weight": ("index_dim",),
    "k_norm.bias": ("index_dim",),
    "weights_proj.weight": ("index_heads", "hidden"),
}
# SGLang's dtype, whatever it serves
_INDEX_DTYPES = {"k_norm": "float32", "weights_proj": "bfloat16"}


def _index_rules() -> tuple[tuple[Rule, ...], tuple[Rule, ...]]:
    megatron, sglang = [], []
    for name in _INDEX_WEIGHTS:
        module, hf = name.partition(".")[0], _indexer(name)
        live = name if module == "k_norm" else f"linear_{name}"
        megatron.append(Rule(f"self_attention.core_attention.indexer.{live}", (hf,)))
        sglang.append(Rule(hf, (hf,), dtype=_INDEX_DTYPES.get(module, "")))
    return tuple(megatron), tuple(sglang)


INDEXER = Part(
    {_indexer(name): sizes for name, sizes in _INDEX_WEIGHTS.items()},
    *_index_rules(),
    when="index_topk",
)
