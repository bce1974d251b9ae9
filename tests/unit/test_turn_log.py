"""Finished turns of open episodes survive the controller, and are never given out wrongly."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.agents.chat_messages import ChatMessage
from moerl.agents.chat_turns import ChatTurns
from moerl.agents.episode_types import Ends, EpisodeLimits
from moerl.config.schema import TaskConfig
from moerl.config.task_programs import AgentConfig
from moerl.controller.controller import Controller
from moerl.controller.engine_choice import EngineChoice
from moerl.controller.journal.turn_log import TurnLog
from moerl.controller.turn_router import TurnRouter
from moerl.core.ids import life_of, name_rollout, without_life
from moerl.core.messages import Ok
from moerl.core.types import (
    Array,
    Finish,
    GenerateRequest,
    Grammar,
    PolicyVersion,
    SamplingParams,
    Score,
    Segment,
)
from moerl.episodes.finished_episode import FinishedEpisode, RecordedTurn
from moerl.episodes.open_episode import (
    EnginePin,
    EpisodeSpec,
    OpenEpisode,
    Outcome,
    TurnCall,
    TurnRequest,
)
from moerl.episodes.turn import TurnInFlight
from moerl.records import BlobStore
from moerl.records.header_check import blob_uris, group_uris
from moerl.records.header_check import check as check_record
from tests.helpers.agent_stubs import (
    AGENT,
    PROMPT,
    SHAPE,
    FakeRunner,
    policy_of,
    program_runner,
    until,
)
from tests.helpers.agent_stubs import SAMPLING as PLAIN
from tests.helpers.controllers import CONFIG, hello, make, running, successor, train
from tests.helpers.one_engine import far
from tests.helpers.patience import patience
from tests.helpers.stub_engine import WordEngine

V0 = PolicyVersion(0, 0)
SAMPLING = SamplingParams(4, temperature=0.9, top_p=0.5)


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs", "n")


EVERY_TURN = replace(CONFIG, rollout=replace(CONFIG.rollout, journal_tokens=0))


class OneRequest(TurnInFlight):
    """A turn that ends with the reply to this request, whatever it is."""

    def __init__(self, request: GenerateRequest) -> None:
        super().__init__(
            request.rollout_id, request.token_ids, request.sampling, audit=request.audit
        )
        self._request = request

    @property
    def finished(self) -> bool:
        return bool(self.segments)

    def request(self, *, streams: bool = False) -> GenerateRequest:
        return self._request

    def add(self, segment: Segment) -> None:
        assert all(piece.rollout_id == self.name for piece in segment.pieces)
        self.segments.append(segment)


class Life:
    """One controller's turns; its episodes have the names that it would give them."""

    def __init__(self, controller: Controller, engine: WordEngine) -> None:
        self.controller, self.engine = controller, engine
        context = controller.context
        engines = EngineChoice(context.pool, context.config.rollout, context.step_metrics)
        self.router = TurnRouter(context, engines)
        context.tasks.spawn(self.router.run())
        self.log = context.services.journal.turns
        self.episodes: dict[str, OpenEpisode] = {}
        self._number = 0

    def open(self, sibling: int) -> OpenEpisode:
        name = name_rollout(8, sibling, self.controller.producer.life)
        if name not in self.episodes:
            spec = EpisodeSpec(name, PROMPT, PLAIN)
            self.episodes[name] = OpenEpisode(spec, self.router)
        return self.episodes[name]

    async def ask(self, prompt: list[int], sibling: int = 0, **changes: Any) -> Segment:
        episode = self.open(sibling)
        turn = OneRequest(request_of(f"{episode.name}.t{self._number}", prompt, **changes))
        self._number += 1
        call = TurnCall(episode, turn, TurnRequest(turn.prompt_ids))
        self.router.submit(call)
        try:
            await call.done
        except BaseException:
            self.router.withdraw(call)
            raise
        return turn.segments[0]

    @property
    def counts(self) -> tuple[float, float, float]:
        """Replayed turns, replayed tokens, lost turns."""
        found = self.controller.context.step_metrics
        replayed = found["agent/replayed_turns"], found["agent/replayed_tokens"]
        return *replayed, found["agent/lost_turns"]


