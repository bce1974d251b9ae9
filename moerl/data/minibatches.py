"""One batch of rollouts as several optimizer steps: whole groups in each, one plan per step.

The controller plans a batch; only the trainer splits it into optimizer steps, so every rank makes
the split from the plan and the seed, without a message.  Each part is planned like a separate
batch: global denominators, microbatch numbers and shapes follow from it, equal on all data-parallel
ranks.  Each batch deals its groups at random, because their order in the plan is by age.
Rejected: splitting groups (siblings would meet different weights), shuffling tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from moerl.config.schema import TrainerConfig
from moerl.data.batching import plan_batch
from moerl.errors import ConfigError
from moerl.types import BatchPlan

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Minibatch:
    """The part of a batch that one optimizer step trains."""

    plan: BatchPlan  # its groups, under the batch's step and version
    rows: tuple[int, ...]  # for each row of `plan`, its number among the rows of the batch

    @classmethod
    def whole(cls, plan: BatchPlan) -> Minibatch:
        """One optimizer step for the batch."""
        return cls(plan, tuple(range(len(plan.rows))))

    def of(self, values: Sequence[T]) -> list[T]:
        """The values of this minibatch's rows, from values by row of the batch."""
        return [values[row] for row in self.rows]


def split_plan(plan: BatchPlan, trainer: TrainerConfig, *, seed: int) -> tuple[Minibatch, ...]:
    """`trainer.minibatches` parts with equal numbers of groups, in the order they are trained.

    Deterministic in plan and seed; one part is the plan itself.
    Raises ConfigError when the groups do not divide.
    """
    count, groups = trainer.minibatches, len(plan.groups)
    if count == 1:
        return (Minibatch.whole(plan),)
    if groups % count:
        raise ConfigError("trainer.minibatches", count, f"it must divide the {groups} groups")
    order = np.random.default_rng([seed, plan.step]).permutation(groups)
    number = {(r.group, r.episode, r.turn): index for index, r in enumerate(plan.rows)}
    return tuple(
        _part(plan, sorted(chosen.tolist()), number, trainer)
        for chosen in order.reshape(count, groups // count)
    )


def _part(
    plan: BatchPlan,
    chosen: Sequence[int],
    number: dict[tuple[int, int, int], int],
    trainer: TrainerConfig,
) -> Minibatch:
    part = plan_batch(
        plan.step,
        plan.version,
        [plan.groups[group] for group in chosen],
        dp_size=trainer.parallel.dp,
        max_tokens_per_microbatch=trainer.max_tokens_per_microbatch,
        packed=trainer.packing,
    )
    rows = tuple(number[chosen[row.group], row.episode, row.turn] for row in part.rows)
    return Minibatch(part, rows)
