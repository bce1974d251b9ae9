"""Advantages, objectives, aggregation: small cases by hand, a reference by autograd, controls."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from moerl.algorithms.advantages import (
    Outcomes,
    gae,
    grpo_mean,
    grpo_std,
    overlong_penalty,
    plan_advantages,
    plan_gae,
    process_mean,
    process_std,
    reinforce_pp,
    reinforce_pp_baseline,
)
from moerl.algorithms.aggregation import plan_weights
from moerl.algorithms.corrections import m2_bound, opsm
from moerl.algorithms.loss import PolicyLoss, loss_metrics, policy_loss
from moerl.algorithms.objectives import ppo_clip
from moerl.algorithms.preference import best_and_worst, pair_advantages, plan_pairs
from moerl.algorithms.selection import resample_correct
from moerl.algorithms.tokens import Sequences, Tokens
from moerl.config.algorithms import AGGREGATIONS
from moerl.config.schema import AlgorithmConfig
from moerl.core.errors import ConfigError, RecordError
from moerl.core.types import BatchPlan, Episode, EpisodeGroup, Finish, PolicyVersion, Score, Turn
from moerl.data.batching import plan_batch
from moerl.records.blob_ranges import read_logprobs
from moerl.records.blob_store import BlobStore
from tests.helpers.random_rollouts import group, make_rollout

V3 = PolicyVersion(0, 3)


def outcomes(reward: Tensor, group_E: Tensor, length: Tensor | None = None) -> Outcomes:
    none = torch.zeros(0, dtype=torch.int64)
    length = torch.ones_like(group_E) if length is None else length
    return Outcomes(reward.double(), group_E, length, none.double(), none, none)


def make_tokens(new: Tensor, old: Tensor, advantage: Tensor, seq: Tensor | None = None) -> Tokens:
    seq = torch.zeros(len(new), dtype=torch.long) if seq is None else seq
    count = int(seq.max()) + 1 if len(seq) else 1
    return Tokens(new, old, advantage, Sequences(seq, count), torch.zeros_like(seq))


def loss_of(
    config: AlgorithmConfig,
    new: Tensor,
    old: Tensor,
    advantage: Tensor,
    weight: Tensor,
    seq: Tensor,
) -> PolicyLoss:
    return policy_loss(config, make_tokens(new, old, advantage, seq), weight)


def test_advantages_by_hand() -> None:
    reward = torch.tensor([1.0, 0.0, 0.5, 2.0, 2.0, 7.0], dtype=torch.float64)
    owner = torch.tensor([0, 0, 0, 1, 1, 2])
    assert grpo_mean(outcomes(reward, owner)).tolist() == [0.5, -0.5, 0.0, 0.0, 0.0, 0.0]
    std = grpo_std(outcomes(reward, owner))
    assert std.tolist()[2:] == [0.0, 0.0, 0.0, 0.0], "no spread, and a group of one, give 0"
    want = 0.5 / (np.std([1.0, 0.0, 0.5], ddof=1) + 1e-4)
    assert std[0].item() == pytest.approx(want)


def test_a_constant_on_every_reward_changes_nothing() -> None:
    torch.manual_seed(0)
    reward, owner = torch.rand(12).double(), torch.arange(12) // 4
    for function in (grpo_mean, grpo_std):
        moved, still = outcomes(reward + 5, owner), outcomes(reward, owner)
        torch.testing.assert_close(function(moved), function(still))
    assert (reward + 5 - reward).abs().max() > 1, "control: the reward itself did change"


def test_ppo_clip_by_hand() -> None:
    old = torch.zeros(6).double()
    new = torch.tensor([0.5, 1.1, 1.5, 0.5, 0.9, 1.5]).double().log().requires_grad_()
    advantage = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0]).double()
    token = ppo_clip(make_tokens(new, old, advantage), old, AlgorithmConfig())
    torch.testing.assert_close(
        token.loss, torch.tensor([-0.5, -1.1, -1.28, 0.8, 0.9, 1.5]).double()
    )
    assert token.high.tolist() == [False, False, True, False, False, False]
    assert token.low.tolist() == [False, False, False, True, False, False]
    token.loss.sum().backward()
    assert (new.grad == 0).tolist() == [False, False, True, True, False, False]


def test_on_policy_gradient_is_the_policy_gradient() -> None:
    torch.manual_seed(1)
    new = torch.randn(9).double().requires_grad_()
    advantage = torch.randn(9).double()
    old = new.detach()
    token = ppo_clip(make_tokens(new, old, advantage), old, AlgorithmConfig(clip_high=0.2))
    (grad,) = torch.autograd.grad(token.loss.sum(), new)
    torch.testing.assert_close(grad, -advantage, rtol=1e-14, atol=1e-14)
    assert not token.low.any()
    assert not token.high.any()


def test_off_policy_mask_drops_negative_drifted_sequences_only() -> None:
    seq = torch.tensor([0, 0, 1, 1, 2, 2, 3])
    engine = torch.tensor([1.0, 2.0, 1.0, 2.0, 0.5, 0.5, 0.0])  # drift 1.5, 1.5, 0.5, 0
    advantage = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    config = AlgorithmConfig(corrections=["opsm"], off_policy_delta=0.5)
    keep = opsm(make_tokens(torch.zeros(7), engine, advantage, seq), config).weight
    assert keep.tolist() == [0, 0, 1, 1, 1, 1, 1], "0.5 > 0.5 is false"
    swapped = opsm(make_tokens(torch.zeros(7), -engine, advantage, seq), config)
    assert swapped.weight.all(), "control: the sign of the drift decides"


def test_a_weight_that_decays_with_age_is_an_exact_sum() -> None:
    """In float64, against the sum by hand; controls: another base, ages shifted by one."""
    lag = torch.tensor([0, 1, 1, 3, 0, 2])
    new = torch.tensor([-0.5, -1.25, -2.0, -0.75, -1.0, -3.0]).double().requires_grad_()
    advantage = torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0, 0.5]).double()
    share = torch.tensor([0.125, 0.125, 0.25, 0.25, 0.125, 0.125]).double()
    tokens = make_tokens(new, new.detach(), advantage, torch.tensor([0, 0, 0, 1, 1, 2]))

    def result(lag_N: Tensor, base: float) -> PolicyLoss:
        config = AlgorithmConfig(
            objective="reinforce", corrections=["lag_decay"], lag_decay_base=base
        )
        return policy_loss(config, replace(tokens, lag=lag_N), share)

    factors = [1.0, 0.75, 0.75, 0.75 * 0.75 * 0.75, 1.0, 0.75 * 0.75]
    parts = zip(factors, share.tolist(), advantage.tolist(), new.tolist(), strict=True)
    terms = [-factor * weight * gain * logprob for factor, weight, gain, logprob in parts]
    found = result(lag, 0.75)
    assert found.loss.item() == sum(terms)
    found.loss.backward()
    assert new.grad.tolist() == [
        -f * w * a for f, w, a in zip(factors, share.tolist(), advantage.tolist(), strict=True)
    ]
    assert result(lag, 0.5).loss.item() != pytest.approx(sum(terms), abs=1e-3)
    assert result(lag + 1, 0.75).loss.item() == pytest.approx(0.75 * sum(terms), abs=1e-12)
    assert sum(terms) != pytest.approx(0.75 * sum(terms), abs=1e-3)
    metrics = loss_metrics(AlgorithmConfig(corrections=["lag_decay"]), found.sums)
    assert metrics["loss/cut_frac/lag_decay"] == 4 / 6
    assert metrics["loss/reject_frac"] == 0.0


def test_a_masked_sequence_keeps_its_place_in_the_denominator() -> None:
    config = AlgorithmConfig(corrections=["opsm"], off_policy_delta=0.1)
    new = torch.zeros(4).double().requires_grad_()
    old = torch.tensor([0.0, 0.0, 0.5, 0.5]).double()
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0]).double()
    weight, seq = torch.full((4,), 0.25).double(), torch.tensor([0, 0, 1, 1])
    result = loss_of(config, new, old, advantage, weight, seq)
    result.loss.backward()
    assert new.grad.tolist() == [-0.25, -0.25, 0.0, 0.0]
    assert loss_metrics(config, result.sums)["loss/opsm_frac"] == 0.5
    open_loss = loss_of(AlgorithmConfig(), new, old, advantage, weight, seq)
    assert open_loss.loss.item() != result.loss.item(), "control: without delta nothing is dropped"


def test_no_token_gives_a_connected_zero_and_no_metric() -> None:
    empty = torch.zeros(0, requires_grad=True)
    none, seq = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    result = loss_of(AlgorithmConfig(), empty, none, none, none, seq)
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert empty.grad is not None
    assert loss_metrics(AlgorithmConfig(), result.sums) == {}


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("algorithm.advantage", lambda plan: plan_advantages(AlgorithmConfig(advantage="x"), plan)),
        (
            "algorithm.aggregation",
            lambda plan: plan_weights(AlgorithmConfig(aggregation="x"), plan),
        ),
    ],
)
def test_unknown_names_list_the_known_ones(field: str, call: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{field} = .*known names are ") as caught:
        call(_plan(BlobStore(tmp_path, "n"), 1, 100))
    assert any(name in str(caught.value) for name in ("grpo_mean", "token_mean"))


def test_an_unscored_episode_is_refused(tmp_path: Path) -> None:
    rollout = make_rollout(BlobStore(tmp_path, "n"), "a", 2, 2)
    prompt = group(0, [rollout], [1.0]).prompt
    bare = EpisodeGroup(0, prompt, (Episode("0.0", (Turn(rollout),)),))
    plan = plan_batch(0, V3, [bare], dp_size=1, max_tokens_per_microbatch=9)
    with pytest.raises(RecordError, match="score_missing"):
        plan_advantages(AlgorithmConfig(), plan)


def test_turns_of_an_episode_share_advantage_and_denominator(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, "n")
    turns = (Turn(make_rollout(store, "a", 2, 3)), Turn(make_rollout(store, "b", 9, 1), (0,)))
    single = group(0, [make_rollout(store, "c", 2, 2)], [0.0])
    whole = replace(single, episodes=(Episode("0.0", turns, Score(1.0)), *single.episodes))
    plan = plan_batch(0, V3, [whole], dp_size=1, max_tokens_per_microbatch=4)
    advantage = plan_advantages(AlgorithmConfig(), plan)
    seq_mean = plan_weights(AlgorithmConfig(), plan)
    token_mean = plan_weights(AlgorithmConfig(aggregation="token_mean"), plan)
    for idx, row in enumerate(plan.rows):
        assert advantage[idx] == (0.5 if row.episode == 0 else -0.5)
        assert seq_mean[idx] == (1 / 8 if row.episode == 0 else 1 / 4)
        assert token_mean[idx] == 1 / 6


def _plan(store: BlobStore, dp_size: int, budget: int) -> BatchPlan:
    rng = np.random.default_rng(0)
    groups = [
        group(
            g,
            [
                make_rollout(store, f"{g}.{e}", 2, int(rng.integers(1, 9)), seed=10 * g + e)
                for e in range(4)
            ],
            rng.random(4).tolist(),
        )
        for g in range(3)
    ]
    return plan_batch(5, V3, groups, dp_size=dp_size, max_tokens_per_microbatch=budget)


def _gradient(
    plan: BatchPlan,
    aggregation: str,
    old: dict[str, Tensor],
    logprob: dict[str, Tensor],
    local: bool,
) -> Tensor:
    """Gradient of the step's loss in every token's log-probability, over all microbatches."""
    config = AlgorithmConfig(aggregation=aggregation, constant_tokens=8)
    advantages, weights = plan_advantages(config, plan), plan_weights(config, plan)
    leaves = {name: value.clone().requires_grad_() for name, value in logprob.items()}
    cells = sorted({(row.dp_rank, row.microbatch) for row in plan.rows})
    for cell in cells:
        rows = [i for i, row in enumerate(plan.rows) if (row.dp_rank, row.microbatch) == cell]
        for seq, i in enumerate(rows):
            row = plan.rows[i]
            rollout = plan.groups[row.group].episodes[row.episode].turns[0].rollout
            new = leaves[rollout.rollout_id]
            per_token = torch.ones_like(new)
            weight = 1 / (len(rows) * len(new) * len(cells)) if local else weights[i]
            loss_of(
                config,
                new,
                old[rollout.rollout_id],
                per_token * advantages[i],
                per_token * weight,
                torch.full((len(new),), seq),
            ).loss.backward()
    return torch.cat([leaves[name].grad for name in sorted(leaves)])


@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
def test_the_gradient_does_not_depend_on_ranks_or_microbatches(
    aggregation: str, tmp_path: Path
) -> None:
    stores = [BlobStore(tmp_path / str(i), "n") for i in range(4)]
    plans = [
        _plan(store, dp, budget)
        for store, (dp, budget) in zip(stores, ((1, 10**6), (1, 20), (2, 20), (3, 9)), strict=True)
    ]
    torch.manual_seed(0)
    old = {
        rollout.rollout_id: torch.from_numpy(read_logprobs(stores[0], rollout)).double()
        for g in plans[0].groups
        for rollout in g.rollouts()
    }
    logprob = {name: values + 0.1 * torch.randn(len(values)) for name, values in old.items()}
    want = _gradient(plans[0], aggregation, old, logprob, local=False)
    assert want.abs().max() > 1e-4
    for plan in plans[1:]:
        got = _gradient(plan, aggregation, old, logprob, local=False)
        assert float((got - want).norm() / want.norm()) < 1e-12
    wrong = _gradient(plans[2], aggregation, old, logprob, local=True)
    assert float((wrong - want).norm() / want.norm()) > 1e-2, "control: local denominators differ"


# --- per-token advantages, reward shaping, resampling ---------------------------------------------
def test_process_rewards_by_hand() -> None:
    """Two siblings: turns of 2 and 1 tokens with rewards 0 and 1; one turn of 2 with reward 2."""
    o = Outcomes(
        reward=torch.zeros(2).double(),
        group=torch.tensor([0, 0]),
        length=torch.tensor([3, 2]),
        step_reward=torch.tensor([0.0, 1.0, 2.0]).double(),
        step_episode=torch.tensor([0, 0, 1]),
        step_end=torch.tensor([1, 2, 1]),
    )
    assert process_mean(o).tolist() == [-1.0, -1.0, 0.0, 1.0, 1.0], "mean of the steps is 1"
    scale = 1.0 / (1.0 + 1e-4)
    torch.testing.assert_close(process_std(o), process_mean(o) * scale)


def test_process_rewards_reach_the_rows_and_wrong_steps_are_refused(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, "n")
    turns = (Turn(make_rollout(store, "a", 2, 2)), Turn(make_rollout(store, "b", 9, 1), (0,)))
    single = group(0, [make_rollout(store, "c", 2, 2)], [0.0])
    two = Episode("0.0", turns, Score(1.0, steps=((1, 0.0), (2, 1.0))))
    other = replace(single.episodes[0], score=Score(0.0, steps=((1, 2.0),)))
    whole = replace(single, episodes=(two, other))
    plan = plan_batch(0, V3, [whole], dp_size=1, max_tokens_per_microbatch=4)
    config = AlgorithmConfig(advantage="process_mean")
    got = {
        (row.episode, row.turn): list(value)
        for row, value in zip(plan.rows, plan_advantages(config, plan), strict=True)
    }
    assert got == {(0, 0): [-1.0, -1.0], (0, 1): [0.0], (1, 0): [1.0, 1.0]}
    for bad in ((), ((5, 1.0),), ((1, 1.0), (0, 1.0))):
        broken = replace(whole, episodes=(replace(two, score=Score(1.0, steps=bad)), other))
        plan = plan_batch(0, V3, [broken], dp_size=1, max_tokens_per_microbatch=4)
        with pytest.raises(RecordError, match="score_steps"):
            plan_advantages(config, plan)


def test_whitened_advantages_weigh_episodes_by_their_tokens() -> None:
    reward, owner = torch.tensor([1.0, 0.0, 3.0]), torch.tensor([0, 0, 1])
    length = torch.tensor([1, 4, 2])
    token = reinforce_pp(outcomes(reward, owner, length)).repeat_interleave(length)
    assert abs(token.mean().item()) < 1e-12
    assert token.std().item() == pytest.approx(1.0)
    base = reinforce_pp_baseline(outcomes(reward, owner, length))
    assert base[2] == pytest.approx(-float(base[:2].mul(length[:2]).sum()) / 2), "zero token mean"


def test_overlong_penalty_and_truncated_answers(tmp_path: Path) -> None:
    assert [overlong_penalty(n, 10, 4) for n in (1, 6, 7, 8, 10, 12)] == [0, 0, -0.25, -0.5, -1, -1]
    store = BlobStore(tmp_path, "n")
    long, short = make_rollout(store, "a", 2, 8), make_rollout(store, "b", 2, 4)
    short = replace(short, finish=Finish.STOP)
    plan = plan_batch(
        0, V3, [group(0, [long, short], [1.0, 0.0])], dp_size=1, max_tokens_per_microbatch=99
    )

    def advantages(**settings: object) -> list[float]:
        values = plan_advantages(AlgorithmConfig(**settings), plan)
        return [v for _, v in sorted(zip((r.episode for r in plan.rows), values, strict=True))]

    assert advantages() == [0.5, -0.5]
    assert advantages(overlong_buffer=2) == [0.0, 0.0], "8 of 8 tokens cost the whole reward"
    assert advantages(mask_truncated=True) == [0.0, -0.5]


def test_resample_on_correct_keeps_proportions_and_prefers_clean_successes() -> None:
    rewards, errors = [1.0] * 4 + [0.0] * 4, [0.0, 0.0, 9.0, 9.0] + [0.0] * 4
    rng = random.Random(0)
    draws = [resample_correct(rewards, errors, 4, rng) for _ in range(400)]
    assert all(len(set(d)) == 4 and sum(i < 4 for i in d) == 2 for d in draws)
    clean = sum(i < 2 for d in draws for i in d)
    dirty = sum(2 <= i < 4 for d in draws for i in d)
    assert clean > 2 * dirty > 0
    wrong = [sum(i == j for d in draws for i in d) for j in range(4, 8)]
    assert min(wrong) > 120, "incorrect ones are drawn uniformly"
    assert resample_correct([1.0] * 4, [1.0] * 4, 2, rng) != []
    assert len(resample_correct([0.0] * 4, [1.0] * 4, 2, rng)) == 2


def test_m2_bound_drops_the_largest_until_the_mean_fits() -> None:
    d = torch.tensor([0.0, 0.1, -0.2, 1.0, -2.0]).double()
    limit = m2_bound(d, 0.04)
    kept = d.square()[d.square() <= limit]
    assert len(kept) == 3
    assert kept.mean() <= 0.04 < (kept.sum() + 1.0) / 4
    assert m2_bound(d, 100.0) == 4.0
    assert m2_bound(d[3:], 0.04) == -1.0, "nothing fits"
    assert torch.isinf(m2_bound(d[:0], 0.04))


def test_gae_by_hand() -> None:
    reward = torch.tensor([0.0, 1.0, 2.0]).double()
    value = torch.tensor([0.5, 0.25, 1.0]).double()
    advantage, target = gae(reward, value, torch.tensor([2, 1]), 0.5, 0.5)
    last = 1.0 - 0.25
    first = 0.0 + 0.5 * 0.25 - 0.5 + 0.25 * last
    torch.testing.assert_close(advantage, torch.tensor([first, last, 1.0]).double())
    torch.testing.assert_close(target, advantage + value)
    whole, _ = gae(reward, value, torch.tensor([3]), 0.5, 0.5)
    assert whole[1] != advantage[1], "control: an episode ends where its length says"


def _gae_token_by_token(
    reward: list[float], value: list[float], length: list[int], gamma: float, lam: float
) -> list[float]:
    advantage, begin = [0.0] * len(reward), 0
    for size in length:
        running, ahead = 0.0, 0.0
        for t in range(begin + size - 1, begin - 1, -1):
            delta = reward[t] + gamma * ahead - value[t]
            running = delta + gamma * lam * running
            advantage[t], ahead = running, value[t]
        begin += size
    return advantage


@pytest.mark.parametrize("length", [[], [0], [1], [7, 0, 300, 1, 299, 0], [64] * 9])
def test_gae_equals_a_loop_over_tokens_bitwise(length: list[int]) -> None:
    draw = torch.Generator().manual_seed(3)
    reward, value = torch.randn(2, sum(length), generator=draw, dtype=torch.float64)
    advantage, _ = gae(reward, value, torch.tensor(length, dtype=torch.int64), 0.99, 0.93)
    assert advantage.tolist() == _gae_token_by_token(
        reward.tolist(), value.tolist(), length, 0.99, 0.93
    )
    if len(length) > 1:
        other, _ = gae(reward, value, torch.tensor(length[::-1]), 0.99, 0.93)
        assert (other == advantage).all() == (length == length[::-1]), "control: other ends"


def test_gae_of_a_plan_joins_the_turns_of_an_episode(tmp_path: Path) -> None:
    """Values of two turns are one sequence: the reward of the last token reaches the first turn."""
    store = BlobStore(tmp_path, "n")
    turns = (Turn(make_rollout(store, "a", 2, 2)), Turn(make_rollout(store, "b", 9, 1), (0,)))
    single = group(0, [make_rollout(store, "c", 2, 2)], [0.0])
    whole = replace(single, episodes=(Episode("0.0", turns, Score(1.0)), *single.episodes))
    plan = plan_batch(0, V3, [whole], dp_size=1, max_tokens_per_microbatch=4)
    config = AlgorithmConfig(advantage="gae", gae_gamma=0.5)
    sizes = [
        plan.groups[r.group].episodes[r.episode].turns[r.turn].rollout.num_sampled
        for r in plan.rows
    ]
    advantages, targets = plan_gae(config, plan, [np.zeros(n, np.float32) for n in sizes])
    by_row = {(r.episode, r.turn): t for r, t in zip(plan.rows, targets, strict=True)}
    assert list(by_row[0, 0]) == [0.25, 0.5]
    assert list(by_row[0, 1]) == [1.0]
    assert list(by_row[1, 0]) == [0.0, 0.0]
    every = np.concatenate(advantages)
    assert abs(every.mean()) < 1e-12
    assert every.std() == pytest.approx(1.0, abs=1e-6)
    with pytest.raises(AssertionError, match="function of its own"):
        plan_advantages(config, plan)


def test_a_truncated_answer_has_no_gae_either(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, "n")
    long, short = make_rollout(store, "a", 2, 3), make_rollout(store, "b", 2, 2)
    short = replace(short, finish=Finish.STOP)
    whole = group(0, [long, short], [1.0, 0.0])
    plan = plan_batch(0, V3, [whole], dp_size=1, max_tokens_per_microbatch=99)

    def found(*, masked: bool) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
        zeros = [np.zeros(r.num_sampled, np.float32) for r in plan.rollouts()]
        config = AlgorithmConfig(advantage="gae", mask_truncated=masked)
        advantages, targets = plan_gae(config, plan, zeros)
        order = [row.episode for row in plan.rows]
        return dict(zip(order, advantages, strict=True)), dict(zip(order, targets, strict=True))

    (masked, targets), (plain, whole_targets) = found(masked=True), found(masked=False)
    assert plain[0].all(), "control: it has one where nothing is masked"
    assert not masked[0].any()
    assert masked[1].tolist() == plain[1].tolist()
    assert targets[0].tolist() == whole_targets[0].tolist(), "the critic learns from it"


def test_a_kl_inside_the_reward_is_paid_by_each_token(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, "n")
    turns = (Turn(make_rollout(store, "a", 2, 2)), Turn(make_rollout(store, "b", 9, 1), (0,)))
    single = group(0, [make_rollout(store, "c", 2, 2)], [0.0])
    whole = replace(single, episodes=(Episode("0.0", turns, Score(1.0)), *single.episodes))
    plan = plan_batch(0, V3, [whole], dp_size=1, max_tokens_per_microbatch=4)
    gaps = {(0, 0): [0.1, 0.2], (0, 1): [-0.4], (1, 0): [0.0, 1.0]}
    drift = [np.array(gaps[r.episode, r.turn]) for r in plan.rows]
    config = AlgorithmConfig(advantage="gae", reward_kl_coef=0.5)
    zeros = [np.zeros(len(values), np.float32) for values in drift]
    _, targets = plan_gae(config, plan, zeros, drift)
    by_row = {(r.episode, r.turn): t.tolist() for r, t in zip(plan.rows, targets, strict=True)}
    assert by_row[0, 0] == pytest.approx([1.05, 1.1])  # 1 - 0.5 x the gaps from the token on
    assert by_row[0, 1] == pytest.approx([1.2])
    assert by_row[1, 0] == pytest.approx([-0.5, -0.5])
    want = np.array([1.05, 1.1, 1.2, -0.5, -0.5])
    want = (want - want.mean()) / want.std(ddof=1)
    found = plan_advantages(replace(config, advantage="reinforce_pp"), plan, drift)
    by_row = {(r.episode, r.turn): a for r, a in zip(plan.rows, found, strict=True)}
    got = np.concatenate([by_row[place] for place in gaps])
    assert got == pytest.approx(want, abs=1e-6)


def dpo_loss(logprob: torch.Tensor, reference: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """DPO (arXiv 2305.18290 eq. 7), mean over the pairs (1, 2) and (4, 3) of episodes, beta 0.2."""
    gain = torch.zeros(6).double().index_add(0, of, logprob - reference)
    margin = 0.2 * (gain[[1, 4]] - gain[[2, 3]])
    return -torch.nn.functional.logsigmoid(margin).mean()


def test_online_dpo_as_an_advantage_has_the_gradient_of_its_loss() -> None:
    reward = torch.tensor([0.5, 1.0, 0.0, 1.0, 3.0, 2.0])
    episodes = outcomes(reward, torch.tensor([0, 0, 0, 1, 1, 2]))
    chosen, rejected = best_and_worst(episodes)
    assert (chosen.tolist(), rejected.tolist()) == ([1, 4], [2, 3]), "no pair without a spread"
    rng = torch.Generator().manual_seed(0)
    of = torch.tensor([0, 1, 1, 2, 3, 3, 3, 4, 5, 5])
    logprob, reference = -3 * torch.rand(2, 10, generator=rng, dtype=torch.float64)
    leaf = logprob.clone().requires_grad_()
    dpo_loss(leaf, reference, of).backward()
    gain = torch.zeros(6).double().index_add(0, of, logprob - reference)
    advantage, margin = pair_advantages(episodes, gain, 0.2)
    assert margin.tolist() == pytest.approx((0.2 * (gain[[1, 4]] - gain[[2, 3]])).tolist())
    other = logprob.clone().requires_grad_()
    (-(advantage[of] * other).sum() / 6).backward()  # `reinforce` under `seq_mean_token_sum`
    assert torch.allclose(other.grad, leaf.grad, rtol=1e-12, atol=0)
    swapped = logprob.clone().requires_grad_()
    (-(pair_advantages(episodes, -gain, 0.2)[0][of] * swapped).sum() / 6).backward()
    assert not torch.allclose(swapped.grad, leaf.grad, rtol=1e-3), "control: margins reversed"


def test_online_dpo_over_a_plan_reports_its_pairs(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, "n")
    rollouts = [make_rollout(store, f"r{i}", 2, 3) for i in range(4)]
    groups = [group(0, rollouts[:2], [0.0, 1.0]), group(1, rollouts[2:], [1.0, 1.0])]
    plan = plan_batch(0, V3, groups, dp_size=1, max_tokens_per_microbatch=4)
    config = AlgorithmConfig(advantage="online_dpo", dpo_beta=0.5)
    gains = [{(0, 0): 2.0, (0, 1): -1.0}.get((r.group, r.episode), 9.0) for r in plan.rows]
    advantages, metrics = plan_pairs(config, plan, gains)
    push = 0.5 / (1 + np.exp(-1.5)) * 4
    found = {(r.group, r.episode): a for r, a in zip(plan.rows, advantages, strict=True)}
    assert found == pytest.approx({(0, 0): -push, (0, 1): push, (1, 0): 0.0, (1, 1): 0.0})
    assert metrics["dpo/pairs"] == 1.0
    assert metrics["dpo/right_frac"] == 0.0
    assert metrics["dpo/loss"] == pytest.approx(np.log1p(np.exp(1.5)))
