"""The layout of a live engine's weights: its identity, and the refusal of unknown layouts.

The precision of the head belongs to the identity, too: a trainer with another precision is refused.

A transfer plan is right for one layout only, and shapes do not identify it: SGLang may interleave,
swap, transpose, pack or shuffle expert weights after loading and keep their shape.  So every server
argument and environment variable that moves weights is checked, and only values that were compared
with SGLang's own `load_weights` (tests/multi/test_layout_sglang.py) are accepted.  A server is
checked twice: its scheduler processes check the modules that they loaded
(`moerl.engine.plugin.loaded_weights`), and once it serves, its resolved arguments become its
`LiveWeightLayout` (sglang_server.py).

Rejected: a list of bad values (a new release adds values, and they would pass).
Read at sglang 0.5.23: srt/layers/quantization/unquant.py, srt/layers/moe/fused_moe_triton/layer.py,
srt/arg_groups/fields, srt/environ.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from moerl.core.errors import ConfigError, nearest
from moerl.layout import FAMILIES, SGLANG_SHARES_HEAD
from moerl.layout.families import LLAMA4_TEXT
from moerl.weight_sync.wire_formats import BLOCK, FORMATS, FP8_BLOCKS

KNOWN_RELEASES = ("0.5.23",)
DTYPES = ("float32", "bfloat16", "float16")
MODULES_CHECKED = "moerl: this rank keeps its weights in the canonical layout"

# Weight formats of unquantised experts that the tables describe: w13 as [gate; up], w2 as loaded.
_RUNNERS = ("triton",)
_REPACKING_RUNNERS = {
    "flashinfer_trtllm": "packs expert weights into blocks of another shape",
    "flashinfer_trtllm_routed": "packs expert weights into blocks of another shape",
    "experimental_sgl_trtllm": "packs expert weights into blocks of another shape",
    "flashinfer_cutlass": "keeps w13 as [up; gate]",
    "triton_kernel": "keeps expert weights transposed",
    "aiter": "shuffles expert weights in place",
}

# Server arguments that decide which weights a rank holds or in which form: the values under which
# the tables of moerl.layout hold, and why others are refused.
_ALLOWED: dict[str, tuple[tuple[Any, ...], str]] = {
    "modelopt_quant": ((None,), "its weights have other bytes and separate scales"),
    "rl_quant_profile": ((None,), "its weights have other bytes and separate scales"),
    "quantize_and_serve": ((False,), "the server then quantises by rules of its own"),
    "moe_a2a_backend": (("none", None), "its dispatcher prepares expert weights for itself"),
    "device": (("cpu", "cuda"), "its kernels lay weights out in their own way"),
    "model_impl": (("auto", "sglang"), "its modules have other names"),
    "json_model_override_args": (("{}",), "the model is then not that of its config.json"),
    "custom_weight_loader": (([], None), "what it loads is not known"),
    "dp_size": ((1,), "an engine is one replica"),
    "pp_size": ((1,), "the tables cover one pipeline stage"),
    "attn_cp_size": ((1,), "the tables cover no context parallelism"),
    "dcp_size": ((1,), "the tables cover no context parallelism"),
    "moe_dp_size": ((1,), "the tables cover no data-parallel experts"),
    "dwdp_size": ((1,), "experts are then read from other ranks"),
    "enable_dp_lm_head": ((False,), "the head is then cut as attention is"),
    "enable_cp_tp_group_sharing": ((False,), "attention is then cut over another group"),
    "enable_dense_mlp_attn_tp": ((False,), "dense layers are then cut as attention is"),
    "enable_shared_experts_attn_tp": ((False,), "shared experts are then cut as attention is"),
    "shared_experts_tp_size": ((None,), "shared experts are then cut over another group"),
    "moe_dense_tp_size": ((None,), "dense layers are then cut over another group"),
    "enforce_shared_experts_fusion": ((False,), "shared experts then join the routed ones"),
    "enable_eplb": ((False,), "experts then move between slots while it runs"),
    "ep_num_redundant_experts": ((0,), "experts then have several slots"),
    "init_expert_location": (("trivial",), "experts then have other slots than their numbers"),
    "elastic_ep_backend": ((None,), "experts then move between ranks while it runs"),
    "lora_paths": ((None, []), "their requests would not be those of the trainer's adapters"),
    "cpu_offload_gb": ((0,), "offloaded weights are not where a plan writes"),
    "offload_group_size": ((-1,), "offloaded weights are not where a plan writes"),
    "enable_paged_experts": ((False,), "experts are then not all in memory"),
    "kt_weight_path": ((None,), "some experts then live in another runtime"),
    "enable_nvidia_megakernel": ((False,), "it packs weights for one kernel"),
    "enable_amd_monokernel": ((False,), "it packs weights for one kernel"),
    "enable_w4a4_mxfp4_megamoe": ((False,), "it quantises expert weights"),
}

# Kernel flags: environment variables, read by SGLang in the server process, unless noted.
_SWITCHES = {
    "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED": "gate and up rows of w13 are then interleaved in place",
    "SGLANG_USE_AITER": "expert weights are then shuffled in place",
    "SGLANG_USE_CPU_ENGINE": "weights are then packed for AMX",
    "intel_amx": "weights are then packed for AMX",  # an attention backend
}

_ATTENTION = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")

_FUSES_SHARED_EXPERTS = ("deepseek_v2", "deepseek_v3", "glm4_moe")
_ALL_LAYERS_ROUTE = ("qwen3_moe", "qwen2_moe")

BLOCK_SHAPE = [BLOCK, BLOCK]
_KNOWN_FP8 = {"weight_block_size": (BLOCK_SHAPE,), "activation_scheme": ("dynamic",)}
_FP8_KERNELS = ("auto", "triton")
_FP32_HEAD = "enable_fp32_lm_head"


@dataclass(frozen=True, slots=True)
class LiveWeightLayout:
    """The settings that decide where each byte of an engine's weights is stored.

    Raises ConfigError for a value that the tables of moerl.layout were not compared under.
    """

    release: str  # of SGLang
    family: str  # Hugging Face model_type
    tp: int
    ep: int
    dp: int  # data-parallel attention: attention is cut over tp / dp ranks each
    moe_runner: str  # MoE runner backend, which decides the format of expert weights
    quantization: str
    dtype: str
    kernel_flags: tuple[str, ...]  # names of other flags that change the format of weights
    fp32_head: bool = False  # the head multiplies in fp32, whatever dtype its weight has

    def __post_init__(self) -> None:
        _check("sglang", self.release, KNOWN_RELEASES, "its layout was not read")
        _check("model_type", self.family, FAMILIES, "no layout is known")
        why = "no other form of quantised weights was compared"
        _check("engine.args.quantization", self.quantization, tuple(FORMATS), why)
        runner = "engine.args.moe_runner_backend"
        why = _REPACKING_RUNNERS.get(self.moe_runner, "was never compared with load_weights")
        _check(runner, self.moe_runner, _RUNNERS, f"its kernel {why}")
        _check("engine.dtype", self.dtype, DTYPES, "no other dtype was compared")
        for name in self.kernel_flags:
            raise ConfigError(name, True, f"{_SWITCHES.get(name, 'not known')}; it must be off")
        if self.family == "olmoe" and self.tp > 1:
            why = "SGLang normalises the queries and keys of olmoe over the heads of one rank; use"
            raise ConfigError("engine.tp", self.tp, f"{why} 1")

    def fingerprint(self) -> str:
        """16 hex digits, equal in every process for equal layouts."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def engine_layout(
    args: Mapping[str, Any],
    environment: Mapping[str, str],
    config: Mapping[str, Any],
    *,
    release: str,
) -> LiveWeightLayout:
    """Identity of a server's weight layout.

    args: resolved server arguments by ServerArgs field name, as /server_info and
    `ServerArgs.resolved_dict()` give them; environment: of the server process; config: the
    model's config.json; release: the version of SGLang.
    Raises ConfigError, naming the argument, for any value that is not known to keep SGLang's
    canonical layout.
    """
    check_model(config)
    family = str(config.get("model_type"))
    for name, (allowed, why) in _ALLOWED.items():
        _check(f"engine.args.{name}", _get(args, name), allowed, why)
    fused = family in _FUSES_SHARED_EXPERTS and not _get(args, "disable_shared_experts_fusion")
    if fused and args["device"] != "cpu":
        raise ConfigError(
            "engine.args.disable_shared_experts_fusion",
            False,
            f"shared experts of {family} would join the routed ones; set it to true",
        )
    runner = _get(args, "moe_runner_backend")
    return LiveWeightLayout(
        release=release,
        family=family,
        tp=_get(args, "tp_size"),
        ep=_get(args, "ep_size"),
        dp=_get(args, "attn_dp_size"),
        moe_runner="triton" if runner == "auto" else runner,  # as for unquantised experts
        quantization=_quantization(args, config),
        dtype=_dtype(_get(args, "dtype"), config),
        kernel_flags=_kernel_flags(args, environment),
        fp32_head=_get(args, _FP32_HEAD),
    )


