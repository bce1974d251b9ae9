"""SGLang server arguments: ours, and the values of `engine.args` that replay allows.

Names are checked against the installed SGLang without importing it (its import takes seconds and a
dozen packages): the ordered field list of ServerArgs is a plain tuple in one small file.
"""

from __future__ import annotations

import ctypes
import difflib
import importlib.util
import logging
import os
import runpy
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from moerl.config.schema import EngineConfig
from moerl.core.errors import ConfigError
from moerl.engine import feature_table
from moerl.engine.host import cpu_kernels
from moerl.engine.protocol import model_type_of
from moerl.engine.weight_layout import LiveWeightLayout, check_model, layout_of_arguments

log = logging.getLogger(__name__)

# Arguments that another setting or this program decides.
_OWNED: dict[str, str] = {
    "model_path": "set model.path",
    "dtype": "set engine.dtype",
    "tp_size": "set engine.tp",
    "max_running_requests": "set engine.max_running_requests",
    "max_total_tokens": "set engine.max_total_tokens",
    "mem_fraction_static": "set engine.mem_fraction_static",
    "host": "set engine.host",
    "device": "set engine.platform",
    "port": "a free port is chosen for each engine",
    "nccl_port": "a free port is chosen for each engine",
    "dist_init_addr": "set engine.nodes",
    "nnodes": "set engine.nodes",
    "node_rank": "set engine.nodes",
    "api_key": "every run makes its own token",
    "admin_api_key": "every run makes its own token",
    "weight_version": "the version is that of the policy",
    "enable_return_routed_experts": "set replay.routing",
    "enable_return_indexer_topk": "set replay.routing",
    "skip_server_warmup": "readiness is checked by the host",
    "skip_tokenizer_init": "the host sends and reads token ids",
    "tokenizer_worker_num": "SGLang checks the token only with one tokenizer worker",
    "use_ray": "the host starts the server",
    "grpc_mode": "the host speaks HTTP",
    "smg_grpc_mode": "the host speaks HTTP",
    "grpc_port": "the host speaks HTTP",
    "ssl_certfile": "the host speaks plain HTTP",
    "encoder_only": "an engine generates",
    "is_embedding": "an engine generates",
    "enable_memory_saver": "set cluster.colocated",
    "enable_weights_cpu_backup": "a publish writes the weights of an engine that slept",
    "enable_lora": "set lora.delivery",
    "max_lora_rank": "set lora.rank",
    "max_loras_per_batch": "set lora.slots",
    "max_loaded_loras": "set lora.slots",
    "lora_target_modules": "set lora.targets",
    "lora_backend": "the only one on a CPU is chosen",
    "config": "put the arguments into engine.args",
}

_CPU_MEMORY = 0.95  # share of the machine's memory that SGLang may find in use
_FP32_ATTENTION = ("triton", "torch_native")  # backends on a GPU that have float32
_ROTARY = (64, 128, 256, 512)  # head_dim of the CUDA kernel that also writes a bf16 cache

SLEEPS = {"enable_memory_saver": True, "sleep_on_idle": True}
"""Arguments of a server whose memory sleeps; while paused it would keep a core busy."""

SPARSE = ("deepseek_v32",)
"""Families whose sparse attention's positions are recorded."""


