"""Placement of rows in microbatches and ranks: one plan per optimizer step, by the controller.

Right-padded, a microbatch costs rows x its longest row; packed, the sum of its rows.  Rows sorted
by length are cut into consecutive bins: neighbours have similar lengths, which keeps padding small.
There are as many bins as data-parallel ranks x microbatches; the largest bin is as small as
possible, and bins of one microbatch have similar cost, because ranks of an expert-parallel exchange
wait for each other.
Rejected: best-fit by token count (it ignores padding, which dominates with padded rows).

One batch may become several optimizer steps: whole groups in each, one plan per step.  How many is
the trainer's own matter, so the split is made on every rank from the plan and the seed, and no
message carries it.  Each part is planned like a batch of its own: global denominators, microbatch
numbers and shapes follow from it, equal on all data-parallel ranks.  Groups are dealt by chance in
each batch: their order in the plan is that of their age.
Rejected: splitting rollouts (siblings of a group would meet different weights), shuffling tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from moerl.config.schema import TrainerConfig
from moerl.errors import ConfigError
from moerl.types import BatchPlan, EpisodeGroup, PlanRow, PolicyVersion

T = TypeVar("T")
_Place = tuple[int, int, int]  # group, episode, turn
_Item = tuple[int, _Place]  # fed-in tokens, place


def plan_batch(
    step: int,
    version: PolicyVersion,
    groups: Sequence[EpisodeGroup],
    *,
    dp_size: int,
    max_tokens_per_microbatch: int,
    packed: bool = False,
) -> BatchPlan:
    """Place every row of every group exactly once.  Deterministic.

    max_tokens_per_microbatch bounds rows x longest row of one rank, packed: their sum; a single
    row above the bound gets its own microbatch.  A rank may have no rows in a microbatch.
    """
    items = [
        (turn.rollout.num_tokens - 1, (group_idx, episode_idx, turn_idx))
        for group_idx, group in enumerate(groups)
        for episode_idx, episode in enumerate(group.episodes)
        for turn_idx, turn in enumerate(episode.turns)
    ]
    assert items, f"step {step} has no row to train"
    items.sort(key=lambda item: (-item[0], item[1]))
    num_microbatches = -(-len(_cut(items, max_tokens_per_microbatch, packed)) // dp_size)
    bins = _smallest(items, num_microbatches * dp_size, max_tokens_per_microbatch, packed)
    bins.sort(key=lambda rows: (-_cost(rows, packed), rows[0][1]))
    rows = []
    for bin_idx, members in enumerate(bins):
        microbatch, rank = divmod(bin_idx, dp_size)
        if microbatch % 2:
            rank = dp_size - 1 - rank  # alternate the direction, so that rank totals even out
        for row, (_, place) in enumerate(members):
            rows.append(PlanRow(*place, dp_rank=rank, microbatch=microbatch, row=row))
    return BatchPlan(step, version, tuple(groups), tuple(rows), num_microbatches)


def _cost(rows: Sequence[_Item], packed: bool) -> int:
    return sum(num for num, _ in rows) if packed else len(rows) * rows[0][0]


def _cut(items: Sequence[_Item], cap: int, packed: bool) -> list[list[_Item]]:
    """Fewest consecutive bins of cost <= cap, a single item may exceed it; items fall in length."""
    bins: list[list[_Item]] = []
    room = 0  # tokens left in a packed bin
    for item in items:
        fits = item[0] <= room if packed else bins and bins[-1][0][0] * (len(bins[-1]) + 1) <= cap
        if bins and fits:
            bins[-1].append(item)
            room -= item[0]
        else:
            bins.append([item])
            room = cap - item[0]
    return bins


def _smallest(items: Sequence[_Item], num_bins: int, cap: int, packed: bool) -> list[list[_Item]]:
    """At most num_bins bins with the smallest possible cap; `cap` is known to suffice."""
    low = 1
    while low < cap:
        middle = (low + cap) // 2
        if len(_cut(items, middle, packed)) <= num_bins:
            cap = middle
        else:
            low = middle + 1
    return _cut(items, cap, packed)


@dataclass(frozen=True, slots=True, eq=False)
class Minibatch:
    """What one optimizer step trains."""

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
