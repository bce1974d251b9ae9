"""`trainer.ddp` and `trainer.optimizer_args`: fields of megatron-core that a recipe may set.

Every field of DistributedDataParallelConfig and OptimizerConfig of megatron-core 0.19.2 is listed
here, either with its type or with the reason why it is refused; tests compare both lists with the
installed classes.  The lists need no torch, so a dry run on a login node refuses what a trainer
rank would refuse later, combinations included.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from moerl.config.schema import TrainerConfig
from moerl.core.errors import ConfigError

Kind = type | tuple[str, ...]  # a type, or the names that a dtype may have

DDP_FIELDS: dict[str, Kind] = {
    "overlap_grad_reduce": bool,
    "overlap_param_gather": bool,
    "bucket_size": int,  # parameters
    "pad_buckets_for_high_nccl_busbw": bool,
}
OPTIMIZER_FIELDS: dict[str, Kind] = {
    "optimizer_cpu_offload": bool,
    "overlap_cpu_optimizer_d2h_h2d": bool,
    "pin_cpu_grads": bool,
    "pin_cpu_params": bool,
    "use_precision_aware_optimizer": bool,
    "store_param_remainders": bool,
    "main_params_dtype": ("fp32", "fp16"),
    "exp_avg_dtype": ("fp32", "bf16", "fp16", "fp8"),
    "exp_avg_sq_dtype": ("fp32", "bf16", "fp16", "fp8"),
    "decoupled_weight_decay": bool,
    "apply_wd_to_qk_layernorm": bool,
}


def _because(reason: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, reason)


DDP_REFUSED: dict[str, str] = {
    **_because(
        "moerl sums gradients in fp32, in megatron-core's own buffers",
        *("grad_reduce_in_fp32", "reduce_scatter_with_fp32_accumulation"),
        *("param_name_patterns_for_fp32_local_accumulation", "average_in_collective"),
    ),
    **_because("use trainer.optimizer.distributed", "use_distributed_optimizer"),
    **_because(
        "moerl ends a step whose gradient is not finite",
        *("check_for_nan_in_grad", "check_for_large_grads"),
    ),
    **_because("DistributedDataParallel does not read it; use bucket_size", "num_buckets"),
    **_because("each pipeline stage gathers when it needs its parameters", "align_param_gather"),
    **_because(
        "the optimizer is cut over all data-parallel ranks",
        "num_distributed_optimizer_instances",
    ),
    **_because(
        "parameters are fp32 or bf16, see trainer.dtype",
        *("fp8_param_gather", "fp4_param_gather", "reuse_grad_buf_for_mxfp8_param_ag"),
    ),
    **_because(
        "Megatron-FSDP is not supported",
        *("use_megatron_fsdp", "use_custom_fsdp", "data_parallel_sharding_strategy"),
        *("outer_dp_sharding_strategy", "suggested_communication_unit_size"),
        *("keep_fp8_transpose_cache", "gradient_reduce_div_fusion", "fsdp_double_buffer"),
        *("fsdp_db_use_persist_buf_on_alloc_fail", "fsdp_all_gather_in_start_param_sync"),
        *("fsdp_manual_registration", "megatron_fsdp_main_params_dtype"),
        *("megatron_fsdp_main_grads_dtype", "megatron_fsdp_grad_comm_dtype"),
        *("megatron_fsdp_use_decoupled_grad", "megatron_fsdp_cuda_graph_mode"),
        "megatron_fsdp_enable_fine_grained_param_gather",
        "megatron_fsdp_max_pool_double_buffer",
    ),
    **_because(
        "buffers registered with NCCL were never tried",
        *("nccl_ub", "disable_symmetric_registration"),
    ),
    **_because("it belongs to overlapped expert parallelism, refused", "delay_wgrad_compute"),
}
OPTIMIZER_REFUSED: dict[str, str] = {
    **_because(
        "use the field of trainer.optimizer",
        *("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad"),
        "use_distributed_optimizer",
    ),
    **_because(
        "it follows from trainer.dtype, fp32 or bf16",
        *("fp16", "bf16", "params_dtype", "fp8_recipe", "reuse_grad_buf_for_mxfp8_param_ag"),
        *("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window"),
        "hysteresis",
    ),
    **_because("moerl sums gradients in fp32", "main_grads_dtype"),
    **_because("set trainer.ddp.overlap_param_gather", "overlap_param_gather"),
    **_because(
        "the gather of the first model chunk would start inside the step",
        "overlap_param_gather_with_optimizer_step",
    ),
    **_because(
        "Adam is the only optimizer",
        *("optimizer", "sgd_momentum", "use_layer_wise_distributed_optimizer"),
        *("muon_momentum", "muon_split_qkv", "muon_nesterov", "muon_scale_mode"),
        *("muon_fp32_matmul_prec", "muon_coefficient_type", "muon_num_ns_steps", "muon_tp_mode"),
        *("muon_extra_scale_factor", "muon_scalar_optimizer", "lion_beta1", "lion_beta2"),
        *("soap_shampoo_beta", "soap_precondition_frequency", "soap_use_kl_shampoo"),
        *("adaptive_muon_moment2_method", "adaptive_muon_beta2", "adaptive_muon_eps"),
    ),
    **_because("all parameters have one rate", "decoupled_lr", "decoupled_min_lr"),
    **_because("a skipped update would be published", "grad_norm_skip_threshold"),
    **_because("on the CPU it is torch's AdamW anyway", "use_torch_optimizer_for_cpu_offload"),
    **_because(
        # Transformer Engine's Adam counts steps in its groups, which Megatron's offload overwrites
        "all is offloaded: after a resume, a part on the device would not count its steps",
        "optimizer_offload_fraction",
    ),
    **_because("CUDA graphs of a step were never tried", "optimizer_cuda_graph"),
    **_because(
        "nothing reads it",
        *("log_num_zeros_in_grad", "barrier_with_L1_time", "timers", "config_logger_dir"),
    ),
}


def ddp_args(trainer: TrainerConfig, *, cuda: bool) -> dict[str, Any]:
    """Arguments of DistributedDataParallelConfig: the user's over moerl's defaults.

    Gradients are reduced during the backward pass where this costs nothing: several data-parallel
    ranks on CUDA that each keep a part of the optimizer.  Parameters are not gathered during the
    forward pass unless asked for: a snapshot follows the last update of a batch and needs them
    whole, so only a batch of several optimizer steps (`trainer.minibatches`) gains by it.
    """
    sizes = trainer.parallel
    free = cuda and trainer.optimizer.distributed and sizes.dp * sizes.cp > 1
    return {"overlap_grad_reduce": free} | trainer.ddp


def optimizer_args(trainer: TrainerConfig) -> dict[str, Any]:
    """Arguments of OptimizerConfig, dtypes by name: the user's and what they imply.

    Megatron's offload reads gradients as the precision-aware optimizer does.
    """
    if not trainer.optimizer_args.get("optimizer_cpu_offload"):
        return dict(trainer.optimizer_args)
    implied = {
        "use_precision_aware_optimizer": True,
        "optimizer_offload_fraction": 1.0,
        "overlap_cpu_optimizer_d2h_h2d": True,
    }
    return implied | trainer.optimizer_args


def check_optimizer_settings(trainer: TrainerConfig) -> None:
    """Raises ConfigError with field, value and what is allowed."""
    _check_fields("trainer.ddp", trainer.ddp, DDP_FIELDS, DDP_REFUSED)
    _check_fields(
        "trainer.optimizer_args", trainer.optimizer_args, OPTIMIZER_FIELDS, OPTIMIZER_REFUSED
    )
    _check_overlap(trainer)
    _check_offload(trainer)
    _check_precision(trainer)


def _check_fields(
    section: str,
    user: Mapping[str, Any],
    allowed: Mapping[str, Kind],
    refused: Mapping[str, str],
) -> None:
    for name, value in user.items():
        field = f"{section}.{name}"
        if name in refused:
            raise ConfigError(field, value, f"{refused[name]}; remove it")
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=3)
            hint = f"; did you mean {', '.join(near)}" if near else ""
            raise ConfigError(field, value, f"megatron-core 0.19.2 has no such field{hint}")
        _check_value(field, value, allowed[name])


def _check_value(field: str, value: object, kind: Kind) -> None:
    if isinstance(kind, tuple):
        if value not in kind:
            raise ConfigError(field, value, f"use {', '.join(kind)}")
    elif type(value) is not kind:
        raise ConfigError(field, value, f"a {kind.__name__} is needed")


def _check_overlap(trainer: TrainerConfig) -> None:
    ddp = trainer.ddp
    size = ddp.get("bucket_size")
    if size is not None and size < 1:
        raise ConfigError("trainer.ddp.bucket_size", size, "use at least 1 parameter")
    if (
        size is not None
        and not ddp_args(trainer, cuda=trainer.platform != "cpu")["overlap_grad_reduce"]
    ):
        raise ConfigError(
            "trainer.ddp.bucket_size",
            size,
            "without overlapped reduction all gradients are one bucket; set "
            "trainer.ddp.overlap_grad_reduce=true",
        )
    if not ddp.get("overlap_param_gather"):
        return
    if not trainer.optimizer.distributed:
        raise ConfigError(
            "trainer.ddp.overlap_param_gather",
            True,
            "only the distributed optimizer gathers parameters; set "
            "trainer.optimizer.distributed=true",
        )
    if not ddp_args(trainer, cuda=trainer.platform != "cpu")["overlap_grad_reduce"]:
        raise ConfigError(
            "trainer.ddp.overlap_param_gather",
            True,
            "it works on the buckets of trainer.ddp.overlap_grad_reduce; set both to true",
        )


def _check_offload(trainer: TrainerConfig) -> None:
    user, section = trainer.optimizer_args, "trainer.optimizer_args"
    if not user.get("optimizer_cpu_offload"):
        for name in ("overlap_cpu_optimizer_d2h_h2d", "pin_cpu_grads", "pin_cpu_params"):
            if name in user:
                reason = "only an offloaded optimizer reads it; set optimizer_cpu_offload=true"
                raise ConfigError(f"{section}.{name}", user[name], reason)
        return
    args = optimizer_args(trainer)
    needs = {
        "trainer.platform=cuda; on the CPU nothing is offloaded": trainer.platform == "cpu",
        "trainer.optimizer.distributed=true": not trainer.optimizer.distributed,
        "trainer.dtype=bf16": trainer.dtype != "bf16",
        "use_precision_aware_optimizer=true": not args["use_precision_aware_optimizer"],
        "decoupled_weight_decay=true": not args.get("decoupled_weight_decay", True),
    }
    for need, is_missing in needs.items():
        if is_missing:
            raise ConfigError(f"{section}.optimizer_cpu_offload", True, f"it needs {need}")
    for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        if args.get(name, "fp32") != "fp32":
            raise ConfigError(
                f"{section}.{name}", args[name], "an offloaded optimizer keeps fp32; use fp32"
            )


def _check_precision(trainer: TrainerConfig) -> None:
    user, section = trainer.optimizer_args, "trainer.optimizer_args"
    if user.get("use_precision_aware_optimizer"):
        needs = {
            "trainer.platform=cuda: it is Transformer Engine's Adam": trainer.platform == "cpu",
            "trainer.optimizer.distributed=true": not trainer.optimizer.distributed,
            "trainer.dtype=bf16": trainer.dtype != "bf16",
        }
        for need, is_missing in needs.items():
            if is_missing:
                raise ConfigError(
                    f"{section}.use_precision_aware_optimizer", True, f"it needs {need}"
                )
        return
    for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        if user.get(name, "fp32") != "fp32":
            raise ConfigError(
                f"{section}.{name}",
                user[name],
                "it needs use_precision_aware_optimizer=true; without it use fp32",
            )
    if "store_param_remainders" in user:
        raise ConfigError(
            f"{section}.store_param_remainders",
            user["store_param_remainders"],
            "only the precision-aware optimizer reads it; set use_precision_aware_optimizer=true",
        )
