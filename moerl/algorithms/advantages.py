"""Advantages from the rewards of sibling episodes.

An advantage function sees the rewards of all groups of a step at once, so that variants which
normalise over the batch fit too; it depends on the plan alone, never on ranks or microbatches.

Legend: E episodes of the step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moerl.algorithms.registry import choose
from moerl.errors import RecordError
from moerl.types import BatchPlan

_STD_EPS = 1e-4  # as in TRL


def grpo_mean(reward_E: Tensor, group_E: Tensor) -> Tensor:
    """Reward minus the mean of its group (arXiv 2512.02556 section 3.1); a group of one gets 0."""
    count = torch.bincount(group_E).to(reward_E.dtype)
    mean = torch.zeros_like(count).index_add_(0, group_E, reward_E) / count
    return reward_E - mean[group_E]


def grpo_std(reward_E: Tensor, group_E: Tensor) -> Tensor:
    """The same divided by the group's unbiased standard deviation (arXiv 2402.03300)."""
    centred = grpo_mean(reward_E, group_E)
    count = torch.bincount(group_E).to(reward_E.dtype)
    squares = torch.zeros_like(count).index_add_(0, group_E, centred.square())
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    return centred / (std[group_E] + _STD_EPS)


ADVANTAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "grpo_mean": grpo_mean,
    "grpo_std": grpo_std,
}


def plan_advantages(name: str, plan: BatchPlan) -> list[float]:
    """Advantage of each row of `plan.rows`, in that order; turns of one episode share it.

    Raises ConfigError for an unknown name, RecordError `score_missing` for an unscored episode.
    """
    function = choose("algorithm.advantage", name, ADVANTAGES)
    rewards: list[float] = []
    owners: list[int] = []
    place: dict[tuple[int, int], int] = {}
    for group_idx, group in enumerate(plan.groups):
        for episode_idx, episode in enumerate(group.episodes):
            if episode.score is None:
                raise RecordError("score_missing", f"episode {episode.episode_id} has no score")
            place[group_idx, episode_idx] = len(rewards)
            rewards.append(episode.score.reward)
            owners.append(group_idx)
    advantage = function(torch.tensor(rewards, dtype=torch.float64), torch.tensor(owners)).tolist()
    return [advantage[place[row.group, row.episode]] for row in plan.rows]