def stated_layout(stated: Mapping[str, str], config: Mapping[str, Any]) -> LiveWeightLayout:
    """Identity of a server that is not running: `stated`, with the defaults of a plain server.

    stated: by name of the server argument, with tp, ep, dp (of attention) and sglang (the release)
    as short forms, or by name of the environment variable; values as text.  Dtype and quantisation
    default to the checkpoint's.  Raises ConfigError as `engine_layout` does, and for a name that is
    not part of a layout.
    """
    plain = _plain_server(config)
    environment: dict[str, str] = {}
    release = KNOWN_RELEASES[-1]
    known = ("tp", "ep", "dp", "sglang", *plain, *_SWITCHES)
    for short, value in stated.items():
        name = {"tp": "tp_size", "ep": "ep_size", "dp": "attn_dp_size"}.get(short, short)
        if short == "sglang":
            release = value
        elif name in _SWITCHES:
            environment[name] = value
        elif name not in plain:
            hint = nearest(short, known)
            raise ConfigError(
                f"engine.{short}",
                value,
                "use tp, ep, dp, count, or a server argument that decides how weights lie" + hint,
            )
        else:
            plain[name] = _value(name, value, like=plain[name])
    if plain["quantization"] is None:  # a copy of the checkpoint that is not quantised
        config = {name: value for name, value in config.items() if name != "quantization_config"}
    return engine_layout(plain, environment, config, release=release)


