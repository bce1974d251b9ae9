"""Attacks on the run's requests: without keys, with other keys, in the place of a server.

Each would succeed without CURVE or without its limit; the controls show that it is real.
"""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from moerl.core import rpc
from moerl.core.errors import ProtocolError
from moerl.core.messages import AskEngine, Failed, Message, Ok
from moerl.core.rpc import Keys, RpcClient, RpcServer
from tests.helpers import raw_zmtp
from tests.helpers.rpc_servers import serving
from tests.helpers.trainer_support import ROOT

KEYS = Keys.make()
SECRET = "a cause that nobody else should read"
MIB = 2**20

SERVER = """
import asyncio, sys
from pathlib import Path
from moerl.core.messages import Ok
from moerl.core.rpc import Keys, RpcServer

async def main():
    async def handle(message):
        return Ok()
    server = RpcServer("tcp://127.0.0.1:*", Keys.read(Path(sys.argv[1])), handle)
    print(server.endpoint, flush=True)
    await server.serve()

asyncio.run(main())
"""


class Handler:
    """What a server was asked."""

    def __init__(self) -> None:
        self.asked: list[Message] = []

    async def __call__(self, message: Message) -> Message:
        self.asked.append(message)
        return Ok()


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, psutil.Process]]:
    """A server in a process of its own: (endpoint, process)."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    KEYS.write(keys)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(keys)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert server.stdout is not None
    yield server.stdout.readline().strip(), psutil.Process(server.pid)
    server.kill()
    server.wait()


# --- memory ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("mechanism", [b"NULL", b"CURVE"])
def test_endless_frames_cost_the_server_no_memory(
    process: tuple[str, psutil.Process], mechanism: bytes
) -> None:
    """A message of frames of which none is the last, before or instead of the handshake."""
    endpoint, server = process
    before = server.memory_info().rss
    lines = [raw_zmtp.connect(endpoint, mechanism) for _ in range(2)]
    for line in lines:
        if mechanism == b"NULL":
            raw_zmtp.ready(line)
        raw_zmtp.send_frames(line, MIB // 2, 128)
    assert server.memory_info().rss - before < 16 * MIB
    for line in lines:
        line.close()
    _is_served(endpoint)


def test_one_frame_of_a_stranger_is_small(process: tuple[str, psutil.Process]) -> None:
    """ZeroMQ reads the frame whole before it looks at it; the connections stay open."""
    endpoint, server = process
    before = server.memory_info().rss
    lines = [raw_zmtp.connect(endpoint, b"CURVE") for _ in range(2)]
    sent = [raw_zmtp.send_frames(line, 32 * MIB, 1) for line in lines]
    assert server.memory_info().rss - before < 16 * MIB
    assert sent == [0] * 2, "sent away in the middle of it"
    for line in lines:
        line.close()


def test_frames_without_end_are_taken_where_there_is_no_handshake() -> None:
    """Control: the same bytes, to a socket as it was: without CURVE, and limited by frame."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as plain:
        plain.setsockopt(zmq.LINGER, 0)
        plain.setsockopt(zmq.MAXMSGSIZE, MIB)
        endpoint = f"tcp://127.0.0.1:{plain.bind_to_random_port('tcp://127.0.0.1')}"
        before = psutil.Process().memory_info().rss
        with closing(raw_zmtp.connect(endpoint)) as line:
            raw_zmtp.ready(line)
            assert raw_zmtp.send_frames(line, MIB // 2, 128) > 60 * MIB
            assert psutil.Process().memory_info().rss - before > 40 * MIB


def test_a_silent_stranger_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rpc._HANDSHAKE_MS <= 5000
    monkeypatch.setattr(rpc, "_HANDSHAKE_MS", 200)
    server = RpcServer("tcp://127.0.0.1:*", KEYS, Handler())
    with closing(raw_zmtp.connect(server.endpoint, b"CURVE")) as line:
        while line.recv(4096):  # ours, then the end
            pass
    server.close()


# --- keys -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("keys", "event"),
    [
        (Keys(KEYS.server, Keys.make().client), zmq.EVENT_HANDSHAKE_FAILED_AUTH),
        (Keys(Keys.make().server, KEYS.client), zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL),
        (KEYS, zmq.EVENT_HANDSHAKE_SUCCEEDED),
    ],
    ids=["another client", "another server", "the run's"],
)
def test_other_keys_fail_in_the_handshake(keys: Keys, event: int) -> None:
    """A client with a key of its own is refused; a client does not talk to a server that has
    another key than the run's: no request leaves it.
    """
    handler = Handler()
    with serving(KEYS, handler) as server, closing(_watched(server.endpoint, keys)) as client:
        monitor = client.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        client.socket.disconnect(server.endpoint)  # its handshake may have been before the monitor
        client.socket.connect(server.endpoint)
        if keys is KEYS:
            assert client.request(AskEngine(0)) == Ok()
        else:
            with pytest.raises(ProtocolError, match="did not answer AskEngine"):
                client.request(AskEngine(0))
        assert monitor.poll(5000)
        assert recv_monitor_message(monitor)["event"] == event
    assert len(handler.asked) == (keys is KEYS)


