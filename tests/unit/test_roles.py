"""Roles of one policy in an episode: their turns, rewards, baselines, sampling and loss weights."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moerl.agents.environments.episode_environment import (
    EpisodeEnd,
    Observation,
    PolicyAnswer,
    StartFields,
)
from moerl.agents.programs.agent_programs import _own_score
from moerl.algorithms.advantages import plan_advantages
from moerl.algorithms.aggregation import NO_ROLES, Roles, plan_weights
from moerl.config.checks import check
from moerl.config.load import load_config
from moerl.config.reward_terms import RewardTerm, RoleConfig
from moerl.config.schema import AlgorithmConfig, Config, TaskConfig
from moerl.controller.episode_scores import weighted
from moerl.controller.player import EnvironmentRunner, SingleTurn
from moerl.core.episode_view import EpisodeView
from moerl.core.errors import ConfigError
from moerl.core.types import (
    Array,
    BatchPlan,
    Episode,
    EpisodeGroup,
    PolicyVersion,
    Prompt,
    SamplingParams,
    Score,
    Turn,
)
from moerl.data.batching import plan_batch
from moerl.data.reward_values import score_of
from moerl.episodes.finished_episode import FinishedEpisode, RecordedTurn
from moerl.records.blob_store import BlobStore
from tests.helpers.agent_stubs import LocalEnvironments, environment_runner, play
from tests.helpers.chat_tokenizer import END
from tests.helpers.controllers import CONFIG, StubScorer, make, running, train
from tests.helpers.one_engine import open_episode
from tests.helpers.random_rollouts import make_rollout
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.served_gateway import HELLO, run, serve
from tests.helpers.stub_engine import StubEngine

SAMPLING = SamplingParams(8, stop_token_ids=(END,))
TWO = {"proposer": RoleConfig(), "solver": RoleConfig()}
SHARED = {name: RoleConfig(baseline="group") for name in TWO}
V0 = PolicyVersion(0, 0)


# --- turns ---------------------------------------------------------------------------------------
class Replies(SingleTurn):
    """An environment of texts with three turns."""

    async def step(self, turns: Sequence[RecordedTurn]) -> Array | None:
        return np.asarray([6], np.int32) if len(turns) < 3 else None


def test_roles_take_turns_in_one_conversation_with_sampling_and_rows_of_their_own() -> None:
    async def body() -> tuple[FinishedEpisode, ScriptedEngine]:
        engine = ScriptedEngine()
        engine.say([3, END], [4, END], [5, END])
        short = replace(SAMPLING, max_new_tokens=3, temperature=0.5)
        episode = open_episode(
            engine, "7.0", SAMPLING, prompt_ids=np.asarray([1, 2], np.int32), max_turns=3,
            roles={"": SAMPLING, "proposer": SAMPLING, "solver": short},
        )  # fmt: skip
        return episode.finish(await EnvironmentRunner(Replies).run(episode)), engine

    done, engine = asyncio.run(body())
    nodes = done.nodes("join")
    assert [turn.role for turn in done.graph] == [
        "policy/proposer",
        "policy/solver",
        "policy/proposer",
    ]
    asked = [(one.sampling.max_new_tokens, one.sampling.temperature) for one in engine.requests]
    assert asked == [(8, 1.0), (3, 0.5), (8, 1.0)]
    assert [(node.role, node.rollout.num_sampled) for node in nodes] == [
        ("proposer", 2),
        ("solver", 2),
        ("proposer", 2),
    ]
    assert [node.rollout.sampling.temperature for node in nodes] == [1.0, 0.5, 1.0]
    view = done.view(lambda ids: " ".join(map(str, ids)))
    assert [turn.role for turn in view.turns] == ["proposer", "solver", "proposer"]
    assert [turn.response for turn in view.only(["text"], ["solver"]).turns] == [f"4 {END}"]


def test_a_client_names_the_role_with_the_model() -> None:
    async def body() -> None:
        async with serve([3, END], [4, END], roles=TWO) as served:
            for role in ("solver.2", "proposer"):
                body = {"model": f"policy/{role}", "messages": HELLO}
                assert (await served.post(json=body))[0] == 200
            roles = [turn.sampled.role for turn in served.opened.turns]
            assert roles == ["solver.2", "proposer"]
            status, reply, _ = await served.post(json={"model": "policy/judge", "messages": HELLO})
            assert status == 404
            assert "allowed are policy, policy/proposer, policy/solver" in reply["error"]["message"]

    run(body)


@dataclass
class TwoTalks:
    """Asks a proposer, then two solvers, each in a conversation of its own."""

    role: str = "solver.2"

    @property
    def counts(self) -> Mapping[str, float]:
        return {}

    async def reset(self, start: StartFields) -> Observation:
        self.asked = iter(["solver.1", self.role])
        return Observation(start.messages, role="proposer")

    async def step(self, answer: PolicyAnswer) -> Observation | EpisodeEnd:
        if (role := next(self.asked, "")) == "":
            return EpisodeEnd(0.5, roles={"proposer": -1.0, "solver.1": 1.0})
        return Observation([{"role": "user", "content": answer.text}], role=role)

    async def close(self) -> None: ...


@dataclass
class Talks(LocalEnvironments):
    role: str = "solver.2"

    async def open(self, name: str) -> TwoTalks:
        return TwoTalks(self.role)


@pytest.mark.parametrize("role", ["solver.2", "judge"])
def test_an_environment_object_asks_roles_in_conversations_of_their_own(role: str) -> None:
    engine, task = ScriptedEngine(), TaskConfig(environment="x:Y", roles=TWO)

    async def body() -> FinishedEpisode:
        runner = environment_runner(task, Talks(role=role))
        engine.say([3, END], [4, END], [5, END])
        await runner.start()
        try:
            return await play(runner, engine, "7.0")
        finally:
            await runner.close()

    done = asyncio.run(body())
    if role == "judge":
        assert done.failure == "environment"
        assert "asks the role 'judge'; task.roles has proposer, solver" in done.detail
        return
    assert [turn.sampled.role for turn in done.turns] == ["proposer", "solver.1", "solver.2"]
    assert all(turn.before is None for turn in done.turns)
    score = done.own_score
    assert score is not None
    assert [score.reward_of(r) for r in ("proposer", "solver.1", "solver.2")] == [-1.0, 1.0, 0.5]


# --- rewards -------------------------------------------------------------------------------------
def test_a_program_and_a_function_give_rewards_of_roles() -> None:
    line = json.dumps({"reward": 1.0, "secret": "s", "roles": {"solver": 0.25}}).encode()
    assert _own_score(line, "s") == Score(1.0, roles={"solver": 0.25})
    assert _own_score(line.replace(b"0.25", b"1e30"), "s") is None
    assert score_of({"roles": {"a": 1, "b": 0.5}}) == Score(1.5, roles={"a": 1.0, "b": 0.5})


def test_a_term_of_a_role_counts_for_that_role_alone() -> None:
    terms = [
        RewardTerm("all", weight=0.5),
        RewardTerm("right", roles=["solver"]),
        RewardTerm("hard", roles=["proposer"], weight=2.0),
    ]
    scores = [Score(1.0, roles={"solver.2": 3.0}), Score(0.25), Score(-1.0)]
    total = weighted(terms, scores, 4, ["proposer", "solver"])
    assert total.reward == 0.5 + 0.25 - 2.0
    assert total.roles == {"proposer": 0.5 - 2.0, "solver": 0.75, "solver.2": 1.5 + 0.25}
    assert weighted(terms[:1], [Score(1.0)], 4, ["proposer"]).roles == {}


class RoleScorer(StubScorer):
    """Gives each role the number of its turns that were shown."""

    def __init__(self, name: str = "solver") -> None:
        super().__init__()
        self.name, self.seen = name, list[EpisodeView]()

    async def rewards(self, prompt: Prompt, episodes: Sequence[EpisodeView]) -> list[Score]:
        self.seen += episodes
        return [Score(1.0, roles={self.name: float(len(one.turns))}) for one in episodes]

    async def reply(self, prompt: Prompt, responses: Sequence[str]) -> str:
        return "6" if len(responses) < 2 else ""


def played(tmp_path: Path, scorer: RoleScorer, terms: list[RewardTerm]) -> tuple[list[Any], Any]:
    task = replace(CONFIG.task, environment="a:b", max_turns=2, rewards=terms, roles=TWO)
    engine = StubEngine()

    async def body() -> tuple[list[Any], Any]:
        controller, reports = make(tmp_path, engine, replace(CONFIG, task=task), scorer=scorer)
        plans = await running(controller, train(controller, 1))
        return [group for plan in plans for group in plan.groups], reports

    return asyncio.run(body())


def test_a_scorer_of_a_role_sees_its_turns_and_metrics_name_the_role(tmp_path: Path) -> None:
    own = RewardTerm("own", where="http", url="http://x", roles=["solver"])
    shared = RewardTerm("shared", where="http", url="http://x")
    groups, reports = played(tmp_path, scorer := RoleScorer(), [own, shared])
    assert {len(view.turns) for view in scorer.seen} == {1, 2}
    for episode in (one for group in groups for one in group.episodes):
        assert [turn.role for turn in episode.turns] == ["proposer", "solver"]
        assert episode.score.roles == {"proposer": 1.0, "solver": 1.0 + 2.0}
    assert reports[-1].metrics["reward/solver"] == 3.0
    assert reports[-1].metrics["reward/proposer"] == 1.0


def test_a_reward_of_an_unknown_role_fails_the_episode(tmp_path: Path) -> None:
    term = RewardTerm("own", where="http", url="http://x")
    with pytest.raises(ConfigError, match="a reward of the role 'judge'"):
        played(tmp_path, RoleScorer("judge"), [term])


# --- advantages and weights ----------------------------------------------------------------------
class Game:
    """Two siblings in which each role takes one of two actions; all outcomes, with exact sums."""

    def __init__(self, tmp_path: Path) -> None:
        store = BlobStore(tmp_path, "n")
        self.rollout = make_rollout(store, "a", 2, 1)
        self.theta = torch.tensor([[0.3, -0.2], [-0.5, 0.4]], dtype=torch.float64)
        self.theta.requires_grad_()
        self.lp = self.theta.log_softmax(-1)  # [role, action]

    @staticmethod
    def rewards(a: int, b: int) -> dict[str, float]:
        """The solver's depends on the proposal; both are far apart."""
        return {"proposer": 5.0 + 2.0 * a, "solver": float(b == a)}

    def plan(self, outcomes: Sequence[tuple[int, int]]) -> BatchPlan:
        episodes = tuple(
            Episode(
                f"0.{i}",
                (Turn(self.rollout, role="proposer"), Turn(self.rollout, role="solver")),
                Score(0.0, roles=self.rewards(*outcome)),
            )
            for i, outcome in enumerate(outcomes)
        )
        group = EpisodeGroup(0, Prompt(0, (1,), "", None, {}), episodes)
        return plan_batch(0, V0, [group], dp_size=1, max_tokens_per_microbatch=1000)

    def outcomes(self) -> Iterator[tuple[list[tuple[int, int]], torch.Tensor]]:
        pairs = list(itertools.product((0, 1), repeat=2))
        for two in itertools.product(pairs, repeat=2):
            log = sum(self.lp[0, a] + self.lp[1, b] for a, b in two)
            yield list(two), torch.as_tensor(log).exp()

    def expected(self, roles: Roles, name: str = "rloo") -> torch.Tensor:
        """Mean over all outcomes of the gradient that is estimated from one."""
        total = torch.zeros_like(self.theta)
        for two, probability in self.outcomes():
            plan = self.plan(two)
            values = plan_advantages(AlgorithmConfig(advantage=name), plan, roles=roles)
            loss = torch.zeros((), dtype=torch.float64)
            for row, value in zip(plan.rows, values, strict=True):
                loss = loss + self.lp[row.turn, two[row.episode][row.turn]] * float(value) / 2
            (gradient,) = torch.autograd.grad(loss, self.theta, retain_graph=True)
            total += probability.detach() * gradient
        return total

    def true(self) -> torch.Tensor:
        """Each role's own score times the gradient of its own log-probability."""
        total = torch.zeros_like(self.theta)
        for a, b in itertools.product((0, 1), repeat=2):
            weight = (self.lp[0, a] + self.lp[1, b]).exp().detach()
            for role, (name, said) in enumerate((("proposer", a), ("solver", b))):
                loss = self.lp[role, said] * self.rewards(a, b)[name]
                (gradient,) = torch.autograd.grad(loss, self.theta, retain_graph=True)
                total += weight * gradient
        return total


