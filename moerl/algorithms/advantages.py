"""Advantages: from the rewards of the episodes of a step to a number per episode, or per token.

An advantage function sees all episodes of a step at once (`Outcomes`), so that variants which
normalise over the batch fit too; it depends on the plan alone, never on ranks or microbatches.
`plan_advantages` reads a plan, shapes the rewards (DAPO's length penalty, truncated answers), calls
the configured function and lays the result out by plan row.

Siblings that another batch trains (`EpisodeGroup.peers`) count in the baseline with their rewards
as scored, and get no advantage.

A single episode has no siblings: its advantage is 0 wherever a group baseline is subtracted.  verl
gives groups of one their raw reward; the configuration refuses group_size 1 for these baselines.

Legend: E episodes of the step, K rewarded steps of them, M sampled tokens of all episodes in
episode order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from moerl.algorithms.registry import choose
from moerl.config.algorithms import ADVANTAGES
from moerl.config.schema import AlgorithmConfig
from moerl.core.errors import RecordError
from moerl.core.types import Array, BatchPlan, Episode, Finish

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
    episodes = _episodes(plan)
    outcomes = _outcomes(algorithm, episodes, per_token=False)
    return outcomes, {key: idx for idx, key in enumerate(episodes)}


def _episodes(plan: BatchPlan) -> dict[tuple[int, int], Episode]:
    return {
        (g, e): episode
        for g, group in enumerate(plan.groups)
        for e, episode in enumerate(group.episodes)
    }


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
    episodes = _episodes(plan)
    outcomes = _outcomes(algorithm, episodes, per_token=False)
    places = [(*key, turn) for key, e in episodes.items() for turn in range(len(e.turns))]
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
    cut = _left_out(algorithm, episodes).repeat_interleave(outcomes.length)
    advantage = advantage.masked_fill(cut, 0.0)
    sizes = [episodes[g, e].turns[turn].rollout.num_sampled for g, e, turn in places]
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
    algorithm: AlgorithmConfig, plan: BatchPlan, drift: Sequence[Array] | None = None
) -> list[float | Array]:
    """Advantage of each row of `plan.rows`, in that order; rows of one episode share it.

    A number for the whole row, or one per sampled token ([n] f64) with process rewards and with a
    KL inside the reward.  drift: for the latter, proximal - reference log-probabilities by row.
    Raises ConfigError for an unknown name, RecordError `score_missing` for an unscored episode and
    `score_steps` for steps that do not lie in it.
    """
    assert algorithm.advantage not in ("gae", "online_dpo"), "they need a critic or a reference"
    function = choose("algorithm.advantage", algorithm.advantage, ADVANTAGES)
    has_steps = "steps" in ADVANTAGES[algorithm.advantage].needs
    per_token = has_steps or drift is not None
    episodes = _episodes(plan)
    outcomes = _outcomes(algorithm, episodes, has_steps)
    if drift is not None:
        places = [(*key, turn) for key, e in episodes.items() for turn in range(len(e.turns))]
        reward_M = -algorithm.reward_kl_coef * _in_order(plan, places, drift)
        outcomes = replace(outcomes, token_reward=reward_M)
    value = function(_with_peers(outcomes, plan))[: None if per_token else len(episodes)]
    cut = _left_out(algorithm, episodes)
    place = {key: idx for idx, key in enumerate(episodes)}
    if not per_token:
        numbers = value.masked_fill(cut, 0.0).tolist()
        return [numbers[place[row.group, row.episode]] for row in plan.rows]
    parts = value.masked_fill(cut.repeat_interleave(outcomes.length), 0.0)
    arrays = [part.numpy() for part in parts.split(outcomes.length.tolist())]
    result: list[float | Array] = []
    for row in plan.rows:
        turns = episodes[row.group, row.episode].turns
        begin = sum(turn.rollout.num_sampled for turn in turns[: row.turn])
        whole = arrays[place[row.group, row.episode]]
        result.append(whole[begin : begin + turns[row.turn].rollout.num_sampled])
    return result


def _with_peers(o: Outcomes, plan: BatchPlan) -> Outcomes:
    """Append the rewards of siblings that another batch trains, as episodes without tokens."""
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
    algorithm: AlgorithmConfig, episodes: dict[tuple[int, int], Episode], per_token: bool
) -> Outcomes:
    rewards: list[float] = []
    steps: list[tuple[int, int, float]] = []  # episode, end, reward
    lengths = [_num_sampled(episode) for episode in episodes.values()]
    for idx, episode in enumerate(episodes.values()):
        if episode.score is None:
            raise RecordError("score_missing", f"episode {episode.episode_id} has no score")
        penalty = _penalty(algorithm, episode) if algorithm.overlong_buffer else 0.0
        rewards.append(episode.score.reward + penalty)
        if per_token:
            steps += [(idx, *step) for step in _checked_steps(episode, lengths[idx])]
            steps += [(idx, lengths[idx] - 1, penalty)] if penalty else []
    return Outcomes(
        reward=torch.tensor(rewards, dtype=torch.float64),
        group=torch.tensor([group for group, _ in episodes]),
        length=torch.tensor(lengths),
        step_reward=torch.tensor([reward for _, _, reward in steps], dtype=torch.float64),
        step_episode=torch.tensor([idx for idx, _, _ in steps], dtype=torch.int64),
        step_end=torch.tensor([end for _, end, _ in steps], dtype=torch.int64),
    )


def _checked_steps(episode: Episode, length: int) -> Sequence[tuple[int, float]]:
    steps = () if episode.score is None else episode.score.steps
    ends = [end for end, _ in steps]
    if not ends or ends != sorted(ends) or ends[0] < 0 or ends[-1] >= length:
        raise RecordError(
            "score_steps",
            f"episode {episode.episode_id}: process rewards end at tokens {ends} of {length}",
        )
    return steps


def _penalty(algorithm: AlgorithmConfig, episode: Episode) -> float:
    """Penalty of the last turn: the limit is per response."""
    length, _ = episode.turn_lengths()[-1]
    longest = episode.turns[-1].rollout.sampling.max_new_tokens
    return overlong_penalty(length, longest, algorithm.overlong_buffer)


def _left_out(algorithm: AlgorithmConfig, episodes: dict[tuple[int, int], Episode]) -> Tensor:
    """[E] bool: episodes that get no advantage because a turn was cut by the length limit."""
    return torch.tensor(
        [
            algorithm.mask_truncated
            and any(finish == Finish.LENGTH for _, finish in episode.turn_lengths())
            for episode in episodes.values()
        ]
    )


def _num_sampled(episode: Episode) -> int:
    return sum(turn.rollout.num_sampled for turn in episode.turns)


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
