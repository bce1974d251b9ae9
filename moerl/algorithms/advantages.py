"""Advantages: from the rewards of the episodes of a step to a number per episode, or per token.

An advantage function sees all episodes of a step at once (`Outcomes`), so that variants which
normalise over the batch fit too; it depends on the plan alone, never on ranks or microbatches.
`plan_advantages` reads a plan, shapes the rewards (DAPO's length penalty, truncated answers), calls
the configured function and lays the result out by plan row.

Siblings that another batch trains (`EpisodeGroup.peers`) count in the baseline with their rewards
as scored, and get no advantage.

A single episode has no siblings: its advantage is 0 wherever a group baseline is subtracted.  verl
gives groups of one their raw reward; the configuration refuses group_size 1 for these baselines.

In a task with roles each role of an episode counts as an episode of its own, and its group is the
set of rewards that `task.roles.ROLE.baseline` names.

Legend: E episodes of the step, K rewarded steps of them, M sampled tokens of all episodes in
episode order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from moerl.algorithms.aggregation import NO_ROLES, Roles, SequenceId, plan_sequences
from moerl.algorithms.registry import choose
from moerl.config.algorithms import ADVANTAGES
from moerl.config.reward_terms import Baseline
from moerl.config.schema import AlgorithmConfig
from moerl.core.errors import RecordError
from moerl.core.types import Array, BatchPlan, Episode, Finish, Turn, base_role, turn_lengths

Units = Mapping[SequenceId, Mapping[int, Turn]]
_STD_EPS = 1e-4  # as in TRL; verl uses 1e-6
_WHITEN_EPS = 1e-8


@dataclass(frozen=True, slots=True, eq=False)
class Outcomes:
    """The episodes of one step.  Steps are process rewards; without any, K is 0.

    Example: an episode of 5 sampled tokens in two turns of 3 and 2 with turn rewards .5 and 1:
    step_reward [.5, 1], step_end [2, 4].
    """

    reward: Tensor  # [E] f64, after shaping
    group: Tensor  # [E] i64, from 0
    length: Tensor  # [E] i64, sampled tokens
    step_reward: Tensor  # [K] f64
    step_episode: Tensor  # [K] i64
    step_end: Tensor  # [K] i64, the sampled token of the episode at which the step ends
    token_reward: Tensor | None = None  # [M] f64, a KL inside the reward; None = there is none


def grpo_mean(o: Outcomes) -> Tensor:
    """R - mean(R of the group): [E].

    Dr.GRPO (arXiv 2503.20783 section 3.2), DeepSeek-V3.2 (2512.02556 section 3.1), Kimi k1.5.
    """
    return o.reward - _group_mean(o.reward, o.group)


def grpo_std(o: Outcomes) -> Tensor:
    """The same divided by the group's unbiased standard deviation: [E] (arXiv 2402.03300)."""
    centred = grpo_mean(o)
    count = _count(o.group)
    squares = torch.zeros_like(count).index_add_(0, o.group, centred.square())
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    return centred / (std[o.group] + _STD_EPS)


def rloo(o: Outcomes) -> Tensor:
    """R - mean(R of the siblings): [E], REINFORCE leave-one-out (arXiv 2402.14740 eq. 8).

    Equals `grpo_mean` times G / (G - 1); unbiased, because the baseline does not see the sample.
    """
    count = _count(o.group)[o.group]
    return grpo_mean(o) * count / (count - 1).clamp(min=1)


def reinforce_pp(o: Outcomes) -> Tensor:
    """R whitened over all sampled tokens of the step: [E] (REINFORCE++, arXiv 2501.03262 eq. 7).

    Token-weighted: an episode counts once per sampled token, as in the published code.  With the
    paper's KL inside the reward, the sum of the token rewards from each token on, plus R: [M].
    """
    if o.token_reward is None:
        return _whitened(o.reward, o.length)
    to_go = _from_each(o.token_reward, o.length) + o.reward.repeat_interleave(o.length)
    return _whitened(to_go, torch.ones_like(to_go))


def reinforce_pp_baseline(o: Outcomes) -> Tensor:
    """`grpo_mean` whitened over all sampled tokens of the step: [E] (REINFORCE++-baseline)."""
    return _whitened(grpo_mean(o), o.length)


def raw_reward(o: Outcomes) -> Tensor:
    """R as it is: [E].  For objectives that read its sign (TOPR), or with a baseline inside R."""
    return o.reward


def no_reward(o: Outcomes) -> Tensor:
    """0: [E].  The reward is ignored: on-policy distillation alone."""
    return torch.zeros_like(o.reward)