def layout_of_arguments(args: Mapping[str, Any], config: Mapping[str, Any]) -> LiveWeightLayout:
    """Identity of a server that would be started with these arguments, of the newest release.

    Raises ConfigError as `engine_layout` does.
    """
    plain = _plain_server(config) | {"device": "cuda", "disable_shared_experts_fusion": False}
    plain |= {name: value for name, value in args.items() if name in plain}
    if plain["quantization"] is None:
        config = {name: value for name, value in config.items() if name != "quantization_config"}
    return engine_layout(plain, {}, config, release=KNOWN_RELEASES[-1])


def _plain_server(config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that decide a layout, of a plain server of one rank."""
    plain: dict[str, Any] = {name: allowed[0] for name, (allowed, _) in _ALLOWED.items()}
    plain |= {"tp_size": 1, "ep_size": 1, "attn_dp_size": 1, "disable_shared_experts_fusion": True}
    plain |= {"moe_runner_backend": "triton", "quantization": _stored(config).get("quant_method")}
    plain |= {"fp8_gemm_runner_backend": "auto", _FP32_HEAD: False}
    plain |= {"dtype": str(config.get("dtype") or config.get("torch_dtype") or "auto")}
    return plain | dict.fromkeys(_ATTENTION)


def asks_fp32_head(args: Mapping[str, Any]) -> bool:
    """Whether server arguments turn the fp32 head on."""
    return bool(args.get(_FP32_HEAD, False))


def check_head(engine_fp32: bool, *, trainer_fp32: bool) -> None:
    """Refuse an engine's head with another precision than the trainer's.  Raises ConfigError.

    Each argument says whether that side multiplies in fp32.
    """
    if engine_fp32 != trainer_fp32:
        raise ConfigError(
            f"engine.args.{_FP32_HEAD}",
            engine_fp32,
            f"the trainer's model.fp32_lm_head is {trainer_fp32}; both sides must have it, "
            "or neither",
        )


def check_model(config: Mapping[str, Any]) -> None:
    """Refuse a model that SGLang would load without an error and serve with unfilled weights.

    config: the model's config.json.  Raises ConfigError naming its field.
    """
    family = config.get("model_type")
    if family == "llama4_text":
        raise ConfigError("model_type", family, LLAMA4_TEXT)
    separate = family in FAMILIES and family not in SGLANG_SHARES_HEAD
    if config.get("tie_word_embeddings") and separate:
        raise ConfigError(
            "tie_word_embeddings",
            True,
            f"SGLang keeps the head of {family} apart from the embedding and would leave it "
            "unfilled; use a checkpoint with untied embeddings (upcycled from a tied model: store "
            "model.embed_tokens.weight as lm_head.weight too, and set tie_word_embeddings=false)",
        )
    if family in _ALL_LAYERS_ROUTE:
        for field, routed in (("mlp_only_layers", []), ("decoder_sparse_step", 1)):
            value = config.get(field)
            if value is not None and value != routed:
                raise ConfigError(
                    field,
                    value,
                    f"SGLang builds experts in every layer of {family} and would leave those of "
                    f"dense layers unfilled; allowed: {routed!r}",
                )


def _get(args: Mapping[str, Any], name: str) -> Any:
    if name not in args:
        raise ConfigError(f"engine.args.{name}", None, "the server did not report this argument")
    return args[name]


def _check(field: str, value: Any, allowed: tuple[Any, ...], why: str) -> None:
    if value not in allowed:
        raise ConfigError(field, value, f"{why}; allowed: {', '.join(map(repr, allowed))}")


def _value(name: str, text: str, *, like: Any) -> Any:
    """A stated value, converted to the type that a plain server has for it."""
    if text.lower() in ("none", "null"):
        return None
    if isinstance(like, bool):
        if text.lower() not in ("true", "false", "1", "0"):
            raise ConfigError(f"engine.args.{name}", text, "must be true or false")
        return text.lower() in ("true", "1")
    if isinstance(like, int):
        if not text.isdecimal():
            raise ConfigError(f"engine.args.{name}", text, "must be a whole number")
        return int(text)
    return text


def _stored(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("quantization_config") or {}


def _quantization(args: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The quantisation of the projections; SGLang takes it from the checkpoint.

    With fp8 requested for a checkpoint without fp8, SGLang quantises whole tensors while loading.
    """
    asked, stored = _get(args, "quantization"), _stored(config)
    method = stored.get("quant_method")
    if asked is None and method is None:
        return "none"
    field = "engine.args.quantization"
    if asked not in (None, "fp8") or method != "fp8":
        why = f"the checkpoint's quant_method is {method!r}; serve unquantised weights, or fp8"
        raise ConfigError(field, asked or method, f"{why} blocks of a checkpoint that has them")
    for name, (known,) in _KNOWN_FP8.items():
        _check(f"quantization_config.{name}", stored.get(name), (known,), "no other was compared")
    _check("quantization_config.scale_fmt", stored.get("scale_fmt"), (None,), "scales are fp32")
    kernel = "engine.args.fp8_gemm_runner_backend"
    _check(kernel, _get(args, kernel.split(".")[-1]), _FP8_KERNELS, "was never compared")
    return FP8_BLOCKS.name


def _kernel_flags(args: Mapping[str, Any], environment: Mapping[str, str]) -> tuple[str, ...]:
    off = ("", "0", "false", "no", "n", "off")
    flags = [name for name in _SWITCHES if environment.get(name, "").lower() not in off]
    if any(_get(args, name) == "intel_amx" for name in _ATTENTION):
        flags.append("intel_amx")
    return tuple(flags)


def _dtype(asked: str, config: Mapping[str, Any]) -> str:
    """The dtype weights are held in; SGLang's "auto" is the checkpoint's, float32 lowered."""
    if asked == "auto":
        own = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        asked = "float16" if own == "float32" else own
    return {"half": "float16", "float": "float32"}.get(asked, asked)
