"""The layout of a live engine's weights: its identity, and the refusal of what is not known.

A plan that writes into an engine is right for one layout only, and shapes do not show which one it
is: SGLang may interleave, swap, transpose, pack or shuffle expert weights after loading and keep
their shape.  So every server argument and environment variable that moves weights is looked at,
and only what was compared with SGLang's own `load_weights` (tests/multi/test_layout_sglang.py)
passes; anything else is refused, never guessed.

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

from moerl.errors import ConfigError
from moerl.layout import SGLANG_SHARES_HEAD

KNOWN_RELEASES = ("0.5.23",)
DTYPES = ("float32", "bfloat16", "float16")

# Both leave w13 as [gate; up] and w2 as loaded; "auto" becomes triton for unquantised experts.
CANONICAL_RUNNERS = ("auto", "triton")
_REPACKING_RUNNERS = {
    "flashinfer_trtllm": "it packs expert weights into blocks of another shape",
    "flashinfer_trtllm_routed": "it packs expert weights into blocks of another shape",
    "experimental_sgl_trtllm": "it packs expert weights into blocks of another shape",
    "flashinfer_cutlass": "it keeps w13 as [up; gate]",
    "triton_kernel": "it keeps expert weights transposed",
    "aiter": "it shuffles expert weights in place",
}

# Server arguments that decide which weights a rank holds or in which form: the values under which
# the tables of moerl.layout hold, and why others are refused.
_ALLOWED: dict[str, tuple[tuple[Any, ...], str]] = {
    "quantization": ((None,), "quantised weights have other bytes and scales beside them"),
    "modelopt_quant": ((None,), "quantised weights have other bytes and scales beside them"),
    "rl_quant_profile": ((None,), "quantised weights have other bytes and scales beside them"),
    "quantize_and_serve": ((False,), "quantised weights have other bytes and scales beside them"),
    "moe_a2a_backend": (("none", None), "its dispatcher prepares expert weights for itself"),
    "device": (("cpu", "cuda"), "its kernels lay weights out in their own way"),
    "model_impl": (("auto", "sglang"), "its modules have other names"),
    "json_model_override_args": (("{}",), "the model is then not that of its config.json"),
    "custom_weight_loader": (([], None), "what it loads is not known"),
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
    "enable_lora": ((None, False), "adapted modules have other names"),
    "lora_paths": ((None, []), "adapted modules have other names"),
    "cpu_offload_gb": ((0,), "offloaded weights are not where a plan writes"),
    "offload_group_size": ((-1,), "offloaded weights are not where a plan writes"),
    "enable_paged_experts": ((False,), "experts are then not all in memory"),
    "kt_weight_path": ((None,), "some experts then live in another runtime"),
    "enable_nvidia_megakernel": ((False,), "it packs weights for one kernel"),
    "enable_amd_monokernel": ((False,), "it packs weights for one kernel"),
    "enable_w4a4_mxfp4_megamoe": ((False,), "it quantises expert weights"),
}

# Environment variables with the same effect; SGLang reads them in the server process.
_SWITCHES = {
    "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED": "gate and up rows of w13 are then interleaved in place",
    "SGLANG_USE_AITER": "expert weights are then shuffled in place",
    "SGLANG_USE_CPU_ENGINE": "weights are then packed for AMX",
}

_FUSES_SHARED_EXPERTS = ("deepseek_v2", "deepseek_v3", "glm4_moe")
_ALL_LAYERS_ROUTE = ("qwen3_moe", "qwen2_moe")


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """What decides where every byte of an engine's weights lives."""

    release: str  # of SGLang
    family: str  # Hugging Face model_type
    tp: int
    ep: int
    dp: int  # data-parallel attention: attention is cut over tp / dp ranks
    moe_runner: str  # of unquantised experts; names a kernel, here also its weight format
    quantization: str
    dtype: str
    kernel_flags: tuple[str, ...]  # switches that change the format of weights; none is supported

    def fingerprint(self) -> str:
        """16 hex digits, equal in every process and release of moerl for equal layouts."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def engine_layout(
    args: Mapping[str, Any],
    environment: Mapping[str, str],
    config: Mapping[str, Any],
    *,
    release: str,
) -> EngineLayout:
    """Identity of a server's weight layout.  Raises ConfigError, naming the argument, for any
    value that is not known to keep SGLang's canonical layout.

    args: resolved server arguments by ServerArgs field name, as /server_info and
    `ServerArgs.resolved_dict()` give them; environment: of the server process; config: the
    model's config.json; release: the version of SGLang.
    """
    if release not in KNOWN_RELEASES:
        raise ConfigError("sglang", release, f"known releases: {', '.join(KNOWN_RELEASES)}")
    family = str(config.get("model_type"))
    check_model(config)
    for name, (allowed, why) in _ALLOWED.items():
        _check(name, _get(args, name), allowed, why)
    _check_runner(_get(args, "moe_runner_backend"))
    _check_amx(args)
    for name, why in _SWITCHES.items():
        if environment.get(name, "").lower() not in ("", "0", "false", "no", "n", "off"):
            raise ConfigError(name, environment[name], f"{why}; unset it")
    fused = family in _FUSES_SHARED_EXPERTS and not _get(args, "disable_shared_experts_fusion")
    if fused and args["device"] != "cpu":
        raise ConfigError(
            "engine.args.disable_shared_experts_fusion",
            False,
            f"shared experts of {family} would join the routed ones; set it to true",
        )
    tp = int(_get(args, "tp_size"))
    if family == "olmoe" and tp > 1:
        raise ConfigError("engine.tp", tp, "SGLang normalises q and k of olmoe on one rank; use 1")
    return EngineLayout(
        release=release,
        family=family,
        tp=tp,
        ep=int(_get(args, "ep_size")),
        dp=int(_get(args, "dp_size")) if _get(args, "enable_dp_attention") else 1,
        moe_runner="triton",
        quantization="none",
        dtype=_dtype(_get(args, "dtype"), config),
        kernel_flags=(),
    )


def check_model(config: Mapping[str, Any]) -> None:
    """Refuse a model that SGLang would load without an error and serve with unfilled weights.

    config: the model's config.json.  Raises ConfigError naming its field.
    """
    family = config.get("model_type")
    if config.get("tie_word_embeddings") and family not in SGLANG_SHARES_HEAD:
        raise ConfigError(
            "tie_word_embeddings",
            True,
            f"SGLang keeps the head of {family} apart from the embedding and would leave it "
            "unfilled; use a checkpoint with untied embeddings",
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


def _check(name: str, value: Any, allowed: tuple[Any, ...], why: str) -> None:
    if value not in allowed:
        raise ConfigError(f"engine.args.{name}", value, f"{why}; allowed: {allowed[0]!r}")


def _check_runner(runner: str) -> None:
    why = _REPACKING_RUNNERS.get(runner, "its weight format was never compared with load_weights")
    _check("moe_runner_backend", runner, CANONICAL_RUNNERS[::-1], why)


def _check_amx(args: Mapping[str, Any]) -> None:
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        if _get(args, name) == "intel_amx":
            raise ConfigError(
                f"engine.args.{name}", "intel_amx", "weights are then packed for AMX; use another"
            )


def _dtype(asked: str, config: Mapping[str, Any]) -> str:
    """The dtype weights are held in; SGLang's "auto" is the checkpoint's, float32 lowered."""
    if asked == "auto":
        own = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        asked = "float16" if own == "float32" else own
    asked = {"half": "float16", "float": "float32"}.get(asked, asked)
    if asked not in DTYPES:
        raise ConfigError("engine.dtype", asked, f"one of {', '.join(DTYPES)}")
    return asked
