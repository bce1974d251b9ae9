"""Placement of rows in microbatches and ranks: one plan per optimizer step, by the controller.

A bin holds the rows that one rank trains in one microbatch; their number is data-parallel ranks x
microbatches.  Its tokens have a bound, for memory: right-padded, rows x the longest row; packed,
the sum of its rows.  Its cost (`moerl.data.batching`) has none, but the largest is kept small, and
bins of one microbatch have similar cost, because ranks of an expert-parallel exchange wait for each
other.  Padded, rows sorted by length are cut into consecutive bins: neighbours have similar
lengths.  Packed, the next row by cost goes to the cheapest bin that has room for its tokens (the
longest-processing-time rule, Graham 1969), so long rows share bins with short rows.  Rows of a
group that share leading tokens (`moerl.data.shared_prefix`) are dealt together, their shared tokens
counted once.
Rejected: best-fit by token count (it ignores padding, and attention, which grows with the square);
set differencing (Karmarkar and Karp), which cannot keep the bound on tokens.

One batch may become several optimizer steps: whole groups in each, one plan per step.  Every rank
derives the split from the plan and the seed, so no message carries it.  Each part is planned like a
batch of its own: global denominators, microbatch numbers and shapes follow from it, equal on all
data-parallel ranks.  Groups are dealt by chance in each batch: their order in the plan is the order
of their age.
Rejected: splitting rollouts (siblings of a group would meet different weights), shuffling tokens.

The cost of a row for a trainer rank: arithmetic that grows with its tokens, and with their
pairs.

A token passes the weights of the layers, of the experts as many as it is sent to: 2 operations per
weight.  In a layer of attention it meets each token before it: 2 heads (qk + v) operations per pair
(Megatron-LM, Narayanan et al., 2104.04473, appendix, without recomputation).  Backward passes take
twice as much of both, so only the ratio counts.  Left out: the output layer, which only sampled
tokens pass; attention within a window and gated delta nets, which cost the same per token.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np

from moerl.config.schema import TrainerConfig
from moerl.core.errors import ConfigError
from moerl.core.types import BatchPlan, EpisodeGroup, PlanRow, PolicyVersion
from moerl.data.shared_prefix import shared_tokens, walk_order
from moerl.layout import ModelSpec, hf_shapes

_UNIT = 1024  # costs are whole numbers, equal on every rank
_OUTSIDE = ("embed_tokens.weight", "lm_head.weight")


def pair_cost(spec: ModelSpec) -> float:
    """Cost of one pair of tokens in all layers, in costs of one token's weights."""
    of_layer = spec.index_heads * spec.index_dim if spec.index_topk else _attention(spec)
    local = {*spec.linear_layers, *(spec.sliding_layers if spec.sliding_window else ())}
    return of_layer * (spec.layers - len(local)) / _weights_of_a_token(spec)


def row_cost(tokens: int, pair: float) -> int:
    """Cost of a row, in 1/1024 of a token's weights; pair: `pair_cost`, 0 counts tokens alone."""
    return _UNIT * tokens + math.floor(_UNIT * pair * tokens * (tokens + 1) / 2)


def _attention(spec: ModelSpec) -> int:
    if spec.kv_lora:
        return spec.heads * (spec.qk_nope + spec.qk_rope + spec.v_head)
    return 2 * spec.heads * spec.head_dim


def _weights_of_a_token(spec: ModelSpec) -> float:
    total = 0.0
    for name, shape in hf_shapes(replace(spec, mtp_layers=0)).items():
        if len(shape) < 2 or name.endswith(_OUTSIDE):
            continue
        share = spec.experts_per_token / spec.experts if ".experts." in name else 1.0
        total += share * math.prod(shape)
    return total


T = TypeVar("T")
_TRIES = 8  # numbers of microbatches that packing tries, from the least that tokens need


