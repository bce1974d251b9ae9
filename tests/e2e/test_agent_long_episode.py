"""An episode that grows to 200,000 tokens: gateway, policy, controller, plan, slices of ranks.

An unchanged client of the gateway asks for turn after turn; the engine is a stub that seals
records of the size that 48 layers with 8 of 128 experts have.  What is asserted are counts: tokens
tokenised, rows recorded, bytes kept and read.  Seconds and memory of a turn are printed.
"""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from moerl.agents.episode_types import PlainAnswers, Policy
from moerl.agents.programs.agent_programs import AgentPrograms
from moerl.agents.prompt_tokens import PromptTokens
from moerl.agents.stop_texts import StopFinder
from moerl.config.schema import SamplingConfig, TaskConfig
from moerl.config.task_programs import AgentConfig
from moerl.controller.journal.journal import Journal
from moerl.core.messages import Plan
from moerl.core.serialization import decode, encode
from moerl.core.types import (
    BatchPlan,
    Finish,
    GenerateRequest,
    LogprobBlob,
    MaskBlob,
    ModelShape,
    PolicyVersion,
    Rollout,
    RoutingBlob,
    Segment,
)
from moerl.data.grid import Grid
from moerl.data.packing import Microbatch, pack_microbatch
from moerl.episodes.open_episode import OpenEpisode, Outcome
from moerl.records.blob_store import BlobStore
from moerl.records.header_check import check, group_refs
from moerl.records.sampling_mask import encode_rows
from tests.helpers.chat_tokenizer import END, SIZE, chat_tokenizer
from tests.helpers.controllers import CONFIG, make, running, train
from tests.helpers.stub_engine import StubEngine

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

LAYERS, EXPERTS, TOP_K = tuple(range(48)), 128, 8
SHAPE = ModelShape(SIZE, 48, LAYERS, EXPERTS, TOP_K, eos_token_ids=(END,))
ANSWER, RESULT, KEPT = 40, 1000, 20  # tokens of an answer and of what follows it; kept per token
SAMPLING = SamplingConfig(max_new_tokens=ANSWER, top_k=KEPT)
ROW_BYTES = len(LAYERS) * TOP_K  # of the routes of one token
AGENT = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
history = task["messages"]
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
for turn in range(int(sys.argv[1])):
    body = json.dumps({"model": "m", "messages": history}).encode()
    reply = json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))
    result = f"{turn:06}".ljust(int(sys.argv[2]), "x")
    history += [reply["choices"][0]["message"], {"role": "user", "content": result}]
reward = int(task["episode"].split(".")[1])
print(json.dumps({"reward": reward, "secret": task["secret"]}))
"""


class RecordingEngine(StubEngine):
    """Records of the right shape for each answer, and what a call found at its begin."""

    def __init__(self, store: BlobStore) -> None:
        super().__init__()
        self.store, self.rng = store, np.random.default_rng(0)
        self.rows = 0
        self.calls_seen: list[tuple[int, float, int]] = []  # tokens, CPU seconds, resident bytes

    def _reply(self, request: GenerateRequest, version: PolicyVersion) -> Segment:
        self.requests.clear()  # each holds its prompt
        memory = psutil.Process().memory_info().rss
        self.calls_seen.append((request.num_tokens, time.process_time(), memory))
        output = self.rng.integers(40, 90, ANSWER).astype(np.int32)
        output[-1] = END
        begin, end = request.rows_from, request.num_tokens + ANSWER - 1
        self.rows += end - begin
        first = self.rng.integers(0, EXPERTS, (len(LAYERS), end - begin, 1))
        routes = ((first + np.arange(TOP_K)) % EXPERTS).astype(np.uint8)
        kept = [np.union1d(np.arange(KEPT - 1), [token]) for token in output]
        lengths = np.asarray([len(row) for row in kept])
        mask = encode_rows(lengths, np.concatenate(kept), output, vocab_size=SIZE)
        values = np.full(ANSWER, -0.1, np.float32)
        refs = self.store.seal(f"{request.rollout_id}-s0", [routes, *mask, values])
        return Segment(
            rollout_id=request.rollout_id,
            output_ids=output,
            logprobs=np.zeros(0, np.float32),
            version=version,
            finish=Finish.STOP,
            routing=RoutingBlob(refs[0], begin, end, version, LAYERS, EXPERTS),
            sampling_mask=MaskBlob(refs[1], refs[2], 0, ANSWER),
            audit_rows=None,
            engine=0,
            cached_tokens=begin,
            start_s=0.0,
            end_s=0.0,
            sealed_logprobs=LogprobBlob(refs[3], 0, ANSWER),
        )


class CountedTokens(PromptTokens):
    """How many tokens were made of text, and shown as text."""

    encoded = decoded = 0

    def encode(self, text: str) -> np.ndarray:
        found = super().encode(text)
        self.encoded += len(found)
        return found

    def decode(self, ids: Any) -> str:
        self.decoded += len(ids)
        return super().decode(ids)


class KeptEpisodes(AgentPrograms):
    """The runner, and what it has played."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.played: list[OpenEpisode] = []

    async def run(self, episode: OpenEpisode) -> Outcome:
        outcome = await super().run(episode)
        self.played.append(episode)
        return outcome


