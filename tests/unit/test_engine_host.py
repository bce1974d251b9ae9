"""The host's state machine against a scripted server: updates, failures, what is held and when."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moerl.config.schema import EngineConfig, ReplayConfig
from moerl.core.errors import BlobError, ConfigError, EngineError, RecordError
from moerl.core.messages import CommitUpdate, Plan, PrepareUpdate, UpdateDone
from moerl.core.serialization import decode, encode
from moerl.core.types import (
    Episode,
    EpisodeGroup,
    Finish,
    Prompt,
    SamplingParams,
    Score,
    Segment,
    Turn,
)
from moerl.data.batching import plan_batch
from moerl.data.packing import pack_microbatch
from moerl.engine.host import generation, reply_parser
from moerl.engine.host import health as gate_module
from moerl.engine.host import host as host_module
from moerl.engine.host.host import EngineContext, EngineHost, Mailbox
from moerl.engine.host.sglang_client import EngineClient, FailedRequest
from moerl.engine.record_files import FIELD, name_of
from moerl.episodes.finished_episode import join
from moerl.episodes.turn import TurnInFlight
from moerl.records.blob_store import BlobStore
from moerl.records.header_check import check
from moerl.runtime.run_dir import RunDir
from tests.helpers.patience import patience
from tests.helpers.scripted_host import SHAPE, V0, V1, ScriptedClient, ScriptedServer, ask, script

COMMIT = CommitUpdate(0, V1, 5.0)
PREPARE = PrepareUpdate(0, V1, 0, "", "", "shm", {}, {}, "local", 5.0)
SHORT, LONG = [{"max_new_tokens": 4}] * 2, [{"max_new_tokens": 4}, {"max_new_tokens": 4000}]


@pytest.fixture
def play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[EngineHost], Coroutine[Any, Any, None]]], None]:
    """Run one scenario against a started host."""
    monkeypatch.setattr(host_module, "EngineServer", ScriptedServer)
    monkeypatch.setattr(host_module, "EngineClient", ScriptedClient)
    for module in (host_module, gate_module):
        monkeypatch.setattr(module, "WATCH_S", 0.01)
    run = RunDir(tmp_path)
    run.create()

    async def main(scenario: Callable[[EngineHost], Coroutine[Any, Any, None]]) -> None:
        store = BlobStore(tmp_path / "blobs", "n")
        context = EngineContext(tmp_path, SHAPE, ReplayConfig(), run, "t")
        host = EngineHost(0, EngineConfig(), context, store)
        await host.start(V0)
        try:
            await asyncio.wait_for(scenario(host), patience(10))
        finally:
            await host.stop()

    return lambda scenario: asyncio.run(main(scenario))


@pytest.mark.parametrize("trainer", [False, True])
def test_a_host_whose_head_is_not_that_of_the_trainer_is_refused(
    tmp_path: Path, trainer: bool
) -> None:
    run, store = RunDir(tmp_path), BlobStore(tmp_path / "blobs", "n")
    context = EngineContext(tmp_path, SHAPE, ReplayConfig(), run, "t", fp32_head=trainer)
    EngineHost(0, EngineConfig(args={"enable_fp32_lm_head": trainer}), context, store)
    with pytest.raises(ConfigError, match=f"trainer's model.fp32_lm_head is {trainer}"):
        EngineHost(0, EngineConfig(args={"enable_fp32_lm_head": not trainer}), context, store)


def test_a_full_disk_refuses_the_record(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(host: EngineHost) -> None:
        def full(*args: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", full)
            (refused,) = await host.generate([ask("a")])
        assert isinstance(refused, RecordError)
        assert refused.reason == "blob"
        assert "No space left on device" in str(refused)
        assert (await host.status()).refused == {"blob": 1}
        (segment,) = await host.generate([ask("a")])
        assert isinstance(segment, Segment), "there is room again"

    play(scenario)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"[{}]", "1 for 2 requests"),
        (b'[{"output_ids": [1', "the answer is no JSON"),
        (b"data: []\n\n", "an event is a list, want a reply"),
        (b"data: {}\n\n", "a reply to request None of 2"),
        (b'data: {"index": 2}\n\n', "a reply to request 2 of 2"),
        (b'data: {"index": 0}\n\n', "ended with 1 of 2 replies missing"),
        (b'data: {"index": 0}\n\ndata: {"index": 0}\n\n', "ended with 1 of 2 replies missing"),
        (b"data: [DONE]\n\n", "ended with 2 of 2 replies missing"),
        (b"not json\n\n", "the answer is no JSON"),
        (b'data: {"output_ids": [1', "it ends within a reply"),
    ],
)
async def test_garbage_instead_of_an_answer_is_an_error(answer: bytes, says: str) -> None:
    """Over a real socket: nothing of it is taken for a reply."""

    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)
        await writer.drain()

    server = await asyncio.start_server(answers, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = EngineClient(f"http://127.0.0.1:{port}")
    client.authenticate("t")
    asked = {"rid": ["a", "b"], "sampling_params": SHORT if answer[:1] == b"[" else LONG}
    try:
        with pytest.raises(EngineError, match=says):
            await client.generate(asked, lambda place, reply: None)
    finally:
        await client.close()
        server.close()


@pytest.mark.parametrize("streams", [False, True])
async def test_replies_are_taken_as_they_come(streams: bool) -> None:
    """Over a real socket, cut anywhere; the first token of a reply is not taken for the reply.

    A part is taken where it was asked for.
    """
    part = b'data: {"index": 0, "meta_info": {"finish_reason": null}}\n\n'
    whole = (
        b'data: {"index": 1, "meta_info": {"finish_reason": {"type": "stop"}}, "text": "%s"}\n\n'
    )
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    first = part + whole % (b"x" * 300_000)
    go_on = asyncio.Event()

    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head)
        for begin in range(0, len(first), 7919):
            piece = first[begin : begin + 7919]
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()
        await go_on.wait()
        last = whole.replace(b'"index": 1', b'"index": 0') % b"" + b"data: [DONE]\n\n"
        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(last), last))
        await writer.drain()

    server = await asyncio.start_server(answers, "127.0.0.1", 0)
    client = EngineClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    client.authenticate("t")
    taken: list[tuple[int, int]] = []

    def take(place: int, reply: dict[str, Any]) -> None:
        taken.append((place, len(reply.get("text", ""))))
        go_on.set()

    try:
        given = [LONG[0] | ({"stream_interval": 8} if streams else {}), LONG[1]]
        asked = {"rid": ["a", "b"], "sampling_params": given}
        await asyncio.wait_for(client.generate(asked, take), patience(10))
        assert taken == [*([(0, 0)] if streams else []), (1, 300_000), (0, 0)]
    finally:
        await client.close()
        server.close()


def test_tokens_of_a_request_that_streams_come_before_its_reply(play: Any) -> None:
    async def scenario(host: EngineHost) -> None:
        client, seen = script(host), asyncio.Event()

        async def generate(body: dict[str, Any], took: Any) -> None:
            replies = await client.all_replies(body)
            for place in range(len(replies)):
                took(place, {"output_ids": [7, 8], "meta_info": {"finish_reason": None}})
            await seen.wait()
            for place, reply in enumerate(replies):
                took(place, reply)

        client.generate = generate
        await host.submit([replace(ask("1.0"), streams=True)])
        first = await host.collect()
        assert [(name, ids.tolist()) for name, ids in first.partial] == [("1.0-s0", [7, 8])]
        assert not first.replies
        seen.set()
        (reply,) = (await host.collect()).replies
        assert (reply[0], type(reply[1])) == ("1.0-s0", Segment)
        intervals = [body["sampling_params"][0].get("stream_interval") for body in client.calls]
        assert intervals == [8]

    play(scenario)


def test_long_answers_come_in_parts_of_more_tokens() -> None:
    """Each part has all tokens so far, so the number of parts is bounded."""
    for most, interval in ((40, 8), (4096, 16), (65536, 256)):
        asked = replace(ask("1.0"), sampling=SamplingParams(most), streams=True)
        assert generation._parts(asked) == {"stream_interval": interval}
    assert generation._parts(ask("1.0")) == {}


def test_replies_are_handed_back_one_by_one(play: Any) -> None:
    """A reply waits for no sibling; an abort by name ends that request alone."""

    async def scenario(host: EngineHost) -> None:
        client = script(host)
        first, last = asyncio.Event(), asyncio.Event()

        async def generate(body: dict[str, Any], took: Any) -> None:
            replies = await client.all_replies(body)
            for place in reversed(range(len(replies))):
                await (first if place else last).wait()
                took(place, replies[place])

        client.generate = generate
        await host.submit([ask("1.0"), ask("1.1")])
        await asyncio.sleep(0.02)
        first.set()
        ((name, segment),) = (await host.collect()).replies
        assert name == "1.1-s0"
        assert isinstance(segment, Segment)
        await host.submit([ask("2.0")])
        await asyncio.sleep(0.02)
        await host.abort(["1.0-s0"])
        (aborted,) = client.aborted
        assert aborted.startswith("1.0-s0.")
        assert aborted.endswith("."), "SGLang aborts all ids that begin with it"
        last.set()
        names: list[str] = []
        while len(names) < 2:
            names += [name for name, _ in (await host.collect()).replies]
        assert sorted(names) == ["1.0-s0", "2.0-s0"]

    play(scenario)


async def test_replies_are_not_given_to_a_controller_that_is_gone() -> None:
    box = Mailbox()
    dead = asyncio.create_task(box.collect())
    await asyncio.sleep(0)
    box.clear()
    new = asyncio.create_task(box.collect())
    await asyncio.sleep(0)
    box.put("a", EngineError("b"))
    assert (await dead).replies == ()
    assert [name for name, _ in (await new).replies] == ["a"]


def test_a_batch_that_the_server_fails_is_sent_one_by_one(play: Any) -> None:
    """Short answers come in one piece, so one bad token fails them all with HTTP 500."""

    async def scenario(host: EngineHost) -> None:
        client, plain = script(host), script(host).all_replies

        async def replies(body: dict[str, Any]) -> list[dict[str, Any]]:
            if any(len(ids) == 5 for ids in body["input_ids"]):
                raise FailedRequest("engine /generate: HTTP 500: the mask misses the token")
            return await plain(body)

        client.all_replies = replies
        bad, *good = await host.generate([ask("1.0", length=5), ask("2.0"), ask("2.1")])
        assert isinstance(bad, RecordError)
        assert bad.reason == "engine"
        assert all(isinstance(segment, Segment) for segment in good)

    play(scenario)


def test_what_the_server_fails_is_one_refused_record(play: Any) -> None:
    async def scenario(host: EngineHost) -> None:
        client, plain = script(host), script(host)._reply

        def other(ids: list[int], start: int, version: str, reason: dict) -> Any:
            failed = {"type": "abort", "status_code": 500, "message": "the mask misses the token"}
            return plain(ids, start, version, failed if len(ids) == 5 else reason)

        client._reply = other
        bad, good = await host.generate([ask("1.0", length=5), ask("2.0")])
        assert isinstance(bad, RecordError)
        assert bad.reason == "engine"
        assert "the mask misses the token" in str(bad)
        assert isinstance(good, Segment)

    play(scenario)


def test_results_keep_the_order_of_requests(play: Any) -> None:
    """Resumed requests go out in calls of their own: rows start where each of them needs."""

    async def scenario(host: EngineHost) -> None:
        asks = [ask("a"), ask("b", 5, 2), ask("c"), ask("d", 6, 2), ask("e", 12)]
        got = await host.generate(asks)
        assert [s.rollout_id for s in got[:4]] == ["a", "b", "c", "d"]
        assert [s.routing.row_begin for s in got[:4]] == [0, 4, 0, 5]
        assert [s.routing.row_end for s in got[:4]] == [4, 5, 4, 6]
        assert isinstance(got[4], RecordError)
        assert (await host.status()).refused == {"request": 1}
        assert (await host.status()).generated_tokens == 4

    play(scenario)


def test_update_aborts_holds_and_resumes(play: Any) -> None:
    async def scenario(host: EngineHost) -> None:
        client = script(host)
        client.slow = True
        client.commits.clear()
        running = asyncio.create_task(host.generate([ask("a"), ask("b")]))
        await asyncio.sleep(0.02)
        committing = asyncio.create_task(host.session(COMMIT))
        assert [s.finish for s in await running] == [Finish.ABORT] * 2
        client.slow = False
        held = asyncio.create_task(host.generate([ask("c")]))
        await asyncio.sleep(0.02)
        assert not held.done()
        assert len(client.calls) == 1, "it was sent during the update"
        client.commits.set()
        closed = await committing
        assert isinstance(closed, UpdateDone)
        assert closed.aborted == 2
        (segment,) = await held
        assert isinstance(segment, Segment)
        assert segment.version == V1

    play(scenario)


def test_a_failed_commit_leaves_the_engine_unusable_until_restarted(play: Any) -> None:
    async def scenario(host: EngineHost) -> None:
        script(host).commit_error = EngineError("connection closed by peer")
        with pytest.raises(EngineError, match=r"commit of 0.1 failed: connection closed by peer"):
            await host.session(COMMIT)
        with pytest.raises(EngineError, match=r"commit of 0.1 failed"):
            await host.generate([ask("a")])
        await host.start(V1)
        script(host).version = str(V1)
        assert isinstance((await host.generate([ask("a")]))[0], Segment)

    play(scenario)


def test_calls_held_by_a_commit_fail_with_it(play: Any) -> None:
    """The trainer may be dead and never commit again: they must not wait for it."""

    async def scenario(host: EngineHost) -> None:
        client = script(host)
        client.commits.clear()
        client.commit_error = EngineError("connection closed by peer")
        committing = asyncio.create_task(host.session(COMMIT))
        await asyncio.sleep(0.02)
        held = asyncio.create_task(host.generate([ask("a")]))
        await asyncio.sleep(0.02)
        assert not held.done()
        client.commits.set()
        for work in (committing, held):
            with pytest.raises(EngineError, match="connection closed by peer"):
                await work

    play(scenario)


def test_a_commit_that_is_never_answered_fails_held_calls(play: Any) -> None:
    async def scenario(host: EngineHost) -> None:
        script(host).commits.clear()
        committing = asyncio.create_task(host.session(CommitUpdate(0, V1, 0.2)))
        await asyncio.sleep(0.02)
        for work in (host.generate([ask("a")]), committing):
            with pytest.raises(EngineError, match=r"commit of 0.1 failed: no answer within 0.2 s"):
                await work

    play(scenario)


def test_a_commit_that_is_asked_again_is_answered_again(play: Any) -> None:
    """Its controller died before it heard the answer, or while the weights were copied."""

    async def scenario(host: EngineHost) -> None:
        server = script(host)
        server.commits.clear()
        asked = [asyncio.create_task(host.session(COMMIT)) for _ in range(2)]
        await asyncio.sleep(0.02)
        server.commits.set()
        first, second = await asyncio.gather(*asked)
        assert first == second == await host.session(COMMIT)
        assert server.committed == ["0.1"]

    play(scenario)


def test_a_version_that_is_prepared_again_is_committed_again(play: Any) -> None:
    """Control: the answer that is kept belongs to what was prepared before it."""

    async def scenario(host: EngineHost) -> None:
        await host.session(COMMIT)
        with pytest.raises(EngineError, match="no receiver"):  # a scripted server has none
            await host.session(PREPARE)
        await host.session(COMMIT)
        assert script(host).committed == ["0.1", "0.1"]

    play(scenario)


def test_restart_during_an_update_forgets_it(play: Any) -> None:
    async def scenario(host: EngineHost) -> None:
        script(host).commits.clear()
        committing = asyncio.create_task(host.session(CommitUpdate(0, V1, 0.5)))
        await asyncio.sleep(0.02)
        await host.start(V0)
        with pytest.raises(EngineError, match="it was stopped"):
            await committing
        await asyncio.sleep(0.7)  # longer than the update may take
        (segment,) = await host.generate([ask("a")])
        assert isinstance(segment, Segment)
        assert segment.version == V0

    play(scenario)


def test_death_fails_running_and_later_calls(play: Any) -> None:
    async def scenario(host: EngineHost) -> None:
        script(host).slow = True
        running = asyncio.create_task(host.generate([ask("a")]))
        await asyncio.sleep(0.02)
        host._server.cause = "server was killed by signal 9: no exception in its log"
        for work in (running, host.generate([ask("b")]), host.session(COMMIT)):
            with pytest.raises(EngineError, match="killed by signal 9"):
                await work

    play(scenario)


def test_a_server_that_hangs_fails_its_calls_and_is_started_again(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes live, so nothing but its silence tells."""

    async def scenario(host: EngineHost) -> None:
        object.__setattr__(host.config, "answer_timeout_s", 0.3)
        await host.start(V0)
        await asyncio.sleep(0.6)
        await host.generate([ask("a")])  # control: it answers, so nothing happens
        script(host).hangs = script(host).slow = True
        running = asyncio.create_task(host.generate([ask("b")]))
        for work in (host.watch(), running):
            with pytest.raises(EngineError, match="the server hangs: it answered nothing for"):
                await work
        await host.start(V0)
        await host.generate([ask("c")])

    play(scenario)


