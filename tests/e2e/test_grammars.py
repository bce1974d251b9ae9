"""Answers of a grammar, from a real engine through the gateway: they parse, before and after an
update in mid-answer of each kind, and what was sampled from is in the record.

The oracle is xgrammar, reading the recorded tokens from the first one on.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import openai
import pytest
import xgrammar

from moerl.agents.episode_types import EpisodeLimits, Policy
from moerl.agents.gateway.gateway import Endpoint, Gateway
from moerl.agents.prompt_tokens import PromptTokens
from moerl.agents.stop_texts import StopFinder
from moerl.config.schema import EngineConfig
from moerl.core.errors import RecordError
from moerl.core.types import (
    GenerateRequest,
    Grammar,
    MaskBlob,
    PolicyVersion,
    Rollout,
    SamplingParams,
    Segment,
)
from moerl.engine import protocol
from moerl.engine.host.answer_parser import SglangAnswers
from moerl.episodes.finished_episode import FinishedEpisode
from moerl.records.header_check import check
from moerl.records.sampling_mask import encode_rows
from moerl.records.segment_split import split_segments
from tests.helpers.agent_records import MAX_GAP, MEAN_GAP, Tap, update
from tests.helpers.chat_tokenizer import END, SIZE, chat_tokenizer, save
from tests.helpers.engine_tiny_model import SHAPE
from tests.helpers.one_engine import far, finished, open_episode
from tests.helpers.replay_scenario import STEPS, A, B, C, Scoring, World
from tests.helpers.session_publisher import Publisher

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(560)]

# The first cuts hardly anything but what a grammar cuts, so that its part can be told.
WIDE = SamplingParams(300, temperature=0.8, top_k=250, stop_token_ids=(END,))
NARROW = replace(WIDE, top_p=0.9, top_k=8)
D = PolicyVersion(0, 3)  # the weights of A once more
HELLO: Any = [{"role": "user", "content": "What is 5 + 6?"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-z]{100}$"}, "n": {"enum": [1, 22]}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
PATTERN = "[a-f]{100}-(yes|no)"
RULES = 'root ::= "so" (" " number){50} "."\nnumber ::= [1-9] [0-9]?'
WRITTEN = re.compile(r"so( [1-9][0-9]?){50}\.")


class Grammars(Tap):
    """The engine, and the grammar of each turn; refusals pass."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.of: dict[str, Grammar | None] = {}

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Segment | RecordError]:
        self.of |= {request.rollout_id: request.sampling.grammar for request in requests}
        return await self.world.host.generate(requests)


@dataclass
class Played:
    """texts: of answers, by the kind of the request; errors: of bad grammars."""

    world: World
    parser: SglangAnswers
    tap: Grammars
    texts: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    errors: list[tuple[int, str | None]] = field(default_factory=list)
    done: dict[str, FinishedEpisode] = field(default_factory=dict)  # by name of the episode

    @property
    def rollouts(self) -> list[Rollout]:
        return [turn.rollout for done in self.done.values() for turn in done.turns]


class Client:
    def __init__(self, played: Played, client: openai.AsyncOpenAI) -> None:
        self.played, self.client = played, client

    async def chat(self, kind: str, n: int, **fields: Any) -> None:
        create = self.client.chat.completions.create
        reply = await create(model="policy", messages=HELLO, n=n, **fields)
        for choice in reply.choices:
            calls = choice.message.tool_calls or []
            text = calls[0].function.arguments if calls else choice.message.content or ""
            self.played.texts[kind].append(text)

    async def text(self, kind: str, n: int, **fields: Any) -> None:
        create = self.client.completions.create
        reply = await create(model="policy", prompt="5 + 6 is ", n=n, extra_body=fields)
        self.played.texts[kind] += [choice.text for choice in reply.choices]

    async def each(self, n: int) -> None:
        of_schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        await asyncio.gather(
            self.chat("json", n, response_format=of_schema),
            self.chat("call", n, tools=[ADD], tool_choice="required", max_tokens=90),
            self.text("pattern", n, regex=PATTERN),
            self.text("rules", n, ebnf=RULES),
            self.chat("object", n, response_format={"type": "json_object"}, max_tokens=30),
            self.chat("free", 1, max_tokens=30),
        )

    async def bad(self) -> None:
        bad: list[dict[str, Any]] = [
            {"regex": "(a", "max_tokens": 9},
            {"regex": "(a", "max_tokens": 200},  # a streamed reply of the engine
            {"ebnf": "root ::= nothing"},
            {"json_schema": '{"type": "objekt"}'},
        ]
        for fields in bad:
            with pytest.raises(openai.BadRequestError) as error:
                await self.text("refused", 1, **fields)
            self.played.errors.append((error.value.status_code, error.value.code))