def request_of(name: str, prompt: list[int], **changes: Any) -> GenerateRequest:
    made = GenerateRequest(name, 0, np.asarray(prompt, np.int32), 0, SAMPLING)
    return replace(made, **changes)


@asynccontextmanager
async def life(folder: Path, engine: WordEngine, **changes: Any) -> AsyncIterator[Life]:
    """A controller that is killed at the end: what it has open is not closed."""
    changes = {"config": EVERY_TURN} | changes
    controller, _ = make(folder, engine, blobs=engine.store, **changes)
    controller.context.pool.incarnation = 0
    if not controller.context.lineage.begins:
        await controller.handle(hello(V0))
    await controller.rejoin([])
    try:
        yield Life(controller, engine)
    finally:
        for task in list(controller.context.tasks._tasks):
            task.cancel()


def ended(sibling: int) -> FinishedEpisode:
    return FinishedEpisode(f"8.{sibling}", PROMPT, ())


def same(a: Segment, b: Segment) -> bool:
    return bool(np.array_equal(a.output_ids, b.output_ids)) and blob_uris(a) == blob_uris(b)


def tokens(prompt: list[int], *replies: Segment) -> list[int]:
    return prompt + [int(token) for reply in replies for token in reply.output_ids]


def rows(folder: Path) -> int:
    log = folder / "journal" / "turns.sqlite"
    if not log.exists():
        return 0
    with sqlite3.connect(log) as db:
        return int(db.execute("select count(*) from replies").fetchone()[0])


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, patience(60.0)))


# --- what is given out ----------------------------------------------------------------------------
def test_finished_turns_are_given_out_and_the_open_one_is_sampled_again(
    tmp_path: Path, store: BlobStore
) -> None:
    engine = WordEngine(store)

    async def body() -> None:
        async with life(tmp_path, engine) as one:
            first = await one.ask([1, 2])
            second = await one.ask([*tokens([1, 2], first), 3], rows_known=5)
            engine.open.clear()
            asking = asyncio.ensure_future(one.ask([9], sibling=1))
            await asyncio.sleep(0.05)
            assert not asking.done()
        engine.open.set()
        while (asked := len(engine.requests)) < 3:  # nobody waits for the third
            await asyncio.sleep(0.01)
        async with life(tmp_path, engine, trainer_alive=True) as two:
            assert set(engine.kept or ()) == blob_uris(first, second)
            assert same(await two.ask([1, 2]), first)
            assert same(await two.ask([*tokens([1, 2], first), 3], rows_known=5), second)
            assert len(engine.requests) == asked, "no engine was asked"
            await two.ask([9], sibling=1)
            assert len(engine.requests) == asked + 1
            assert two.counts == (2, 8, 0)
            known = two.episodes["8.0.r1-0"].oldest_step(runs_through_updates=False)
            assert known == V0.step, "the rules of staleness see them"
        async with life(tmp_path, engine, trainer_alive=True) as three:
            assert same(await three.ask([1, 2]), first), "of two controllers before"
            assert not same(await three.ask([9, 9], sibling=1), first)

    run(body())


def test_without_the_log_turns_are_sampled_again(tmp_path: Path, store: BlobStore) -> None:
    """Control of the test above."""
    engine = WordEngine(store)

    async def body() -> None:
        async with life(tmp_path, engine) as one:
            first = await one.ask([1, 2])
            one.log.close()
        for path in (tmp_path / "journal").glob("turns.sqlite*"):
            path.unlink()
        async with life(tmp_path, engine, trainer_alive=True) as two:
            again = await two.ask([1, 2])
            assert not np.array_equal(first.output_ids, again.output_ids)
            assert two.counts == (0, 0, 0)

    run(body())


def test_equal_requests_get_their_replies_in_order_each_once(
    tmp_path: Path, store: BlobStore
) -> None:
    engine = WordEngine(store)

    async def body() -> None:
        async with life(tmp_path, engine) as one:
            before = [await one.ask([1, 2]) for _ in range(3)]
            sibling = await one.ask([1, 2], sibling=1)
        async with life(tmp_path, engine, trainer_alive=True) as two:
            after = [await two.ask([1, 2]) for _ in range(4)]
            assert all(map(same, before, after))
            assert not any(same(after[3], reply) for reply in (*before, sibling))
            assert same(await two.ask([1, 2], sibling=1), sibling), "an episode has its own"

    run(body())


