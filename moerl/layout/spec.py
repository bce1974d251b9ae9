"""ModelSpec: the sizes and switches of one model, read from a Hugging Face config.

It holds only what determines shapes, names or the forward computation.  A variant that the tables
do not cover is refused here, in one sentence, rather than loaded with tensors missing.
Defaults for absent keys are those of transformers 5.19.0 (released config.json files omit keys that
equal the default of their time).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from moerl.errors import LayoutError

Config = Mapping[str, Any]


class Yarn(NamedTuple):
    """Context extension of the rotary embedding; names of the config's rope_parameters."""

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    truncate: bool  # correction range rounded to integers


@dataclass(frozen=True, slots=True)
class ModelSpec:
    family: str  # Hugging Face model_type
    vocab_size: int  # without padding
    hidden: int
    layers: int  # without multi-token-prediction layers
    heads: int  # query heads
    kv_heads: int
    head_dim: int
    experts: int  # per MoE layer; 0 = dense model
    experts_per_token: int
    moe_ffn: int  # inner width of one expert
    moe_layers: tuple[int, ...]  # global 0-based numbers of the layers that route
    tied: bool  # output head and embedding are one tensor
    norm_topk_prob: bool  # gate weights of the chosen experts are divided by their sum
    rms_eps: float
    rope_theta: float
    max_positions: int
    dtype: str  # of the checkpoint: float32, bfloat16, float16

    root: str = ""  # what every tensor's name begins with: a language model inside another one

    # --- layer kinds and attention ---
    ffn: int = 0  # inner width of a dense layer; 0 = there is none
    shared_ffn: int = 0  # inner width of all shared experts together; 0 = none
    shared_gate: bool = False  # their output is scaled by a sigmoid of the hidden state
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False  # one weight of head_dim for all heads
    qk_norm_all_heads: bool = False  # a weight per element, normalised over all heads at once
    qk_l2_norm: bool = False  # without a weight, in layers that rotate
    nope_layers: tuple[int, ...] = ()  # layers without a rotary embedding
    longest: int = 0  # tokens of a sequence up to which attention is plain causal; 0 = any
    rotary_percent: float = 1.0  # part of head_dim that rotates
    rotary_pairs: bool = False  # neighbours rotate together, instead of the two halves of a head
    yarn: Yarn | None = None
    sinks: bool = False  # a learned logit per head that takes attention and gives no value
    sliding_window: int = 0  # positions seen by the layers of sliding_layers
    sliding_layers: tuple[int, ...] = ()

    output_gate: bool = False  # attention is scaled by a sigmoid; q_proj holds query, gate per head
    zero_centred_norm: bool = False  # norms scale by 1 + weight

    # --- gated delta net, in place of attention in the layers of linear_layers ---
    linear_layers: tuple[int, ...] = ()
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_key_dim: int = 0  # per head
    linear_value_dim: int = 0
    conv_width: int = 0

    # --- multi-head latent attention; kv_lora 0 = ordinary attention ---
    q_lora: int = 0  # 0 = the query is projected directly
    kv_lora: int = 0
    qk_nope: int = 0  # per head, without position
    qk_rope: int = 0  # per head, with position; the key's is shared by all heads
    v_head: int = 0

    # --- sparse attention: an indexer in each layer chooses positions; index_topk 0 = dense ---
    index_topk: int = 0  # positions that a token attends to
    index_heads: int = 0
    index_dim: int = 0  # per head; its one key has the same size

    # --- router ---
    score: str = "softmax"  # or sigmoid
    expert_bias: bool = False  # fp32, added to the scores for the choice only
    groups: int = 1  # experts are chosen from the best group_topk of these
    group_topk: int = 1
    group_score: str = ""  # how a group is rated: max, or sum of its top2
    topk_scaling: float = 1.0  # gate weights are multiplied by it
    weigh_input: bool = False  # gate weights scale what an expert reads, not what it returns

    mtp_layers: int = 0  # multi-token-prediction layers, stored as layers `layers`, ...

    @property
    def q_rows(self) -> int:
        per_head = self.qk_nope + self.qk_rope if self.kv_lora else self.head_dim
        return self.heads * per_head * (2 if self.output_gate else 1)

    @property
    def kv_rows(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def o_cols(self) -> int:
        return self.heads * (self.v_head if self.kv_lora else self.head_dim)

    @property
    def kv_a_rows(self) -> int:
        return self.kv_lora + self.qk_rope

    @property
    def kv_b_rows(self) -> int:
        return self.heads * (self.qk_nope + self.v_head)

    @property
    def delta_keys(self) -> int:
        return self.linear_key_heads * self.linear_key_dim

    @property
    def delta_values(self) -> int:
        return self.linear_value_heads * self.linear_value_dim

    @property
    def delta_rows(self) -> int:
        """Queries, keys, values and gates of a gated delta net."""
        return 2 * self.delta_keys + 2 * self.delta_values

    @property
    def conv_rows(self) -> int:
        return 2 * self.delta_keys + self.delta_values

    @property
    def step_rows(self) -> int:
        """Step size and decay of each value head."""
        return 2 * self.linear_value_heads

    @property
    def fused_ffn(self) -> int:
        """Rows of an expert's gate and up in one tensor."""
        return 2 * self.moe_ffn

    @property
    def wide(self) -> int:
        """Columns of eh_proj: embedding and hidden state side by side."""
        return 2 * self.hidden

    def layer_prefix(self, number: int) -> str:
        """What the names of a layer's tensors begin with, in files and in an engine."""
        return f"{self.root}model.layers.{number}."

    @property
    def one(self) -> int:
        return 1

    @property
    def index_rows(self) -> int:
        return self.index_heads * self.index_dim

    @property
    def index_layers(self) -> tuple[int, ...]:
        """Global 0-based numbers of the layers that choose positions."""
        return tuple(range(self.layers)) if self.index_topk else ()

    @property
    def direct_q(self) -> bool:
        """Latent attention whose query is projected directly."""
        return bool(self.kv_lora) and not self.q_lora

    @property
    def pre_softmax(self) -> bool:
        """Softmax over all experts, then the choice; else over the chosen ones only.

        Dividing the chosen probabilities by their sum is the softmax over the chosen logits.
        """
        return self.score == "softmax" and not self.norm_topk_prob


LLAMA4_TEXT = (
    "SGLang's class for it leaves the experts unfilled; use the multimodal form "
    "(model_type llama4, this config as text_config, tensors under language_model.)"
)


def model_spec(config: Config) -> ModelSpec:
    """Read a config.json dict.

    Raises LayoutError for an unknown family, a missing or non-positive size, or an unsupported
    variant of a known family.
    """
    family = config.get("model_type")
    if family == "llama4_text":
        raise LayoutError(f"model_type = {family!r} is not supported: {LLAMA4_TEXT}")
    if family not in _READERS:
        raise LayoutError(
            f"model_type = {family!r} has no layout; known families: {', '.join(FAMILIES)}"
        )
    reader = _READERS[family]
    config = config["text_config"] if reader.nested else config
    _refuse(config, family, _COMMON | reader.allowed)
    _refuse_quantized(config, family)
    spec = ModelSpec(**(_common(config, family, reader.rope) | reader.read(config)))
    _check(spec)
    return spec


def padded_vocab(spec: ModelSpec, tp: int, divisible_by: int = 128) -> int:
    """Vocabulary rows Megatron allocates: the next multiple of divisible_by * tp.

    Source: megatron/core/tokenizers/utils/build_tokenizer.py (0.19.2).
    """
    multiple = divisible_by * tp
    return -(-spec.vocab_size // multiple) * multiple


# --- fields of every family ----------------------------------------------------------------------
def _common(config: Config, family: str, rope_kinds: tuple[str, ...]) -> dict[str, Any]:
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    theta, yarn = _rope(config, family, rope_kinds)
    return {
        "family": family,
        "vocab_size": _size(config, "vocab_size"),
        "hidden": hidden,
        "layers": _size(config, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": _size(config, "num_key_value_heads", heads),
        "head_dim": _size(config, "head_dim", hidden // heads),
        "experts": 0,
        "experts_per_token": 0,
        "moe_ffn": 0,
        "moe_layers": (),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "norm_topk_prob": bool(config.get("norm_topk_prob", False)),
        "rms_eps": float(config.get("rms_norm_eps", 1e-6)),
        "rope_theta": theta,
        "yarn": yarn,
        "max_positions": _size(config, "max_position_embeddings"),
        "dtype": str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    }


def _experts(config: Config, ffn: str = "moe_intermediate_size") -> dict[str, Any]:
    # transformers 5 writes num_local_experts, released checkpoints say num_experts or
    # n_routed_experts
    keys = ("num_experts", "n_routed_experts", "num_local_experts")
    return {
        "experts": _size(config, next((key for key in keys if key in config), keys[-1])),
        "experts_per_token": _size(config, "num_experts_per_tok"),
        "moe_ffn": _size(config, ffn),
    }


def _every_layer(config: Config) -> tuple[int, ...]:
    return tuple(range(_size(config, "num_hidden_layers")))


def _dense(config: Config) -> dict[str, Any]:
    return {"ffn": _size(config, "intermediate_size")}


# --- families ------------------------------------------------------------------------------------
def _qwen3(config: Config) -> dict[str, Any]:
    return _dense(config) | {"qk_norm": True}


def _qwen3_moe(config: Config) -> dict[str, Any]:
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    moe = tuple(
        layer for layer in _every_layer(config) if layer not in dense and (layer + 1) % step == 0
    )
    fields = _experts(config) | {"moe_layers": moe, "qk_norm": True}
    return fields if len(moe) == config["num_hidden_layers"] else fields | _dense(config)


def _qwen2_moe(config: Config) -> dict[str, Any]:
    return _qwen3_moe(config) | {
        "qk_norm": False,
        "qkv_bias": bool(config.get("qkv_bias", True)),
        "shared_ffn": _size(config, "shared_expert_intermediate_size"),
        "shared_gate": True,
    }


def _qwen3_next(config: Config) -> dict[str, Any]:
    rope: Config = config.get("rope_parameters") or {}
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.25))
    layers, step = _every_layer(config), _size(config, "full_attention_interval", 4)
    kinds = config.get("layer_types") or [
        "full_attention" if (layer + 1) % step == 0 else "linear_attention" for layer in layers
    ]
    return _qwen3_moe(config) | {
        "norm_topk_prob": bool(config.get("norm_topk_prob", True)),
        "shared_ffn": _size(config, "shared_expert_intermediate_size"),
        "shared_gate": True,
        "rotary_percent": float(part),
        "output_gate": True,
        "zero_centred_norm": True,
        "linear_layers": tuple(i for i in layers if kinds[i] == "linear_attention"),
        "linear_key_heads": _size(config, "linear_num_key_heads"),
        "linear_value_heads": _size(config, "linear_num_value_heads"),
        "linear_key_dim": _size(config, "linear_key_head_dim"),
        "linear_value_dim": _size(config, "linear_value_head_dim"),
        "conv_width": _size(config, "linear_conv_kernel_dim"),
    }


def _mixtral(config: Config) -> dict[str, Any]:
    return _experts(config, "intermediate_size") | {
        "moe_layers": _every_layer(config),
        "norm_topk_prob": True,
        "rms_eps": float(config.get("rms_norm_eps", 1e-5)),
    }


def _olmoe(config: Config) -> dict[str, Any]:
    return _experts(config, "intermediate_size") | {
        "moe_layers": _every_layer(config),
        "qk_norm_all_heads": True,
        "rms_eps": float(config.get("rms_norm_eps", 1e-5)),
    }


def _grouped_moe(config: Config) -> dict[str, Any]:
    """Routed and shared experts after some dense layers: DeepSeek and GLM."""
    first_dense = int(config.get("first_k_dense_replace") or 0)
    fields = _experts(config) | {
        "moe_layers": _every_layer(config)[first_dense:],
        "shared_ffn": _size(config, "moe_intermediate_size") * _size(config, "n_shared_experts", 0),
        "topk_scaling": float(config.get("routed_scaling_factor", 1.0)),
        "groups": _size(config, "n_group", 1),
        "group_topk": _size(config, "topk_group", 1),
    }
    return fields | (_dense(config) if first_dense else {})


def _sigmoid(config: Config) -> dict[str, Any]:
    """The router of DeepSeek-V3 and GLM-4.5, and their extra prediction layers."""
    mtp = config.get("num_nextn_predict_layers", config.get("num_mtp_layers")) or 0
    return {
        "score": "sigmoid",
        "expert_bias": True,
        "group_score": "top2",
        "norm_topk_prob": bool(config.get("norm_topk_prob", True)),
        "mtp_layers": int(mtp),
    }


def _latent(config: Config) -> dict[str, Any]:
    rope = _size(config, "qk_rope_head_dim")
    return {
        "q_lora": _size(config, "q_lora_rank") if config.get("q_lora_rank") else 0,
        "kv_lora": _size(config, "kv_lora_rank"),
        "qk_nope": _size(config, "qk_nope_head_dim"),
        "qk_rope": rope,
        "v_head": _size(config, "v_head_dim"),
        "kv_heads": _size(config, "num_attention_heads"),
        "head_dim": rope,
    }


def _deepseek_v2(config: Config) -> dict[str, Any]:
    fields = _grouped_moe(config) | _latent(config) | {"group_score": "max"}
    greedy = config.get("topk_method", "greedy") == "greedy"
    return fields | ({"groups": 1, "group_topk": 1} if greedy else {})


def _deepseek_v3(config: Config) -> dict[str, Any]:
    return _grouped_moe(config) | _latent(config) | _sigmoid(config)


def _deepseek_v32(config: Config) -> dict[str, Any]:
    return _deepseek_v3(config) | {
        "index_topk": _size(config, "index_topk"),
        "index_heads": _size(config, "index_n_heads"),
        "index_dim": _size(config, "index_head_dim"),
    }


def _glm4_moe(config: Config) -> dict[str, Any]:
    rope: Config = config.get("rope_parameters") or {}
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.5))
    return (
        _grouped_moe(config)
        | _sigmoid(config)
        | {
            "qkv_bias": bool(config.get("attention_bias", False)),
            "qk_norm": bool(config.get("use_qk_norm", False)),
            "rotary_percent": float(part),
            "rms_eps": float(config.get("rms_norm_eps", 1e-5)),
        }
    )


