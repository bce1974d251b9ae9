"""Checkpoints for resume: model, optimizer, schedule, random state and consumed groups.

Format: megatron-core's torch_dist, in global coordinates: tensors are cut for the layout that loads
them.  `moerl.trainer.checkpoints.checkpoint_writer` writes them while training continues.

The set of consumed groups is inside the checkpoint: a restart redoes the steps after it, and the
controller never plans a consumed group again (design: exactly once in the surviving history).

Traps of 0.16.1: loading a distributed optimizer asserts until torch Adam has state, so a step with
zero gradients and rate 0 comes first; EP = 1 and EP > 1 keep differently chained optimizers, so a
resume on the other side needs fresh optimizer state (`moerl.config.resume` refuses it otherwise).
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import (
    MegatronOptimizer,
    param_group_identifier_keys,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from moerl.config.resume import resume_facts
from moerl.config.schema import ParallelConfig
from moerl.core.errors import TrainerError
from moerl.core.ids import IdSet, Ranges
from moerl.core.types import PolicyVersion
from moerl.distributed.object_collectives import all_gather_values, broadcast_value
from moerl.runtime.run_dir import RunDir, read_manifest
from moerl.trainer.checkpoints.checkpoint_files import damage, newest_checkpoint, set_aside
from moerl.trainer.checkpoints.checkpoint_writer import METADATA, CheckpointWriter
from moerl.trainer.checkpoints.optimizer_shards import is_sharded, load_state, sharded_state
from moerl.trainer.learner.step import Learner
from moerl.trainer.model.gpt import Chunk
from moerl.trainer.model.lora import PREFIX
from moerl.trainer.model.parallel import Parallel

log = logging.getLogger(__name__)

_PREFIX = "critic."
_MAY_CHANGE = ("max_lr", "min_lr", "start_wd", "end_wd")  # of a parameter group, over a resume
# Of a parameter group: how an offloaded optimizer computes.  Two are classes, which no checkpoint
# may contain: megatron-core 0.19.2 writes them and then refuses to read them.
_HOW = (
    "cpu_optimizer_cls",
    "gpu_optimizer_cls",
    "offload_fraction",
    "param_update_in_fp32",
    "pin_cpu_grads",
    "pin_cpu_params",
    "overlap_cpu_optimizer_d2h_h2d",
    "bias_correction",
    "fused",
)


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a resumed run continues.

    The data cursor is in `consumed`: prompt i belongs to group i, and a resumed run continues with
    the lowest id that is not in it.
    """

    version: PolicyVersion  # weights in the checkpoint; version.step optimizer steps are inside
    consumed: Ranges  # group ids trained so far
    begins: tuple[PolicyVersion, ...] = ()  # first version of each trainer that led to the weights


def save(
    writer: CheckpointWriter, learner: Learner, progress: Progress, parallel: Parallel
) -> None:
    """Copy the state of a resume and start to write it; collective over all ranks."""
    state = _state(learner, parallel, is_loading=False)
    state["moerl"] = asdict(progress)
    manifest = resume_facts(learner.config) | {
        "version": str(progress.version),
        "step": progress.version.step,
        "consumed_groups": len(IdSet(progress.consumed)),
        "saved_s": time.time(),
    }
    is_offloaded = bool(learner.config.trainer.optimizer_args.get("optimizer_cpu_offload"))
    writer.save(progress.version.step, state, manifest, is_offloaded=is_offloaded)


def load_newest(
    run: RunDir,
    newest: Path,
    learner: Learner,
    parallel: Parallel,
    *,
    reset_optimizer: bool = False,
) -> Progress:
    """`load`, after all ranks together have compared the files with their digests; collective.

    A damaged checkpoint is set aside and its predecessor is loaded.  Raises ModelError without any.
    """
    path = newest
    while cause := _damage(path, parallel):
        path = _one_before(run, path, cause, parallel)
    return load(path, learner, parallel, reset_optimizer=reset_optimizer)


def _damage(path: Path, parallel: Parallel) -> str:
    """The damage, equal text on every rank, or ""; each reads its share of the files."""
    names = sorted(read_manifest(path)["files"])
    own = damage(path, names[parallel.rank :: parallel.world_size])
    return next(filter(None, all_gather_values(own, str, parallel.control)), "")


def _one_before(run: RunDir, path: Path, cause: str, parallel: Parallel) -> Path:
    before = ""
    if parallel.is_first:
        set_aside(path, cause)
        before = str(newest_checkpoint(run))
    return Path(broadcast_value(before, str, parallel.control))


def load(
    path: Path, learner: Learner, parallel: Parallel, *, reset_optimizer: bool = False
) -> Progress:
    """Restore a checkpoint, on any layout that `check_resume` allows; collective.

    Rates, decay and Adam's constants come from the configuration; moments and the position in
    the schedule come from the checkpoint.
    reset_optimizer: take weights and position, start with fresh optimizer state.  Random states
    are restored on the layout they were saved with; on another layout they keep initial values.
    Raises TrainerError for a folder that is not a complete checkpoint.
    """
    if not (path / "metadata.json").exists():
        raise TrainerError(f"{path} is not a whole checkpoint")
    saved = read_manifest(path)
    same = ParallelConfig(**saved["parallel"]) == parallel.sizes  # absent: the default
    if learner.config.trainer.optimizer.distributed and not reset_optimizer:
        for ddp, optimizer, _ in _trained(learner):
            _give_adam_state(ddp, optimizer)
    wanted = _state(learner, parallel, is_loading=True, with_optimizer=not reset_optimizer)
    if not same:
        del wanted["random"]
        log.warning("%s has layout %s: random states stay as seeded", path, saved["parallel"])
    if reset_optimizer:
        log.warning("%s: fresh optimizer state, the saved moments are not used", path)
    state = dist_checkpointing.load(wanted, str(path), process_group=parallel.control)
    _restore(learner, state, reset_optimizer=reset_optimizer)
    if same:
        _restore_random(state["random"])
    progress = state["moerl"]
    return Progress(
        version=PolicyVersion(**progress["version"]),
        consumed=tuple((int(begin), int(end)) for begin, end in progress["consumed"]),
        begins=tuple(PolicyVersion(**one) for one in progress["begins"]),
    )


