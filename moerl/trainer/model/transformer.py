"""TransformerConfig of a model, from checkpoint, layout, precision and user settings.

Every field can be set through `trainer.megatron`, except fields that follow from the model, the
parallel layout, the precision or the platform (they would contradict the checkpoint or the process
groups) and fields that break replay or the plain-sum loss.  A field that the installed version does
not have is refused, with the nearest names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_args, get_type_hints

import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from moerl.config.checks import NOT_WITH_REPLAY
from moerl.config.schema import TrainerConfig
from moerl.core.errors import ConfigError, nearest
from moerl.layout.spec import ModelSpec
from moerl.trainer.model.platform import Platform
from moerl.trainer.model.sparse_attention import sparse_fields

# Fields no setting may change, with the reason shown to the user.
_REFUSED: dict[str, str] = {
    "moe_enable_routing_replay": "moerl attaches its own replay; remove it",
    "mtp_num_layers": "multi-token prediction is not supported; null",
    "defer_embedding_wgrad_compute": "the head computes its own gradient, in blocks; remove it",
    "fp8_output_proj": "the head's products are in the trainer's dtype; remove it",
    "calculate_per_token_loss": "moerl needs plain gradient sums; remove it",
    "finalize_model_grads_func": "it is a function, set by moerl; remove it",
    "grad_scale_func": "it is a function, set by moerl; remove it",
    "no_sync_func": "it is a function, set by moerl; remove it",
}
# Fields whose values would bypass the replayed choice or drop a recorded row.
_BREAKS_REPLAY: dict[str, str] = {
    **NOT_WITH_REPLAY,
    "moe_expert_capacity_factor": "it drops tokens after the replayed choice",
    "moe_router_force_load_balancing": "it replaces the router's logits by noise",
    "moe_router_enable_expert_bias": "the bias would be updated from replayed counts",
    "overlap_moe_expert_parallel_comm": "it runs two microbatches at once",
}
_OFF = (None, False, 0, "none")


def transformer_config(
    spec: ModelSpec, trainer: TrainerConfig, platform: Platform, *, with_replay: bool
) -> TransformerConfig:
    """TransformerConfig of a model, a layout, a precision and the user's `trainer.megatron`.

    Raises ConfigError naming the field of `trainer.megatron` that is unknown, owned by moerl or
    breaks replay, or repeating a refusal of megatron-core itself.
    """
    owned = _model_fields(spec) | _layout_fields(trainer) | _precision_fields(trainer.dtype)
    if platform.layers == "local":
        owned |= _local_fields(on_cpu=platform.name == "cpu")
        if spec.linear_layers:
            owned["deterministic_mode"] = True  # torch code in place of Triton kernels
    else:
        owned |= _not_fused(spec)
    user = trainer.megatron
    check_megatron_fields(user, owned, with_replay=with_replay)
    kind = MLATransformerConfig if spec.kv_lora else TransformerConfig
    try:
        return kind(**(_defaults(spec, platform) | user | owned))
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError("trainer.megatron", dict(user), f"megatron-core says: {error}") from error


def equal_shapes(trainer: TrainerConfig) -> bool:
    """Whether all microbatches of a step must have one shape, on all ranks.

    The allgather dispatcher gathers equal shares.  Stages that pass chunks round in both directions
    exchange shapes without their direction, so two stages confuse them
    (megatron-core 0.19.2, p2p_communication.py `_communicate_shapes`).
    """
    return trainer.dispatcher == "allgather" or trainer.parallel.vpp > 1


def check_megatron_fields(
    user: Mapping[str, Any], owned: Mapping[str, Any], *, with_replay: bool
) -> None:
    """Refuse fields that cannot be set.  Raises ConfigError with field, value and reason."""
    kind = MLATransformerConfig if owned.get("multi_latent_attention") else TransformerConfig
    known = {field.name for field in fields(kind) if field.init}
    hints = get_type_hints(kind)
    for name, value in user.items():
        field = f"trainer.megatron.{name}"
        if name not in known:
            hint = nearest(name, known)
            raise ConfigError(field, value, f"the installed megatron-core has no such field{hint}")
        if name in _REFUSED:
            raise ConfigError(field, value, _REFUSED[name])
        _check_type(field, value, hints[name])
        if name in owned and value != owned[name]:
            raise ConfigError(
                field, value, f"it follows from the model, layout or platform: {owned[name]}"
            )
        if with_replay and value not in _OFF and name in _BREAKS_REPLAY:
            raise ConfigError(field, value, f"{_BREAKS_REPLAY[name]}; not with routing replay")
    _check_router_losses(user, with_replay=with_replay)


def _check_router_losses(user: Mapping[str, Any], *, with_replay: bool) -> None:
    """Allow the losses that `router_losses` computes; they do not depend on the split."""
    name = "moe_router_load_balancing_type"
    kind = user.get(name, "none")
    if kind not in ("none", "seq_aux_loss"):
        raise ConfigError(
            f"trainer.megatron.{name}",
            kind,
            "it is a loss over a microbatch of a rank, which another split would change; "
            "use seq_aux_loss or none",
        )
    for coeff in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        value = user.get(coeff)
        if value is not None and not isinstance(value, (int, float)):
            raise ConfigError(f"trainer.megatron.{coeff}", value, "one number is needed")
        if value and not with_replay:
            raise ConfigError(
                f"trainer.megatron.{coeff}",
                value,
                "router losses are computed with replayed routes; use replay.routing R3 or R2",
            )
    if user.get("moe_aux_loss_coeff") and kind == "none":
        raise ConfigError(
            "trainer.megatron.moe_aux_loss_coeff",
            user["moe_aux_loss_coeff"],
            f"nothing reads it; set trainer.megatron.{name}=seq_aux_loss",
        )


def _check_type(field: str, value: object, hint: Any) -> None:
    """Checks plain annotations only: megatron-core checks no type and fails much later."""
    kinds = set(get_args(hint)) or {hint}
    if not kinds <= {bool, int, float, str, type(None)}:
        return
    if float in kinds and type(value) is int:
        return
    if type(value) not in kinds:
        names = ", ".join(sorted(kind.__name__ for kind in kinds - {type(None)}))
        raise ConfigError(field, value, f"a {names} is needed")


def _model_fields(spec: ModelSpec) -> dict[str, Any]:
    fields = {
        "num_layers": spec.layers,
        "hidden_size": spec.hidden,
        "ffn_hidden_size": spec.ffn or spec.moe_ffn,
        "num_attention_heads": spec.heads,
        "num_query_groups": spec.kv_heads,
        "kv_channels": spec.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": spec.rms_eps,
        "qk_layernorm": spec.qk_norm or spec.qk_norm_all_heads or bool(spec.kv_lora),
        "add_qkv_bias": spec.qkv_bias,
        "add_bias_linear": spec.o_bias,  # gpt-oss has a bias in every linear layer
        "rotary_interleaved": spec.rotary_pairs,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "calculate_per_token_loss": True,
    }
    if spec.experts:
        fields |= _router_fields(spec)
    if spec.kv_lora:
        fields |= _latent_fields(spec)
    if spec.sinks:
        fields |= _gpt_oss_fields(spec)
    if spec.index_topk:
        fields |= sparse_fields(spec)
    if spec.nope_layers:
        fields |= {
            "qk_l2_norm": spec.qk_l2_norm,
            "no_rope_freq": [int(layer in spec.nope_layers) for layer in range(spec.layers)],
        }
    if spec.linear_layers:
        fields |= _delta_fields(spec)
    return fields


def _delta_fields(spec: ModelSpec) -> dict[str, Any]:
    """Qwen3-Next: gated attention, norms around one, a gated delta net in most layers."""
    return {
        "layernorm_zero_centered_gamma": spec.zero_centred_norm,
        "attention_output_gate": spec.output_gate,
        "linear_num_key_heads": spec.linear_key_heads,
        "linear_num_value_heads": spec.linear_value_heads,
        "linear_key_head_dim": spec.linear_key_dim,
        "linear_value_head_dim": spec.linear_value_dim,
        "linear_conv_kernel_dim": spec.conv_width,
    }


def _router_fields(spec: ModelSpec) -> dict[str, Any]:
    fields = {
        "num_moe_experts": spec.experts,
        "moe_ffn_hidden_size": spec.moe_ffn,
        "moe_router_topk": spec.experts_per_token,
        "moe_layer_freq": [int(layer in spec.moe_layers) for layer in range(spec.layers)],
        "moe_router_score_function": spec.score,
        "moe_router_pre_softmax": spec.pre_softmax,
        # a softmax with a bias is SoftmaxBiasRouter
        "moe_router_enable_expert_bias": spec.expert_bias and spec.score != "softmax",
        "moe_router_bias_update_rate": 0.0,  # keep the balance of the checkpoint
        "moe_shared_expert_intermediate_size": spec.shared_ffn or None,
        "moe_shared_expert_gate": spec.shared_gate,
        "moe_apply_probs_on_input": spec.weigh_input,
    }
    if spec.groups > 1:
        fields |= {
            "moe_router_num_groups": spec.groups,
            "moe_router_group_topk": spec.group_topk,
        }
    if spec.topk_scaling != 1.0:
        fields["moe_router_topk_scaling_factor"] = spec.topk_scaling
    return fields


def _latent_fields(spec: ModelSpec) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "multi_latent_attention": True,
        "q_lora_rank": spec.q_lora or None,
        "kv_lora_rank": spec.kv_lora,
        "qk_head_dim": spec.qk_nope,
        "qk_pos_emb_head_dim": spec.qk_rope,
        "v_head_dim": spec.v_head,
        "rotary_base": spec.rope_theta,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
    }
    if spec.yarn:
        fields |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": spec.yarn.factor,
            "original_max_position_embeddings": spec.yarn.original_max_positions,
            "beta_fast": spec.yarn.beta_fast,
            "beta_slow": spec.yarn.beta_slow,
            "mscale": spec.yarn.mscale,
            "mscale_all_dim": spec.yarn.mscale_all_dim,
        }
    return fields


def _gpt_oss_fields(spec: ModelSpec) -> dict[str, Any]:
    """Sinks, a window on some layers, and a clamped GLU whose linear half is offset by one."""
    return {
        "softmax_type": "learnable",
        "window_size": (spec.sliding_window - 1, 0),
        "window_attn_skip_freq": [
            int(layer in spec.sliding_layers) for layer in range(spec.layers)
        ],
        "activation_func": quick_gelu,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 7.0,
    }


def set_yarn(config: TransformerConfig, spec: ModelSpec) -> None:
    """GPTModel reads these by name from a config that does not declare them (0.19.2)."""
    assert spec.yarn is not None, "the caller checks that there is one"
    for name, value in {
        "rotary_scaling_factor": spec.yarn.factor,
        "original_max_position_embeddings": spec.yarn.original_max_positions,
        "beta_fast": spec.yarn.beta_fast,
        "beta_slow": spec.yarn.beta_slow,
        "mscale": spec.yarn.mscale or None,  # None: 0.1 ln(factor) + 1
        "mscale_all_dim": spec.yarn.mscale_all_dim or None,
        "correction_range_round_to_int": spec.yarn.truncate,
    }.items():
        setattr(config, f"yarn_{name}", value)


def _layout_fields(trainer: TrainerConfig) -> dict[str, Any]:
    sizes = trainer.parallel
    return {
        "tensor_model_parallel_size": sizes.tp,
        "pipeline_model_parallel_size": sizes.pp,
        "virtual_pipeline_model_parallel_size": sizes.vpp if sizes.vpp > 1 else None,
        "num_layers_in_first_pipeline_stage": sizes.first_stage_layers or None,
        "num_layers_in_last_pipeline_stage": sizes.last_stage_layers or None,
        "context_parallel_size": sizes.cp,
        # otherwise microbatches are padded to one shape, see `equal_shapes`
        "variable_seq_lengths": sizes.pp > 1 and not equal_shapes(trainer),
        "expert_model_parallel_size": sizes.ep,
        "expert_tensor_parallel_size": sizes.etp,
        "sequence_parallel": sizes.tp > 1,  # MoE with tensor parallelism requires it
        "moe_token_dispatcher_type": trainer.dispatcher,
    }


def _precision_fields(dtype: str) -> dict[str, Any]:
    half = dtype == "bf16"
    params = torch.bfloat16 if half else torch.float32
    return {"bf16": half, "fp16": False, "params_dtype": params, "pipeline_dtype": params}


def _local_fields(*, on_cpu: bool) -> dict[str, Any]:
    """Fused kernels come with Transformer Engine or Apex."""
    fused = (
        "gradient_accumulation_fusion",
        "apply_rope_fusion",
        "masked_softmax_fusion",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "persist_layer_norm",
        "moe_grouped_gemm",
        "moe_permute_fusion",
        "moe_router_fusion",
    )
    own: dict[str, Any] = {"use_cpu_initialization": on_cpu, "transformer_impl": "local"}
    return own | dict.fromkeys(fused, False)


def _has_fused_rope(spec: ModelSpec) -> bool:
    """Latent attention has a fused form with YaRN only; other YaRN has none for packed rows: the
    kernel leaves out its factor, without an error (megatron-core 0.19.2, rope_utils.py).
    """
    if spec.index_topk:
        return False
    return bool(spec.yarn) == bool(spec.kv_lora)


def _not_fused(spec: ModelSpec) -> dict[str, bool]:
    """Fusions that megatron-core does not have for this model.

    It leaves out a factor in the first without an error, and refuses the second when it makes
    grouped experts with biases.
    """
    lacks = {
        "apply_rope_fusion": not _has_fused_rope(spec),
        "bias_dropout_fusion": bool(spec.experts) and spec.o_bias,
    }
    return {name: False for name, is_missing in lacks.items() if is_missing}


def fused_fields(spec: ModelSpec) -> dict[str, Any]:
    """Fused kernels of Transformer Engine and torch.compile that are on by default."""
    return {
        "bias_activation_fusion": True,
        "bias_dropout_fusion": True,
        # megatron-core calls the fused form of latent attention experimental
        "apply_rope_fusion": _has_fused_rope(spec) and not spec.kv_lora,
        "moe_permute_fusion": bool(spec.experts),
    }


def _defaults(spec: ModelSpec, platform: Platform) -> dict[str, Any]:
    """Starting values that `trainer.megatron` may change."""
    values: dict[str, Any] = {
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "attention_softmax_in_fp32": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "batch_p2p_comm": False,
    }
    if platform.layers == "te":
        values |= {"moe_grouped_gemm": True, "use_cpu_initialization": False}
        values |= fused_fields(spec)
    return values