async def play(world: World, parser: SglangAnswers) -> Played:
    tokens, played = PromptTokens(chat_tokenizer()), Played(world, parser, Grammars(world))
    publisher = Publisher(world.host, world.folders)
    for name, meets in EPISODES.items():
        sampling = NARROW if name == "narrow" else WIDE
        policy = Policy(tokens, StopFinder(tokens), parser, context_tokens=2000)
        gateway = Gateway(policy, Endpoint())
        await gateway.start()
        opened = open_episode(played.tap, name, sampling, audit=True)
        limits = EpisodeLimits(context_tokens=2000, turns=100)
        episode = gateway.open_episode(far(opened), limits)
        openai_client = openai.AsyncOpenAI(
            base_url=gateway.base_url(name), api_key=episode.key, max_retries=0
        )
        client = Client(played, openai_client)
        await client.each(1)
        if meets is not None:
            asking = asyncio.ensure_future(client.each(3))
            await meets(world, publisher, asking)
            await asking
        await client.bad()
        await client.text("pattern", 1, regex=PATTERN)  # the engine still serves
        await openai_client.close()
        await gateway.stop()
        played.done[name] = await finished(opened, episode)
    return played


async def abort_resume(world: World, _: Publisher, asking: asyncio.Future[Any]) -> None:
    await update(world, asking, steps=STEPS)


async def retract(world: World, publisher: Publisher, asking: asyncio.Future[Any]) -> None:
    await publish(world, publisher, asking, protocol.RETRACT_AUDIT, C)


async def in_place(world: World, publisher: Publisher, asking: asyncio.Future[Any]) -> None:
    await publish(world, publisher, asking, protocol.IN_PLACE, D)


async def publish(
    world: World,
    publisher: Publisher,
    asking: asyncio.Future[Any],
    mode: str,
    version: PolicyVersion,
) -> None:
    """A session that running requests meet."""
    seen = world.prefills()
    await publisher.stage(version)
    await world.decode_a_while(asking, seen, steps=STEPS)
    world.host._updates.mode = mode
    await publisher.commit(version)


# What happens to the weights while the turns of an episode run.
EPISODES = {"plain": abort_resume, "narrow": None, "retract": retract, "in_place": in_place}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    root = tmp_path_factory.mktemp("grammars")
    parser = SglangAnswers("qwen25")
    world = World(root, EngineConfig(max_total_tokens=16384))
    world.folders[D] = world.folders[A]
    save(world.folders[A])  # the grammar backend reads it there
    try:
        world.run(world.host.start(A), 240.0)
        found = world.run(play(world, parser), 280.0)
    finally:
        world.run(world.host.stop())
    yield found
    world.loop.close()


# --- answers --------------------------------------------------------------------------------------
def test_every_answer_is_of_its_grammar(played: Played) -> None:
    for text in played.texts["json"]:
        value = json.loads(text)
        assert (len(value["name"]), value["n"] in (1, 22), len(value)) == (100, True, 2)
    assert all(json.loads(text)["a"] in (1, 2) for text in played.texts["call"])
    assert all(re.fullmatch(PATTERN, text) for text in played.texts["pattern"])
    assert all(WRITTEN.fullmatch(text) for text in played.texts["rules"])
    assert all(text.lstrip().startswith("{") for text in played.texts["object"])
    assert not any(re.fullmatch(PATTERN, text) for text in played.texts["free"]), "control"
    assert {kind: len(found) for kind, found in played.texts.items()} == {
        **dict.fromkeys(("json", "call", "rules", "object"), 13), "pattern": 17, "free": 7,
    }  # fmt: skip


def test_a_bad_grammar_is_one_clear_400(played: Played) -> None:
    assert played.errors == [(400, "invalid_grammar")] * 16


@pytest.mark.parametrize("episode", ["plain", "retract", "in_place"])
def test_the_update_met_answers_of_several_grammars(played: Played, episode: str) -> None:
    rollouts = [turn.rollout for turn in played.done[episode].turns]
    crossed = [rollout.rollout_id for rollout in rollouts if len(rollout.versions) > 1]
    kinds = {grammar.kind for name in crossed if (grammar := played.tap.of[name])}
    assert {"json_schema", "regex", "ebnf"} <= kinds
    resumed = played.done[episode].counts["resumed"]
    assert resumed >= len(crossed) if episode == "plain" else not resumed