def test_without_a_thread_that_knows_the_keys_nobody_is_admitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ZeroMQ lets everybody in when nobody answers for a domain, unless it is told not to."""
    with zmq.Context() as bare:
        monkeypatch.setattr(rpc, "_context", lambda: bare)
        socket_ = rpc._server_socket(KEYS)
        endpoint = f"tcp://127.0.0.1:{socket_.bind_to_random_port('tcp://127.0.0.1')}"
        client = rpc._client_socket(KEYS, endpoint)
        assert not client.poll(300, zmq.POLLOUT), "a handshake succeeded"
        client.close(0)
        socket_.close(0)


def test_nobody_on_the_way_reads_a_request() -> None:
    """A proxy records both directions; control: it records what is sent without CURVE."""
    handler = Handler()
    with serving(KEYS, handler) as server, Proxy(server.endpoint) as proxy:
        with closing(RpcClient(proxy.endpoint, KEYS, timeout_s=20)) as client:
            assert client.request(Failed(0, SECRET)) == Ok()
        assert handler.asked == [Failed(0, SECRET)]
        assert len(proxy.seen) > 500
        assert SECRET.encode() not in proxy.seen
        for key in (KEYS.server, KEYS.client):
            assert key not in proxy.seen
    with zmq.Context() as context, context.socket(zmq.ROUTER) as plain:
        port = plain.bind_to_random_port("tcp://127.0.0.1")
        with Proxy(f"tcp://127.0.0.1:{port}") as proxy, context.socket(zmq.DEALER) as dealer:
            dealer.connect(proxy.endpoint)
            dealer.send(SECRET.encode())
            assert plain.recv_multipart()[1] == SECRET.encode()
            assert SECRET.encode() in proxy.seen


def test_keys_are_private_and_are_not_printed(tmp_path: Path) -> None:
    KEYS.write(tmp_path / "keys")
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o600
    assert Keys.read(tmp_path / "keys") == KEYS
    for key in (KEYS.server, KEYS.client):
        assert key.decode() not in repr(KEYS)
        assert len(key) == 40
    (tmp_path / "keys").write_text("half of")
    with pytest.raises(ProtocolError, match="holds no keys of a run"):
        Keys.read(tmp_path / "keys")


# --- who has keys, and sends what no client sends -------------------------------------------------
@pytest.mark.parametrize(
    "frames",
    [
        [b"short"],
        [rpc._HEADER.pack(b"c" * 8, 1, 0, 1), b"another frame"],
        [rpc._HEADER.pack(b"c" * 8, 1, 3, 2)],
        [rpc._HEADER.pack(b"c" * 8, 1, 0, 2**31)],
        [rpc._HEADER.pack(b"c" * 8, 1, 0, 1) + b"no message"],
    ],
)
def test_strange_frames_change_nothing(frames: list[bytes]) -> None:
    handler = Handler()
    with serving(KEYS, handler) as server:
        strange = rpc._client_socket(KEYS, server.endpoint)
        strange.send_multipart(frames)
        with closing(RpcClient(server.endpoint, KEYS, timeout_s=20)) as client:
            assert client.request(AskEngine(0)) == Ok()
        strange.close(0)
    assert handler.asked == [AskEngine(0)]


def _watched(endpoint: str, keys: Keys) -> RpcClient:
    return RpcClient(endpoint, keys, timeout_s=20.0 if keys is KEYS else 0.3)


def _is_served(endpoint: str) -> None:
    with closing(RpcClient(endpoint, KEYS, timeout_s=20)) as client:
        assert client.request(AskEngine(0)) == Ok()


class Proxy:
    """Passes one connection on, and keeps what it sees."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self.seen = bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._far = socket.create_connection((host, int(port)))
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        near, _ = self._listener.accept()
        for source, sink in ((near, self._far), (self._far, near)):
            threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(65536):
            self.seen += data
            sink.sendall(data)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._far.close()
