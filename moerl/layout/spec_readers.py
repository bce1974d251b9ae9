"""Reads the ModelSpec of each family from its Hugging Face config; `families` has the table.

A variant that the tables do not cover is refused here, in one sentence, rather than loaded with
tensors missing.  Defaults for absent keys follow transformers 5.19.0 (released config.json files
omit keys that equal the default of their time).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from moerl.core.errors import LayoutError
from moerl.layout.spec import ModelSpec, Yarn

Config = Mapping[str, Any]


def read_spec(config: Config, family: str, reader: SpecReader) -> ModelSpec:
    """The ModelSpec of a config.json dict.

    Raises LayoutError for a missing or non-positive size, or an unsupported variant of the family.
    """
    head = _value_head(config)
    config = config["text_config"] if reader.nested else config
    _refuse(config, family, {**_COMMON, **reader.allowed})
    _refuse_quantized(config, family)
    spec = ModelSpec(**(_common(config, family, reader.rope) | reader.read(config) | head))
    _check(spec)
    return spec


def _value_head(config: Config) -> dict[str, Any]:
    """Fields of a value head, which the config's class of transformers has."""
    names = " ".join(map(str, config.get("architectures") or ()))
    per_token = names.endswith("ForTokenClassification")
    if not (per_token or names.endswith("ForSequenceClassification")):
        return {}
    return {"values": 1, "value_bias": per_token, "tied": False, "mtp_layers": 0}


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


class SpecReader(NamedTuple):
    """Reads the config.json of a family: `read` returns its own fields of ModelSpec.

    allowed: the supported values of switches that no rule covers, by key.
    nested: the fields of the language model are in `text_config`.
    """

    read: Callable[[Config], dict[str, Any]]
    allowed: Mapping[str, tuple[object, ...]] = MappingProxyType({})
    rope: tuple[str, ...] = ("default",)
    nested: bool = False


_COMMON: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "use_sliding_window": (None, False),
}
_YARN = ("default", "yarn")
QWEN3_MOE = SpecReader(_qwen3_moe)
QWEN2_MOE = SpecReader(_qwen2_moe)
QWEN3_NEXT = SpecReader(  # SGLang builds experts in every layer
    _qwen3_next, {"mlp_only_layers": (None, []), "decoder_sparse_step": (None, 1)}
)
MIXTRAL = SpecReader(_mixtral, {"sliding_window": (None,)})
OLMOE = SpecReader(_olmoe, {"clip_qkv": (None,)})
DEEPSEEK_V2 = SpecReader(
    _deepseek_v2,
    {"topk_method": ("greedy", "group_limited_greedy"), "norm_topk_prob": (None, False)},
    _YARN,
)
DEEPSEEK_V3 = SpecReader(_deepseek_v3, {"rope_interleave": (None, True)}, _YARN)
DEEPSEEK_V32 = SpecReader(
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
)
GLM4_MOE = SpecReader(_glm4_moe, {"attention_bias": (None, False, True)})
GPT_OSS = SpecReader(
    _gpt_oss,
    {"attention_bias": (True,), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
    _YARN,
)
MINIMAX_M2 = SpecReader(
    _minimax_m2,
    {
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",),
        "use_routing_bias": (True,),
        "scoring_func": ("sigmoid",),
    },
)
ERNIE4_5_MOE = SpecReader(
    _ernie4_5_moe, {"use_bias": (None, False), "moe_layer_interval": (None, 1)}
)
LLAMA4 = SpecReader(_llama4, {"num_experts_per_tok": (1,)}, nested=True)
QWEN3 = SpecReader(_qwen3)
LLAMA = SpecReader(_dense)


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
    if spec.values and spec.root:
        raise LayoutError(f"a value head is not supported inside {spec.root}")
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