@dataclass
class Long:
    """One step's plan of two long episodes, and what their turns cost."""

    turns: int
    store: BlobStore
    engine: RecordingEngine
    tokens: CountedTokens
    plan: BatchPlan
    played: list[OpenEpisode]
    joins: list[str] = field(default_factory=list)

    @property
    def rollouts(self) -> list[Rollout]:
        return self.plan.rollouts()


@pytest.fixture(
    scope="module", params=[20, pytest.param(200, marks=pytest.mark.full)], ids="{} turns".format
)
def long(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Long:
    folder, turns = tmp_path_factory.mktemp("long"), request.param
    store, tokens = BlobStore(folder / "blobs", "n"), CountedTokens(chat_tokenizer())
    engine, joins = RecordingEngine(store), list[str]()
    command = ["python", "-c", AGENT, str(turns), str(RESULT)]
    task = TaskConfig(agent=AgentConfig(command=command), max_turns=turns)
    rollout = replace(
        CONFIG.rollout, groups_per_step=1, max_groups_in_flight=1, buffer_depth=1, max_lag=0
    )
    config = replace(CONFIG, task=task, rollout=rollout, run=replace(CONFIG.run, steps=1))
    trainer = replace(CONFIG.trainer, max_tokens_per_microbatch=1000)  # a row each
    config = replace(config, trainer=trainer, sampling=SAMPLING)
    policy = Policy(tokens, StopFinder(tokens), PlainAnswers(), 1100 * turns)
    tokens.encoded = tokens.decoded = 0
    runner = KeptEpisodes(task, policy, folder / "agents.log")

    async def body() -> list[BatchPlan]:
        controller, _ = make(folder, engine, config, agents={"": runner}, model=SHAPE, blobs=store)
        return await running(controller, train(controller, 1), 600)

    with pytest.MonkeyPatch.context() as patch:
        from moerl.episodes.finished_episode import RecordedTurn

        real = RecordedTurn.rollout.fget
        made = property(lambda turn: joins.append(turn.name) or real(turn))
        patch.setattr(RecordedTurn, "rollout", made)
        store.delete = lambda uris: None  # type: ignore[method-assign]
        (plan,) = asyncio.run(body())
    return Long(turns, store, engine, tokens, plan, runner.played[:2], joins)


def test_each_token_is_tokenised_recorded_and_kept_once(long: Long) -> None:
    fed = [rollout.num_tokens - 1 for rollout in long.rollouts]
    assert min(fed) >= 1000 * long.turns
    for rollout in long.rollouts:
        check(rollout, SHAPE)
        assert len(rollout.ends) == len(rollout.routing) == long.turns
    episodes = len(long.engine.calls_seen) // long.turns  # another group may have begun
    assert long.engine.rows <= episodes * max(fed)
    per_turn = RESULT + 100  # what the template writes included
    assert long.tokens.encoded <= (episodes + 1) * long.turns * per_turn
    assert long.tokens.decoded <= (episodes + 1) * long.turns * ANSWER
    assert not long.joins, "no row is made before the episode has ended"
    report(long)


def report(long: Long) -> None:
    calls, tenth = long.engine.calls_seen, len(long.engine.calls_seen) // 10
    for part in (calls[:tenth], calls[-tenth:]):
        seconds, memory = (np.diff([call[at] for call in part]).mean() for at in (1, 2))
        print(f"{part[-1][0]} tokens: {1e3 * seconds:.1f} ms CPU, {memory / 1024:.0f} KiB a turn")


def test_an_open_episode_keeps_its_tokens_once(long: Long) -> None:
    for episode in long.played:
        prompts = [turn.sampled.prompt_ids for turn in episode.turns]
        arrays = {id(ids.base): ids.base for ids in prompts}
        kept = sum(base.nbytes for base in arrays.values() if base is not None)
        assert kept <= 4 * 4 * (len(prompts[-1]) + ANSWER), "arrays that double"
        apart = sum(ids.nbytes for ids in prompts)
        assert apart > long.turns / 4 * prompts[-1].nbytes, "control: an array for each turn"


def test_plan_and_journal_hold_the_episode(long: Long, tmp_path: Path) -> None:
    data = encode(Plan(long.plan))
    tokens = sum(rollout.num_tokens for rollout in long.rollouts)
    print(f"plan: {len(data)} bytes, {len(data) / tokens:.2f} a token")
    assert len(data) <= 6 * tokens
    found = decode(data)
    assert isinstance(found, Plan)
    (group,) = long.plan.groups
    journal = Journal(tmp_path, long.store)
    journal.load()
    journal.began((PolicyVersion(0, 0),), 1, ())
    journal.admitted(group)
    journal.close()
    again = Journal(tmp_path, long.store).load()
    for known in (found.plan.groups[0], again.ready[0]):
        for mine, other in zip(group.rollouts(), known.rollouts(), strict=True):
            np.testing.assert_array_equal(mine.token_ids, other.token_ids)
            np.testing.assert_array_equal(mine.loss_mask, other.loss_mask)
        assert [ref.uri for ref in group_refs(known)] == [ref.uri for ref in group_refs(group)]


# --- slices of context-parallel ranks -------------------------------------------------------------
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("cp_size", [2, 4])
def test_the_slices_of_ranks_are_those_of_the_whole(long: Long, cp_size: int, packed: bool) -> None:
    """Tokens, labels, positions, kept sets and routes of two layers; each token on one rank."""
    layers = (LAYERS[0], LAYERS[-1])
    whole, most = packed_slice(long, Grid(packed), layers)
    wanted = {layer: ids.numpy() for layer, ids in whole.routes(layers).items()}
    (rollout,) = whole.rollouts
    fed = rollout.num_tokens - 1
    seen, scored = np.zeros(fed, int), list[int]()
    for rank in range(cp_size):
        mine, peak = packed_slice(long, Grid(packed, rank, cp_size), layers)
        print(f"rank {rank}: {peak / 2**20:.1f} MiB of {most / 2**20:.1f} MiB")
        # what is held for all sampled tokens on each rank does not shrink
        assert peak <= 1.3 * most / cp_size + 100 * len(whole.sampled) + 2**19
        for row, slot, begin, count in mine.pieces(0, mine.tokens.shape[1]).of(0):
            slots, places = slice(slot, slot + count), slice(begin, begin + count)
            seen[places] += 1
            for name in ("tokens", "labels", "positions"):
                a, b = getattr(mine, name)[row, slots], getattr(whole, name)[0, places]
                assert a.equal(b), name
        compare_routes(mine, layers, wanted)
        compare_kept(mine, whole)
        scored += mine.held.tolist()
        assert mine.read.routing <= 2 * len(layers) * TOP_K * (fed // cp_size + cp_size)
    assert (seen == 1).all()
    assert sorted(scored) == list(range(rollout.num_sampled))


def packed_slice(long: Long, grid: Grid, layers: tuple[int, ...]) -> tuple[Microbatch, int]:
    """A rank's share with its routes, and the most memory that making it took.

    The lesser of two, since the memory of other threads of this process is counted too.
    """
    peaks = list[int]()
    for _ in range(2):
        tracemalloc.start()
        try:
            mine = pack_microbatch(long.plan, 0, 0, long.store, grid=grid)
            mine.routes(layers)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    return mine, min(peaks)


def compare_routes(mine: Microbatch, layers: tuple[int, ...], wanted: dict[int, Any]) -> None:
    found = mine.routes(layers)
    for row, slot, begin, count in mine.pieces(0, mine.tokens.shape[1]).of(0):
        assert row == 0
        for layer in layers:
            own = found[layer][slot : slot + count].numpy()
            np.testing.assert_array_equal(own, wanted[layer][begin : begin + count])
            shifted = wanted[layer][begin + 1 : begin + 1 + count]
            assert not np.array_equal(own[: len(shifted)], shifted), "control"


def compare_kept(mine: Microbatch, whole: Microbatch) -> None:
    assert mine.mask_offsets is not None
    assert mine.mask_ids is not None
    assert whole.mask_offsets is not None
    assert whole.mask_ids is not None
    for at, number in enumerate(mine.held.tolist()):
        own = mine.mask_ids[mine.mask_offsets[at] : mine.mask_offsets[at + 1]]
        low, high = whole.mask_offsets[number : number + 2].tolist()
        assert own.equal(whole.mask_ids[low:high])
        assert mine.labels.view(-1)[mine.sampled_rows[at]] == whole.sampled[number]
