"""Megatron's optimizer and learning-rate schedule from our settings; gradients stay plain sums.

The schedule counts batches: all optimizer steps of a batch (`trainer.minibatches`) have one rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed import finalize_model_grads as megatron_finalize
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from moerl.config.optimizer_settings import optimizer_args
from moerl.config.schema import OptimizerConfig, TrainerConfig
from moerl.core.errors import ConfigError

if TYPE_CHECKING:
    from moerl.trainer.model.gpt import Model
    from moerl.trainer.model.parallel import Parallel

# fp8: Transformer Engine's Adam keeps scaled bytes
_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.uint8,
}


def finalize_as_sums(model: list[Any], _num_tokens: Tensor | None, **kwargs: Any) -> None:
    """Megatron's finaliser without the token count it would divide the gradients by."""
    megatron_finalize(model, None, **kwargs)


def router_grad_norm(model: Model, parallel: Parallel) -> float:
    """L2 norm of the gradients of all routers, before clipping; collective.

    Every rank of a stage has the whole gradient of its routers, so each counts its share.  Not for
    the distributed optimizer, which leaves a rank with a part of the sums.
    """
    routers = [
        layer.mlp.router.weight.main_grad
        for chunk in model.chunks
        for layer in chunk.gpt.decoder.layers
        if hasattr(layer.mlp, "router") and layer.mlp.router.weight.requires_grad
    ]
    squares = torch.zeros(1, dtype=torch.float64, device=parallel.device)
    for grad in routers:
        squares += grad.detach().double().square().sum()
    squares = squares.cpu()
    dist.all_reduce(squares, group=parallel.control)
    return math.sqrt(float(squares) * parallel.sizes.pp / parallel.world_size)


def make_optimizer(ddp: list[DistributedDataParallel], trainer: TrainerConfig) -> MegatronOptimizer:
    """Megatron's Adam.  Raises ConfigError when it refuses `trainer.optimizer_args`."""
    half, settings = trainer.dtype == "bf16", trainer.optimizer
    asked = optimizer_args(trainer)
    args = {name: _DTYPES.get(value, value) for name, value in asked.items()}
    try:
        config = MegatronOptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=_floor(settings),
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            bf16=half,
            params_dtype=torch.bfloat16 if half else torch.float32,
            use_distributed_optimizer=settings.distributed,
            overlap_param_gather=ddp[0].ddp_config.overlap_param_gather,
            **args,
        )
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            "trainer.optimizer_args", asked, f"megatron-core says: {error}"
        ) from error
    return get_megatron_optimizer(config, ddp)


def connect(
    model: Model, ddp: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer
) -> None:
    """Give Megatron's schedules the functions that finish, scale and delay the reduction.

    An overlapped reduction belongs to the last microbatch of a step.
    """
    model.config.finalize_model_grads_func = finalize_as_sums
    model.config.grad_scale_func = optimizer.scale_loss
    if ddp[0].ddp_config.overlap_grad_reduce:
        pauses = [chunk.no_sync for chunk in ddp]
        model.config.no_sync_func = pauses if len(pauses) > 1 else pauses[0]


def gather_parameters(ddp: Sequence[DistributedDataParallel]) -> None:
    """Make every rank's parameters whole after the last update of a batch; collective.

    With `trainer.ddp.overlap_param_gather` the forward pass would do it, and readers of weights
    outside it (snapshot of a publish, checkpoint, hf/) would find the weights before the update.
    """
    for chunk in ddp:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def make_schedule(
    optimizer: MegatronOptimizer, settings: OptimizerConfig, run_steps: int
) -> OptimizerParamScheduler:
    decay_steps = settings.decay_steps or run_steps
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=_floor(settings),
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=max(decay_steps, settings.warmup_steps + 1),
        lr_decay_style=settings.decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
        # a checkpoint restores the position in the schedule, never the schedule itself
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def _floor(settings: OptimizerConfig) -> float:
    """A rate below `min_lr` does not rise to it: parameter groups would decay towards theirs."""
    return min(settings.min_lr, settings.lr)


class NotFiniteError(Exception):
    """The gradient norm is not finite; the optimizer step was not taken."""


def take_step(optimizer: MegatronOptimizer, agree: Callable[[bool], bool]) -> list[float]:
    """Take one optimizer step; returns the gradient norm before clipping if Megatron computed one.

    agree: whether the norm is finite on all ranks.  Raises NotFiniteError on all of them if it is
    not; weights and optimizer state are then unchanged.
    """
    measure = optimizer.get_grad_norm

    def measured() -> Any:
        norm = measure()
        is_finite = norm is None or math.isfinite(norm)
        if not agree(is_finite):
            found = "not finite on another rank" if is_finite else norm
            raise NotFiniteError(f"the gradient norm is {found}")
        return norm

    # Megatron's step asks for it before it clips
    optimizer.get_grad_norm = measured
    try:
        _, grad_norm, _ = optimizer.step()
    finally:
        optimizer.get_grad_norm = measure
    return [] if grad_norm is None else [float(grad_norm)]