def _restore(learner: Learner, state: dict[str, Any], *, reset_optimizer: bool) -> None:
    for chunk in learner.model.chunks:
        chunk.gpt.load_state_dict(state[f"model{chunk.index}"], strict=chunk.lora is None)
    learner.model.merge()
    if (critic := learner.critic) is not None:
        for chunk in critic.model.chunks:
            chunk.gpt.load_state_dict(state[f"critic_model{chunk.index}"])
    for (_, optimizer, schedule), role in zip(_trained(learner), ("", "critic_"), strict=False):
        if reset_optimizer:
            optimizer.reload_model_params()
        else:
            configured, saved = _settings(optimizer), state[role + "optimizer"]
            _name_groups_by(saved, optimizer)
            if is_sharded(optimizer):
                load_state(optimizer, saved)
            else:
                optimizer.load_state_dict(saved)
            _unshare_adam_steps(optimizer)
            for group, own in zip(optimizer.param_groups, configured, strict=True):
                group |= own
        schedule.load_state_dict(state[role + "schedule"])


def _trained(
    learner: Learner,
) -> list[tuple[list[DistributedDataParallel], MegatronOptimizer, OptimizerParamScheduler]]:
    """The policy's wrapped model, optimizer and schedule, then the critic's."""
    trained = [(learner.ddp, learner.optimizer, learner.schedule)]
    if (critic := learner.critic) is not None:
        trained.append((critic.ddp, critic.optimizer, critic.schedule))
    return trained


def _state(
    learner: Learner, parallel: Parallel, *, is_loading: bool, with_optimizer: bool = True
) -> dict[str, Any]:
    """The sharded state: the source of a save, the target tensors of a load.

    with_optimizer: False leaves optimizers untouched; requesting their state would create it.
    """
    model = {f"model{chunk.index}": _trained_part(chunk) for chunk in learner.model.chunks}
    state = model | {
        "schedule": learner.schedule.state_dict(),
        "random": ShardedObject(
            "random", _random_state(), (parallel.world_size,), (parallel.rank,), replica_id=0
        ),
    }
    if with_optimizer:
        state["optimizer"] = _optimizer_state(learner.optimizer, model, is_loading)
    if (critic := learner.critic) is not None:
        # keys of a folder are global: the critic's tensors get a prefix
        model = {
            f"critic_model{chunk.index}": {
                key.removeprefix(_PREFIX): part
                for key, part in chunk.gpt.sharded_state_dict(
                    prefix=_PREFIX, metadata=dict(METADATA)
                ).items()
            }
            for chunk in critic.model.chunks
        }
        state |= model
        state["critic_schedule"] = critic.schedule.state_dict()
        if with_optimizer:
            state["critic_optimizer"] = _optimizer_state(critic.optimizer, model, is_loading)
    return state


def _trained_part(chunk: Chunk) -> dict[str, Any]:
    """The sharded tensors of a chunk; adapters alone where the weights are frozen."""
    whole: dict[str, Any] = chunk.gpt.sharded_state_dict(metadata=dict(METADATA))
    if chunk.lora is None:
        return whole
    return {name: part for name, part in whole.items() if name.startswith(PREFIX)}


def _optimizer_state(
    optimizer: MegatronOptimizer, model: dict[str, Any], is_loading: bool
) -> dict[str, Any]:
    state: dict[str, Any]
    if is_sharded(optimizer):
        state = sharded_state(optimizer, model, is_loading=is_loading)
    else:
        state = optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=dict(METADATA))
    for group in _saved_groups(state):
        if "cpu_optimizer_cls" in group:
            for name in _HOW:
                group.pop(name, None)
    return state


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _settings(optimizer: MegatronOptimizer) -> list[dict[str, Any]]:
    """The configured values of each parameter group; the schedule derives rate and weight decay.

    A checkpoint holds the values of the run that wrote it.
    """
    names = ("max_lr", "min_lr", "betas", "eps", *_HOW)
    return [
        {name: group[name] for name in names if name in group} for group in optimizer.param_groups
    ]


def _name_groups_by(saved: Any, optimizer: MegatronOptimizer) -> None:
    """Give saved parameter groups the configured rates and decays, in place.

    megatron-core finds the saved group of a live one by these values too
    (`param_group_identifier_keys`), and a resume may change them.  Fields that set groups of
    moerl apart are left: multipliers, and whether a group holds experts.
    """
    live = {_kind(group): group for group in optimizer.param_groups}
    for group in _saved_groups(saved):
        configured = live[_kind(group)]
        group |= {key: configured[key] for key in _MAY_CHANGE if key in configured}


def _kind(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(group.get(key) for key in param_group_identifier_keys if key not in _MAY_CHANGE)


def _saved_groups(saved: Any) -> Iterator[dict[str, Any]]:
    """Parameter groups of an optimizer's state: chained or one, distributed or not."""
    if isinstance(saved, dict):
        yield from saved.get("param_groups", ())
        for part in saved.values():
            yield from _saved_groups(part)


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
    """One step with zero gradients and rate 0: torch Adam creates its state, no weight changes."""
    for chunk in ddp:
        chunk.zero_grad_buffer()
    rates = [(group, group["lr"]) for group in optimizer.param_groups]
    for group, _ in rates:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in rates:
        group["lr"] = rate
