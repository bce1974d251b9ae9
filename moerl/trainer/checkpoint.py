"""Checkpoints for resume: model, optimizer, schedule, random state and what the run has consumed.

Format: megatron-core's torch_dist.  A checkpoint is written to a hidden folder and renamed when all
ranks are done, so a folder that is called step-NNNNNN is whole; the oldest beyond `keep` go.

The set of consumed groups is inside the checkpoint: a restart redoes the steps after it, and the
controller never plans a consumed group again (design: exactly once in the surviving history).

Traps of 0.16.1: psutil must be installed (the forked writer dies without it and the parent hangs);
loading a distributed optimizer asserts until torch Adam has state, so a step with zero gradients
and rate 0 comes first; EP = 1 and EP > 1 keep differently chained optimizers, so a checkpoint is
resumed with the layout it was written with.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer

from moerl.errors import TrainerError
from moerl.trainer.parallel import Parallel
from moerl.trainer.step import Learner
from moerl.types import PolicyVersion

_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}
_PREFIX = "step-"
_CRITIC = "critic."


@dataclass(frozen=True, slots=True)
class Progress:
    """What a resumed run continues from."""

    version: PolicyVersion  # weights in the checkpoint; version.step optimizer steps are inside
    consumed: tuple[int, ...]  # group ids trained so far, ascending
    metrics_rows: int  # rows of metrics.jsonl that belong to the surviving history


def save(
    folder: Path, learner: Learner, progress: Progress, parallel: Parallel, *, keep: int
) -> Path:
    """Write folder/step-NNNNNN, collective over all ranks; returns its path."""
    name = f"{_PREFIX}{progress.version.step:06d}"
    fresh, target = folder / f".{name}.writing", folder / name
    if parallel.is_first:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
    dist.barrier(parallel.control)
    state = _state(learner, parallel, is_loading=False)
    state["moerl"] = asdict(progress) | {"parallel": asdict(parallel.sizes)}
    dist_checkpointing.save(state, str(fresh), content_metadata=_METADATA)
    dist.barrier(parallel.control)
    if parallel.is_first:
        if target.exists():  # a step that was redone after a crash
            shutil.rmtree(target)
        fresh.rename(target)
        for old in sorted(folder.glob(f"{_PREFIX}*"))[:-keep]:
            shutil.rmtree(old)
    dist.barrier(parallel.control)
    return target


def load(path: Path, learner: Learner, parallel: Parallel) -> Progress:
    """Restore everything `save` wrote, collective over all ranks.

    Raises TrainerError for a missing folder or one written with another parallel layout.
    """
    if not (path / "metadata.json").exists():
        raise TrainerError(f"{path} is not a whole checkpoint")
    common = dist_checkpointing.load_common_state_dict(str(path))["moerl"]
    if common["parallel"] != asdict(parallel.sizes):
        raise TrainerError(
            f"{path} was written with trainer.parallel {common['parallel']}; resume with the same"
        )
    if learner.config.trainer.optimizer.distributed:
        _give_adam_state(learner.ddp, learner.optimizer)
        if learner.critic is not None:
            _give_adam_state(learner.critic.ddp, learner.critic.optimizer)
    state = dist_checkpointing.load(_state(learner, parallel, is_loading=True), str(path))
    for chunk in learner.model.chunks:
        chunk.gpt.load_state_dict(state[f"model{chunk.index}"])
    learner.optimizer.load_state_dict(state["optimizer"])
    _unshare_adam_steps(learner.optimizer)
    learner.schedule.load_state_dict(state["schedule"])
    if (critic := learner.critic) is not None:
        critic.model.gpt.load_state_dict(state["critic_model"])
        critic.optimizer.load_state_dict(state["critic_optimizer"])
        _unshare_adam_steps(critic.optimizer)
        critic.schedule.load_state_dict(state["critic_schedule"])
    _restore_random(state["random"])
    return Progress(
        version=PolicyVersion(**common["version"]),
        consumed=tuple(common["consumed"]),
        metrics_rows=common["metrics_rows"],
    )


def _state(learner: Learner, parallel: Parallel, *, is_loading: bool) -> dict[str, Any]:
    model = {
        f"model{chunk.index}": chunk.gpt.sharded_state_dict(metadata=_METADATA)
        for chunk in learner.model.chunks
    }
    return _critic_state(learner, is_loading=is_loading) | {
        **model,
        "optimizer": learner.optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=_METADATA
        ),
        "schedule": learner.schedule.state_dict(),
        "random": ShardedObject(
            "random", _random_state(), (parallel.world_size,), (parallel.rank,), replica_id=0
        ),
    }


def _critic_state(learner: Learner, *, is_loading: bool) -> dict[str, Any]:
    """Keys of a folder are global: the critic's tensors have a prefix of their own there."""
    if (critic := learner.critic) is None:
        return {}
    model = critic.model.gpt.sharded_state_dict(prefix=_CRITIC, metadata=_METADATA)
    optimizer = critic.optimizer.sharded_state_dict(
        model, is_loading=is_loading, metadata=_METADATA
    )
    return {
        "critic_model": {key.removeprefix(_CRITIC): value for key, value in model.items()},
        "critic_optimizer": optimizer,
        "critic_schedule": critic.schedule.state_dict(),
    }


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _unshare_adam_steps(optimizer: MegatronOptimizer) -> None:
    """Give each parameter its own step count again.

    The distributed optimizer's loader hands one `step` tensor to all of them; torch Adam then
    counts it up once per parameter, and the second update after a resume has a wrong bias
    correction (losses differ in the third digit, nothing fails).
    """
    for chained in optimizer.chained_optimizers:
        for state in chained.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()


def _give_adam_state(ddp: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """One step with zero gradients and rate 0: torch Adam creates its state, nothing moves."""
    for chunk in ddp:
        chunk.zero_grad_buffer()
    rates = [(group, group["lr"]) for group in optimizer.param_groups]
    for group, _ in rates:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in rates:
        group["lr"] = rate
