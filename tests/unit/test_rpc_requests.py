"""Requests of `moerl.core.rpc`: repeated until answered, served once, no late reply."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq

from moerl.core import rpc
from moerl.core.errors import ProtocolError, TrainerError
from moerl.core.messages import AskEngine, EngineVersion, Failed, Message, Ok, Plan, Refused
from moerl.core.rpc import Keys, RpcClient, RpcServer, ask, request_all
from moerl.core.serialization import decode, encode
from moerl.core.types import BatchPlan, PolicyVersion
from tests.helpers.patience import Patience, patience
from tests.helpers.rpc_servers import serving

HOLDS = EngineVersion(PolicyVersion(0, 3), "")
KEYS = Keys.make()
LONG = "a cause " * 700_000  # more than one frame


class Door:
    """A server at a fixed port, which may die and come back, and says what it is told to say."""

    def __init__(self, endpoint: str, replies: Callable[[Message], list[Message]]) -> None:
        self.asked: list[Message] = []
        self._endpoint, self._replies = endpoint, replies
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(patience(10))

    def _serve(self) -> None:
        socket = rpc._server_socket(KEYS)
        while True:
            try:
                socket.bind(self._endpoint)
                break
            except zmq.ZMQError:  # the one before is closed by a thread of its own
                time.sleep(0.05)
        while not self._stop.is_set():
            if socket.poll(20):
                connection, frame = socket.recv_multipart()
                client, number, _, _ = rpc._HEADER.unpack_from(frame)
                self.asked.append(decode(frame[rpc._HEADER.size :]))
                for reply in self._replies(self.asked[-1]):
                    (answer,) = rpc._cut(client, number, encode(reply))
                    socket.send_multipart([connection, answer])
        socket.close(0)


@pytest.fixture
def endpoint(free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(rpc, "_REPEAT_S", 0.1)
    return f"tcp://127.0.0.1:{free_port()}"


@contextmanager
def client(endpoint: str, timeout_s: float = 30.0) -> Iterator[RpcClient]:
    made = RpcClient(endpoint, KEYS, timeout_s=timeout_s)
    try:
        yield made
    finally:
        made.close()


def test_a_request_outlives_the_server(endpoint: str) -> None:
    """The first server takes it and dies; its successor at the same place answers."""
    first = Door(endpoint, lambda message: [])
    second: list[Door] = []

    def succeed() -> None:
        while not first.asked:
            time.sleep(0.01)
        first.close()
        second.append(Door(endpoint, lambda message: [HOLDS]))

    thread = threading.Thread(target=succeed)
    thread.start()
    with client(endpoint) as asking:
        assert asking.expect(AskEngine(0), EngineVersion) == HOLDS
    thread.join()
    second[0].close()


def test_a_late_reply_never_answers_a_later_question(endpoint: str) -> None:
    answers: dict[int, list[Message]] = {0: [Ok(), Ok(), Ok()], 1: [HOLDS]}
    door = Door(endpoint, lambda message: answers[message.engine])  # type: ignore[union-attr]
    with client(endpoint) as asking:
        assert asking.request(AskEngine(0)) == Ok()
        assert asking.request(AskEngine(1)) == HOLDS, "one of the two that were left over came back"
    door.close()


def test_nobody_there_and_a_refusal_are_errors(endpoint: str) -> None:
    with (
        client(endpoint, 0.3) as asking,
        pytest.raises(ProtocolError, match=r"did not answer AskEngine in 0\.3 s"),
    ):
        asking.request(AskEngine(0))
    door = Door(endpoint, lambda message: [Refused("no")])
    with client(endpoint) as asking:
        with pytest.raises(TrainerError, match="AskEngine was refused: no"):
            asking.request(AskEngine(0))
        with pytest.raises(TrainerError):
            asking.expect(AskEngine(0), Ok)
    door.close()


@pytest.mark.parametrize("is_there", [False, True])
def test_a_server_that_reads_nothing_blocks_no_client(
    endpoint: str, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often a request is repeated, and however long it is."""
    monkeypatch.setattr(rpc, "_REPEAT_S", 0.0)
    silent = rpc._server_socket(KEYS) if is_there else None
    if silent is not None:
        silent.bind(endpoint)
    failures: list[str] = []

    def work() -> None:
        with client(endpoint, 0.5) as asking, pytest.raises(ProtocolError) as raised:
            asking.request(Failed(0, LONG))
        failures.append(str(raised.value))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(patience(20))
    assert len(failures) == 1, "the client is blocked"
    if silent is not None:
        silent.close(0)


