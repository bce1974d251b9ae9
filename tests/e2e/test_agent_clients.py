"""Agents of others, unchanged and in an environment of their own, against a real engine.

openai-agents, Pydantic AI, Anthropic's client and verifiers play episodes with tools at the same
time.  Each is held at its second turn until all are there; then the weights change under their
requests.  Every turn is scored by Megatron-core with the weights that sampled it.  Each claim has
a control.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from moerl.agents.gateway import Endpoint, FinishedEpisode, Gateway
from moerl.agents.open_episode import EpisodeLimits, Policy
from moerl.agents.prompt_tokens import PromptTokens
from moerl.agents.stop_texts import StopFinder
from moerl.config.schema import EngineConfig
from moerl.controller.pooled_turns import episode_of
from moerl.engine.answer_parser import SglangAnswers
from moerl.errors import RecordError
from moerl.records.header_check import check
from moerl.types import GenerateRequest, SamplingParams, Segment
from tests.helpers.agent_clients import PROGRAMS, PYTHON, environment, verifiers_agent
from tests.helpers.agent_records import Records, Tap, check_control, check_scores, score, update
from tests.helpers.chat_tokenizer import END, chat_tokenizer
from tests.helpers.engine_tiny_model import SHAPE
from tests.helpers.replay_scenario import A, B, Scoring, World

pytestmark = [pytest.mark.e2e, pytest.mark.clients, pytest.mark.timeout(1200)]

# Turns of one length: each has calls, and an agent that gets none has done its work.
SAMPLING = SamplingParams(
    60, temperature=0.8, top_p=0.9, top_k=40, stop_token_ids=(END,), ignore_eos=True
)
TURNS = 4
CLIENTS: dict[str, tuple[str, ...]] = {
    "1.0": (str(PROGRAMS / "openai_agents_loop.py"),),
    "2.0": (str(PROGRAMS / "pydantic_ai_loop.py"),),
    "4.0": (str(PROGRAMS / "anthropic_loop.py"),),
    "3.0": verifiers_agent("sums_taskset", "null", max_turns=TURNS),
}


@dataclass
class MeetingTap(Tap):
    """Holds the second turn of each episode until all have come to theirs."""

    started: dict[str, set[str]] = field(default_factory=dict)
    begin: asyncio.Barrier = field(default_factory=lambda: asyncio.Barrier(len(CLIENTS) + 1))

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Segment | RecordError]:
        for request in requests:
            turns = self.started.setdefault(episode_of(request.rollout_id), set())
            is_new = request.rollout_id not in turns
            turns.add(request.rollout_id)
            if is_new and len(turns) == 2:
                await self.begin.wait()
        return await super().generate(requests)


@dataclass
class Played:
    """What the programs did and printed, by episode."""

    scoring: Scoring
    tokens: PromptTokens
    tap: MeetingTap
    done: dict[str, FinishedEpisode]
    printed: dict[str, str]

    @property
    def records(self) -> Records:
        turns = [turn for episode in self.done.values() for turn in episode.turns]
        return Records(self.scoring, self.tokens, turns)


async def play(world: World, parser: SglangAnswers) -> Played:
    tokens, tap = PromptTokens(chat_tokenizer()), MeetingTap(world)
    policy = Policy(tap, tokens, StopFinder(tokens), parser, SAMPLING, audit=True)
    gateway = Gateway(policy, Endpoint())
    await gateway.start()
    playing = {name: asyncio.create_task(run_client(gateway, name)) for name in CLIENTS}
    meeting = asyncio.create_task(tap.begin.wait())
    await asyncio.wait({meeting, *playing.values()}, return_when=asyncio.FIRST_COMPLETED)
    for task in playing.values():
        assert not task.done(), f"it has ended before its second turn: {task.result()}"
    await update(world, 0.1)
    printed = {name: await task for name, task in playing.items()}
    done = {name: await gateway.end_episode(name) for name in CLIENTS}
    await gateway.stop()
    return Played(Scoring(world, world.root), tokens, tap, done, printed)


async def run_client(gateway: Gateway, name: str) -> str:
    """What the program prints; it reads one line, as workers of `task.agent` do."""
    episode = gateway.open_episode(name, EpisodeLimits(context_tokens=4000))
    asked = {
        "episode": name,
        "base_url": gateway.base_url(name),
        "api_key": episode.key,
        "prompt": "What is 5 + 6?",
        "extra": {"turns": TURNS},
    }
    process = await asyncio.create_subprocess_exec(
        str(PYTHON),
        *CLIENTS[name],
        env=environment(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await process.communicate(json.dumps(asked).encode() + b"\n")
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    root = tmp_path_factory.mktemp("clients")
    environment()
    world = World(root, EngineConfig(max_total_tokens=16384))
    try:
        world.run(world.host.start(A), 600.0)  # a machine that many share
        found = world.run(play(world, SglangAnswers("qwen25")), 600.0)
    finally:
        world.run(world.host.stop())
    score(found.records)
    yield found
    world.loop.close()


@pytest.mark.parametrize("name", CLIENTS)
def test_an_episode_is_one_conversation_over_an_update(played: Played, name: str) -> None:
    done = played.done[name]
    assert [str(turn.origin) for turn in done.turns] == ["first"] + ["continued"] * (TURNS - 1)
    assert [turn.parent for turn in done.turns] == [None, *range(TURNS - 1)]
    spans = [span.version for turn in done.turns for span in turn.rollout.versions]
    assert set(spans) == {A, B}
    assert done.turns[-1].rollout.versions[-1].version == B


def test_the_update_interrupted_turns(played: Played) -> None:
    assert sum(done.counts["resumed"] for done in played.done.values()) >= 1


def test_the_environment_gives_its_reward(played: Played) -> None:
    answer = json.loads(played.printed["3.0"])
    assert answer["episode"] == "3.0"
    assert 0 < answer["reward"] <= 1, "the tool was called"


def test_every_sampled_token_is_in_the_record(played: Played) -> None:
    found = [turn.rollout for turn in played.records.turns]
    assert {rollout.rollout_id for rollout in found} == set(played.tap.sampled)
    for rollout in found:
        check(rollout, SHAPE)  # a row for each fed-in token, a mask for each sampled one
        sampled = rollout.token_ids[rollout.loss_mask].tolist()
        assert sampled == played.tap.sampled[rollout.rollout_id]
    again = [played.records.tokens.decode(rollout.token_ids.tolist()) for rollout in found]
    tokens = [played.records.tokens.encode(text) for text in again]
    assert not any(map(np.array_equal, tokens, (r.token_ids for r in found))), "control"


def test_every_turn_matches_the_weights_that_sampled_it(played: Played) -> None:
    check_scores(played.records)


@pytest.mark.parametrize("control", ["rows", "masks", "text"])
@pytest.mark.parametrize("step", [0, 1])
def test_a_record_with_one_thing_wrong_fails(played: Played, control: str, step: int) -> None:
    check_control(played.records, control, step)