def _minimax_m2(config: Config) -> dict[str, Any]:
    rope: Config = config.get("rope_parameters") or {}
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if part is None:  # released files say how many positions of a head rotate
        head = _size(config, "head_dim")
        part = _size(config, "rotary_dim", head) / head
    return _experts(config, "intermediate_size") | {
        "moe_layers": _every_layer(config),
        "qk_norm_all_heads": True,
        "rotary_percent": float(part),
        "score": "sigmoid",
        "expert_bias": True,
        "norm_topk_prob": True,
    }


def _ernie4_5_moe(config: Config) -> dict[str, Any]:
    last = int(config.get("moe_layer_end_index", -1))
    layers = range(_size(config, "num_hidden_layers"))
    moe = layers[int(config.get("moe_layer_start_index", 1)) : last + 1 if last >= 0 else None]
    width = _size(config, "moe_intermediate_size")
    fields = {
        "experts": _size(config, "moe_num_experts"),
        "experts_per_token": _size(config, "moe_k"),
        "moe_ffn": width,
        "moe_layers": tuple(moe),
        "shared_ffn": width * int(config.get("moe_num_shared_experts") or 0),
        "rotary_pairs": True,
        "expert_bias": True,
        "norm_topk_prob": True,
        "rms_eps": float(config.get("rms_norm_eps", 1e-5)),
        "tied": bool(config.get("tie_word_embeddings", True)),
    }
    return fields if len(moe) == len(layers) else fields | _dense(config)


