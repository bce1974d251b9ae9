"""What a case of the replay matrix does with a critic: values, GAE, gradients, a resumed step.

Imported by the worker after its platform is set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moerl.core.types import Array, BatchPlan, PolicyVersion
from moerl.runtime.run_dir import RunDir
from moerl.trainer.checkpoints import checkpoint
from moerl.trainer.learner.critic import Critic
from moerl.trainer.learner.step import Learner
from moerl.trainer.model.parallel import Parallel
from moerl.trainer.model.value_head import ValueHead
from tests.helpers.hf_gather import HfGather
from tests.helpers.saved_checkpoint import save_whole

NAMES = ("loss/value", "critic/value_mean", "critic/return_mean", "critic/explained_frac")


def critic_step(
    case: dict[str, Any],
    learner: Learner,
    plan: BatchPlan,
    again: Callable[[], Learner],
    root: Path,
) -> dict[str, Any]:
    """One step of policy and critic.  again: a learner like this one, from the model's folder."""
    critic = learner.critic
    assert critic is not None
    assert all(not value.any() for value in critic.values(plan)), "a head of zeros"
    head = _head(critic)
    if head is not None:  # with zeros nothing below the head would get a gradient
        noise = np.random.default_rng(0).normal(0, 0.3, tuple(head.weight.shape))
        with torch.no_grad():
            head.weight.copy_(torch.from_numpy(noise))
    found: dict[str, Any] = {
        "values": _by_rollout(plan, critic.values(plan)),
        "advantages": _by_rollout(plan, critic.advantages(plan)),
        "returns": _by_rollout(plan, critic._returns),
    }
    metrics = learner.step(plan)
    found["metrics"] = {name: metrics[name] for name in (*NAMES, "critic/grad_norm")}
    found["after"] = _by_rollout(plan, critic.values(plan))
    found["gradients"] = _gradients(critic, learner.parallel)
    if case.get("resume"):
        found["resumed"] = _resumed(root, learner, again, plan)
    if left := case.get("continues"):  # another trainer's checkpoint, of another layout
        other = again()
        path = RunDir(root.with_name(f"run.{left}")).checkpoint(1)
        checkpoint.load(path, other, learner.parallel)
        assert other.critic is not None
        found["continued"] = _by_rollout(plan, other.critic.values(plan))
    return found


def _head(critic: Critic) -> ValueHead | None:
    heads = [c.gpt.output_layer for c in critic.model.chunks if c.has_loss]
    return heads[0] if heads else None


def _by_rollout(plan: BatchPlan, rows: Sequence[Array]) -> dict[str, torch.Tensor]:
    named = zip(plan.rollouts(), rows, strict=True)
    return {rollout.rollout_id: torch.from_numpy(values).float() for rollout, values in named}


def _gradients(critic: Critic, ranks: Parallel) -> dict[str, torch.Tensor] | None:
    """Whole gradients on rank 0 in Hugging Face names; the head's as `head`."""
    named: dict[str, torch.Tensor] = {}
    for name, tensor in critic.model.tensors.items():
        named[name] = getattr(tensor, "main_grad", tensor)
    head = _head(critic)
    every: list[torch.Tensor | None] = [None] * ranks.world_size
    dist.all_gather_object(
        every, None if head is None else head.weight.main_grad.clone(), group=ranks.control
    )
    gather = HfGather(
        lambda: named, critic.model.spec, ranks.sizes, ranks.rank, "local", ranks.control
    )
    whole = gather.gather()
    if whole is None:
        return None
    heads = [part for part in every if part is not None]
    assert all(torch.equal(heads[0], other) for other in heads), "tensor ranks hold one head"
    result = {name: t.clone() for name, t in whole.items() if name != "score.weight"}
    assert torch.equal(whole["score.weight"], heads[0])
    return result | {"head": heads[0]}


def _resumed(
    root: Path, learner: Learner, again: Callable[[], Learner], plan: BatchPlan
) -> dict[str, tuple[float, float]]:
    """(uninterrupted, resumed) of the second step, after a checkpoint of the first."""
    ranks = learner.parallel
    progress = checkpoint.Progress(PolicyVersion(0, 1), ((0, 2),))
    path = save_whole(root, learner, progress, ranks)
    other = again()
    assert checkpoint.load(path, other, ranks) == progress
    want, got = learner.step(plan), other.step(plan)
    return {name: (want[name], got[name]) for name in (*NAMES, "loss/total")}