class Asked:
    """A server as `Heartbeat` sees it, and a clock that the test moves."""

    def __init__(self) -> None:
        self.clock, self.asked = 0.0, 0
        self.answers: asyncio.Future[None] | None = None

    async def ask(self) -> None:
        self.asked += 1
        self.answers = asyncio.get_running_loop().create_future()
        await self.answers

    async def pass_time(
        self, pulse: gate_module.Heartbeat, seconds: int, **look: Any
    ) -> str | None:
        for _ in range(seconds):
            self.clock += 1.0
            await asyncio.sleep(0)
            if cause := pulse.check(**look):
                return cause
            await asyncio.sleep(0)
        return None


@pytest.mark.parametrize(
    "how", ["silent", "commits", "tries again", "suspended", "refuses", "broken"]
)
async def test_the_deadline_of_a_server_counts_its_silence_only(how: str) -> None:
    server = Asked()
    pulse = gate_module.Heartbeat(server.ask, 120.0, lambda: server.clock)
    assert await server.pass_time(pulse, 12) is None
    assert server.asked == 1
    if how == "silent":
        cause = await server.pass_time(pulse, 200)
        assert cause == "the server hangs: it answered nothing for 120 s"
    elif how == "commits":  # each has a deadline of its own
        assert await server.pass_time(pulse, 200, attempt=1) is None
        assert await server.pass_time(pulse, 100, answers=1) is None
        assert await server.pass_time(pulse, 200, attempt=2, answers=1) is None
        # it was not answered: no sign of life
        assert await server.pass_time(pulse, 1, answers=1)
    elif how == "tries again":  # at once, so that no look falls between two attempts
        assert await server.pass_time(pulse, 60, attempt=1) is None
        assert await server.pass_time(pulse, 80, attempt=2) is None
        cause = await server.pass_time(pulse, 1, attempt=3)
        assert cause == "the server hangs: it answered nothing for 153 s"
    elif how == "suspended":  # this process was
        server.clock += 600.0
        assert await server.pass_time(pulse, 60) is None
    else:
        error = EngineError("HTTP 500") if how == "refuses" else OSError("reset")
        server.answers.set_exception(error)
        cause = await server.pass_time(pulse, 115)
        assert (cause is None) == (how == "refuses"), "no connection is no sign of life"
    pulse.close()


