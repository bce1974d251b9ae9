"""Advantages over the tree of an answer and its forks: the value of a state is a mean of its ends.

    prompt --- tokens --- pivot --- tokens --- pivot --- tokens --- end        the answer
                            |--- end             |--- end                      its continuations
                            `--- end             `--- end

With V(pivot) the mean of its continuations (VinePPO, arXiv 2410.01679) and of the answer's own
continuation, its next pivot's V or its reward:

- tokens of the answer before a pivot: V(pivot) minus a baseline.  In front of the first pivot that
  is the mean over the siblings of V at theirs, behind a pivot the mean of its continuations;
- tokens of a continuation: its reward minus the mean of the others of its pivot.

No baseline depends on its own tokens, so each is unbiased.  Advantages behind a pivot of K
continuations are multiplied by 1 / (K + 1): each of its K + 1 ends is an estimate of one gradient.
The answer's own continuation counts in V and in the baselines of the others if its weights are
theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from moerl.core.errors import RecordError
from moerl.core.types import Array, BatchPlan, Episode, PolicyVersion


@dataclass(slots=True)
class _Pivot:
    at: int  # sampled tokens of the answer in front of it
    rows: list[int] = field(default_factory=list)  # of its continuations
    rewards: list[float] = field(default_factory=list)
    versions: set[PolicyVersion] = field(default_factory=set)


def plan_vine(plan: BatchPlan) -> list[float | Array]:
    """Advantage of each sampled token of each row of `plan.rows`, in that order.

    Raises RecordError `score_missing` (unscored episode), `score_forks` (unscored continuation).
    """
    found: dict[tuple[int, int, int], Array] = {}
    for g, group in enumerate(plan.groups):
        trees = [_tree(episode) for episode in group.episodes]
        values = [value for value, _ in trees]
        for e, (_, rows) in enumerate(trees):
            others = [*values[:e], *values[e + 1 :], *group.peers]
            baseline = fmean(others) if others else values[e]
            found |= {(g, e, row): one - baseline * first for row, (one, first) in rows.items()}
    return [found[row.group, row.episode, row.turn] for row in plan.rows]


def _tree(episode: Episode) -> tuple[float, dict[int, tuple[Array, Array]]]:
    """(value at the first pivot, or the reward; of each row (advantages, which lack a baseline)).

    The second array is 1 for tokens in front of the first pivot, else 0.
    """
    if episode.score is None:
        raise RecordError("score_missing", f"episode {episode.episode_id} has no score")
    pivots, own = _pivots(episode), [n for n, turn in enumerate(episode.turns) if turn.fork_at < 0]
    versions = [v for n in own for v in episode.turns[n].rollout.version_of_tokens()]
    answer = np.zeros(len(versions))
    rows: dict[int, tuple[Array, Array]] = {}
    value, end, later = episode.score.reward, len(versions), set[PolicyVersion]()
    for number, pivot in reversed(list(enumerate(pivots))):
        later |= {*versions[pivot.at : end], *pivot.versions}
        ends = pivot.rewards + ([value] if len(later) == 1 else [])
        share = _share(pivots[: number + 1])
        answer[pivot.at : end] = share * (value - fmean(pivot.rewards))
        for place, row in enumerate(pivot.rows):
            length = episode.turns[row].rollout.num_sampled
            advantage = share * (ends[place] - mean_of_others(ends, place))
            rows[row] = np.full(length, advantage), np.zeros(length)
        value, end = fmean(ends), pivot.at
    answer[:end] = value
    in_front = np.arange(len(versions)) < end
    begin = 0
    for row in own:
        stop = begin + episode.turns[row].rollout.num_sampled
        rows[row] = answer[begin:stop], in_front[begin:stop].astype(float)
        begin = stop
    return value, rows


def mean_of_others(values: Sequence[float], place: int) -> float:
    return fmean([*values[:place], *values[place + 1 :]])


def _pivots(episode: Episode) -> list[_Pivot]:
    """Ascending.  Raises RecordError."""
    forks = [(row, turn) for row, turn in enumerate(episode.turns) if turn.fork_at >= 0]
    rewards = () if episode.score is None else episode.score.forks
    if len(rewards) != len(forks):
        detail = f"{len(rewards)} rewards for {len(forks)} continuations"
        raise RecordError("score_forks", f"episode {episode.episode_id}: {detail}")
    found: dict[int, _Pivot] = {}
    for (row, turn), reward in zip(forks, rewards, strict=True):
        pivot = found.setdefault(turn.fork_at, _Pivot(turn.fork_at))
        pivot.rows.append(row)
        pivot.rewards.append(reward)
        pivot.versions |= {span.version for span in turn.rollout.versions}
    return [found[at] for at in sorted(found)]


def _share(pivots: Sequence[_Pivot]) -> float:
    """Of one end behind all of these pivots."""
    return float(np.prod([1.0 / (len(pivot.rows) + 1) for pivot in pivots]))