@pytest.mark.parametrize(
    "other",
    [
        {"sampling": replace(SAMPLING, temperature=1.0)},
        {"sampling": replace(SAMPLING, max_new_tokens=3)},
        {"sampling": replace(SAMPLING, stop_token_ids=(7,))},
        {"sampling": replace(SAMPLING, grammar=Grammar("regex", "a"))},
        {"audit": True},
        {"rows_known": 1},
        {"num_sampled": 1},
        {"tail_ids": np.asarray([1, 2, 3], np.int32)},
    ],
)
def test_another_request_is_sampled(tmp_path: Path, store: BlobStore, other: Any) -> None:
    engine = WordEngine(store)

    async def body() -> None:
        async with life(tmp_path, engine) as one:
            reply = await one.ask([1, 2])
        async with life(tmp_path, engine, trainer_alive=True) as two:
            assert not same(await two.ask([1, 2], **other), reply)
            assert two.counts == (0, 0, 0)
            assert same(await two.ask([1, 2]), reply), "it waits for its own request"

    run(body())


def test_a_turn_that_an_update_cut_continues_where_it_was(tmp_path: Path, store: BlobStore) -> None:
    engine = WordEngine(store)

    async def body() -> None:
        async with life(tmp_path, engine) as one:
            engine.interrupted.set()
            part = await one.ask([1, 2])
            engine.interrupted.clear()
            assert (len(part.output_ids), part.finish) == (2, Finish.ABORT)
        async with life(tmp_path, engine, trainer_alive=True) as two:
            again = await two.ask([1, 2])
            assert same(again, part)
            assert again.finish is Finish.ABORT
            rest = await two.ask(tokens([1, 2], part), num_sampled=2)
            assert len(rest.output_ids) == 4
            assert two.counts == (1, 2, 0)

    run(body())


# --- what is not given out ------------------------------------------------------------------------
def test_a_turn_behind_one_that_was_sampled_again_is_too(tmp_path: Path, store: BlobStore) -> None:
    """The tokens are the same, so only the rows of its context tell that it continues another."""
    engine = WordEngine(store, greedy=True)

    async def body() -> None:
        async with life(tmp_path, engine) as one:
            first = await one.ask([1, 2])
            prompt = [*tokens([1, 2], first), 3]
            second = await one.ask(prompt, rows_known=5)
            alone = await one.ask(prompt)  # delivers all its rows
            (uri,) = blob_uris(first)
        store.delete(uri)
        async with life(tmp_path, engine, trainer_alive=True) as two:
            again = await two.ask([1, 2])
            assert np.array_equal(again.output_ids, first.output_ids)
            assert two.counts == (0, 0, 1)
            child = await two.ask(prompt, rows_known=5)
            assert not same(child, second)
            assert same(await two.ask(prompt), alone)
            assert not same(
                await two.ask(tokens(prompt, child), num_sampled=4, rows_known=5), alone
            )

    run(body())


def flip(store: BlobStore, uri: str) -> None:
    path = store._path(uri)
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [BlobStore.delete, flip])
def test_a_lost_or_damaged_record_costs_its_turn(
    tmp_path: Path, store: BlobStore, damage: Callable[[BlobStore, str], None]
) -> None:
    engine = WordEngine(store)

    async def body() -> None:
        async with life(tmp_path, engine) as one:
            first, other = await one.ask([1, 2]), await one.ask([3])
        damage(store, *blob_uris(first))
        async with life(tmp_path, engine, trainer_alive=True) as two:
            again = await two.ask([1, 2])
            assert not same(again, first)
            assert same(await two.ask([3]), other)
            assert two.counts == (1, 4, 1)
            two.controller.context.buffer._started.add(8)
            two.controller.scoring_stage.cancelled(8, [ended(sibling) for sibling in range(4)])
            assert set(store.uris()) == blob_uris(again, other), "what is left of it is deleted"

    run(body())