def _llama4(config: Config) -> dict[str, Any]:
    layers = _every_layer(config)
    step = _size(config, "interleave_moe_layer_step", 1)
    moe = tuple(config.get("moe_layers") or layers[step - 1 :: step])
    nope = tuple(i for i in layers if (i + 1) % _NOPE_STEP == 0)
    rotates = config.get("no_rope_layers") or [int(i not in nope) for i in layers]
    if nope != tuple(i for i in layers if not rotates[i]):
        raise LayoutError(
            f"no_rope_layers = {rotates!r} is not supported for llama4: SGLang leaves out the "
            f"rotary embedding in every {_NOPE_STEP}th layer"
        )
    longest = _size(config, "attention_chunk_size", 8192)
    if config.get("attn_temperature_tuning", True):  # scales later queries of layers without rope
        longest = min(longest, _size(config, "floor_scale", 8192) - 1)
    fields = _experts(config, "intermediate_size") | {
        "root": "language_model.",
        "moe_layers": moe,
        "shared_ffn": _size(config, "intermediate_size"),
        "rotary_pairs": True,
        "qk_l2_norm": bool(config.get("use_qk_norm", True)),
        "nope_layers": nope,
        "longest": longest,
        "score": "sigmoid",
        "weigh_input": True,
        "rms_eps": float(config.get("rms_norm_eps", 1e-5)),
    }
    if len(moe) == len(layers):
        return fields
    return fields | {"ffn": _size(config, "intermediate_size_mlp")}