# --- records --------------------------------------------------------------------------------------
def compiled_by(parser: SglangAnswers) -> Callable[[Grammar], xgrammar.CompiledGrammar]:
    info = xgrammar.TokenizerInfo.from_huggingface(
        chat_tokenizer(), vocab_size=SIZE, stop_token_ids=[END]
    )
    compiler = xgrammar.GrammarCompiler(info)

    def compiled(grammar: Grammar) -> xgrammar.CompiledGrammar:
        if grammar.kind == "json_schema":
            return compiler.compile_json_schema(grammar.text)
        if grammar.kind == "regex":
            return compiler.compile_regex(grammar.text)
        if grammar.kind == "ebnf":
            return compiler.compile_grammar(grammar.text)
        items = [
            xgrammar.StructuralTagItem(
                begin=one["begin"], schema=json.dumps(one["schema"]), end=one["end"]
            )
            for one in json.loads(grammar.text)["structures"]
        ]
        tag = xgrammar.StructuralTag.from_legacy_structural_tag(items, ["<tool_call>"])
        tag.format.at_least_one = True
        return compiler.compile_structural_tag(tag)

    return compiled


def kept_sets(world: World, rollout: Rollout) -> list[np.ndarray]:
    masks = [(world.store.load(b.offsets), world.store.load(b.ids)) for b in rollout.sampling_mask]
    return [row for offsets, ids in masks for row in np.split(ids, offsets[1:-1])]


def allowed_at_each(compiled: xgrammar.CompiledGrammar, ids: list[int]) -> list[set[int]]:
    matcher, found = xgrammar.GrammarMatcher(compiled), []
    for token in ids:
        bits = xgrammar.allocate_token_bitmask(1, SIZE)
        matcher.fill_next_token_bitmask(bits)
        raw = bits.numpy().view(np.uint8)
        found.append(set(np.flatnonzero(np.unpackbits(raw, bitorder="little")).tolist()))
        assert matcher.accept_token(token)
    return found


def test_each_kept_set_is_of_the_grammar_and_of_the_truncation(played: Played) -> None:
    compiled, cut = compiled_by(played.parser), 0
    for rollout in played.rollouts:
        grammar = played.tap.of[rollout.rollout_id]
        check(rollout, SHAPE)
        kept = kept_sets(played.world, rollout)
        sampled = rollout.token_ids[rollout.loss_mask].tolist()
        assert len(kept) == len(sampled)
        assert all(token in row for token, row in zip(sampled, kept, strict=True))
        assert max(map(len, kept)) <= rollout.sampling.top_k
        if grammar is None:
            assert min(map(len, kept)) > 1, "control: nothing but the truncation"
            continue
        places = allowed_at_each(compiled(grammar), sampled)
        for row, allowed in zip(kept, places, strict=True):
            assert set(row.tolist()) <= allowed
            if rollout.sampling.top_k == WIDE.top_k:  # the truncation takes hardly anything
                assert len(row) == min(len(allowed), WIDE.top_k)
            cut += len(row) < len(allowed)
    assert cut > 100, "with the narrow truncation, both cut"


def without_the_grammar(played: Played, rollout: Rollout) -> Rollout:
    """The same answer with the kept sets of the truncation alone: nearly the whole vocabulary."""
    store, sampled = played.world.store, rollout.token_ids[rollout.loss_mask]
    rows = np.tile(np.arange(SIZE, dtype=np.int32), len(sampled))
    lengths = np.full(len(sampled), SIZE)
    csr = encode_rows(lengths, rows, sampled, vocab_size=SIZE)
    offsets, ids = store.seal(f"{rollout.rollout_id}.free".replace("/", "."), csr)
    return replace(rollout, sampling_mask=(MaskBlob(offsets, ids, 0, len(sampled)),))


@pytest.fixture(scope="module")
def scoring(played: Played) -> Scoring:
    found = Scoring(played.world, played.world.root)
    for name, done in played.done.items():
        if name == "in_place":  # no forward pass reproduces a kept KV cache
            continue
        parts = [part for turn in done.turns for part in split_segments(turn.rollout)]
        for version in (A, B, C):
            own = [part for part in parts if part.versions[0].version == version]
            if own:
                found.add(f"own{name}-{version}", own, version)
            if own and name == "plain":
                bound = [p for p in own if played.tap.of[p.rollout_id.partition("/")[0]]]
                wrong = [without_the_grammar(played, part) for part in bound]
                found.add(f"free-{version}", wrong, version)
    found.run()
    return found


def test_the_trainer_agrees_with_the_kept_sets_and_not_without_them(scoring: Scoring) -> None:
    for name in scoring.jobs:
        gaps = np.abs(np.concatenate(list(scoring.gaps(name).values())))
        if name.startswith("free"):
            assert np.median(gaps) > 100 * MAX_GAP, "control"
        else:
            assert gaps.max() <= MAX_GAP, name
            assert gaps.mean() <= MEAN_GAP, name