def test_tokens_of_a_discarded_branch_are_sampled_again(tmp_path: Path, store: BlobStore) -> None:
    """The trainer restarts from step 1 as incarnation 1, without step 2 of incarnation 0."""
    engine = WordEngine(store)

    async def body() -> None:
        async with life(tmp_path, engine) as one:
            one.controller.context.buffer.next_step = 3
            kept = await one.ask([1])
            engine.version = PolicyVersion(0, 2)
            dropped = await one.ask([2])
        engine.version = PolicyVersion(1, 1)
        async with life(tmp_path, engine) as two:
            await two.controller.handle(hello(PolicyVersion(1, 1)))
            assert same(await two.ask([1]), kept)
            assert not same(await two.ask([2]), dropped)
            assert two.counts == (1, 4, 1)

    run(body())


def test_a_turn_whose_client_left_is_not_kept(tmp_path: Path, store: BlobStore) -> None:
    engine = WordEngine(store)

    async def body() -> None:
        async with life(tmp_path, engine) as one:
            engine.open.clear()
            asking = asyncio.ensure_future(one.ask([1]))
            while not one.router._sent:
                await asyncio.sleep(0.01)
            asking.cancel()
            await asyncio.wait([asking])
            engine.open.set()
            await one.ask([2])
            assert len(engine.requests) == 2
            assert rows(tmp_path) == 1
            assert not one.router._sent

    run(body())


def test_held_out_turns_are_not_kept(tmp_path: Path, store: BlobStore) -> None:
    engine = WordEngine(store)

    async def body() -> None:
        async with life(tmp_path, engine) as one:
            pin = EnginePin(0, engine.version)
            spec = EpisodeSpec("eval-0.0-1.0", PROMPT, PLAIN, held_out=True, pin=pin)
            await OpenEpisode(spec, one.router).sample(TurnRequest(np.asarray([1], np.int32)))
            assert not (tmp_path / "journal" / "turns.sqlite").exists()

    run(body())


# --- the file -------------------------------------------------------------------------------------
def reply_of(name: str) -> Segment:
    out: Array = np.arange(4, dtype=np.int32)
    logprobs = np.full(4, -0.5, np.float32)
    return Segment(name, out, logprobs, V0, Finish.STOP, None, None, None, 0, 0, 0.0, 0.0)


def test_a_reply_comes_back_as_it_was(tmp_path: Path) -> None:
    log, name = TurnLog(tmp_path), "3.1.r2-5.t7"
    later = replace(reply_of(name), version=PolicyVersion(0, 1), kept_kv=True)
    log.add([(request_of(name, [1]), replace(reply_of(name), rest=(later,)))])
    log.close()
    again = TurnLog(tmp_path)
    again.load(set())
    found = again.take(request_of("3.1.r3-0.t0", [1]))
    assert found is not None
    assert [piece.version for piece in found.pieces] == [V0, PolicyVersion(0, 1)]
    assert found.rest[0].kept_kv
    for piece in found.pieces:
        np.testing.assert_array_equal(piece.output_ids, np.arange(4))
        np.testing.assert_array_equal(piece.logprobs, np.full(4, -0.5, np.float32))
    assert again.take(request_of("3.1.r3-0.t0", [1])) is None, "once"


def test_the_log_does_not_grow(tmp_path: Path) -> None:
    """1,000 groups, at most two open: only replies of these are in the file."""
    log, most = TurnLog(tmp_path), 0
    for group in range(1000):
        for turn in range(4):
            name = f"{group}.0.t{turn}"
            log.add([(request_of(name, [turn]), reply_of(name))])
        log.end([f"{group - 1}.0"])
        most = max(most, sum(path.stat().st_size for path in tmp_path.iterdir()))
    log.end(["999.0"])
    log.close()
    assert most < 4 << 20
    with sqlite3.connect(tmp_path / "turns.sqlite") as db:
        assert db.execute("select count(*) from replies").fetchone() == (0,)
    assert (tmp_path / "turns.sqlite").stat().st_size < 64 << 10


