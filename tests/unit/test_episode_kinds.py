"""Kinds of episodes, each written with what `moerl.episodes` gives, in a few lines.

A single answer, a loop of tools, a stateful environment, a fork at a token, two roles of one
policy.  A program over the gateway is `examples/agent.py`.  Each is played through `OpenEpisode`
over one engine; the rows are those that a trainer gets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from moerl.controller.player import EnvironmentRunner, SingleTurn
from moerl.core.types import Array, PolicyVersion, SamplingParams, Score
from moerl.episodes.finished_episode import FinishedEpisode, RecordedTurn, checked_graph
from moerl.episodes.open_episode import EpisodeSpec, OpenEpisode, Outcome, TurnRequest, VersionGone
from tests.helpers.controllers import hello, make
from tests.helpers.one_engine import PROMPT, open_episode
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.stub_engine import StubEngine

END = 9
SAMPLING = SamplingParams(8, stop_token_ids=(END,))
IDS = np.asarray(PROMPT.token_ids, np.int32)


def opened(*answers: list[int]) -> OpenEpisode:
    engine = ScriptedEngine()
    engine.say(*answers)
    return open_episode(engine, "7.0", SAMPLING, prompt_ids=IDS, max_turns=4)


def rows(done: FinishedEpisode) -> list[tuple[list[int], list[int]]]:
    """Tokens of each row, and those of them that are trained."""
    nodes = done.nodes("join")
    checked_graph(done, nodes)
    found = [node.rollout for node in nodes]
    return [(r.token_ids.tolist(), r.token_ids[r.loss_mask].tolist()) for r in found]


class Adder(SingleTurn):
    """A tool: 5 asks for the sum of the tokens before it, which it then reads."""

    async def step(self, turns: Sequence[RecordedTurn]) -> Array | None:
        said = turns[-1].output_ids.tolist()
        return np.asarray([sum(said[: said.index(5)])], np.int32) if 5 in said else None


class Countdown:
    """A world with a state: it says how many turns are left, and ends at none."""

    counts: Mapping[str, float] = {"countdown": 1.0}

    def __init__(self, spec: EpisodeSpec) -> None:
        self._left, self._spec = 2, spec

    async def reset(self) -> Array:
        return np.append(self._spec.prompt_ids, np.int32(self._left))

    async def step(self, turns: Sequence[RecordedTurn]) -> Array | None:
        self._left -= 1
        return np.asarray([self._left], np.int32) if self._left else None


def test_a_single_answer_is_an_episode_of_one_turn() -> None:
    async def body() -> FinishedEpisode:
        episode = opened([3, 4, END])
        return episode.finish(await EnvironmentRunner(SingleTurn).run(episode))

    assert rows(asyncio.run(body())) == [([1, 2, 3, 4, END], [3, 4, END])]


def test_a_loop_of_tools() -> None:
    async def body() -> FinishedEpisode:
        episode = opened([3, 4, 5, END], [7, END])
        return episode.finish(await EnvironmentRunner(Adder).run(episode))

    assert rows(asyncio.run(body())) == [
        ([1, 2, 3, 4, 5, END, 7, 7, END], [3, 4, 5, END, 7, END]),
    ]


def test_a_stateful_environment() -> None:
    async def body() -> FinishedEpisode:
        episode = opened([3, END], [4, END])
        return episode.finish(await EnvironmentRunner(Countdown).run(episode))

    done = asyncio.run(body())
    assert rows(done) == [([1, 2, 2, 3, END, 1, 4, END], [3, END, 4, END])]
    assert done.counts["countdown"] == 1


def test_a_fork_of_an_episode_at_a_token() -> None:
    """Two other ends behind the second token of a turn: each is trained, its beginning once."""

    async def body() -> FinishedEpisode:
        episode = opened([3, 4, 6, END], [7, END], [8, END])
        turn = await episode.sample(TurnRequest(IDS))
        for wanted in episode.fork(turn, at=2, count=2):
            await episode.sample(wanted)
        with pytest.raises(ValueError, match="fork at 4"):
            episode.fork(turn, at=4, count=1)
        return episode.finish(Outcome(score=Score(1.0)))

    assert rows(asyncio.run(body())) == [
        ([1, 2, 3, 4, 6, END], [3, 4, 6, END]),
        ([1, 2, 3, 4, 7, END], [7, END]),
        ([1, 2, 3, 4, 8, END], [8, END]),
    ]


def test_two_roles_of_one_policy() -> None:
    """A solver answers, a checker reads the answer in a conversation of its own."""

    async def body() -> FinishedEpisode:
        episode = opened([3, END], [4, END])
        solved = await episode.sample(TurnRequest(IDS, role="solver"))
        asked = np.concatenate([[6], solved.output_ids]).astype(np.int32)
        await episode.sample(TurnRequest(asked, role="checker"))
        return episode.finish(Outcome(score=Score(0.5)))

    done = asyncio.run(body())
    assert [turn.role for turn in done.graph] == ["policy/solver", "policy/checker"]
    assert rows(done) == [([1, 2, 3, END], [3, END]), ([6, 3, END, 4, END], [4, END])]


@pytest.mark.parametrize(("step", "is_gone"), [(0, False), (1, True)])
async def test_a_turn_under_weights_that_are_gone_is_not_sampled(
    tmp_path_factory: pytest.TempPathFactory, step: int, is_gone: bool
) -> None:
    controller, _ = make(tmp_path_factory.mktemp("run"), StubEngine())
    await controller.handle(hello(PolicyVersion(0, 0)))
    router = controller._player.router
    episode = OpenEpisode(EpisodeSpec("7.0", PROMPT, replace(SAMPLING)), router)
    wanted = TurnRequest(IDS, version=PolicyVersion(0, step))
    if is_gone:
        with pytest.raises(VersionGone, match=r"no engine has the weights 0\.1"):
            await episode.sample(wanted)
        assert controller.context.step_metrics["agent/version_gone"] == 1
    else:
        assert (await episode.sample(wanted)).newest == PolicyVersion(0, 0)
    await controller.stop()