def _gpt_oss(config: Config) -> dict[str, Any]:
    layers = _every_layer(config)
    kinds = config.get("layer_types") or ["sliding_attention", "full_attention"] * len(layers)
    return _experts(config, "intermediate_size") | {
        "moe_layers": layers,
        "norm_topk_prob": True,
        "qkv_bias": True,
        "o_bias": True,
        "sinks": True,
        "sliding_window": _size(config, "sliding_window", 128),
        "sliding_layers": tuple(i for i in layers if kinds[i] == "sliding_attention"),
        "rms_eps": float(config.get("rms_norm_eps", 1e-5)),
    }


class _Reader(NamedTuple):
    read: Callable[[Config], dict[str, Any]]
    allowed: dict[str, tuple[object, ...]]  # switches that no rule covers: the allowed values
    rope: tuple[str, ...] = ("default",)
    nested: bool = False  # the language model's fields are those of text_config


_COMMON: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "use_sliding_window": (None, False),
}
_YARN = ("default", "yarn")
_READERS: dict[str, _Reader] = {
    "qwen3_moe": _Reader(_qwen3_moe, {}),
    "qwen2_moe": _Reader(_qwen2_moe, {}),
    "qwen3_next": _Reader(  # SGLang builds experts in every layer
        _qwen3_next, {"mlp_only_layers": (None, []), "decoder_sparse_step": (None, 1)}
    ),
    "mixtral": _Reader(_mixtral, {"sliding_window": (None,)}),
    "olmoe": _Reader(_olmoe, {"clip_qkv": (None,)}),
    "deepseek_v2": _Reader(
        _deepseek_v2,
        {"topk_method": ("greedy", "group_limited_greedy"), "norm_topk_prob": (None, False)},
        _YARN,
    ),
    "deepseek_v3": _Reader(_deepseek_v3, {"rope_interleave": (None, True)}, _YARN),
    "deepseek_v32": _Reader(
        _deepseek_v32,
        {
            "rope_interleave": (None, True),
            "indexer_rope_interleave": (None, False),
            "index_topk_freq": (None, 1),  # a layer that takes another one's choice
            "index_topk_pattern": (None,),
            "indexer_types": (None,),
            "index_k_norm_type": (None, "layer"),
            "index_kpool": (None, 1),
        },
        _YARN,
    ),
    "glm4_moe": _Reader(_glm4_moe, {"attention_bias": (None, False, True)}),
    "gpt_oss": _Reader(
        _gpt_oss,
        {"attention_bias": (True,), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
        _YARN,
    ),
    "minimax_m2": _Reader(
        _minimax_m2,
        {
            "use_qk_norm": (True,),
            "qk_norm_type": ("per_layer",),
            "use_routing_bias": (True,),
            "scoring_func": ("sigmoid",),
        },
    ),
    "ernie4_5_moe": _Reader(
        _ernie4_5_moe, {"use_bias": (None, False), "moe_layer_interval": (None, 1)}
    ),
    "llama4": _Reader(_llama4, {"num_experts_per_tok": (1,)}, nested=True),
    "qwen3": _Reader(_qwen3, {}),
    "llama": _Reader(_dense, {}),
}
FAMILIES = tuple(_READERS)


def add_reader(model_type: str, read: Callable[[Config], dict[str, Any]]) -> None:
    """Read config.json files of another family with `read`, in this process only."""
    if model_type in _READERS:
        raise LayoutError(f"model_type = {model_type!r} has a layout already")
    _READERS[model_type] = _Reader(read, {})


# --- checks --------------------------------------------------------------------------------------
def _size(config: Config, key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise LayoutError(f"{key} = {value!r} in the model's config must be a positive integer")
    return value


def _refuse_quantized(config: Config, family: str) -> None:
    """FP8 and MXFP4 files describe the same tensors: readers dequantise them or refuse the file."""
    stored = config.get("quantization_config")
    if stored and stored.get("quant_method") not in ("fp8", "mxfp4"):
        raise LayoutError(
            f"quantization_config = {stored!r} is not supported for {family}; "
            "its quant_method must be fp8 or mxfp4"
        )


def _refuse(config: Config, family: str, allowed: dict[str, tuple[object, ...]]) -> None:
    """Refuse switches that change tensors or arithmetic and that no rule covers."""
    for key, values in allowed.items():
        value = config.get(key, values[0])
        if value not in values:
            raise LayoutError(
                f"{key} = {value!r} is not supported for {family}; it must be {values[-1]!r}"
            )


def _check(spec: ModelSpec) -> None:
    if spec.linear_layers and spec.linear_value_heads % spec.linear_key_heads:
        raise LayoutError(
            f"linear_num_value_heads = {spec.linear_value_heads} is not a multiple of "
            f"linear_num_key_heads = {spec.linear_key_heads}"
        )
    if spec.heads % spec.kv_heads:
        raise LayoutError(
            f"num_attention_heads = {spec.heads} is not a multiple of "
            f"num_key_value_heads = {spec.kv_heads}"
        )
    if spec.experts_per_token > spec.experts:
        raise LayoutError(
            f"num_experts_per_tok = {spec.experts_per_token} exceeds num_experts = {spec.experts}"
        )
    if spec.experts % spec.groups or spec.group_topk > spec.groups:
        raise LayoutError(
            f"n_group = {spec.groups} must divide {spec.experts} experts and be at least "
            f"topk_group = {spec.group_topk}"
        )
    if spec.tied and spec.mtp_layers:
        raise LayoutError("tie_word_embeddings = True is not supported with prediction layers")


def _rope(config: Config, family: str, kinds: tuple[str, ...]) -> tuple[float, Yarn | None]:
    """`rope_parameters` since transformers 5, `rope_theta` and `rope_scaling` before."""
    rope: Config = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in kinds:
        raise LayoutError(
            f"rope_type = {kind!r} is not supported for {family}; it must be {kinds[-1]!r}"
        )
    theta = float(rope.get("rope_theta", config.get("rope_theta", _THETA.get(family, 10000.0))))
    if kind == "default":
        return theta, None
    positions = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    return theta, Yarn(
        factor=float(rope["factor"]),
        original_max_positions=int(positions),
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        mscale=float(rope.get("mscale") or 0),
        mscale_all_dim=float(rope.get("mscale_all_dim") or 0),
        truncate=bool(rope.get("truncate", True)),
    )


_THETA = {
    "mixtral": 1e6,
    "gpt_oss": 150000.0,
    "minimax_m2": 5e6,
    "ernie4_5_moe": 500000.0,
    "llama4": 500000.0,
}
_NOPE_STEP = 4  # of Llama-4's layers: SGLang's class reads no field for it