def test_a_repeated_request_is_served_once(endpoint: str) -> None:
    """Also over a new connection, to which the answer then goes; a later repeat gets it again."""
    served: list[Message] = []
    go = threading.Event()

    async def handle(message: Message) -> Message:
        served.append(message)
        while not go.is_set():
            await asyncio.sleep(0.01)
        return HOLDS

    with serving(KEYS, handle, endpoint), client(endpoint) as first, client(endpoint) as second:
        second._client = first._client
        for one in (first, second):
            one.begin(AskEngine(0))
            until(lambda one=one: (one.advance(), not one._unsent)[1])  # type: ignore[misc]
            time.sleep(0.25)
        go.set()
        answers: list[bytes | None] = []
        until(lambda: answers.append(second.advance()) or answers[-1] is not None)
        assert decode(answers[-1] or b"") == HOLDS
        until(lambda: answers.append(first.advance()) or answers[-1] is not None)
        assert len(served) == 1


def test_a_copy_of_an_earlier_request_is_not_served(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "_KEPT_BYTES", 0)  # an answer that is kept would be sent again
    served: list[Message] = []

    async def handle(message: Message) -> Message:
        served.append(message)
        return Ok()

    with serving(KEYS, handle, endpoint), client(endpoint) as asking:
        asking.request(AskEngine(0))
        early = list(asking._frames)
        asking.request(AskEngine(1))
        asking.socket.send(early[0])
        asking.request(AskEngine(2))
    assert [message.engine for message in served] == [0, 1, 2]  # type: ignore[union-attr]


def test_a_message_has_a_bounded_number_of_parts() -> None:
    def header(parts: int) -> bytes:
        return rpc._HEADER.pack(b"a client", 1, 0, parts)

    assert rpc._header(header(rpc._MAX_PARTS)) == (b"a client", 1, 0, rpc._MAX_PARTS)
    assert rpc._header(header(rpc._MAX_PARTS + 1)) is None


def test_an_answer_that_cannot_be_encoded_is_a_refusal(endpoint: str) -> None:
    """A client that waits for nothing would wait until its deadline, and its repeats too."""

    async def handle(message: Message) -> Message:
        return EngineVersion(PolicyVersion(0, 0), object())  # type: ignore[arg-type]

    with (
        serving(KEYS, handle, endpoint),
        client(endpoint) as asking,
        pytest.raises(TrainerError, match="EngineVersion could not be encoded"),
    ):
        asking.request(AskEngine(0))


def test_messages_of_many_frames_arrive_whole(endpoint: str) -> None:
    async def handle(message: Message) -> Message:
        assert isinstance(message, Failed)
        return Refused(message.cause[::-1])

    with serving(KEYS, handle, endpoint), client(endpoint) as asking:
        reply = decode(asking.request_encoded(Failed(0, LONG)))
        assert len(asking._frames) > 5
    assert reply == Refused(LONG[::-1])
    assert asyncio.run(_asked(handle)) == Refused("no")


async def _asked(handle: Callable) -> Message:
    server = RpcServer("tcp://127.0.0.1:*", KEYS, handle)
    serve = asyncio.create_task(server.serve())
    try:
        return await ask(server.endpoint, KEYS, Failed(0, "on"))
    finally:
        serve.cancel()
        server.close()


def test_the_first_failure_of_many_servers_is_seen_at_once(endpoint: str) -> None:
    async def fail(message: Message) -> Message:
        return Refused("no")

    with serving(KEYS, fail) as works, client(works.endpoint) as one, client(endpoint) as other:
        begin = time.monotonic()
        asked = {3: (one, AskEngine(0)), 4: (other, AskEngine(0))}
        replies = request_all(asked, begin + patience(1.0))
        assert next(replies)[0] == 3
        assert time.monotonic() - begin < patience(1.0)
        assert list(replies) == [], "the other did not answer in time"


def test_a_plan_of_thousands_of_rollouts_does_not_block_the_loop(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests: the plan's encoding takes long, the other is answered in between."""
    plan = Plan(BatchPlan(0, PolicyVersion(0, 0), (), (), 0))
    order: list[str] = []

    def slow(message: Message) -> bytes:
        if isinstance(message, Plan):
            time.sleep(0.6)
            order.append("plan")
        return encode(message)

    async def handle(message: Message) -> Message:
        assert isinstance(message, AskEngine)
        return plan if message.engine == 1 else Ok()

    monkeypatch.setattr(rpc, "encode", slow)
    with serving(KEYS, handle, endpoint), client(endpoint) as one, client(endpoint) as other:
        one.begin(AskEngine(1))
        until(lambda: (one.advance(), not one._unsent)[1])
        time.sleep(0.2)
        assert other.request(AskEngine(0)) == Ok()
        assert order == []
        answers: list[bytes | None] = []
        until(lambda: answers.append(one.advance()) or answers[-1] is not None)
        assert isinstance(decode(answers[-1] or b""), Plan)


def until(condition: Callable[[], object], limit_s: float = 20.0) -> None:
    limit = Patience(limit_s)
    while not condition():
        assert not limit.over()
        time.sleep(0.01)
