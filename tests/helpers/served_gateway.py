"""A gateway over a scripted engine, for clients of any form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import anthropic
import openai

from moerl.agents.chat_messages import Json
from moerl.agents.chat_turns import ChatTurns
from moerl.agents.episode_types import AnswerParser, EpisodeLimits, Policy
from moerl.agents.gateway.gateway import Endpoint, Gateway
from moerl.agents.gateway.other_models import OtherModels
from moerl.agents.prompt_tokens import PromptTokens
from moerl.agents.stop_texts import StopFinder
from moerl.config.task_programs import OtherModelConfig
from moerl.core.types import Grammar, SamplingParams
from moerl.episodes.finished_episode import FinishedEpisode
from moerl.episodes.open_episode import OpenEpisode
from tests.helpers.chat_tokenizer import END, call_text, chat_tokenizer
from tests.helpers.one_engine import far, finished, open_episode
from tests.helpers.patience import patience
from tests.helpers.scripted_engine import ScriptedEngine

TOKENIZER = chat_tokenizer()
TOKENS = PromptTokens(TOKENIZER)
LIMITS = EpisodeLimits(context_tokens=4000)
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = TOKENIZER.convert_tokens_to_ids(call_text(5))
SAMPLING = SamplingParams(50, stop_token_ids=(END,))
HELLO: Any = [{"role": "user", "content": "hello"}]


class MarkedCalls:
    """A parser for the vocabulary of the tests."""

    def parse(
        self, text: str, tools: Sequence[Json]
    ) -> tuple[str, str, tuple[tuple[str, str], ...]]:
        before, mark, rest = text.partition("<tool_call>")
        if not (mark and tools):
            return "", text, ()
        body = json.loads(rest.partition("</tool_call>")[0])
        return "thought", before, ((body["name"], json.dumps(body["arguments"])),)

    def begun(self, text: str, tools: Sequence[Json]) -> tuple[str, str]:
        return ("", "") if tools else ("", text)

    def call_grammar(self, tools: Sequence[Json]) -> Grammar:
        return Grammar("structural_tag", " ".join(tool["function"]["name"] for tool in tools))


@dataclass
class Served:
    engine: ScriptedEngine
    gateway: Gateway
    opened: OpenEpisode
    episode: ChatTurns

    @property
    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=self.gateway.base_url("e"), api_key=self.episode.key, max_retries=0
        )

    async def post(self, path: str = "/chat/completions", **body: Any) -> tuple[int, Any, Any]:
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {self.episode.key}"}) as http,
            http.post(self.gateway.base_url("e") + path, **body) as reply,
        ):
            text = await reply.text()
            return reply.status, json.loads(text), reply.headers

    async def end(self, failure: tuple[str, str] = ("", "")) -> FinishedEpisode:
        await self.gateway.end_episode("e")
        return await finished(self.opened, self.episode, failure)

    def open(self, name: str) -> ChatTurns:
        """Another episode."""
        episode = open_episode(self.engine, name, SAMPLING)
        return self.gateway.open_episode(far(episode), LIMITS)


@asynccontextmanager
async def serve(
    *answers: list[int],
    sampling: SamplingParams = SAMPLING,
    no_grammar: str = "",
    models: Mapping[str, OtherModelConfig] | None = None,
    parser: AnswerParser | None = None,
    tokens: PromptTokens = TOKENS,
    roles: Collection[str] = (),
    **endpoint: Any,
) -> AsyncIterator[Served]:
    engine = ScriptedEngine()
    engine.say(*answers)
    policy = Policy(
        tokens,
        StopFinder(tokens),
        parser or MarkedCalls(),
        LIMITS.context_tokens,
        logprobs=lambda rollout: rollout.logprobs,
        no_grammar=no_grammar,
    )
    gateway = Gateway(policy, Endpoint(**endpoint), OtherModels(models or {}, roles))
    await gateway.start()
    try:
        opened = open_episode(engine, "e", sampling)
        yield Served(engine, gateway, opened, gateway.open_episode(far(opened), LIMITS))
    finally:
        await gateway.stop()


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(work(), patience(60.0))

    asyncio.run(limited())


def ids(text: str) -> list[int]:
    return TOKENS.encode(text).tolist()


def anthropic_client(served: Served) -> anthropic.AsyncAnthropic:
    url = served.gateway.base_url("e").removesuffix("/v1")
    return anthropic.AsyncAnthropic(base_url=url, api_key=served.episode.key, max_retries=0)
