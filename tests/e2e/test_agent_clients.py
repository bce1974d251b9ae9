"""Agents of others, unchanged and in an environment of their own, against a real engine.

OpenAI's client, openai-agents, Pydantic AI, Anthropic's client and verifiers play episodes with
tools at the same time, twice.  Each is held at its second turn until all are there; then the
weights change under their requests.  The first time the update interrupts the turns, which are
resumed; the second time they run through it on their KV cache.  Every turn is scored by
Megatron-core with the weights that sampled it.  Each claim has a control.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest

from moerl.agents.chat_turns import ChatTurns
from moerl.agents.episode_types import EpisodeLimits, Policy
from moerl.agents.gateway.gateway import Endpoint, Gateway
from moerl.agents.prompt_tokens import PromptTokens
from moerl.agents.stop_texts import StopFinder
from moerl.config.schema import EngineConfig
from moerl.core.errors import RecordError
from moerl.core.ids import episode_of
from moerl.core.types import Array, GenerateRequest, SamplingParams, Segment
from moerl.engine.host.answer_parser import SglangAnswers
from moerl.episodes.finished_episode import FinishedEpisode
from moerl.records.header_check import check
from tests.helpers.agent_clients import PROGRAMS, PYTHON, environment, verifiers_agent
from tests.helpers.agent_records import (
    Records,
    Tap,
    check_control,
    check_scores,
    check_tails,
    score,
    update,
    update_in_place,
)
from tests.helpers.chat_tokenizer import END, chat_tokenizer
from tests.helpers.engine_tiny_model import SHAPE
from tests.helpers.one_engine import far, finished, open_episode
from tests.helpers.replay_scenario import A, B, C, Scoring, World
from tests.helpers.session_publisher import Publisher

pytestmark = [pytest.mark.e2e, pytest.mark.clients, pytest.mark.timeout(1200)]

# Turns of one length: each has calls, and an agent that gets none has done its work.
SAMPLING = SamplingParams(
    60, temperature=0.8, top_p=0.9, top_k=40, stop_token_ids=(END,), ignore_eos=True
)
TURNS = 4
CLIENTS: dict[str, tuple[str, ...]] = {
    "openai": (str(PROGRAMS / "openai_loop.py"),),
    "openai-agents": (str(PROGRAMS / "openai_agents_loop.py"),),
    "pydantic-ai": (str(PROGRAMS / "pydantic_ai_loop.py"),),
    "anthropic": (str(PROGRAMS / "anthropic_loop.py"),),
    "verifiers": verifiers_agent("sums_taskset", "null", max_turns=TURNS),
}
UPDATES = {"abort_resume": (A, B), "in_place": (B, C)}


@dataclass
class MeetingTap(Tap):
    """Holds the second turn of each episode until all have come to theirs."""

    started: dict[str, set[str]] = field(default_factory=dict)
    begin: asyncio.Barrier = field(default_factory=lambda: asyncio.Barrier(len(CLIENTS) + 1))

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Segment | RecordError]:
        for request in requests:
            await self._meet(request)
        return await super().generate(requests)

    async def stream(
        self, request: GenerateRequest, heard: Callable[[Array], None]
    ) -> Segment | RecordError:
        await self._meet(request)
        return await super().stream(request, heard)

    async def _meet(self, request: GenerateRequest) -> None:
        turns = self.started.setdefault(episode_of(request.rollout_id), set())
        is_new = request.rollout_id not in turns
        turns.add(request.rollout_id)
        if is_new and len(turns) == 2:
            await self.begin.wait()


@dataclass
class Played:
    """What the programs did and printed over one update, by client."""

    records: Records
    tap: MeetingTap
    done: dict[str, FinishedEpisode]
    printed: dict[str, str]


class Stage:
    """One server, and what all plays share."""

    def __init__(self, world: World) -> None:
        self.world, self._parser = world, SglangAnswers("qwen25")
        self._tokens, self._scoring = PromptTokens(chat_tokenizer()), Scoring(world, world.root)

    async def play_all(self) -> dict[str, Played]:
        begun = await self.play("abort_resume", partial(update, self.world, 0.1))
        publisher = Publisher(self.world.host, self.world.folders)
        await publisher.stage(C)
        change = partial(update_in_place, self.world, publisher, 0.1)
        return {"abort_resume": begun, "in_place": await self.play("in_place", change)}

    async def play(self, name: str, change: Callable[[], Awaitable[None]]) -> Played:
        tokens, tap = self._tokens, MeetingTap(self.world)
        policy = Policy(tokens, StopFinder(tokens), self._parser, context_tokens=4000)
        gateway = Gateway(policy, Endpoint())
        await gateway.start()
        opened = {
            client: open_episode(tap, episode_name(name, client), SAMPLING, audit=True)
            for client in CLIENTS
        }
        turns_of = {
            client: gateway.open_episode(far(episode), EpisodeLimits(context_tokens=4000))
            for client, episode in opened.items()
        }
        playing = {
            client: asyncio.create_task(run_client(gateway, turns))
            for client, turns in turns_of.items()
        }
        meeting = asyncio.create_task(tap.begin.wait())
        await asyncio.wait({meeting, *playing.values()}, return_when=asyncio.FIRST_COMPLETED)
        for task in playing.values():
            assert not task.done(), f"it has ended before its second turn: {task.result()}"
        await change()
        printed = {client: await task for client, task in playing.items()}
        await gateway.stop()
        done = {client: await finished(opened[client], turns_of[client]) for client in CLIENTS}
        turns = [turn for episode in done.values() for turn in episode.turns]
        records = Records(self._scoring, tokens, turns, UPDATES[name], f"{name}.")
        return Played(records, tap, done, printed)


def episode_name(update_name: str, client: str) -> str:
    return f"{10 * list(UPDATES).index(update_name) + list(CLIENTS).index(client)}.0"


async def run_client(gateway: Gateway, episode: ChatTurns) -> str:
    """What the program prints; it reads one line, as workers of `task.agent` do."""
    name = episode.name
    asked = {
        "episode": name,
        "secret": "s",
        "base_url": gateway.base_url(name),
        "api_key": episode.key,
        "prompt": "What is 5 + 6?",
        "extra": {"turns": TURNS},
    }
    process = await asyncio.create_subprocess_exec(
        str(PYTHON),
        *list(CLIENTS.values())[int(name.partition(".")[0]) % 10],
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
def all_played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Played]]:
    root = tmp_path_factory.mktemp("clients")
    environment()
    world = World(root, EngineConfig(max_total_tokens=16384))
    try:
        world.run(world.host.start(A), 600.0)  # a machine that many share
        found = world.run(Stage(world).play_all(), 600.0)
    finally:
        world.run(world.host.stop())
    score(*(played.records for played in found.values()))
    yield found
    world.loop.close()


@pytest.fixture(params=UPDATES)
def played(request: pytest.FixtureRequest, all_played: dict[str, Played]) -> Played:
    return all_played[request.param]


@pytest.mark.parametrize("name", CLIENTS)
def test_an_episode_is_one_conversation_over_an_update(played: Played, name: str) -> None:
    done, (before, after) = played.done[name], played.records.versions
    assert [str(turn.origin) for turn in done.turns] == ["first"] + ["continued"] * (TURNS - 1)
    assert [turn.before for turn in done.turns] == [None, *done.turns[:-1]]
    spans = [span.version for turn in done.turns for span in turn.rollout.versions]
    assert set(spans) == {before, after}
    assert done.turns[-1].rollout.versions[-1].version == after


def test_the_update_met_running_turns(all_played: dict[str, Played]) -> None:
    resumed = {
        name: sum(done.counts["resumed"] for done in played.done.values())
        for name, played in all_played.items()
    }
    assert resumed["abort_resume"] >= 1
    assert resumed["in_place"] == 0, "no call is interrupted"


def test_the_environment_gives_its_reward(played: Played) -> None:
    answer = json.loads(played.printed["verifiers"])
    assert answer["episode"] == played.done["verifiers"].episode_id
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


def test_every_turn_matches_the_weights_that_sampled_it(all_played: dict[str, Played]) -> None:
    """What follows an update in place inside its turn matches none: it has bins of its own."""
    check_scores(all_played["abort_resume"].records)
    records = all_played["in_place"].records
    check_scores(records, tails=check_tails(records))


@pytest.mark.parametrize("control", ["rows", "masks", "text"])
@pytest.mark.parametrize("step", [0, 1])
def test_a_record_with_one_thing_wrong_fails(played: Played, control: str, step: int) -> None:
    check_control(played.records, control, step)
