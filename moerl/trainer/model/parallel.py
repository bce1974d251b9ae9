"""Process groups of the trainer, as one value that is passed down.

megatron-core reads groups from its own module global, which cannot be avoided; our code takes a
`Parallel`.  Rank order is Megatron's default, tp-cp-ep-dp-pp, so tensor-parallel peers are
neighbours and the expert-parallel group lies inside the data-parallel one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from moerl.config.schema import ParallelConfig
from moerl.core.errors import ConfigError, TrainerError
from moerl.distributed.token_store import rank_store
from moerl.trainer.model.platform import Platform

Group = dist.ProcessGroup

_CONTROL_SLACK = timedelta(seconds=60)  # rank 0 waits for the controller, the others for rank 0


@dataclass(frozen=True, slots=True)
class Parallel:
    """This rank's process groups.  Set once by `start`."""

    sizes: ParallelConfig
    platform: Platform
    rank: int
    world_size: int
    dp: Group  # ranks that see different rows
    dp_gloo: Group  # the same ranks over gloo: sums of metrics
    dp_rank: int
    tp: Group  # ranks that share a vocabulary, attention heads and sequence positions
    tp_rank: int
    cp: Group  # ranks that share rows and split their positions
    cp_rank: int
    pp: Group  # ranks that hold successive stages of one model
    pp_rank: int
    control: Group  # gloo group of all ranks: plans, verdicts, checkpoints
    timeout: timedelta  # of collectives

    @property
    def dp_size(self) -> int:
        return self.sizes.dp

    @property
    def tp_size(self) -> int:
        return self.sizes.tp

    @property
    def cp_size(self) -> int:
        return self.sizes.cp

    @property
    def is_first_stage(self) -> bool:
        """True where tokens are embedded (in the first model chunk)."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True where logits and losses are computed (in the last model chunk)."""
        return self.pp_rank == self.sizes.pp - 1

    @property
    def device(self) -> torch.device:
        return self.platform.device

    @property
    def is_first(self) -> bool:
        """True on the rank that talks to the controller."""
        return self.rank == 0


def start(sizes: ParallelConfig, platform: Platform, *, timeout_s: float) -> Parallel:
    """Join the trainer described by torchrun's environment and build Megatron's groups.

    Ranks meet in the job's own store, and all groups are made over it.
    Raises TrainerError outside torchrun, ConfigError when the trainer has another size.  Layouts
    that train wrong or are not proven with replay are refused earlier, by `moerl.config.checks`.
    """
    try:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except KeyError as error:
        raise TrainerError(f"start the trainer with torchrun: {error.args[0]} is not set") from None
    if world_size != sizes.world_size:
        raise ConfigError(
            "trainer.parallel", sizes, f"needs {sizes.world_size} ranks and has {world_size}"
        )
    from megatron.core import parallel_state

    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        platform.backend,
        store=rank_store(timeout),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    _make_groups(sizes, timeout_s)
    return Parallel(
        sizes=sizes,
        platform=platform,
        rank=rank,
        world_size=world_size,
        dp=parallel_state.get_data_parallel_group(),
        dp_gloo=parallel_state.get_data_parallel_group_gloo(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        tp=parallel_state.get_tensor_model_parallel_group(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        cp=parallel_state.get_context_parallel_group(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        control=dist.new_group(backend="gloo", timeout=timeout + _CONTROL_SLACK),
        timeout=timeout,
    )


def _make_groups(sizes: ParallelConfig, timeout_s: float) -> None:
    """Build Megatron's groups over the default one, and seed its random states."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        sizes.tp,
        sizes.pp,
        sizes.vpp if sizes.vpp > 1 else None,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        distributed_timeout_minutes=timeout_s / 60,  # a timedelta accepts fractions
        create_gloo_process_groups=True,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def stop() -> None:
    """Leave the trainer's process groups."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