class _Item(NamedTuple):
    """A row to place, or rows that share leading tokens."""

    tokens: int  # fed in, shared tokens once
    cost: int
    places: tuple[tuple[int, int, int], ...]  # group, episode, turn


def plan_batch(
    step: int,
    version: PolicyVersion,
    groups: Sequence[EpisodeGroup],
    *,
    dp_size: int,
    max_tokens_per_microbatch: int,
    packed: bool = False,
    share: bool = False,
    pair: float = 0.0,
) -> BatchPlan:
    """Place every row of every group exactly once.  Deterministic.

    max_tokens_per_microbatch bounds rows x longest row of one rank, packed: their sum; a single
    row above the bound gets its own microbatch.  A rank may have no rows in a microbatch.
    share: packed rows are forwarded with their shared tokens once (`trainer.share_prompts`).
    pair: the model's `moerl.data.batching.pair_cost`; 0 counts tokens alone.
    """
    items = _items(groups, pair, max_tokens_per_microbatch if share else 0)
    if share and len(items) < dp_size:  # a rank without rows would wait for the others
        items = _items(groups, pair, -(-sum(item.tokens for item in items) // dp_size))
    assert items, f"step {step} has no row to train"
    cut = _cut(items, max_tokens_per_microbatch, packed)
    num_microbatches = -(-len(cut) // dp_size)
    if packed:
        bins = _dealt(items, dp_size, num_microbatches, max_tokens_per_microbatch) or cut
    else:
        bins = _smallest(items, num_microbatches * dp_size, max_tokens_per_microbatch)
    num_microbatches = -(-len(bins) // dp_size)
    bins.sort(key=lambda rows: (-_cost(rows, packed), rows[0].places))
    rows = []
    for bin_idx, members in enumerate(bins):
        microbatch, rank = divmod(bin_idx, dp_size)
        if microbatch % 2:
            rank = dp_size - 1 - rank  # alternate the direction, so that rank totals even out
        for row, place in enumerate(place for item in members for place in item.places):
            rows.append(PlanRow(*place, dp_rank=rank, microbatch=microbatch, row=row))
    return BatchPlan(step, version, tuple(groups), tuple(rows), num_microbatches)


def _items(groups: Sequence[EpisodeGroup], pair: float, most: int) -> list[_Item]:
    """All rows, longest first.  most: tokens of the rows of an item; 0 = one row each."""
    items = list[_Item]()
    for group_idx, group in enumerate(groups):
        rows = [
            ((group_idx, episode_idx, turn_idx), turn.rollout)
            for episode_idx, episode in enumerate(group.episodes)
            for turn_idx, turn in enumerate(episode.turns)
        ]
        if most:
            rows.sort(key=lambda row: walk_order(row[1]))
        for idx, (place, row) in enumerate(rows):
            tokens = row.num_tokens - 1
            shared = shared_tokens(rows[idx - 1][1], row) if most and idx else 0
            cost = row_cost(tokens, pair)
            if shared and items[-1].tokens + tokens - shared <= most:
                num, spent, places = items.pop()
                cost += spent - row_cost(shared, pair)
                items.append(_Item(num + tokens - shared, cost, (*places, place)))
            else:
                items.append(_Item(tokens, cost, (place,)))
    return sorted(items, key=lambda item: (-item.tokens, item.places))


def _cost(rows: Sequence[_Item], packed: bool) -> int:
    return sum(row.cost for row in rows) if packed else len(rows) * rows[0].cost


def _cut(
    items: Sequence[_Item], cap: int, packed: bool, most: float = math.inf
) -> list[list[_Item]]:
    """Fewest consecutive bins of at most `cap` tokens, and padded of at most the cost `most`.

    A single item may exceed both.
    """
    bins: list[list[_Item]] = []
    room = 0  # tokens left in a packed bin
    for item in items:
        if packed:
            fits = item.tokens <= room
        elif bins:
            first, count = bins[-1][0], len(bins[-1]) + 1
            fits = first.tokens * count <= cap and first.cost * count <= most
        if bins and fits:
            bins[-1].append(item)
            room -= item.tokens
        else:
            bins.append([item])
            room = cap - item.tokens
    return bins


def _smallest(items: Sequence[_Item], num_bins: int, cap: int) -> list[list[_Item]]:
    """At most num_bins padded bins whose largest cost is as small as possible; cap suffices."""
    low, high = 1, sum(item.cost for item in items) + len(items) * items[0].cost
    while low < high:
        middle = (low + high) // 2
        if len(_cut(items, cap, False, middle)) <= num_bins:
            high = middle
        else:
            low = middle + 1
    return _cut(items, cap, False, high)


def _dealt(items: Sequence[_Item], dp_size: int, most: int, cap: int) -> list[list[_Item]] | None:
    """Packed bins of like cost, for at most `most` microbatches; None: the rule found none."""
    alone = sum(2 * item.tokens > cap for item in items)  # no two of these share a bin
    fewest = max(alone, -(-sum(item.tokens for item in items) // cap))
    first = min(-(-fewest // dp_size), most)
    for num in range(first, min(first + _TRIES, most + 1)):
        if bins := _into(items, num * dp_size, cap):
            return bins
    return None


def _into(items: Sequence[_Item], num_bins: int, cap: int) -> list[list[_Item]] | None:
    """Each item, the most expensive first, into the cheapest bin with room for its tokens."""
    bins: list[list[_Item]] = [[] for _ in range(num_bins)]
    free = [cap] * num_bins
    cheapest = [(0, number) for number in range(num_bins)]  # a heap
    for item in items:
        passed = []
        while cheapest and bins[cheapest[0][1]] and free[cheapest[0][1]] < item.tokens:
            passed.append(heapq.heappop(cheapest))
        if not cheapest:
            return None
        cost, number = heapq.heappop(cheapest)
        bins[number].append(item)
        free[number] -= item.tokens
        for entry in (*passed, (cost + item.cost, number)):
            heapq.heappush(cheapest, entry)
    return [rows for rows in bins if rows]


@dataclass(frozen=True, slots=True, eq=False)
class Minibatch:
    """The share of one optimizer step."""

    plan: BatchPlan  # its groups, under the batch's step and version
    rows: tuple[int, ...]  # for each row of `plan`, its number among the rows of the batch

    @classmethod
    def whole(cls, plan: BatchPlan) -> Minibatch:
        """One optimizer step for the batch."""
        return cls(plan, tuple(range(len(plan.rows))))

    def of(self, values: Sequence[T]) -> list[T]:
        """The values of this minibatch's rows, from values by row of the batch."""
        return [values[row] for row in self.rows]


def split_plan(
    plan: BatchPlan, trainer: TrainerConfig, *, seed: int, pair: float = 0.0
) -> tuple[Minibatch, ...]:
    """`trainer.minibatches` parts with equal numbers of groups, in the order they are trained.

    Deterministic in plan and seed; one part is the plan itself.  pair: as in `plan_batch`.
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
        _part(plan, sorted(chosen.tolist()), number, trainer, pair)
        for chosen in order.reshape(count, groups // count)
    )


def _part(
    plan: BatchPlan,
    chosen: Sequence[int],
    number: dict[tuple[int, int, int], int],
    trainer: TrainerConfig,
    pair: float,
) -> Minibatch:
    part = plan_batch(
        plan.step,
        plan.version,
        [plan.groups[group] for group in chosen],
        dp_size=trainer.parallel.dp,
        max_tokens_per_microbatch=trainer.max_tokens_per_microbatch,
        packed=trainer.packing,
        share=trainer.share_prompts,
        pair=pair,
    )
    rows = tuple(number[chosen[row.group], row.episode, row.turn] for row in part.rows)
    return Minibatch(part, rows)
