"""Parts of a feed-forward block: dense MLP, shared experts, router, experts."""

from __future__ import annotations

from moerl.layout.rules import Part, Rule, columns, concat, deinterleave, each, first, flat


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
    """Tensors of the experts.  stacked: of a file that holds all experts of a layer in one."""
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

# --- gpt-oss: one fused tensor per expert, gate in its even rows, up in its odd rows -----------
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