def test_siblings_share_prompt_rows_that_are_equal(play: Any) -> None:
    """Equal bytes are stored once; a sibling whose prefill routed otherwise keeps its own."""

    async def scenario(host: EngineHost) -> None:
        client, plain = script(host), script(host)._reply

        def other(ids: list[int], start: int, version: str, reason: dict) -> dict[str, Any]:
            answer = plain(ids, start, version, reason)
            client.replies += 1
            if client.replies == 3:
                rows = np.broadcast_to(np.array([0, 3], "<i4"), (len(ids) - start, 2, 2))
                answer["rows"] = rows
            return answer

        client.replies, client._reply = 0, other
        one, two, odd, alone = await host.generate(
            [ask("a.0"), ask("a.1"), ask("a.2"), ask("b.0", length=5)]
        )
        assert one.prompt_rows == two.prompt_rows != odd.prompt_rows
        assert alone.prompt_rows is None
        for segment in (one, two, odd):
            assert (segment.prompt_rows.row_begin, segment.prompt_rows.row_end) == (0, 3)
            assert (segment.routing.row_begin, segment.routing.row_end) == (3, 4)
        load = host._store.load
        assert (load(odd.prompt_rows.ids) != load(one.prompt_rows.ids)).any()
        assert one.routing.ids != two.routing.ids

    play(scenario)


