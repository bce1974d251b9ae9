"""Functions of SGLang that are replaced on a plain CPU: by model family, for fp8, for DP attention.

SGLang has kernels for these on GPUs only.  A row of FAMILY_HOOKS names the families that need it;
`entry_points.register_hooks` registers the rows of the served model.  README.md beside this package
has an entry per hook.
"""

from __future__ import annotations

from dataclasses import dataclass

from moerl.engine.plugin.hooks import Hook, When
from moerl_cpu_sglang import (
    absorbed_mla,
    all_heads_norm,
    attention_sinks,
    bias_row,
    delta_net_kernels,
    dp_attention,
    fp8_blocks,
    lightning_indexer,
    llama4,
    shared_expert_gate,
)


@dataclass(frozen=True, slots=True)
class FamilyHooks:
    """One row.  A family may be in several rows and needs all of them."""

    model_types: tuple[str, ...]
    hooks: tuple[Hook, ...]


_MODELS = "sglang.srt.models"
_KERNELS = "sglang.kernels.ops"
_DELTA_KERNEL = "sglang.srt.layers.attention.linear.kernels.gdn_triton.TritonGDNKernel"
_TORCH_NATIVE = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"

_FP8 = "sglang.srt.layers.quantization.fp8"
_BATCH = "sglang.srt.model_executor.forward_batch_info.ForwardBatch"
_GROUP = "sglang.srt.distributed.parallel_state.GroupCoordinator"
_SLEEPER = "sglang.srt.managers.scheduler_components.idle_sleeper.IdleSleeper"

FP8_HOOKS = (
    Hook(f"{_FP8}.Fp8LinearMethod.apply", "around", fp8_blocks.linear, When.CPU),
    Hook(f"{_FP8}.Fp8MoEMethod.apply", "around", fp8_blocks.experts, When.CPU),
    Hook(f"{_FP8}.Fp8Config.get_supported_act_dtypes", "after", fp8_blocks.dtypes, When.CPU),
)
DP_HOOKS = (
    Hook(f"{_BATCH}.prepare_mlp_sync_batch", "around", dp_attention.prepare, When.CPU),
    Hook(
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend"
        ".get_cuda_graph_seq_len_fill_value",
        "replace",
        dp_attention.padded_length,
        When.CPU,
    ),
    Hook(
        "sglang.kernels.ops.memory.memcpy_triton.memcpy_triton",
        "replace",
        dp_attention.copy_rows,
        When.CPU,
    ),
    Hook(f"{_GROUP}.all_gather_into_tensor", "replace", dp_attention.gather_equal, When.CPU),
    Hook(f"{_GROUP}.reduce_scatter_tensor", "replace", dp_attention.sum_equal, When.CPU),
    Hook(f"{_GROUP}.reduce_scatterv", "replace", dp_attention.sum_parts, When.CPU),
    Hook(f"{_GROUP}.all_gatherv", "replace", dp_attention.gather_parts, When.CPU),
    Hook(f"{_SLEEPER}.maybe_sleep", "replace", dp_attention.nap, When.CPU),
)
FAMILY_HOOKS = (
    FamilyHooks(
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
    FamilyHooks(
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
    FamilyHooks(
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
    FamilyHooks(
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
    ),
    FamilyHooks(
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
    FamilyHooks(
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
    FamilyHooks(
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
    ),
    FamilyHooks(
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
    ),
)


def hooks_of(model_type: str) -> tuple[Hook, ...]:
    """The hooks of one model family; empty where SGLang serves it on a CPU by itself."""
    rows = (row for row in FAMILY_HOOKS if model_type in row.model_types)
    return tuple(hook for row in rows for hook in row.hooks)
