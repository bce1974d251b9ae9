"""From per-token losses to one number: the weight of a token, with global denominators.

A weight depends on the whole plan only.  The loss of a step is the plain SUM of weight x token
loss over all ranks and microbatches, so splitting the batch another way cannot change it;
denominators taken per rank or per microbatch would (a 28% wrong gradient in a toy).  Tokens that a
rejection mask zeroes keep their place in the denominator.

The unit of "sequence" is the episode: a policy that answered in several turns is one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moerl.algorithms.registry import choose
from moerl.types import BatchPlan


def seq_mean_token_mean(lengths: Sequence[int]) -> list[float]:
    """Mean over sequences of the mean over tokens: 1 / (E |o_i|) (arXiv 2512.02556 eq. 5)."""
    return [1.0 / (len(lengths) * length) for length in lengths]


def token_mean(lengths: Sequence[int]) -> list[float]:
    """Mean over all sampled tokens of the step (DAPO, arXiv 2503.14476)."""
    return [1.0 / sum(lengths)] * len(lengths)


AGGREGATIONS: dict[str, Callable[[Sequence[int]], list[float]]] = {
    "seq_mean_token_mean": seq_mean_token_mean,
    "token_mean": token_mean,
}


def plan_weights(name: str, plan: BatchPlan) -> list[float]:
    """Weight of every sampled token of each row of `plan.rows`, in that order.

    Raises ConfigError for an unknown name.
    """
    function = choose("algorithm.aggregation", name, AGGREGATIONS)
    episodes = [
        (group_idx, episode_idx)
        for group_idx, group in enumerate(plan.groups)
        for episode_idx in range(len(group.episodes))
    ]
    lengths = [
        sum(turn.rollout.num_sampled for turn in plan.groups[group].episodes[episode].turns)
        for group, episode in episodes
    ]
    weight = dict(zip(episodes, function(lengths), strict=True))
    return [weight[row.group, row.episode] for row in plan.rows]
