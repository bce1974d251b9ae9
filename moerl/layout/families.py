"""Tables per model family: Hugging Face shapes, Megatron-core rules, SGLang rules.

A `Part` is a group of tensors that come together (attention, experts, ...) with both frameworks'
rules; a `Family` says which parts its layers have.  Sizes in the shape tables are attributes of
ModelSpec.  Names under a layer are relative to it.
Read at megatron-core 0.19.2 (local and Transformer Engine layer specs), sglang 0.5.23 (srt/models),
transformers 5.19.0.
Round trips do not find a wrong table (a k/v swap passes them all): each family needs an outside
oracle, see docs/layout.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moerl.layout.rules import (
    Part,
    Rule,
    columns,
    concat,
    concat_heads,
    copy,
    deinterleave,
    delta_conv,
    delta_heads,
    each,
    each_rotary,
    first,
    flat,
    head_groups,
    qkv_grouped,
    qkv_grouped_gate,
    whole,
)


@dataclass(frozen=True, slots=True)
class Family:
    """Parts of the layers: `every` layer starts with the first, then `moe` or `dense` follows."""

    every: tuple[Part, ...]
    moe: tuple[Part, ...] = ()
    dense: tuple[Part, ...] = ()
    linear: tuple[Part, ...] = ()
    """In place of `every` in the layers of `linear_layers`."""
    expert_files: str = "rows"
    """Stacked experts in a file: rows [E, rows, cols] as in the tables, or transposed (gpt-oss)."""


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


# --- norms ---------------------------------------------------------------------------------------
def _norm(name: str, megatron: str, te: str = "") -> Part:
    return Part({name: ("hidden",)}, (Rule(megatron, (name,), te=te),), (Rule(name, (name,)),))


_NORM_1, _NORM_2 = "input_layernorm.weight", "post_attention_layernorm.weight"
# Transformer Engine fuses a norm into the projection behind it: QKV, and the dense fc1.
NORM_GQA = _norm(_NORM_1, _NORM_1, te="self_attention.linear_qkv.layer_norm_weight")
NORM_MLA = _norm(_NORM_1, _NORM_1)
NORM_MOE = _norm(_NORM_2, "pre_mlp_layernorm.weight")
NORM_DENSE = _norm(_NORM_2, "pre_mlp_layernorm.weight", te="mlp.linear_fc1.layer_norm_weight")


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
NORM_DELTA = _norm(_NORM_1, _NORM_1, te="self_attention.in_proj.layer_norm_weight")
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
def _own_norms(part: Part) -> Part:
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


# --- feed-forward --------------------------------------------------------------------------------
def _glu(hf: str, megatron: str, sglang: str, width: str, when: str = "") -> Part:
    """gate, up, down of a dense MLP or of the shared experts."""
    gate_up = tuple(f"{hf}.{x}_proj.weight" for x in ("gate", "up"))
    down = f"{hf}.down_proj.weight"
    return Part(
        {gate_up[0]: (width, "hidden"), gate_up[1]: (width, "hidden"), down: ("hidden", width)},
        (
            Rule(f"{megatron}.linear_fc1.weight", gate_up, concat, each),
            Rule(f"{megatron}.linear_fc2.weight", (down,), cut=columns),
        ),
        (
            Rule(f"{sglang}.gate_up_proj.weight", gate_up, concat, each),
            Rule(f"{sglang}.down_proj.weight", (down,), cut=columns),
        ),
        when=when,
    )


DENSE = _glu("mlp", "mlp", "mlp", "ffn")
SHARED = _glu(
    "mlp.shared_experts",
    "mlp.shared_experts",
    "mlp.shared_experts",
    "shared_ffn",
    when="shared_ffn",
)
SHARED_GATED = _glu(
    "mlp.shared_expert", "mlp.shared_experts", "mlp.shared_expert", "shared_ffn", when="shared_ffn"
)
_SHARED_GATE = "mlp.shared_expert_gate.weight"
SHARED_GATE = Part(
    {_SHARED_GATE: ("one", "hidden")},
    (Rule("mlp.shared_experts.gate_weight", (_SHARED_GATE,)),),
    (Rule(_SHARED_GATE, (_SHARED_GATE,)),),
    when="shared_gate",
)


def router(hf: str = "mlp.gate.weight", sglang_dtype: str = "") -> Part:
    return Part(
        {hf: ("experts", "hidden")},
        (Rule("mlp.router.weight", (hf,)),),
        (Rule(hf, (hf,), dtype=sglang_dtype),),
    )


ROUTER, ROUTER_FP32 = router(), router(sglang_dtype="float32")


def expert_bias(hf: str) -> Part:
    return Part(
        {hf: ("experts",)},
        (Rule("mlp.router.expert_bias", (hf,), dtype="float32"),),
        (Rule(hf, (hf,), dtype="float32"),),
        when="expert_bias",
    )


EXPERT_BIAS = expert_bias("mlp.gate.e_score_correction_bias")
# ERNIE keeps it as one row, in a module of its own, and SGLang in the dtype that it serves.
_BIAS_ROW = "mlp.moe_statics.e_score_correction_bias"
EXPERT_BIAS_ROW = Part(
    {_BIAS_ROW: ("one", "experts")},
    (Rule("mlp.router.expert_bias", (_BIAS_ROW,), dtype="float32"),),
    (Rule("mlp.gate.e_score_correction_bias", (_BIAS_ROW,)),),
    when="expert_bias",
)
_FC1, _FC2 = (f"mlp.experts.local_experts.{{e}}.linear_fc{i}" for i in (1, 2))
_TE_FC1, _TE_FC2 = (f"mlp.experts.linear_fc{i}" for i in (1, 2))


def experts(where: str, gate: str, up: str, down: str, stacked: str = "mlp.experts") -> Part:
    """stacked: the tensors of a file that holds all experts of a layer in one."""
    pair = tuple(f"{where}.{{e}}.{x}.weight" for x in (gate, up))
    down = f"{where}.{{e}}.{down}.weight"
    return Part(
        {
            pair[0]: ("moe_ffn", "hidden"),
            pair[1]: ("moe_ffn", "hidden"),
            down: ("hidden", "moe_ffn"),
        },
        (
            Rule(f"{_FC1}.weight", pair, concat, each, te=f"{_TE_FC1}.weight{{e}}"),
            Rule(f"{_FC2}.weight", (down,), cut=columns, te=f"{_TE_FC2}.weight{{e}}"),
        ),
        (
            Rule(f"{where}.w13_weight", pair, concat, each),
            Rule(f"{where}.w2_weight", (down,), cut=columns),
        ),
        stacked={f"{stacked}.gate_up_proj": pair, f"{stacked}.down_proj": (down,)},
    )


EXPERTS = experts("mlp.experts", "gate_proj", "up_proj", "down_proj")

# --- gpt-oss: one fused tensor per expert, gate in its even rows and up in its odd ones -----------
_GPT_ROUTER, _GPT_ROUTER_BIAS = "mlp.router.weight", "mlp.router.bias"
GPT_OSS_ROUTER = Part(
    {_GPT_ROUTER: ("experts", "hidden"), _GPT_ROUTER_BIAS: ("experts",)},
    (Rule(_GPT_ROUTER, (_GPT_ROUTER,)), Rule(_GPT_ROUTER_BIAS, (_GPT_ROUTER_BIAS,))),
    (Rule(_GPT_ROUTER, (_GPT_ROUTER,)), Rule(_GPT_ROUTER_BIAS, (_GPT_ROUTER_BIAS,))),
)
_UP, _UP_BIAS, _DOWN, _DOWN_BIAS = (
    f"mlp.experts.{{e}}.{x}"
    for x in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
)
GPT_OSS_EXPERTS = Part(
    {
        _UP: ("fused_ffn", "hidden"),
        _UP_BIAS: ("fused_ffn",),
        _DOWN: ("hidden", "moe_ffn"),
        _DOWN_BIAS: ("hidden",),
    },
    (
        Rule(f"{_FC1}.weight", (_UP,), deinterleave, each, te=f"{_TE_FC1}.weight{{e}}"),
        Rule(f"{_FC1}.bias", (_UP_BIAS,), deinterleave, each, te=f"{_TE_FC1}.bias{{e}}"),
        Rule(f"{_FC2}.weight", (_DOWN,), cut=columns, te=f"{_TE_FC2}.weight{{e}}"),
        Rule(f"{_FC2}.bias", (_DOWN_BIAS,), te=f"{_TE_FC2}.bias{{e}}"),
    ),
    (
        Rule("mlp.experts.w13_weight", (_UP,), cut=flat),
        Rule("mlp.experts.w13_weight_bias", (_UP_BIAS,), cut=flat, dtype="float32"),
        Rule("mlp.experts.w2_weight", (_DOWN,), cut=columns),
        Rule("mlp.experts.w2_weight_bias", (_DOWN_BIAS,), cut=first, dtype="float32"),
    ),
    stacked={
        f"mlp.experts.{name.rpartition('.')[2]}": (name,)
        for name in (_UP, _UP_BIAS, _DOWN, _DOWN_BIAS)
    },
)

# --- Llama-4: its stacks hold [E, cols, rows], gate before up ------------------------------------
_L4 = "feed_forward"
LLAMA4_DENSE = _glu(_L4, "mlp", _L4, "ffn")
LLAMA4_SHARED = _glu(
    f"{_L4}.shared_expert", "mlp.shared_experts", f"{_L4}.shared_expert", "shared_ffn"
)
LLAMA4_EXPERTS = experts(
    f"{_L4}.experts", "gate_proj", "up_proj", "down_proj", stacked=f"{_L4}.experts"
)

# --- multi-token prediction: an ordinary layer behind a projection of (embedding, hidden) ---------
MTP_PREFIX = "mtp.layers.{i}."
MTP_BODY = "transformer_layer."
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

# --- families ------------------------------------------------------------------------------------
_QWEN = (NORM_GQA, GQA, QKV_BIAS, QK_NORM)
_MOE, _DENSE = (NORM_MOE, ROUTER, EXPERTS), (NORM_DENSE, DENSE)
_DEEPSEEK = Family(
    every=(NORM_MLA, MLA, MLA_Q_LORA, MLA_DIRECT_Q),
    moe=(*_MOE, EXPERT_BIAS, SHARED),
    dense=_DENSE,
)
FAMILY_TABLES: dict[str, Family] = {
    "qwen3_moe": Family(_QWEN, _MOE, _DENSE),
    "qwen2_moe": Family(_QWEN, (*_MOE, SHARED_GATED, SHARED_GATE), _DENSE),
    "qwen3_next": Family(
        (NORM_GQA, GQA_GATED, QK_NORM_GATED),
        (*_MOE, SHARED_GATED, SHARED_GATE),
        linear=(NORM_DELTA, DELTA_NET),
    ),
    "mixtral": Family(
        (NORM_GQA, GQA),
        (
            NORM_MOE,
            router("block_sparse_moe.gate.weight"),
            experts("block_sparse_moe.experts", "w1", "w3", "w2"),
        ),
    ),
    "olmoe": Family((NORM_GQA, GQA, QK_NORM_ALL_HEADS), _MOE),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": replace(
        _DEEPSEEK,
        every=(NORM_MLA, _own_norms(MLA), _own_norms(MLA_Q_LORA), INDEXER),
    ),
    "glm4_moe": Family(_QWEN, (NORM_MOE, ROUTER_FP32, EXPERTS, EXPERT_BIAS, SHARED), _DENSE),
    "gpt_oss": Family(
        (NORM_GQA, GQA, QKV_BIAS, O_BIAS, SINKS),
        (NORM_MOE, GPT_OSS_ROUTER, GPT_OSS_EXPERTS),
        expert_files="transposed",
    ),
    "minimax_m2": Family(
        (NORM_GQA, GQA, QK_NORM_CUT),
        (
            NORM_MOE,
            router("block_sparse_moe.gate.weight", sglang_dtype="float32"),
            experts("block_sparse_moe.experts", "w1", "w3", "w2"),
            expert_bias("block_sparse_moe.e_score_correction_bias"),
        ),
    ),
    "ernie4_5_moe": Family((NORM_GQA, GQA), (*_MOE, EXPERT_BIAS_ROW, SHARED), _DENSE),
    "llama4": Family(
        (NORM_GQA, GQA_REORDERED),
        (NORM_MOE, router("feed_forward.router.weight"), LLAMA4_EXPERTS, LLAMA4_SHARED),
        (NORM_DENSE, LLAMA4_DENSE),
        expert_files="transposed",
    ),
    "qwen3": Family(_QWEN, dense=_DENSE),
    "llama": Family((NORM_GQA, GQA), dense=_DENSE),
}


def te_rule(rule: Rule) -> Rule:
    """The same tensor in a layer built from Transformer Engine modules."""
    return replace(rule, local=rule.te or rule.local)
