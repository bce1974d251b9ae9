"""Who gets requests around a publish session: the host's and the controller's states."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from moerl.config.schema import EngineConfig, ReplayConfig
from moerl.core.errors import EngineError
from moerl.core.messages import (
    AbortUpdate,
    AskEngine,
    CommitUpdate,
    EngineVersion,
    MemoryState,
    Message,
    Ok,
    PrepareUpdate,
    SleepEngine,
    UpdateDone,
    UpdatePrepared,
    UpdateVerified,
    VerifyUpdate,
    WakeEngine,
    WriteUpdate,
)
from moerl.core.rpc import Keys
from moerl.core.types import GenerateRequest, ModelShape, PolicyVersion, SamplingParams
from moerl.engine.host.host import EngineContext, EngineHost
from moerl.engine.host.sglang_client import BadRequest, read_record
from moerl.records.blob_store import BlobStore
from moerl.runtime.run_dir import RunDir
from moerl.weight_sync.receiver import ReceiverSocket
from moerl.weight_sync.receiver_names import UNCHANGED, Committed, MemoryMoved, socket_path
from tests.helpers.controllers import make, written_live
from tests.helpers.patience import patience
from tests.helpers.stub_engine import StubEngine

V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)
KEYS = Keys.make()
ALL = ("kv_cache", "weights")
COMMIT = CommitUpdate(0, V1, 30.0)


class ScriptedClient:
    def __init__(self) -> None:
        self.error: Exception | None = None
        self.committed: list[str] = []
        self.moved: list[tuple[str, ...]] = []
        self.aborts = 0

    async def move_memory(self, what: str, parts: Sequence[str]) -> MemoryMoved:
        if self.error is not None:
            raise self.error
        self.moved.append((what, *parts))
        return MemoryMoved(0.5, 7, 3)

    async def commit(self, version: str, mode: str = "") -> Committed:
        if self.error is not None:
            raise self.error
        self.committed.append(version)
        return Committed(0.25)

    async def abort_all(self) -> None:
        self.aborts += 1


def make_host(tmp_path: Path) -> tuple[EngineHost, ScriptedClient]:
    """A host whose server is up; receivers, if any, listen in tmp_path."""
    run = RunDir(tmp_path / "run")
    run.create()
    shape = ModelShape(vocab_size=9, num_layers=1, moe_layers=(0,), num_experts=2, top_k=1)
    store = BlobStore(tmp_path / "blobs", "n0")
    context = EngineContext(tmp_path, shape, ReplayConfig(), run, "token")
    host = EngineHost(0, EngineConfig(), context, store)
    client = ScriptedClient()
    server: Any = SimpleNamespace(
        receiver_sockets=[socket_path(tmp_path, 0)],
        receiver_keys=KEYS,
        death=lambda: None,
        pid=1,
    )
    host._updates.attach(server, client, V0)  # type: ignore[arg-type]
    host._client = host._generation.client = client  # type: ignore[assignment]
    host._health.open()
    return host, client


async def test_a_refused_commit_changes_nothing_and_a_failed_one_suspends(tmp_path: Path) -> None:
    host, client = make_host(tmp_path)
    request = GenerateRequest("r", 0, np.arange(4, dtype=np.int32), 0, SamplingParams(4))
    client.error = BadRequest(f"{UNCHANGED}: rank 1 has not verified 0.1")
    with pytest.raises(BadRequest):
        await host.session(COMMIT)
    assert await host.session(AskEngine(0)) == EngineVersion(V0, "")
    assert host._health.admit.is_set()
    client.error = EngineError("the connection broke")
    with pytest.raises(EngineError, match=r"the commit of 0\.1 failed"):
        await host.session(COMMIT)
    state = await host.session(AskEngine(0))
    assert isinstance(state, EngineVersion)
    assert state.version == V0
    assert "connection broke" in state.cause
    with pytest.raises(EngineError, match="not usable"):
        await host.generate([request])
    client.error = None  # a whole session brings it back
    closed = await host.session(COMMIT)
    assert isinstance(closed, UpdateDone)
    assert closed.commit_s == 0.25
    assert await host.session(AskEngine(0)) == EngineVersion(V1, "")
    assert client.committed == ["0.1"]


def sleep(*parts: str) -> SleepEngine:
    return SleepEngine(0, parts or ALL, 5.0)


def wake(*parts: str) -> WakeEngine:
    return WakeEngine(0, parts or ALL, 5.0)


async def test_a_sleep_is_one_change_and_ends_with_a_commit(tmp_path: Path) -> None:
    """What is there already is answered by the host, and dirty weights admit nothing."""
    host, client = make_host(tmp_path)
    assert await host.move_memory(wake()) == MemoryState((), False)
    assert await host.move_memory(sleep("kv_cache")) == MemoryState(("kv_cache",), False, 0.5, 7, 3)
    assert (await host.move_memory(sleep())).asleep == ALL
    assert await host.move_memory(sleep()) == MemoryState(ALL, True)
    assert client.moved == [("sleep", "kv_cache"), ("sleep", "weights")]
    for early in (COMMIT, None):
        with pytest.raises(EngineError, match=rf"{UNCHANGED}.*(sleep|no verified weights)"):
            await (host.session(early) if early else host.move_memory(wake("kv_cache")))
    await host.move_memory(wake("weights"))
    with pytest.raises(EngineError, match="no verified weights"):
        await host.move_memory(wake())
    assert await host.session(AskEngine(0)) == EngineVersion(V0, "", ("kv_cache",), True)
    await host.session(COMMIT)
    assert not host._health.admit.is_set(), "its KV cache sleeps"
    assert await host.move_memory(wake()) == MemoryState((), False, 0.5, 7, 3)
    assert host._health.admit.is_set()
    assert await host.session(AskEngine(0)) == EngineVersion(V1, "")
    assert len(client.moved) == 4


async def test_live_weights_are_written_only_while_the_kv_cache_alone_sleeps(
    tmp_path: Path,
) -> None:
    """From the first round on the engine is dirty, whatever becomes of the session."""
    asked: list[str] = []
    writing, written = threading.Event(), threading.Event()

    def rank(message: Message) -> Message:
        asked.append(type(message).__name__)
        match message:
            case PrepareUpdate():
                return UpdatePrepared((b"",), ({0: 0},), "", V0, 3)
            case VerifyUpdate():
                return UpdateVerified(((4,),), "")
            case WriteUpdate(round=1):
                writing.set()
                assert written.wait(patience(20.0))
        return Ok()

    prepare, *_ = written_live(V1, 0)
    write, verify = WriteUpdate(0, V1, 0, 20.0), VerifyUpdate(0, V1, (b"",), 20.0)
    host, _client = make_host(tmp_path)
    ReceiverSocket(rank, socket_path(tmp_path, 0), KEYS).start()
    for sleeps in (False, True):
        if sleeps:
            await host.move_memory(sleep())
        for message in (prepare, write):
            with pytest.raises(EngineError, match=rf"{UNCHANGED}.*alone sleeps, here"):
                await host.session(message)
    assert not asked
    await host.move_memory(wake("weights"))
    await host.session(COMMIT)
    await host.move_memory(sleep("kv_cache"))
    prepared = await host.session(prepare)
    assert isinstance(prepared, UpdatePrepared)
    assert prepared.rounds == 3
    assert await state(host) == (("kv_cache",), False), "nothing is written yet"
    await host.session(write)
    assert await state(host) == (("kv_cache",), True)
    going_on = asyncio.create_task(host.session(replace(write, round=1)))
    await asyncio.to_thread(writing.wait)
    asleep = asyncio.create_task(host.move_memory(sleep("weights")))
    await asyncio.sleep(0.1)
    assert not asleep.done(), "pages that are being written"
    written.set()
    await going_on
    await asleep
    with pytest.raises(EngineError, match="alone sleeps"):
        await host.session(verify)
    await host.move_memory(wake("weights"))
    await host.session(verify)
    await host.session(AbortUpdate(0, V1, "damaged", 5.0))
    with pytest.raises(EngineError, match="no verified weights"):
        await host.move_memory(wake("kv_cache"))
    await host.session(COMMIT)
    assert (await host.move_memory(wake())).asleep == ()
    assert await state(host) == ((), False)


async def state(host: EngineHost) -> tuple[tuple[str, ...], bool]:
    found = await host.session(AskEngine(0))
    assert isinstance(found, EngineVersion)
    return found.asleep, found.is_dirty


async def test_an_abort_of_a_sleeping_request_waits_for_the_wake(tmp_path: Path) -> None:
    """SGLang would answer it at once, without the record of its tokens."""
    host, client = make_host(tmp_path)
    host._generation._sent["r"] = "r.0."
    await host.move_memory(sleep("kv_cache"))
    before = client.aborts
    await host.abort(["r"])
    await asyncio.sleep(0.05)
    assert client.aborts == before
    await host.move_memory(wake())
    await asyncio.sleep(0.05)
    assert client.aborts == before + 1


async def test_a_sleep_that_is_refused_changes_nothing_and_a_failed_one_ends_the_server(
    tmp_path: Path,
) -> None:
    host, client = make_host(tmp_path)
    client.error = EngineError(f"{UNCHANGED}: a request cannot be retracted now")
    with pytest.raises(EngineError, match="cannot be retracted"):
        await host.move_memory(sleep())
    assert host._health.admit.is_set()
    assert await host.session(AskEngine(0)) == EngineVersion(V0, "")
    client.error = EngineError("the connection broke")
    with pytest.raises(EngineError, match="sleep of kv_cache, weights failed"):
        await host.move_memory(sleep())
    assert host._health.ended.is_set(), "what its ranks released is unknown"


def test_what_a_commit_cost_travels_as_one_record() -> None:
    cost = Committed(seconds=1.5e-7, recomputed=12, begun_s=1.7e9, cpu_s=0.1)
    message = msgspec.json.encode(cost).decode() + "\n"
    assert read_record(message, Committed) == cost
    assert read_record(f"{message} Weight version updated to 0.1.", Committed) == cost
    for broken in ("", "Success", "0.1 12 1.7 0.1", '{"recomputed": 1}', '{"seconds": "x"}'):
        with pytest.raises(EngineError, match="answer to an update is not readable"):
            read_record(broken, Committed)


async def test_a_commit_that_is_given_up_leaves_no_engine_that_only_looks_fit(
    tmp_path: Path,
) -> None:
    """Requests would wait at its gate for ever."""
    host, client = make_host(tmp_path)
    reached = asyncio.Event()

    async def commit(_version: str, _mode: str = "") -> Committed:
        reached.set()
        await asyncio.sleep(60)
        return Committed(0.0)

    client.commit, real = commit, client.commit  # type: ignore[method-assign]
    committing = asyncio.create_task(host.session(COMMIT))
    await reached.wait()
    committing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await committing
    state = await host.session(AskEngine(0))
    assert isinstance(state, EngineVersion)
    assert "was given up" in state.cause
    request = GenerateRequest("r", 0, np.arange(4, dtype=np.int32), 0, SamplingParams(4))
    with pytest.raises(EngineError, match="not usable"):
        await host.generate([request])
    client.commit = real  # type: ignore[method-assign]
    await host.session(COMMIT)
    assert await host.session(AskEngine(0)) == EngineVersion(V1, "")


async def test_a_server_that_dies_as_it_commits_is_not_taken_for_alive(tmp_path: Path) -> None:
    host, client = make_host(tmp_path)

    async def commit(_version: str, _mode: str = "") -> Committed:
        host._health.close("it was killed")  # by the watch of its process
        return Committed(0.0)

    client.commit = commit  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="it was killed"):
        await host.session(COMMIT)
    assert await host.session(AskEngine(0)) == EngineVersion(V0, "it was killed")


async def test_a_receiver_that_does_not_answer_suspends_and_one_that_is_missing_is_named(
    tmp_path: Path,
) -> None:
    answer = True

    def handle(_message: Message) -> Message:
        while not answer:
            pass_time.wait(0.01)
        return Ok()

    pass_time = threading.Event()
    host, _ = make_host(tmp_path)
    with pytest.raises(EngineError, match="did not load the plug-in"):
        await host.session(AbortUpdate(0, V1, "x", 5.0))
    ReceiverSocket(handle, socket_path(tmp_path, 0), KEYS).start()
    assert await host.session(AbortUpdate(0, V1, "x", 30.0)) == Ok()
    answer = False
    with pytest.raises(EngineError, match="did not answer AbortUpdate"):
        await host.session(AbortUpdate(0, V1, "x", 0.2))
    answer = True
    state = await host.session(AskEngine(0))
    assert isinstance(state, EngineVersion)
    assert "did not answer" in state.cause


def test_a_rank_without_a_receiver_leaves_no_question_to_one_that_hangs(tmp_path: Path) -> None:
    going_on = threading.Event()

    def hang(_message: Message) -> Message:
        going_on.wait(patience(60))
        return Ok()

    async def work() -> None:
        host, _ = make_host(tmp_path)
        sockets = [socket_path(tmp_path, rank) for rank in range(2)]
        host._updates._server.receiver_sockets[:] = sockets  # type: ignore[union-attr]
        ReceiverSocket(hang, sockets[0], KEYS).start()
        for _ in range(3):
            with pytest.raises(EngineError, match="has no receiver"):
                await host.session(AbortUpdate(0, V1, "x", 30.0))
        async with asyncio.timeout(patience(20)):
            while asyncio.all_tasks() != {asyncio.current_task()}:
                await asyncio.sleep(0.01)

    asyncio.run(work())
    going_on.set()


async def test_a_suspended_engine_gets_no_requests_until_a_commit(tmp_path: Path) -> None:
    engine = StubEngine()
    engine.suspended = "a rank did not answer"
    controller, _ = make(tmp_path, engine)
    controller.context.pool.incarnation = 0
    assert controller.context.pool.serves(0)
    with pytest.raises(EngineError, match="engine 0: a rank did not answer"):
        await controller.handle(AbortUpdate(0, V1, "x", 1.0))
    assert not controller.context.pool.serves(0)
    assert controller.context.step_metrics["async/engines_suspended"] == 1
    engine.suspended = ""
    await controller.handle(COMMIT)
    assert controller.context.pool.serves(0)
    assert controller.context.pool.engines[0].version == V1