def process_mean(o: Outcomes) -> Tensor:
    """Sum of the group-centred rewards of the steps that end at or after a token: [M].

    GRPO with process supervision (arXiv 2402.03300 section 4.1.3) without the division, for
    rewards per turn or per token.  The mean is over all steps of all siblings, so an episode with
    more steps weighs more, as in the paper.
    """
    group = o.group[o.step_episode]
    return _to_go(o, o.step_reward - _group_mean(o.step_reward, group))


def process_std(o: Outcomes) -> Tensor:
    """`process_mean` with step rewards also divided by the group's standard deviation: [M]."""
    group = o.group[o.step_episode]
    centred = o.step_reward - _group_mean(o.step_reward, group)
    count = _count(group)
    squares = torch.zeros_like(count).index_add_(0, group, centred.square())
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    return _to_go(o, centred / (std[group] + _STD_EPS))


def gae(
    reward_M: Tensor, value_M: Tensor, length: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation and the return that a critic learns, both [M].

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = sum_l (gamma lam)^l delta_{t+l}, return = A + V
    (arXiv 1506.02438 eq. 11-16); V after the last token of an episode is 0, also when it was cut
    by the length limit.  V_t is the critic's value of the state that produces token t.  Not
    whitened: verl whitens here, TRL does not.
    reward_M: of each sampled token, an outcome reward on the last one.  length: [E].
    """
    ends = length.numpy().cumsum() - 1
    value = value_M.double().numpy()
    ahead = np.append(value, 0.0)[1:]
    ahead[ends[length.numpy() > 0]] = 0.0
    delta = reward_M.double().numpy() + gamma * ahead - value
    advantage = torch.from_numpy(_decayed_sums(delta, length.numpy(), ends, gamma * lam))
    advantage = advantage.to(reward_M.dtype)
    return advantage, advantage + value_M


def _decayed_sums(delta: Array, length: Array, ends: Array, decay: float) -> Array:
    """sum_l decay^l delta_{t+l} within each episode: [M].

    One step per distance from the end, for all episodes that are that long; the additions are those
    of a loop over tokens, in its order.  ends: [E], the last token of each.
    """
    by_length = np.argsort(-length, kind="stable")
    ends, rising = ends[by_length], np.sort(length)
    sums, running = np.zeros_like(delta), np.zeros(len(length))
    for back in range(int(rising[-1]) if len(rising) else 0):
        longer = len(length) - int(np.searchsorted(rising, back, "right"))
        at = ends[:longer] - back
        running = delta[at] + decay * running[:longer]
        sums[at] = running
    return sums


def plan_outcomes(
    algorithm: AlgorithmConfig, plan: BatchPlan
) -> tuple[Outcomes, dict[tuple[int, int], int]]:
    """Outcome rewards of a plan's episodes, and their indices by (group, episode)."""
    units = plan_sequences(plan)
    outcomes = _outcomes(algorithm, plan, units, NO_ROLES, per_token=False)
    return outcomes, {unit[:2]: idx for idx, unit in enumerate(units)}


def _places(units: Units) -> list[tuple[int, int, int]]:
    """(group, episode, row of the episode) of all rows, in the order of the sampled tokens."""
    return [(*unit[:2], number) for unit, rows in units.items() for number in rows]


def plan_gae(
    algorithm: AlgorithmConfig,
    plan: BatchPlan,
    values: Sequence[Array],
    drift: Sequence[Array] | None = None,
) -> tuple[list[Array], list[Array]]:
    """GAE of each row of `plan.rows` and the returns that the critic learns, arrays per row.

    values: of each row, the critic's value at each sampled token.  Rows of an episode follow one
    another, as do the turns in one: the next token may be behind an environment's reply.  The
    (shaped) reward belongs to the episode's last token.  Advantages are whitened over all sampled
    tokens of the step, as in verl; returns are not, and the critic also learns from episodes that
    `mask_truncated` leaves out.  drift: as in `plan_advantages`.  Raises RecordError as it does.
    """
    units = plan_sequences(plan)
    outcomes = _outcomes(algorithm, plan, units, NO_ROLES, per_token=False)
    places = _places(units)
    value_M = _in_order(plan, places, values)
    reward_M = torch.zeros_like(value_M)
    if drift is not None:
        reward_M -= algorithm.reward_kl_coef * _in_order(plan, places, drift)
    reward_M[outcomes.length.cumsum(0) - 1] += outcomes.reward
    advantage, target = gae(
        reward_M, value_M, outcomes.length, algorithm.gae_gamma, algorithm.gae_lambda
    )
    deviation = advantage.var(unbiased=False) + _WHITEN_EPS
    advantage = (advantage - advantage.mean()) / deviation.sqrt()
    cut = _left_out(algorithm, units).repeat_interleave(outcomes.length)
    advantage = advantage.masked_fill(cut, 0.0)
    sizes = _sizes(units)
    split = dict(
        zip(places, zip(advantage.split(sizes), target.split(sizes), strict=True), strict=True)
    )
    rows = [split[row.group, row.episode, row.turn] for row in plan.rows]
    return [a.numpy() for a, _ in rows], [t.numpy() for _, t in rows]


def _in_order(
    plan: BatchPlan, places: Sequence[tuple[int, int, int]], values: Sequence[Array]
) -> Tensor:
    """[M] f64, from arrays by row of the plan."""
    by_place = {
        (row.group, row.episode, row.turn): value
        for row, value in zip(plan.rows, values, strict=True)
    }
    return torch.from_numpy(np.concatenate([by_place[place] for place in places]).astype(float))


def overlong_penalty(length: int, longest: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476 eq. 13), to be added to a reward.

    0 up to longest - buffer tokens, falling linearly to -1 at longest, -1 beyond.
    """
    return -min(max((length - (longest - buffer)) / buffer, 0.0), 1.0)


def plan_advantages(
    algorithm: AlgorithmConfig,
    plan: BatchPlan,
    drift: Sequence[Array] | None = None,
    roles: Roles = NO_ROLES,
) -> list[float | Array]:
    """Advantage of each row of `plan.rows`, in that order; rows of one episode and role share it.

    A number for the whole row, or one per sampled token ([n] f64) with process rewards and with a
    KL inside the reward.  drift: for the latter, proximal - reference log-probabilities by row.
    Raises ConfigError for an unknown name, RecordError `score_missing` for an unscored episode and
    `score_steps` for steps that do not lie in it.
    """
    others = ("gae", "online_dpo", "vine")  # they need a critic, a reference, or forks
    assert algorithm.advantage not in others, "it has a function of its own"
    function = choose("algorithm.advantage", algorithm.advantage, ADVANTAGES)
    has_steps = "steps" in ADVANTAGES[algorithm.advantage].needs
    per_token = has_steps or drift is not None
    units = plan_sequences(plan)
    outcomes = _outcomes(algorithm, plan, units, roles, has_steps)
    if drift is not None:
        reward_M = -algorithm.reward_kl_coef * _in_order(plan, _places(units), drift)
        outcomes = replace(outcomes, token_reward=reward_M)
    value = function(_with_peers(outcomes, plan))[: None if per_token else len(units)]
    cut = _left_out(algorithm, units)
    if not per_token:
        number = dict(zip(units, value.masked_fill(cut, 0.0).tolist(), strict=True))
        return [number[SequenceId.of(plan, row)] for row in plan.rows]
    value = value.masked_fill(cut.repeat_interleave(outcomes.length), 0.0)
    parts = dict(zip(_places(units), value.split(_sizes(units)), strict=True))
    return [parts[row.group, row.episode, row.turn].numpy() for row in plan.rows]


def _sizes(units: Units) -> list[int]:
    """Sampled tokens of each row, in the order of `_places`."""
    return [turn.rollout.num_sampled for rows in units.values() for turn in rows.values()]


def _with_peers(o: Outcomes, plan: BatchPlan) -> Outcomes:
    """Append the rewards of siblings that another batch trains, as episodes without tokens.

    Tasks with roles have no such siblings, so the groups are the plan's.
    """
    peers = [(idx, reward) for idx, group in enumerate(plan.groups) for reward in group.peers]
    if not peers:
        return o
    groups, rewards = zip(*peers, strict=True)
    return replace(
        o,
        reward=torch.cat([o.reward, torch.tensor(rewards, dtype=torch.float64)]),
        group=torch.cat([o.group, torch.tensor(groups)]),
        length=torch.cat([o.length, torch.zeros(len(peers), dtype=torch.int64)]),
    )


def _outcomes(
    algorithm: AlgorithmConfig, plan: BatchPlan, units: Units, roles: Roles, per_token: bool
) -> Outcomes:
    rewards: list[float] = []
    steps: list[tuple[int, int, float]] = []  # episode, end, reward
    lengths = [sum(turn.rollout.num_sampled for turn in rows.values()) for rows in units.values()]
    cells: dict[tuple[int, int, str], int] = {}
    groups = [
        cells.setdefault(_compared(unit, unit.settings(plan, roles).baseline), len(cells))
        for unit in units
    ]
    for idx, (unit, rows) in enumerate(units.items()):
        episode = plan.groups[unit.group].episodes[unit.episode]
        if episode.score is None:
            raise RecordError("score_missing", f"episode {episode.episode_id} has no score")
        penalty = _penalty(algorithm, rows) if algorithm.overlong_buffer else 0.0
        rewards.append(episode.score.reward_of(unit.role) + penalty)
        if per_token:
            steps += [(idx, *step) for step in _checked_steps(episode, lengths[idx])]
            steps += [(idx, lengths[idx] - 1, penalty)] if penalty else []
    return Outcomes(
        reward=torch.tensor(rewards, dtype=torch.float64),
        group=torch.tensor(groups),
        length=torch.tensor(lengths),
        step_reward=torch.tensor([reward for _, _, reward in steps], dtype=torch.float64),
        step_episode=torch.tensor([idx for idx, _, _ in steps], dtype=torch.int64),
        step_end=torch.tensor([end for _, end, _ in steps], dtype=torch.int64),
    )


def _compared(unit: SequenceId, baseline: Baseline) -> tuple[int, int, str]:
    """The key of the rewards that a unit's reward is compared with."""
    episode = unit.episode if baseline == "episode" else -1
    return unit.group, episode, "" if baseline == "group" else base_role(unit.role)


def _checked_steps(episode: Episode, length: int) -> Sequence[tuple[int, float]]:
    steps = () if episode.score is None else episode.score.steps
    ends = [end for end, _ in steps]
    if not ends or ends != sorted(ends) or ends[0] < 0 or ends[-1] >= length:
        raise RecordError(
            "score_steps",
            f"episode {episode.episode_id}: process rewards end at tokens {ends} of {length}",
        )
    return steps


def _penalty(algorithm: AlgorithmConfig, rows: Mapping[int, Turn]) -> float:
    """Penalty of the last turn: the limit is per response."""
    rollouts = [turn.rollout for turn in rows.values()]
    length, _ = turn_lengths(rollouts)[-1]
    longest = rollouts[-1].sampling.max_new_tokens
    return overlong_penalty(length, longest, algorithm.overlong_buffer)


def _left_out(algorithm: AlgorithmConfig, units: Units) -> Tensor:
    """[E] bool: episodes that get no advantage because a turn was cut by the length limit."""
    return torch.tensor(
        [
            algorithm.mask_truncated
            and any(
                finish == Finish.LENGTH
                for _, finish in turn_lengths(turn.rollout for turn in rows.values())
            )
            for rows in units.values()
        ]
    )


def _to_go(o: Outcomes, step_value: Tensor) -> Tensor:
    """[M]: at each token, the sum of the values of the steps that end at or after it."""
    end_of_M = o.length.cumsum(0)
    total = torch.zeros(int(o.length.sum()), dtype=torch.float64)
    begin_E = end_of_M - o.length
    total.index_add_(0, begin_E[o.step_episode] + o.step_end, step_value)
    return _from_each(total, o.length)


def _from_each(value_M: Tensor, length: Tensor) -> Tensor:
    """[M]: at each token, the sum of the values from it to the end of its episode."""
    parts = [part.flip(0).cumsum(0).flip(0) for part in value_M.split(length.tolist())]
    return torch.cat(parts) if parts else value_M


def _count(group: Tensor) -> Tensor:
    return torch.bincount(group).to(torch.float64)


def _group_mean(values: Tensor, group: Tensor) -> Tensor:
    count = _count(group)
    return (torch.zeros_like(count).index_add_(0, group, values) / count.clamp(min=1))[group]


def _whitened(values: Tensor, length: Tensor) -> Tensor:
    count = length.sum()
    mean = (values * length).sum() / count
    variance = ((values - mean).square() * length).sum() / (count - 1).clamp(min=1)
    return (values - mean) / (variance + _WHITEN_EPS).sqrt()


def advantage_metrics(advantages: Sequence[float | Array]) -> dict[str, float]:
    """`adv/*` of one step (docs/metrics.md): over rows, or over tokens with process rewards."""
    values = np.concatenate([np.atleast_1d(np.asarray(a, np.float64)) for a in advantages])
    return {
        "adv/mean": float(values.mean()),
        "adv/std": float(values.std()),
        "adv/pos_frac": float((values > 0).mean()),
    }