def test_groups_that_the_journal_knows_are_not_open(tmp_path: Path) -> None:
    """The controller died between the admission and the end of a group's entries."""
    log = TurnLog(tmp_path)
    for group in (1, 2):
        log.add([(request_of(f"{group}.0.t0", [1]), reply_of(f"{group}.0.t0"))])
    log.close()
    again = TurnLog(tmp_path)
    again.load({1})
    assert again.take(request_of("1.0.r1-0.t0", [1])) is None
    assert again.take(request_of("2.0.r1-0.t0", [1])) is not None
    assert again.lost == 0


def test_without_a_whole_journal_nothing_is_used(tmp_path: Path) -> None:
    log = TurnLog(tmp_path)
    log.add([(request_of("1.0.t0", [1]), reply_of("1.0.t0"))])
    log.close()
    again = TurnLog(tmp_path)
    again.load(None)
    assert again.take(request_of("1.0.r1-0.t0", [1])) is None
    assert (again.lost, again.uris) == (1, set())
    again.add([(request_of("1.0.r1-0.t0", [1]), reply_of("1.0.r1-0.t0"))])
    third = TurnLog(tmp_path)
    third.load(set())
    assert third.take(request_of("1.0.r2-0.t0", [1])) is not None, "a new log was begun"


def damaged(log: Path) -> None:
    log.write_bytes(b"x" * 5000)


def altered(log: Path) -> None:
    with sqlite3.connect(log) as db:
        (body,) = db.execute("select body from replies where id = 2").fetchone()
        db.execute("update replies set body = ? where id = 2", (body[:-1] + b"\0",))


@pytest.mark.parametrize(("damage", "left"), [(damaged, 0), (altered, 2)])
def test_damage_costs_turns(tmp_path: Path, damage: Callable[[Path], None], left: int) -> None:
    log = TurnLog(tmp_path)
    for turn in range(3):
        log.add([(request_of(f"1.0.t{turn}", [turn]), reply_of(f"1.0.t{turn}"))])
    log.close()
    damage(tmp_path / "turns.sqlite")
    again = TurnLog(tmp_path)
    again.load(set())
    found = [again.take(request_of("1.0.r1-0.t0", [turn])) for turn in range(3)]
    assert sum(reply is not None for reply in found) == left
    again.add([(request_of("1.0.r1-0.t1", [9]), reply_of("1.0.r1-0.t1"))])
    assert again.take_failed() == 0


def test_a_torn_end_of_the_file_costs_what_was_written_last(tmp_path: Path) -> None:
    """As a power cut leaves it: at each length, a beginning of what was written is found."""
    log = TurnLog(tmp_path)
    for turn in range(6):
        log.add([(request_of(f"1.0.t{turn}", [turn]), reply_of(f"1.0.t{turn}"))])
    whole = (tmp_path / "turns.sqlite-wal").read_bytes()
    main = (tmp_path / "turns.sqlite").read_bytes()
    counts = []
    for number, end in enumerate(np.linspace(0, len(whole), 25).astype(int).tolist()):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "turns.sqlite").write_bytes(main)
        (folder / "turns.sqlite-wal").write_bytes(whole[:end])
        again = TurnLog(folder)
        again.load(set())
        found = [again.take(request_of("1.0.r1-0.t0", [turn])) is not None for turn in range(6)]
        assert found == sorted(found, reverse=True)
        counts.append(sum(found))
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 6)
    assert len(set(counts)) > 3


def test_a_full_disk_costs_turns_and_never_mixes_two_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = TurnLog(tmp_path)
    log.add([(request_of("1.0.t0", [1]), reply_of("1.0.t0"))])
    real, full = TurnLog._query, [True]

    def query(self: TurnLog, sql: str, values: tuple[object, ...] = ()) -> sqlite3.Cursor:
        if full[0]:
            raise sqlite3.OperationalError("database or disk is full")
        return real(self, sql, values)

    monkeypatch.setattr(TurnLog, "_query", query)
    log.end(["1.0"])  # cancelled; it is played again
    log.add([(request_of("1.0.r0-1.t0", [2]), reply_of("1.0.r0-1.t0"))])
    assert log.take_failed() == 2
    full[0] = False
    log.add([(request_of("1.0.r0-1.t1", [3]), reply_of("1.0.r0-1.t1"))])
    again = TurnLog(tmp_path)
    again.load(set())
    found = [again.take(request_of("1.0.r1-0.t0", [prompt])) is not None for prompt in (1, 2, 3)]
    assert found == [False, False, True]