def test_a_new_controller_finds_no_calls_and_no_records_of_the_one_before(play: Any) -> None:
    """Nobody would ever take or delete them."""

    async def scenario(host: EngineHost) -> None:
        (known,) = await host.generate([ask("1.0")])
        (part,) = await host.generate([ask("2.0")])  # of a rollout that was being made
        assert isinstance(known, Segment)
        assert isinstance(part, Segment)
        script(host).slow = True
        late = asyncio.create_task(host.generate([ask("3.0")]))
        await asyncio.sleep(0.02)
        host._health.admit.clear()
        waits = asyncio.create_task(host.generate([ask("4.0")]))  # for an update to end
        await asyncio.sleep(0.02)
        kept = known.routing.ids.uri
        await host.forget([kept, "blob://elsewhere/5.0"], life=1)
        host._health.admit.set()
        for call in (late, waits):
            with pytest.raises(EngineError, match="its controller is gone"):
                await asyncio.wait_for(call, patience(5))
        assert [path.name for path in host._store.root.iterdir()] == [kept.rpartition("/")[2]]
        script(host).slow = False
        (segment,) = await host.generate([ask("6.0")])
        assert isinstance(segment, Segment), "the new one is served"

    play(scenario)


@pytest.mark.parametrize("answer", [None, "x", [], {}, {"meta_info": {"finish_reason": None}}])
def test_a_reply_that_is_none_is_refused_and_the_others_are_not(play: Any, answer: Any) -> None:
    async def scenario(host: EngineHost) -> None:
        client, plain = script(host), script(host)._reply

        def other(ids: list[int], start: int, version: str, reason: dict) -> Any:
            return answer if len(ids) == 5 else plain(ids, start, version, reason)

        client._reply = other
        bad, good = await host.generate([ask("1.0", length=5), ask("2.0")])
        assert isinstance(bad, RecordError)
        assert isinstance(good, Segment)
        assert (await host.status()).refused == {"reply": 1}

    play(scenario)