def test_a_baseline_per_role_is_unbiased_and_one_for_both_is_not(tmp_path: Path) -> None:
    game = Game(tmp_path)
    want = game.true()
    assert torch.allclose(game.expected({"": TWO}), want, atol=1e-12)
    assert (game.expected({"": SHARED}) - want).norm() > 0.05 * want.norm(), "control"


def test_baselines_of_a_role_of_an_episode_and_of_all(tmp_path: Path) -> None:
    rollout = make_rollout(BlobStore(tmp_path, "n"), "a", 2, 2)
    names = ["proposer", "solver.1", "solver.2"]
    rewards = [[4.0, 1.0, 0.0], [2.0, 1.0, 1.0]]
    episodes = tuple(
        Episode(
            f"0.{i}",
            tuple(Turn(rollout, role=name) for name in names),
            Score(0.0, roles=dict(zip(names, mine, strict=True))),
        )
        for i, mine in enumerate(rewards)
    )
    group = EpisodeGroup(0, Prompt(0, (1,), "", None, {}), episodes)
    plan = plan_batch(0, V0, [group], dp_size=1, max_tokens_per_microbatch=1000)

    def found(baseline: Any, **role: Any) -> dict[tuple[int, int], float]:
        roles = {"": TWO | {"solver": RoleConfig(baseline=baseline, **role)}}
        values = plan_advantages(AlgorithmConfig(), plan, roles=roles)
        return {(r.episode, r.turn): float(v) for r, v in zip(plan.rows, values, strict=True)}

    assert found("role") == {
        (0, 0): 1.0, (0, 1): 0.25, (0, 2): -0.75, (1, 0): -1.0, (1, 1): 0.25, (1, 2): 0.25,
    }  # fmt: skip
    assert found("episode") == {
        (0, 0): 1.0, (0, 1): 0.5, (0, 2): -0.5, (1, 0): -1.0, (1, 1): 0.0, (1, 2): 0.0,
    }  # fmt: skip
    half = {"": TWO | {"solver": RoleConfig(loss_weight=0.5)}}
    config = AlgorithmConfig(aggregation="seq_mean_token_mean")
    weights = {
        (row.episode, row.turn): weight
        for row, weight in zip(plan.rows, plan_weights(config, plan, half), strict=True)
    }
    assert weights[0, 0] == 1 / (6 * 2), "each role of an episode is a sequence"
    assert weights[0, 1] == weights[1, 2] == 0.5 / (6 * 2)
    assert set(plan_weights(config, plan, NO_ROLES)) == {1 / (6 * 2)}


# --- settings ------------------------------------------------------------------------------------
def test_the_recipe_is_checked() -> None:
    config: Config = load_config("proposer-solver", ["task.roles.solver.sampling.temperature=0.5"])
    check(config)
    assert list(config.task.roles) == ["proposer", "solver"]