def test_names_of_an_episode_are_the_same_in_every_life() -> None:
    names = [name_rollout(7, 2, life, tries) for life, tries in ((0, 0), (3, 0), (0, 5), (2, 9))]
    assert {without_life(name) for name in names} == {"7.2"}
    assert without_life("7.2.r1-0.t5") == "7.2.t5"


# --- whole episodes -------------------------------------------------------------------------------
POLICY = policy_of()
LIMITS = EpisodeLimits(context_tokens=4000)


class Program:
    """Asks at random: few texts, so that prompts are equal; siblings, branches, sub-agents."""

    def __init__(self, life: Life, seed: int, other_from: int = 99) -> None:
        """other_from: the step from which on it does something else than with another number."""
        self._opened = life.open(sibling=0)
        self._turns = ChatTurns(far(self._opened), POLICY, LIMITS)
        self._choices, self._other_from = random.Random(seed), other_from
        self._histories: list[list[ChatMessage]] = [[]]

    async def play(self, steps: int) -> None:
        for step in range(steps):
            draw = self._choices
            history = self._histories[draw.randrange(len(self._histories))]
            text = f"q{draw.randrange(2)}" + "!" * (step >= self._other_from)
            works = [self._ask([*history, ChatMessage("user", text)], draw.choice((1, 1, 2)))]
            if draw.random() < 0.3:
                works.append(self._ask([ChatMessage("user", text)], 1))
            for histories in await asyncio.gather(*works):
                self._histories += histories

    async def _ask(self, history: list[ChatMessage], n: int) -> list[list[ChatMessage]]:
        answers = await self._turns.chat(history, (), Ends(), n)
        said = [ChatMessage("assistant", answer.text, []) for answer in answers]
        return [[*history, message] for message in said]

    async def finish(self) -> FinishedEpisode:
        await self._turns.end()
        return self._opened.finish(self._turns.outcome(("", ""), None, {}))


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    replies=st.integers(1, 14),
    cuts=st.sets(st.integers(1, 14), max_size=3),
    other_from=st.sampled_from([0, 2, 4, 99, 99]),
)
def test_an_episode_played_again_has_every_finished_turn(
    seed: int, replies: int, cuts: set[int], other_from: int
) -> None:
    """Killed after some replies, of which updates cut some.

    The same program gets all of them and an engine is asked for the rest only.  One that does
    something else gets those that it asks for.  All rows are valid and nothing stays.
    """

    async def body(folder: Path) -> None:
        store = BlobStore(folder / "blobs", "n")
        dying = WordEngine(store)
        dying.hangs_at, dying.cuts = replies, cuts
        async with life(folder, dying) as one:
            playing = asyncio.create_task(Program(one, seed).play(6))
            await until(lambda: playing.done() or hangs_after(dying, folder, replies))
            playing.cancel()
        logged = rows(folder)
        assert logged == min(replies, len(dying.requests))
        engine = WordEngine(store, first_call=1000)
        async with life(folder, engine, trainer_alive=True) as two:
            program = Program(two, seed, other_from)
            await program.play(6)
            done = await program.finish()
            turns, replayed = done.turns, int(two.counts[0])
            segments = [segment for turn in turns for segment in turn.sampled.segments]
            assert len(segments) == replayed + len(engine.requests)
            assert replayed == logged if other_from == 99 else replayed <= logged
            for turn in turns:
                check_record(turn.rollout, SHAPE)
            two.controller.context.buffer._started.add(8)
            two.controller.scoring_stage.cancelled(8, [ended(sibling) for sibling in range(4)])
            assert set(store.uris()) == blob_uris(*segments)
            assert rows(folder) == 0

    with tempfile.TemporaryDirectory() as folder:
        run(body(Path(folder)))


def hangs_after(engine: WordEngine, folder: Path, replies: int) -> bool:
    return not engine.open.is_set() and rows(folder) == replies