@pytest.mark.parametrize("damage", ["gone", "altered", "no reference"])
def test_a_record_file_that_is_none_costs_its_rollout(play: Any, damage: str) -> None:
    async def scenario(host: EngineHost) -> None:
        client, plain = script(host), script(host).all_replies

        async def replies(body: dict[str, Any]) -> list[dict[str, Any]]:
            found = await plain(body)
            file = host._server.folder / name_of(body["rid"][0])
            if damage == "gone":
                file.unlink()
            elif damage == "altered":
                file.write_bytes(bytes(file.stat().st_size))
            else:
                del found[0]["meta_info"]["finish_reason"][FIELD]
            return found

        client.all_replies = replies
        bad, good = await host.generate([ask("1.0"), ask("2.0")])
        assert isinstance(bad, RecordError)
        assert isinstance(good, Segment)
        reason = "routing_rows" if damage == "no reference" else "record_file"
        assert (await host.status()).refused == {reason: 1}
        host._server.records.sweep()
        assert os.listdir(host._server.folder) == []

    play(scenario)


def test_replies_are_decoded_off_the_event_loop(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply of many tokens takes seconds, and an update waits for no turn of the loop."""
    begun, go_on, parse = threading.Event(), threading.Event(), reply_parser.parse

    def slow(*args: Any, **fields: Any) -> Any:
        begun.set()
        assert go_on.wait(patience(5))
        return parse(*args, **fields)

    async def scenario(host: EngineHost) -> None:
        monkeypatch.setattr(generation, "_FEW_ROWS", 0)
        monkeypatch.setattr(reply_parser, "parse", slow)
        call = asyncio.create_task(host.generate([ask("1.0")]))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        assert (await host.status()).running == 1
        go_on.set()
        (segment,) = await call
        assert isinstance(segment, Segment)

    play(scenario)


def test_a_call_that_is_cancelled_while_it_is_decoded_seals_nothing(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, parse = threading.Event(), threading.Event(), reply_parser.parse

    def slow(*args: Any, **fields: Any) -> Any:
        begun.set()
        assert go_on.wait(patience(5))
        return parse(*args, **fields)

    async def scenario(host: EngineHost) -> None:
        monkeypatch.setattr(generation, "_FEW_ROWS", 0)
        monkeypatch.setattr(reply_parser, "parse", slow)
        call = asyncio.create_task(host.generate([ask("1.0"), ask("2.0")]))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        call.cancel()
        go_on.set()
        await asyncio.gather(call, return_exceptions=True)
        host._server.records.sweep()
        assert os.listdir(host._server.folder) == list(host._store.root.iterdir()) == []
        monkeypatch.setattr(reply_parser, "parse", parse)
        (segment,) = await host.generate([ask("3.0")])
        assert isinstance(segment, Segment), "the next one is served"

    play(scenario)


def test_a_failed_call_leaves_no_other_behind(play: Any) -> None:
    """Requests that need other rows go out beside it; nobody takes what they would seal."""

    async def scenario(host: EngineHost) -> None:
        client, plain = script(host), script(host).all_replies
        client.slow = True

        async def replies(body: dict[str, Any]) -> list[dict[str, Any]]:
            if body["routed_experts_start_len"] > 0:
                raise EngineError("engine /generate: HTTP 500")
            return await plain(body)

        client.all_replies = replies
        with pytest.raises(EngineError, match="HTTP 500"):
            await host.generate([ask("1.0"), ask("2.0", 5, 2)])
        client.released.set()
        await asyncio.sleep(0.05)
        assert list(host._store.root.iterdir()) == []
        assert (await host.status()).running == 0

    play(scenario)


def test_the_others_of_a_refused_batch_run_side_by_side(play: Any) -> None:
    """One after the other they would take longer than a call may, and be sent again for good."""

    async def scenario(host: EngineHost) -> None:
        client, plain = script(host), script(host).all_replies
        running, most = 0, 0

        async def replies(body: dict[str, Any]) -> list[dict[str, Any]]:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.02)
            running -= 1
            return await plain(body)

        client.all_replies = replies
        *good, bad = await host.generate([*(ask(f"{i}.0") for i in range(5)), ask("5.0", 12)])
        assert isinstance(bad, RecordError)
        assert all(isinstance(segment, Segment) for segment in good)
        assert most == 6

    play(scenario)


def test_groups_of_one_prompt_share_no_blob(play: Any) -> None:
    """Data repeats prompts: the group that is trained first takes its blobs along."""

    async def scenario(host: EngineHost) -> None:
        pairs = await host.generate([ask("7.0"), ask("7.1"), ask("8.0"), ask("8.1")])
        assert not any(isinstance(segment, RecordError) for segment in pairs)
        first, second = ({s.prompt_rows.ids.uri for s in pair} for pair in (pairs[:2], pairs[2:]))
        assert len(first) == len(second) == 1, "siblings do"
        assert first.isdisjoint(second)

    play(scenario)


def test_log_probabilities_are_sealed_beside_the_routes(play: Any) -> None:
    async def scenario(host: EngineHost) -> None:
        one, two = await host.generate([ask("a.0"), ask("a.1")])
        for segment in (one, two):
            assert not len(segment.logprobs), "the header carries none"
            sealed = segment.sealed_logprobs
            assert (sealed.first, sealed.num_tokens) == (0, len(segment.output_ids))
            assert sealed.values.uri == segment.routing.ids.uri
            values = host._store.load(sealed.values)
            assert values.dtype == np.float32
            assert np.isfinite(values).all()

    play(scenario)


def test_sealed_log_probabilities_reach_the_trainer(play: Any) -> None:
    """Host, assembly, door, wire and packing, over several calls of one rollout."""

    async def scenario(host: EngineHost) -> None:
        prompt = Prompt(0, (0, 1, 2, 3), "p", None, {})
        ids = np.asarray(prompt.token_ids, np.int32)
        partial = TurnInFlight("0.0", ids, SamplingParams(3), audit=False, slice_tokens=1)
        while not partial.finished:
            (reply,) = await host.generate([partial.request()])
            partial.add(reply)
        rollout = join("0.0", [partial.sampled(partial.sampling)])
        check(rollout, SHAPE)
        assert [part.first for part in rollout.sealed_logprobs] == [0, 1, 2]
        group = EpisodeGroup(0, prompt, (Episode("0.0", (Turn(rollout),), Score(1.0)),))
        plan = plan_batch(0, V0, [group], dp_size=1, max_tokens_per_microbatch=100)
        told = decode(encode(Plan(plan)))
        assert isinstance(told, Plan)
        packed = pack_microbatch(told.plan, 0, 0, host._store)
        assert packed.old_logprob.tolist() == [-1.0] * 3
        assert packed.tokens[0].tolist() == [0, 1, 2, 3, 7, 7]
        host._store.delete(rollout.sealed_logprobs[1].values.uri)
        with pytest.raises(BlobError, match="is not in"):
            pack_microbatch(told.plan, 0, 0, host._store)

    play(scenario)
