"""Streams of a real engine: text arrives while SGLang samples, through an update of the weights."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest

from moerl.agents.episode_types import EpisodeLimits, Policy
from moerl.agents.gateway.gateway import Endpoint, Gateway
from moerl.agents.prompt_tokens import PromptTokens
from moerl.agents.stop_texts import StopFinder
from moerl.config.schema import EngineConfig
from moerl.core.types import SamplingParams
from moerl.engine.host.answer_parser import SglangAnswers
from moerl.episodes.finished_episode import FinishedEpisode
from moerl.records.header_check import check
from tests.helpers.agent_records import Tap, update_now
from tests.helpers.chat_tokenizer import END, chat_tokenizer
from tests.helpers.engine_tiny_model import SHAPE
from tests.helpers.one_engine import PROMPT, far, finished, open_episode
from tests.helpers.patience import patience
from tests.helpers.replay_scenario import A, B, World

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(400)]

SAMPLING = SamplingParams(500, temperature=0.8, top_p=0.9, top_k=40, stop_token_ids=(END,))
BEGIN: Any = [{"role": "user", "content": "What is 5 + 6?"}]
SIBLINGS = 6


@dataclass
class Streamed:
    """What a client saw of its siblings, and the records."""

    done: FinishedEpisode
    tap: Tap
    tokens: PromptTokens
    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    chunks: int = 0
    unfinished: int = -1  # siblings that the engine still had when the first text arrived


async def play(world: World) -> Streamed:
    tokens, tap = PromptTokens(chat_tokenizer()), Tap(world)
    policy = Policy(tokens, StopFinder(tokens), SglangAnswers(), context_tokens=4000)
    gateway = Gateway(policy, Endpoint())
    await gateway.start()
    opened = open_episode(tap, "7.0", SAMPLING, audit=True)
    episode = gateway.open_episode(far(opened), EpisodeLimits(context_tokens=4000))
    url = gateway.base_url("7.0")
    async with openai.AsyncOpenAI(base_url=url, api_key=episode.key, max_retries=0) as client:
        found = Streamed(FinishedEpisode("", PROMPT, ()), tap, tokens)
        await listen(client, world, found)
        await hang_up(client, world)
    await gateway.end_episode("7.0")
    found.done = await finished(opened, episode)
    await gateway.stop()
    return found


async def listen(client: openai.AsyncOpenAI, world: World, found: Streamed) -> None:
    """Siblings that a weight update interrupts as soon as a text has arrived."""
    stream = await client.chat.completions.create(
        model="policy", messages=BEGIN, n=SIBLINGS, max_tokens=500, stream=True
    )
    update: asyncio.Task[None] | None = None
    async for chunk in stream:
        for choice in chunk.choices:
            found.texts[choice.index] += choice.delta.content or ""
        found.chunks += 1
        if update is None and any(found.texts.values()):
            found.unfinished = SIBLINGS - len(found.tap.sampled)
            update = asyncio.create_task(update_now(world))
    assert update is not None
    await update


async def hang_up(client: openai.AsyncOpenAI, world: World) -> None:
    """A client that leaves behind the first text; the engine must become idle."""
    stream = await client.chat.completions.create(
        model="policy", messages=BEGIN, n=2, max_tokens=500, stream=True
    )
    async for chunk in stream:
        if any(choice.delta.content for choice in chunk.choices):
            break
    await stream.close()
    await asyncio.wait_for(world.host._health.idle.wait(), patience(30.0))


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Streamed]:
    world = World(tmp_path_factory.mktemp("streams"), EngineConfig(max_total_tokens=16384))
    try:
        world.run(world.host.start(A), 240.0)
        found = world.run(play(world), 120.0)
    finally:
        world.run(world.host.stop())
    yield found
    world.loop.close()


def test_text_arrives_before_the_engine_has_ended(streamed: Streamed) -> None:
    assert streamed.unfinished > 0
    assert streamed.chunks > 3 * SIBLINGS, "more than a text and an end for each"


def test_the_increments_are_the_recorded_answers(streamed: Streamed) -> None:
    assert len(streamed.done.turns) == SIBLINGS
    recorded = []
    for turn in streamed.done.turns:
        check(turn.rollout, SHAPE)
        ids = turn.sampled.output_ids.tolist()
        assert ids == streamed.tap.sampled[turn.rollout.rollout_id]
        recorded.append(streamed.tokens.decode(ids[:-1] if ids[-1] == END else ids))
    assert sorted(streamed.texts.values()) == sorted(recorded)


def test_the_update_met_streams_and_a_client_left_one(streamed: Streamed) -> None:
    assert streamed.done.counts["resumed"] >= 1
    versions = [span.version for turn in streamed.done.turns for span in turn.rollout.versions]
    assert set(versions) == {A, B}
    assert streamed.done.counts["cancelled"] == 2