class ThreeTurns(FakeRunner):
    """Plays episodes of three turns, without a program."""

    async def run(self, episode: OpenEpisode) -> Outcome:
        sibling = int(episode.name.split(".")[1])
        ids = np.asarray([*episode.spec.prompt.token_ids, sibling], np.int32)
        turn: RecordedTurn | None = None
        for _ in range(3):
            inherited = turn.num_tokens if turn else 0
            turn = await episode.sample(TurnRequest(ids, turn, inherited))
            ids = np.append(turn.token_ids, np.int32(5))
        return Outcome(score=Score(float(sibling)))

    def end(self, name: str) -> None: ...


TASK = TaskConfig(agent=AgentConfig(command=["python", "-c", AGENT]))


@pytest.mark.parametrize(
    ("agents", "num_turns", "replies"),
    [
        *((lambda _: ThreeTurns(), 3, replies) for replies in (1, 5, 9, 13)),
        (lambda folder: program_runner(folder, TASK), 2, 3),  # programs behind the gateway
    ],
)
def test_a_controller_that_dies_in_mid_group_costs_open_turns_only(
    tmp_path: Path, store: BlobStore, agents: Any, num_turns: int, replies: int
) -> None:
    """Groups of two episodes; each is trained once, with the turns of both controllers."""

    async def body() -> None:
        config = replace(EVERY_TURN, task=TASK)
        dying, dead = WordEngine(store), agents(tmp_path)
        dying.hangs_at, size = replies, 2 * num_turns
        first, _ = make(tmp_path, dying, config, blobs=store, agents={"": dead}, model=SHAPE)
        tasks = asyncio.create_task(first.run())
        assert await first.handle(hello(V0)) == Ok()
        await until(lambda: not dying.open.is_set() and rows(tmp_path) % size == replies % size)
        logged, engine = rows(tmp_path), WordEngine(store, first_call=1000)
        second, reports = successor(
            tmp_path, engine, first, config=config, blobs=store, agents={"": agents(tmp_path)},
            model=SHAPE, trainer_alive=True,
        )  # fmt: skip
        tasks.cancel()
        await second.rejoin([])
        plans = await running(second, train(second, 4), 50)
        groups = [group for plan in plans for group in plan.groups]
        assert sorted(group.group_id for group in groups) == list(range(8))
        kept = {name for g in groups for name in group_uris(g) if not life_of(name)}
        assert len(kept) == replies, "what was sampled before the death is trained"
        assert sum(r.metrics.get("agent/replayed_turns", 0) for r in reports) == logged
        assert len(engine.requests) - engine.cut == 8 * size - replies
        assert rows(tmp_path) == 0
        await dead.close()

    run(body())


@pytest.mark.parametrize(("journal_tokens", "continues"), [(2, True), (5, False), (-1, False)])
def test_a_long_answer_continues_where_an_update_had_cut_it(
    tmp_path: Path, store: BlobStore, journal_tokens: int, continues: bool
) -> None:
    """Answers of four tokens; the first two were sampled when the controller died.

    The controls: too few tokens for the journal, and no journal of turns.
    """

    async def body() -> None:
        rollout = replace(CONFIG.rollout, journal_tokens=journal_tokens)
        config = replace(CONFIG, rollout=rollout)
        dying = WordEngine(store)
        dying.cuts, dying.hangs_at = {1}, 1
        first, _ = make(tmp_path, dying, config, blobs=store, model=SHAPE)
        tasks = asyncio.create_task(first.run())
        assert await first.handle(hello(V0)) == Ok()
        await until(lambda: not dying.open.is_set())
        await asyncio.sleep(0.05)
        assert rows(tmp_path) == continues
        engine = WordEngine(store, first_call=1000)
        second, _ = successor(
            tmp_path, engine, first, config=config, blobs=store, model=SHAPE, trainer_alive=True
        )
        tasks.cancel()
        await second.rejoin([])
        plans = await running(second, train(second, 4), 50)
        groups = [group for plan in plans for group in plan.groups]
        assert sorted(group.group_id for group in groups) == list(range(8)), "each once"
        begun: dict[str, int] = {}
        for request in engine.requests:
            begun.setdefault(request.rollout_id, request.num_sampled)
        assert sorted(begun.values())[-2:] == [0, 2 * continues], "first requests"
        assert rows(tmp_path) == 0

    run(body())
