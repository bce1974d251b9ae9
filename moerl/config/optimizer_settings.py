"""`trainer.ddp`, `trainer.optimizer_args`: settings of megatron-core's gradient buffers and Adam.

Any field of DistributedDataParallelConfig and OptimizerConfig may be set, except the fields below:
moerl sets them itself, or a step, publish or checkpoint would be wrong with them.  Names and types
are compared with the installed megatron-core, whose source is read without importing it, so a dry
run needs no torch.  Without megatron-core on the machine a trainer rank compares them.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from moerl.config.rules import Rows, refuse
from moerl.config.schema import TrainerConfig
from moerl.core.errors import ConfigError, nearest

_DTYPES = {  # of fields that name a torch.dtype; others take any of moerl's names
    "main_params_dtype": ("fp32", "fp16"),
    "exp_avg_dtype": ("fp32", "bf16", "fp16", "fp8"),
    "exp_avg_sq_dtype": ("fp32", "bf16", "fp16", "fp8"),
}
DDP_REFUSED = {  # patterns of fields -> the reason
    "grad_reduce_in_fp32 reduce_scatter_with_fp32_accumulation average_in_collective "
    "param_name_patterns_for_fp32_local_accumulation": "moerl sums gradients in fp32, in "
    "megatron-core's own buffers",
    "use_distributed_optimizer": "use trainer.optimizer.distributed",
    "check_for_*": "use trainer.skip_bad_steps",
    "num_buckets": "DistributedDataParallel does not read it; use bucket_size",
    "align_param_gather": "each pipeline stage gathers when it needs its parameters",
    "num_distributed_optimizer_instances": "the optimizer is cut over all data-parallel ranks",
    "fp8_param_gather fp4_param_gather reuse_grad_buf_for_mxfp8_param_ag": "parameters are fp32 or "
    "bf16, see trainer.dtype",
    "*fsdp* data_parallel_sharding_strategy outer_dp_sharding_strategy keep_fp8_transpose_cache "
    "suggested_communication_unit_size gradient_reduce_div_fusion": "Megatron-FSDP is not "
    "supported",
    "nccl_ub disable_symmetric_registration": "buffers registered with NCCL were never tried",
    "delay_wgrad_compute": "it belongs to overlapped expert parallelism, refused",
}
OPTIMIZER_REFUSED = {
    "lr min_lr weight_decay adam_* clip_grad use_distributed_optimizer": "use the field of "
    "trainer.optimizer",
    "fp16 bf16 params_dtype fp8_recipe reuse_grad_buf_for_mxfp8_param_ag *loss_scale* hysteresis": (
        "it follows from trainer.dtype, fp32 or bf16"
    ),
    "main_grads_dtype": "moerl sums gradients in fp32",
    "overlap_param_gather": "set trainer.ddp.overlap_param_gather",
    "overlap_param_gather_with_optimizer_step": "the gather of the first model chunk would start "
    "inside the step",
    "optimizer use_layer_wise_distributed_optimizer sgd_* *muon_* lion_* soap_*": (
        "Adam is the only optimizer"
    ),
    "decoupled_lr decoupled_min_lr": "all parameters have one rate",
    "grad_norm_skip_threshold": "a skipped update would be published",
    "use_torch_optimizer_for_cpu_offload": "on the CPU it is torch's AdamW anyway",
    # Transformer Engine's Adam counts steps in its groups, which Megatron's offload overwrites
    "optimizer_offload_fraction": "all is offloaded: after a resume, a part on the device would "
    "not count its steps",
    "optimizer_cuda_graph": "CUDA graphs of a step were never tried",
    "timers log_num_zeros_in_grad barrier_with_L1_time config_logger_dir": "nothing reads it",
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
    file = "distributed/distributed_data_parallel_config.py"
    ddp = installed_fields(file, "DistributedDataParallelConfig")
    _check_fields("trainer.ddp", trainer.ddp, ddp, DDP_REFUSED)
    optimizer = installed_fields("optimizer/optimizer_config.py", "OptimizerConfig")
    _check_fields("trainer.optimizer_args", trainer.optimizer_args, optimizer, OPTIMIZER_REFUSED)
    refuse({"trainer": trainer}, chain(_ddp(trainer), _offload(trainer), _precision(trainer)))


@cache
def installed_fields(file: str, name: str) -> Mapping[str, str]:
    """Annotations by field of a dataclass of the installed megatron-core; empty without it.

    file: path below megatron/core.
    """
    try:
        spec = importlib.util.find_spec("megatron")
    except ModuleNotFoundError:
        spec = None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(folder) / "core" / file).is_file():
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and node.name == name:
                    return {
                        ast.unparse(part.target): ast.unparse(part.annotation)
                        for part in node.body
                        if isinstance(part, ast.AnnAssign)
                    }
    return {}


def refusal(name: str, refused: Mapping[str, str]) -> str:
    """The reason why a field cannot be set; "" if it can.  refused: reason by patterns."""
    for patterns, reason in refused.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns.split()):
            return reason
    return ""


def _check_fields(
    section: str, user: Mapping[str, Any], fields: Mapping[str, str], refused: Mapping[str, str]
) -> None:
    for name, value in user.items():
        field = f"{section}.{name}"
        if reason := refusal(name, refused):
            raise ConfigError(field, value, f"{reason}; remove it")
        if fields and name not in fields:
            free = [other for other in fields if not refusal(other, refused)]
            hint = nearest(name, free)
            raise ConfigError(field, value, f"the installed megatron-core has no such field{hint}")
        _check_value(field, name, value, fields.get(name, ""))


def _check_value(field: str, name: str, value: object, annotation: str) -> None:
    names = _DTYPES.get(name)
    if names is not None:
        if value not in names:
            raise ConfigError(field, value, f"use {', '.join(names)}")
        return
    kinds = {"bool": (bool,), "int": (int,), "float": (float, int), "str": (str,)}
    inner = annotation.removeprefix("Optional[").removesuffix("]")
    if (kind := kinds.get(inner)) is None or (value is None and inner != annotation):
        return
    if type(value) not in kind:
        raise ConfigError(field, value, f"a {inner} is needed")


def _ddp(trainer: TrainerConfig) -> Rows:
    size, gathers = trainer.ddp.get("bucket_size"), trainer.ddp.get("overlap_param_gather")
    overlaps = ddp_args(trainer, cuda=trainer.platform != "cpu")["overlap_grad_reduce"]
    if size is not None and size < 1:
        yield "trainer.ddp.bucket_size", "use at least 1 parameter"
    if size is not None and not overlaps:
        yield (
            "trainer.ddp.bucket_size",
            "without overlapped reduction all gradients are one bucket; set "
            "trainer.ddp.overlap_grad_reduce=true",
        )
    field = "trainer.ddp.overlap_param_gather"
    if gathers and not trainer.optimizer.distributed:
        yield (
            field,
            True,
            "only the distributed optimizer gathers parameters; set "
            "trainer.optimizer.distributed=true",
        )
    if gathers and not overlaps:
        allowed = "it works on the buckets of trainer.ddp.overlap_grad_reduce; set both to true"
        yield field, True, allowed


def _offload(trainer: TrainerConfig) -> Rows:
    user, args, section = trainer.optimizer_args, optimizer_args(trainer), "trainer.optimizer_args"
    if not user.get("optimizer_cpu_offload"):
        for name in ("overlap_cpu_optimizer_d2h_h2d", "pin_cpu_grads", "pin_cpu_params"):
            if name in user:
                allowed = "only an offloaded optimizer reads it; set optimizer_cpu_offload=true"
                yield f"{section}.{name}", allowed
        return
    needs = {
        "trainer.platform=cuda; on the CPU nothing is offloaded": trainer.platform != "cpu",
        **_precise_needs(trainer),
        "use_precision_aware_optimizer=true": args.get("use_precision_aware_optimizer"),
        "decoupled_weight_decay=true": args.get("decoupled_weight_decay", True),
    }
    for need, is_met in needs.items():
        if not is_met:
            yield f"{section}.optimizer_cpu_offload", True, f"it needs {need}"
    for name in _DTYPES:
        if args.get(name, "fp32") != "fp32":
            yield f"{section}.{name}", "an offloaded optimizer keeps fp32; use fp32"


def _precision(trainer: TrainerConfig) -> Rows:
    user, section = trainer.optimizer_args, "trainer.optimizer_args"
    if user.get("use_precision_aware_optimizer"):
        on_cuda = "trainer.platform=cuda: it is Transformer Engine's Adam"
        needs = {on_cuda: trainer.platform != "cpu", **_precise_needs(trainer)}
        for need, is_met in needs.items():
            if not is_met:
                field = f"{section}.use_precision_aware_optimizer"
                yield field, True, f"it needs {need}"
        return
    for name in _DTYPES:
        if user.get(name, "fp32") != "fp32":
            allowed = "it needs use_precision_aware_optimizer=true; without it use fp32"
            yield f"{section}.{name}", allowed
    if "store_param_remainders" in user:
        yield (
            f"{section}.store_param_remainders",
            "only the precision-aware optimizer reads it; set use_precision_aware_optimizer=true",
        )


def _precise_needs(trainer: TrainerConfig) -> dict[str, bool]:
    return {
        "trainer.optimizer.distributed=true": trainer.optimizer.distributed,
        "trainer.dtype=bf16": trainer.dtype == "bf16",
    }
