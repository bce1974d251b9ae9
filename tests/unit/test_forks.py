"""Forks: pivots, their continuations under one version, and advantages over the tree, exactly."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moerl.algorithms import fork_advantages
from moerl.algorithms.fork_advantages import plan_vine
from moerl.config.checks import check
from moerl.config.load import load_config
from moerl.config.schema import AlgorithmConfig, Config, ForkConfig
from moerl.core.errors import RecordError
from moerl.core.types import (
    BatchPlan,
    Episode,
    EpisodeGroup,
    Finish,
    GenerateRequest,
    PlanRow,
    PolicyVersion,
    Prompt,
    Rollout,
    SamplingParams,
    Score,
    Turn,
    VersionSpan,
)
from moerl.episodes.finished_episode import FinishedEpisode, checked_graph
from moerl.episodes.forks import pivots_of
from moerl.episodes.open_episode import Outcome, TurnRequest
from tests.helpers.controllers import CONFIG, make, running, train
from tests.helpers.one_engine import PROMPT, open_episode
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.stub_engine import StubEngine

V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)
END = 9
SAMPLING = SamplingParams(8, stop_token_ids=(END,))


# --- the tree ------------------------------------------------------------------------------------
def row(num_sampled: int, version: PolicyVersion = V0, changes_at: int = 0) -> Rollout:
    """A row without records.  changes_at: its later tokens are of V1."""
    spans = (VersionSpan(0, version), VersionSpan(changes_at, V1))
    return Rollout(
        "0.0",
        np.zeros(num_sampled + 1, np.int32),
        np.arange(num_sampled + 1) > 0,
        np.zeros(num_sampled, np.float32),
        spans if changes_at else spans[:1],
        (), (), Finish.STOP, SamplingParams(4), 0,
    )  # fmt: skip


def episode(
    reward: float, answer: Rollout, forks: Sequence[tuple[int, Rollout, float]] = ()
) -> Episode:
    """forks: (tokens kept, row of the continuation, its reward)."""
    turns = (Turn(answer), *(Turn(one, fork_at=at) for at, one, _ in forks))
    return Episode("0.0", turns, Score(reward, forks=tuple(r for _, _, r in forks)))


def plan_of(*groups: Sequence[Episode], peers: tuple[float, ...] = ()) -> BatchPlan:
    made = tuple(
        EpisodeGroup(g, Prompt(g, (1,), "", None, {}), tuple(mine), peers)
        for g, mine in enumerate(groups)
    )
    rows = tuple(
        PlanRow(g, e, t, 0, 0, 0)
        for g, mine in enumerate(groups)
        for e, one in enumerate(mine)
        for t in range(len(one.turns))
    )
    return BatchPlan(0, V0, made, rows, 1)


def advantages(*groups: Sequence[Episode]) -> list[list[float]]:
    return [np.asarray(values).tolist() for values in plan_vine(plan_of(*groups))]


def test_the_values_of_a_tree_with_two_pivots() -> None:
    forks = [(1, row(3), 1.0), (1, row(3), 0.0), (3, row(1), 1.0), (3, row(1), 1.0)]
    found = advantages([episode(0.0, row(4), forks), episode(0.25, row(2))])
    second = (1.0 + 1.0 + 0.0) / 3
    first = (1.0 + 0.0 + second) / 3
    assert found[0] == pytest.approx(
        [first - 0.25, *[(second - 0.5) / 3] * 2, (0.0 - 1.0) / 9], abs=1e-12
    )
    assert found[1] == pytest.approx([(1.0 - second / 2) / 3] * 3)
    assert found[2] == pytest.approx([(0.0 - (1.0 + second) / 2) / 3] * 3)
    assert found[3] == found[4] == pytest.approx([(1.0 - 0.5) / 9])
    assert found[5] == pytest.approx([0.25 - first] * 2)


@pytest.mark.parametrize(
    ("answer", "theirs", "enters"),
    [
        (row(4), V0, True),
        (row(4), V1, False),
        (row(4, changes_at=2), V0, False),
        (row(4, changes_at=2), V1, True),
        (row(4, changes_at=3), V1, False),
    ],
)
def test_the_answers_own_end_is_in_the_baseline_only_under_the_same_weights(
    answer: Rollout, theirs: PolicyVersion, *, enters: bool
) -> None:
    forks = [(2, row(2, theirs), 1.0), (2, row(2, theirs), 0.0)]
    found = advantages([episode(1.0, answer, forks), episode(0.0, row(1))])
    value = 2 / 3 if enters else 0.5
    assert found[0] == pytest.approx([value] * 2 + [0.5 / 3] * 2)
    assert found[1] == pytest.approx([((1.0 - 0.5) if enters else 1.0) / 3] * 2)


def test_peers_are_in_the_baseline_and_missing_rewards_are_refused() -> None:
    plan = plan_of([episode(1.0, row(1)), episode(0.0, row(1))], peers=(0.5,))
    assert [float(one[0]) for one in plan_vine(plan)] == [0.75, -0.75]
    lacks = replace(episode(1.0, row(2), [(1, row(1), 0.0)]), score=Score(1.0))
    with pytest.raises(RecordError, match="score_forks"):
        advantages([lacks])


# --- exact sums over a small tree -----------------------------------------------------------------
@dataclass(frozen=True)
class Sampled:
    """An episode of the decision process: its tokens, and the continuations of its pivots."""

    answer: tuple[int, ...]
    forks: tuple[tuple[int, tuple[int, ...]], ...]  # (tokens kept, further tokens)


class Chain:
    """Up to three tokens, each 0 (go on) or 1 (stop); the reward depends on all of them."""

    def __init__(self) -> None:
        self.theta = torch.tensor([0.4, -0.3, 0.2, 0.7], dtype=torch.float64).requires_grad_()

    def log(self, begin: tuple[int, ...], said: tuple[int, ...]) -> list[Tensor]:
        """Log-probability of each of some tokens behind others."""
        found = []
        for at in range(len(begin), len(begin) + len(said)):
            history = (*begin, *said)[:at]
            logit = self.theta[at] + 0.5 * sum(history) * self.theta[3]
            token = (*begin, *said)[at]
            found.append(torch.nn.functional.logsigmoid(logit if token else -logit))
        return found

    @staticmethod
    def reward(tokens: tuple[int, ...]) -> float:
        return {(1,): 0.3, (0, 1): 2.0, (0, 0, 1): -1.0, (0, 0, 0): 0.5}[tokens]

    @staticmethod
    def ends(begin: tuple[int, ...]) -> list[tuple[int, ...]]:
        """All ways to go on."""
        whole = [(1,), (0, 1), (0, 0, 1), (0, 0, 0)]
        return [one[len(begin) :] for one in whole if one[: len(begin)] == begin]

    def episodes(
        self, pivots: Callable[[tuple[int, ...]], list[int]]
    ) -> Iterator[tuple[Sampled, Tensor]]:
        """All outcomes, with their probabilities."""
        for answer in self.ends(()):
            kept = [at for at in pivots(answer) for _ in range(2)]
            for said in itertools.product(*(self.ends(answer[:at]) for at in kept)):
                forks = tuple(zip(kept, said, strict=True))
                logs = self.log((), answer) + [
                    one for at, more in forks for one in self.log(answer[:at], more)
                ]
                yield Sampled(answer, forks), torch.stack(logs).sum().exp().detach()

    def expected(self, pivots: Callable[[tuple[int, ...]], list[int]]) -> Tensor:
        """Mean over all pairs of a tree and a sibling without forks of the gradient of one pair."""
        plain = list(self.episodes(lambda answer: []))
        pairs = list(itertools.product(self.episodes(pivots), plain))
        groups = [[self.made(one) for one, _ in pair] for pair in pairs]
        assert math.isclose(sum(float(a * b) for (_, a), (_, b) in pairs), 1.0)
        plan = plan_of(*groups)
        loss = torch.zeros((), dtype=torch.float64)
        for place, values in zip(plan.rows, plan_vine(plan), strict=True):
            pair = pairs[place.group]
            sampled = pair[place.episode][0]
            begin: tuple[int, ...] = ()
            said = sampled.answer
            if place.turn:
                at, said = sampled.forks[place.turn - 1]
                begin = sampled.answer[:at]
            weight = pair[0][1] * pair[1][1] / 2
            logs = torch.stack(self.log(begin, said))
            loss = loss + weight * (logs * torch.from_numpy(np.array(values))).sum()
        return torch.autograd.grad(loss, self.theta)[0]

    def made(self, sampled: Sampled) -> Episode:
        forks = [
            (at, row(len(said)), self.reward((*sampled.answer[:at], *said)))
            for at, said in sampled.forks
        ]
        return episode(self.reward(sampled.answer), row(len(sampled.answer)), forks)

    def true(self) -> Tensor:
        mean = sum(
            torch.stack(self.log((), one)).sum().exp() * self.reward(one) for one in self.ends(())
        )
        return torch.autograd.grad(torch.as_tensor(mean), self.theta)[0]


def by_position(answer: tuple[int, ...]) -> list[int]:
    """As `rollout.forks.every=1` chooses: known from the tokens up to it."""
    return list(range(1, len(answer)))


def one_pivot(answer: tuple[int, ...]) -> list[int]:
    return by_position(answer)[:1]


def error(found: Tensor, want: Tensor) -> float:
    return float((found - want).norm() / want.norm())


@pytest.mark.parametrize("pivots", [one_pivot, by_position])
def test_the_gradient_over_a_tree_is_that_of_the_expected_reward(pivots: Any) -> None:
    chain = Chain()
    assert error(chain.expected(pivots), chain.true()) < 1e-12


def test_control_a_baseline_that_contains_its_own_reward_is_biased(monkeypatch: Any) -> None:
    chain = Chain()
    monkeypatch.setattr(
        fork_advantages, "mean_of_others", lambda values, place: sum(values) / len(values)
    )
    assert error(chain.expected(one_pivot), chain.true()) > 0.02


def test_control_pivots_that_depend_on_the_length_are_biased() -> None:
    chain = Chain()

    def by_length(answer: tuple[int, ...]) -> list[int]:
        return [1] if len(answer) == 2 else []

    assert error(chain.expected(by_length), chain.true()) > 0.02


# --- pivots --------------------------------------------------------------------------------------
WORDS = {3: "a", 4: "b.", 5: ".", 9: ""}


@pytest.mark.parametrize(
    ("ids", "settings", "found"),
    [
        ([3, 4, 3, 5, 3, 9], ForkConfig(9, separator="."), [2, 4]),
        ([3, 4, 3, 5, 3, 9], ForkConfig(1, separator="."), [2]),
        ([3, 4], ForkConfig(9, separator="."), []),  # the limit ends it with its step
        ([3, 4, 9], ForkConfig(9, separator="."), [2]),
        ([3, 3, 3, 3, 3], ForkConfig(9, every=2), [2, 4]),
        ([3, 3, 3, 3], ForkConfig(9, every=2), [2]),
    ],
)
def test_pivots_are_ends_of_steps_or_every_few_tokens(
    ids: list[int], settings: ForkConfig, found: list[int]
) -> None:
    def decode(some: Sequence[int]) -> str:
        return "".join(WORDS[one] for one in some)

    assert pivots_of(ids, settings, decode) == found
    for at in found:  # what follows does not matter
        assert (
            pivots_of([*ids[:at], 3, 9], settings, decode)[: found.index(at) + 1]
            == (found[: found.index(at) + 1])
        )


# --- sampling ------------------------------------------------------------------------------------
FORKS = ForkConfig(2, continuations=2, every=1)
SETTINGS = replace(
    CONFIG,
    rollout=replace(CONFIG.rollout, forks=FORKS),
    algorithm=AlgorithmConfig(advantage="vine"),
)


def forks_of(group: EpisodeGroup) -> list[tuple[int, Rollout]]:
    return [(t.fork_at, t.rollout) for e in group.episodes for t in e.turns if t.fork_at >= 0]


def played(
    tmp_path: Path,
    engine: StubEngine,
    config: Config = SETTINGS,
    ends: Callable[[int], Awaitable[None]] | None = None,
) -> tuple[list, list]:
    async def body() -> tuple[list, list]:
        controller, reports = make(tmp_path, engine, config)
        plans = await running(controller, train(controller, 4, ends=ends), 60)
        return plans, reports

    return asyncio.run(body())


def test_forks_are_continued_scored_and_trained_with_their_answer(tmp_path: Path) -> None:
    async def ends(_: int) -> None:
        await asyncio.sleep(0.1)  # an update interrupts a pivot once at most, not in each try

    plans, reports = played(tmp_path, engine := StubEngine(), ends=ends)
    for group in (group for plan in plans for group in plan.groups):
        for one in group.episodes:
            rows = [(turn.fork_at, turn.rollout.num_sampled) for turn in one.turns]
            assert sorted(rows) == [(-1, 4), (1, 3), (1, 3), (2, 2), (2, 2)]
            assert rows[0] == (-1, 4)
            assert all(turn.rollout.num_tokens == 6 for turn in one.turns)
            assert one.score is not None
            assert len(one.score.forks) == 4
            assert len(one.turn_lengths()) == 1, "the answer's"
            trained = [turn.fork_at for turn in one.graph if not turn.left_out]
            assert sorted(trained) == [-1, 1, 1, 2, 2]
            assert {turn.left_out for turn in one.graph} <= {"", "no_answer"}
    asked = [one for one in engine.requests if not one.rollout_id.endswith(".t0")]
    assert {len(one.token_ids) + one.sampling.max_new_tokens for one in asked} == {6}
    assert {one.rows_known for one in asked} == {0}, "the engine records the rows of the prefix"
    assert sum(report.metrics.get("fork/continuations", 0.0) for report in reports) >= 6 * 2 * 4
    assert all(plan_vine(plan) for plan in plans)


def test_an_update_between_a_pivot_and_its_ends_samples_all_of_them_again(tmp_path: Path) -> None:
    """The first continuations are interrupted by every update; the next ones are of one version."""
    held: list[GenerateRequest] = []

    def holds(first: GenerateRequest) -> bool:
        is_late = int(first.rollout_id.split(".")[0]) >= 6  # groups 0 to 5 train three steps
        if not (is_late and not first.rollout_id.endswith(".t0") and not held):
            return False
        held.append(first)
        return True

    async def ends(step: int) -> None:
        while step == 2 and not held:  # the last update comes while they wait
            await asyncio.sleep(0.01)

    plans, reports = played(tmp_path, engine := StubEngine(holds=holds), ends=ends)
    assert held
    assert engine.cut, "continuations were interrupted"
    groups = [group for plan in plans for group in plan.groups]
    for group in groups:
        for one in group.episodes:
            for at in (1, 2):
                rows = [turn.rollout for turn in one.turns if turn.fork_at == at]
                assert len({span.version for each in rows for span in each.versions}) <= 1
                assert len(rows) in (0, 2)
    graphs = [turn for group in groups for one in group.episodes for turn in one.graph]
    assert "no_answer" in {turn.left_out for turn in graphs}
    assert sum(report.metrics.get("agent/version_gone", 0) for report in reports) > 0


def test_continuations_of_several_versions_are_refused() -> None:
    """Control: of one version they are admitted."""

    async def body(versions: Sequence[PolicyVersion]) -> FinishedEpisode:
        engine = ScriptedEngine()
        engine.say([3, 4, END], [5, END], [6, END])
        opened = open_episode(
            engine, "7.0", SAMPLING, prompt_ids=np.asarray(PROMPT.token_ids, np.int32)
        )
        answer = await opened.sample(TurnRequest(opened.spec.prompt_ids))
        for wanted in opened.fork(answer, at=1, count=2):
            await opened.sample(wanted)
        done = opened.finish(Outcome())
        graph = [
            replace(turn, versions=(version,))
            for turn, version in zip(done.graph, versions, strict=True)
        ]
        return replace(done, graph=tuple(graph))

    whole = asyncio.run(body([V0, V0, V0]))
    nodes = whole.nodes("join")
    assert len(checked_graph(whole, nodes)) == 3
    view = whole.answers[1].view(lambda ids: " ".join(map(str, ids)))
    assert (view.turns[0].response, view.turns[0].read) == (f"3 5 {END}", "p")
    mixed = asyncio.run(body([V0, V0, V1]))
    with pytest.raises(RecordError, match=r"of 7.0.t0 behind token 1 are of 0.0, 0.1"):
        checked_graph(mixed, nodes)


# --- settings ------------------------------------------------------------------------------------
def test_the_recipe_is_checked() -> None:
    check(load_config("vine", []))