@lru_cache
def field_names() -> frozenset[str]:
    """Names of all server arguments of the installed SGLang."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        raise ConfigError("engine", "sglang", "the sglang package must be installed")
    path = Path(spec.origin).parent / "srt" / "arg_groups" / "field_order.py"
    if not path.is_file():
        raise ConfigError("engine", "sglang", "this SGLang has no field list; install 0.5.23")
    return frozenset(runpy.run_path(str(path))["POSITIONAL_FIELD_ORDER"])


def check_args(args: dict[str, Any], *, replay: bool) -> None:
    """Check `engine.args`.  Raises ConfigError: unknown name, one of ours, or not proven.

    replay: routing is recorded, so a feature that may record other rows than it ran is refused.
    """
    for name, value in args.items():
        field = f"engine.args.{name}"
        if name in _OWNED:
            raise ConfigError(field, value, _OWNED[name])
        if name not in field_names():
            close = difflib.get_close_matches(name, field_names(), 3)
            hint = f", such as {' or '.join(close)}" if close else ""
            raise ConfigError(field, value, f"it must name an SGLang server argument{hint}")
        feature_table.check(name, value, replay=replay)


def uses_cuda(platform: str) -> bool:
    """Resolve engine.platform."""
    if platform not in ("auto", "cpu", "cuda"):
        raise ConfigError("engine.platform", platform, "one of auto, cpu, cuda")
    if platform == "cuda" and not _has_cuda():
        raise ConfigError("engine.platform", platform, "torch finds no CUDA device here")
    return platform != "cpu" and _has_cuda()


def _has_cuda() -> bool:
    """Whether torch finds a CUDA device.  Its import takes seconds: only where a driver is."""
    if "torch" not in sys.modules:
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return False
    import torch

    return torch.cuda.is_available()


def server_args(
    config: EngineConfig,
    model_path: Path,
    *,
    routing: bool,
    version: str,
    port: int,
    nccl_port: int,
) -> dict[str, Any]:
    """All arguments of one server, by ServerArgs field name.  Raises ConfigError.

    routing: record the routed experts; version: the initial weight version.
    """
    check_args(config.args, replay=routing)
    if config.args.get("trust_remote_code"):
        log.warning("engine.args.trust_remote_code is set: the engine runs code of %s", model_path)
    feature_table.check_environment(os.environ)
    cuda = uses_cuda(config.platform)
    return arguments(
        config,
        model_path,
        routing=routing,
        version=version,
        port=port,
        nccl_port=nccl_port,
        cuda=cuda,
        model_type=model_type_of(model_path),
    )


def arguments(
    config: EngineConfig,
    model_path: Path,
    *,
    routing: bool,
    version: str,
    port: int | str,
    nccl_port: int | str,
    cuda: bool,
    model_type: str,
) -> dict[str, Any]:
    """`server_args` without reading this machine, so that a dry run prints them anywhere.

    model_type: of the model, empty if it is not known yet.
    """
    args: dict[str, Any] = {
        "model_path": str(model_path),
        "dtype": config.dtype,
        "tp_size": config.tp,
        "max_running_requests": config.max_running_requests,
        "mem_fraction_static": config.mem_fraction_static,
        "host": config.host,
        "port": port,
        "nccl_port": nccl_port,
        "weight_version": version,
        "enable_return_routed_experts": routing,
        "skip_server_warmup": True,
        "skip_tokenizer_init": True,
        "sampling_backend": "pytorch",  # its sampling mask is the array that was sampled from
    }
    if config.max_total_tokens:  # else SGLang fills the rest of mem_fraction_static
        args["max_total_tokens"] = config.max_total_tokens
    if routing and model_type in SPARSE:
        args["enable_return_indexer_topk"] = True
    own = _cuda_arguments(config, routing=routing) if cuda else _cpu_arguments(config, model_type)
    return args | own | config.args


def _cuda_arguments(config: EngineConfig, *, routing: bool) -> dict[str, Any]:
    # SGLang's own choice by model and GPU would pack, swap or join expert weights
    # (arg_groups/model_overrides); `moerl.engine.weight_layout` has the proven layouts.
    args: dict[str, Any] = {
        "moe_runner_backend": "triton",
        "disable_shared_experts_fusion": True,
    }
    if routing and config.attention_dp > 1:
        args |= _without_prefill_graphs(config.args)
    return args


def _cpu_arguments(config: EngineConfig, model_type: str) -> dict[str, Any]:
    args: dict[str, Any] = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sleep_on_idle": True,  # else an engine without requests keeps one core busy polling
    }
    if config.max_total_tokens:
        # The memory that other processes take while the weights load counts as the engine's, and
        # a start on a busy machine was refused for it; the cache has its size anyway.
        args["mem_fraction_static"] = max(config.mem_fraction_static, _CPU_MEMORY)
    return args | cpu_kernels.arguments_of(model_type, config.args)


def check_planned_layout(
    config: EngineConfig, model: Mapping[str, Any], *, cuda: bool, routing: bool
) -> LiveWeightLayout:
    """Layout of an engine that would be started, by the checks of a start and of a running server.

    A dry run calls it, and a run before it starts anything.  Raises ConfigError as a start would.
    model: its config.json; routing: routes are recorded.
    """
    check_model(model)
    if not cuda:
        cpu_kernels.check_kernels(config, model)
    stored = (model.get("quantization_config") or {}).get("quant_method")
    feature_table.check("quantization", stored, replay=routing)
    stated = arguments(
        config,
        Path(),
        routing=routing,
        version="",
        port=0,
        nccl_port=0,
        cuda=cuda,
        model_type=str(model.get("model_type") or ""),
    )
    if cuda and stated["dtype"] == "float32":
        _check_fp32_attention(stated)
    if cuda and stated["dtype"] == "bfloat16" and model.get("model_type") == "qwen3_moe":
        _check_rotary(model)
    return layout_of_arguments(stated, model)


def _check_fp32_attention(args: Mapping[str, Any]) -> None:
    """SGLang chooses by GPU alone (fa3 on Hopper), whatever the dtype.  Raises ConfigError."""
    for phase in ("prefill", "decode"):
        backend = args.get(f"{phase}_attention_backend") or args.get("attention_backend")
        if backend not in _FP32_ATTENTION:
            raise ConfigError(
                "engine.dtype",
                "float32",
                f"attention of {phase} would be {backend or 'fa3 on Hopper'}, without float32: set "
                f"engine.dtype=bfloat16, or engine.args.attention_backend={_FP32_ATTENTION[0]}",
            )


def _check_rotary(model: Mapping[str, Any]) -> None:
    """SGLang 0.5.23 asserts it in the first forward pass of a Qwen3-MoE.  Raises ConfigError."""
    size = model.get("head_dim", 128)
    if size not in _ROTARY:
        allowed = ", ".join(map(str, _ROTARY))
        raise ConfigError(
            "model.tiny.head_dim",
            size,
            f"a Qwen3-MoE in bfloat16 on CUDA has heads of {allowed}; set one of these",
        )


def _without_prefill_graphs(chosen: dict[str, Any]) -> dict[str, bool]:
    """With data-parallel attention SGLang 0.5.23 reads a rank's rows, after a graph of prefill, at
    the offset that they have in decoding.  chosen: `engine.args`.  Raises ConfigError.
    """
    for name, off in (
        ("disable_prefill_cuda_graph", True),
        ("cuda_graph_backend_prefill", "disabled"),
    ):
        if chosen.get(name, off) != off:
            raise ConfigError(
                f"engine.args.{name}",
                chosen[name],
                "with engine.args.attn_dp_size routes of prefill graphs would be those of other "
                f"tokens; leave it out, or use {off!r}",
            )
    return {"disable_prefill_cuda_graph": True}
