"""From per-token losses to one number: the weight of a token, with global denominators.

A weight depends on the whole plan only.  The loss of a step is the plain SUM of weight x token
loss over all ranks and microbatches, so splitting the batch another way cannot change it;
denominators taken per rank or per microbatch would (a 28% wrong gradient in a toy).  Tokens that a
rejection mask zeroes still count in the denominator, and so does an episode that is rejected
whole; verl drops fully masked sequences from its denominator unless given a global size.

The unit of "sequence" is the episode: a policy that answered in several turns is one sequence.  In
an episode with roles it is each role.

Legend: E episodes of the step, |o| sampled tokens of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from moerl.algorithms.registry import choose
from moerl.config.algorithms import AGGREGATIONS
from moerl.config.reward_terms import RoleConfig
from moerl.config.schema import AlgorithmConfig
from moerl.core.types import BatchPlan, PlanRow, Turn, base_role

Roles = Mapping[str, Mapping[str, RoleConfig]]  # settings by label of the task and name of the role
NO_ROLES: Roles = MappingProxyType({})


class SequenceId(NamedTuple):
    """A sequence of a plan: the policy's tokens in one role of an episode."""

    group: int
    episode: int
    role: str  # "": the task has no roles

    @classmethod
    def of(cls, plan: BatchPlan, row: PlanRow) -> SequenceId:
        turn = plan.groups[row.group].episodes[row.episode].turns[row.turn]
        return cls(row.group, row.episode, turn.role)

    def settings(self, plan: BatchPlan, roles: Roles) -> RoleConfig:
        known = roles.get(plan.groups[self.group].prompt.task, {})
        return known.get(base_role(self.role), RoleConfig())


def plan_sequences(plan: BatchPlan) -> dict[SequenceId, dict[int, Turn]]:
    """The sequences of a plan in order, each with its rows by their number in the episode."""
    found: dict[SequenceId, dict[int, Turn]] = {}
    for g, group in enumerate(plan.groups):
        for e, episode in enumerate(group.episodes):
            for number, turn in enumerate(episode.turns):
                found.setdefault(SequenceId(g, e, turn.role), {})[number] = turn
    return found


def seq_mean_token_mean(lengths: Sequence[int], algorithm: AlgorithmConfig) -> list[float]:
    """1 / (E |o|): mean over sequences of the mean over tokens.

    GRPO (arXiv 2402.03300 eq. 3), DeepSeek-V3.2 (2512.02556 eq. 5), GSPO.
    """
    return [1.0 / (len(lengths) * length) for length in lengths]


def token_mean(lengths: Sequence[int], algorithm: AlgorithmConfig) -> list[float]:
    """1 / sum of |o|: mean over all sampled tokens of the step (DAPO, arXiv 2503.14476 eq. 12)."""
    return [1.0 / sum(lengths)] * len(lengths)


def seq_mean_token_sum(lengths: Sequence[int], algorithm: AlgorithmConfig) -> list[float]:
    """1 / E: mean over sequences of the sum over tokens (REINFORCE, Kimi k1.5)."""
    return [1.0 / len(lengths)] * len(lengths)


def constant(lengths: Sequence[int], algorithm: AlgorithmConfig) -> list[float]:
    """1 / (E constant_tokens): independent of lengths (Dr.GRPO, arXiv 2503.20783 section 3.2).

    `constant_tokens` is the largest response length in the paper, the same in every step.
    """
    return [1.0 / (len(lengths) * algorithm.constant_tokens)] * len(lengths)


def plan_weights(
    algorithm: AlgorithmConfig, plan: BatchPlan, roles: Roles = NO_ROLES
) -> list[float]:
    """Weights of the sampled tokens of `plan.rows`.  Raises ConfigError (unknown name)."""
    function = choose("algorithm.aggregation", algorithm.aggregation, AGGREGATIONS)
    units = plan_sequences(plan)
    lengths = [sum(turn.rollout.num_sampled for turn in rows.values()) for rows in units.values()]
    found = zip(units, function(lengths, algorithm), strict=True)
    weight = {unit: one * unit.settings(plan, roles).loss_weight for unit, one in found}
    return [weight[SequenceId.of(plan, row)] for row in plan.rows]
