"""What a model family needs of an engine on a plain CPU: one table, by `model_type`.

SGLang has no plain-CPU path for some modules of some families.  A row names the families, the
functions of SGLang that are replaced for them (`moerl.engine.cpu_models`), and the server arguments
and environment variables without which these functions would not run.  Other families pay nothing:
`plugin.register_hooks` registers the rows of the served model only.  With CUDA nothing of this
applies.

patches/sglang/README.md has an entry per hook, as for the table in hooks.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moerl.config.json_files import read_json
from moerl.engine.cpu_models import (
    absorbed_mla,
    all_heads_norm,
    attention_sinks,
    bias_row,
    delta_net_kernels,
    lightning_indexer,
    llama4,
    shared_expert_gate,
)
from moerl.engine.hooks import Hook, When
from moerl.errors import ConfigError

# Environment variable of a server: the folder of its model, which the plug-in reads.
MODEL_FOLDER = "MOERL_ENGINE_MODEL"


@dataclass(frozen=True, slots=True)
class StandIns:
    """One row.  A family may be in several rows and needs all of them."""

    model_types: tuple[str, ...]
    hooks: tuple[Hook, ...]
    args: Mapping[str, bool | str] = field(default_factory=dict)  # server arguments
    environment: Mapping[str, str] = field(default_factory=dict)


_MODELS = "sglang.srt.models"
_KERNELS = "sglang.kernels.ops"
_DELTA_KERNEL = "sglang.srt.layers.attention.linear.kernels.gdn_triton.TritonGDNKernel"
_TORCH_NATIVE = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"

STAND_INS = (
    StandIns(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32"),
        (
            Hook(
                f"{_MODELS}.deepseek_v2.DeepseekV2AttentionMLA.dispatch_attn_forward_method",
                "around",
                absorbed_mla.absorbed,
                When.CPU,
            ),
            Hook(
                "sglang.srt.layers.rotary_embedding.factory.get_rope_cpu",
                "around",
                absorbed_mla.any_rope,
                When.CPU,
            ),
        ),
    ),
    StandIns(
        ("deepseek_v32",),
        (
            Hook(
                "sglang.srt.configs.model_config.is_deepseek_dsa",
                "around",
                lightning_indexer.in_models_only,
                When.CPU,
            ),
            Hook(
                "sglang.srt.state_capturer.indexer_topk.create_indexer_capturer",
                "around",
                lightning_indexer.capturer,
                When.CPU,
            ),
            Hook(
                "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer.forward_native",
                "replace",
                lightning_indexer.choose,
                When.CPU,
            ),
            Hook(f"{_TORCH_NATIVE}.forward_extend", "around", lightning_indexer.forward, When.CPU),
            Hook(f"{_TORCH_NATIVE}.forward_decode", "around", lightning_indexer.forward, When.CPU),
        ),
    ),
    StandIns(
        ("qwen2_moe", "qwen3_next"),
        (
            Hook(
                "sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add",
                "replace",
                shared_expert_gate.add_gated,
                When.CPU,
            ),
        ),
    ),
    StandIns(
        ("gpt_oss",),
        (
            Hook(
                "sglang.srt.arg_groups.model_hook.attention_backends_of",
                "after",
                attention_sinks.name_backend,
                When.CPU,
            ),
            Hook(f"{_TORCH_NATIVE}.forward_extend", "around", attention_sinks.forward, When.CPU),
            Hook(f"{_TORCH_NATIVE}.forward_decode", "around", attention_sinks.forward, When.CPU),
            Hook(
                f"{_MODELS}.gpt_oss.GptOssAttention.__init__",
                "after",
                attention_sinks.full_sinks,
                When.CPU,
            ),
        ),
        # torch_native writes the cache of window layers at slots other than those it reads
        args={"disable_hybrid_swa_memory": True},
        # SGLang compiles the activation of its experts: 26 s at the first request, 0.2 s without
        environment={"TORCHDYNAMO_DISABLE": "1"},
    ),
    StandIns(
        ("minimax_m2",),
        (
            Hook(
                f"{_MODELS}.minimax_m2.rms_sumsq_serial",
                "replace",
                all_heads_norm.sums_of_squares,
                When.CPU,
            ),
            Hook(
                f"{_MODELS}.minimax_m2.rms_apply_serial",
                "replace",
                all_heads_norm.normalise,
                When.CPU,
            ),
        ),
    ),
    StandIns(
        ("ernie4_5_moe",),
        (
            Hook(
                "sglang.srt.layers.moe.topk.fused_topk_native",
                "around",
                bias_row.flat_bias,
                When.CPU,
            ),
        ),
    ),
    StandIns(
        ("llama4",),
        (
            Hook(f"{_MODELS}.llama4.Llama4Attention.forward", "replace", llama4.attend, When.CPU),
            Hook(f"{_MODELS}.llama4.Llama4MoE.__init__", "after", llama4.weigh_outside, When.CPU),
            Hook(
                f"{_MODELS}.llama4.Llama4MoE._forward_core_normal",
                "replace",
                llama4.run_experts,
                When.CPU,
            ),
        ),
        # the language model alone; attention in chunks keeps its cache as windows do
        args={"enable_multimodal": False, "disable_hybrid_swa_memory": True},
        environment={"TORCHDYNAMO_DISABLE": "1"},  # SGLang compiles its router
    ),
    StandIns(
        ("qwen3_next",),
        (
            Hook(
                f"{_KERNELS}.mamba.causal_conv1d_triton.causal_conv1d_fn",
                "replace",
                delta_net_kernels.convolve,
                When.CPU,
            ),
            Hook(
                f"{_KERNELS}.mamba.causal_conv1d_triton.causal_conv1d_update",
                "replace",
                delta_net_kernels.convolve_next,
                When.CPU,
            ),
            Hook(
                f"{_KERNELS}.attention.linear.fused_gdn_gating.fused_gdn_gating",
                "replace",
                delta_net_kernels.gates,
                When.CPU,
            ),
            Hook(
                f"{_KERNELS}.attention.triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat",
                "replace",
                delta_net_kernels.split_projections,
                When.CPU,
            ),
            Hook(
                f"{_KERNELS}.attention.fla.fused_norm_gate.rms_norm_gated",
                "replace",
                delta_net_kernels.gated_norm,
                When.CPU,
            ),
            Hook(f"{_DELTA_KERNEL}.packed_decode", "replace", delta_net_kernels.decode, When.CPU),
            Hook(f"{_DELTA_KERNEL}.extend", "replace", delta_net_kernels.prefill, When.CPU),
        ),
        # the plain CPU has no snapshots of states, which the other strategy shares between requests
        args={"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True},
        # inputs of the convolution would be kept in bf16, whatever dtype is served
        environment={"SGLANG_MAMBA_CONV_DTYPE": "float32"},
    ),
)


def model_type_of(folder: Path) -> str:
    """`model_type` of a model folder; empty where there is no config.json yet."""
    file = folder / "config.json"
    return str(read_json(file).get("model_type", "")) if file.is_file() else ""


def hooks_of(model_type: str) -> tuple[Hook, ...]:
    return tuple(hook for row in _rows(model_type) for hook in row.hooks)


def environment_of(model_type: str) -> dict[str, str]:
    return {name: value for row in _rows(model_type) for name, value in row.environment.items()}


def arguments_of(model_type: str, chosen: Mapping[str, object]) -> dict[str, bool | str]:
    """Server arguments that a family needs on a plain CPU.

    chosen: `engine.args`.  Raises ConfigError where they hold another value.
    """
    needed = {name: value for row in _rows(model_type) for name, value in row.args.items()}
    for name, value in needed.items():
        if chosen.get(name, value) != value:
            raise ConfigError(
                f"engine.args.{name}",
                chosen[name],
                f"without CUDA an engine of {model_type} needs {value!r}; leave it out",
            )
    return needed


def _rows(model_type: str) -> tuple[StandIns, ...]:
    return tuple(row for row in STAND_INS if model_type in row.model_types)
