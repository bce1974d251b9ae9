"""Callers that are slow on purpose or ask for too much, and one that listens on a port of ours."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from moerl.config.schema import EngineConfig
from moerl.core.errors import EngineError
from moerl.engine.host.sglang_client import EngineClient
from moerl.engine.host.sglang_server import EngineServer
from moerl.records.range_server import RangeServer
from moerl.records.remote_blobs import ClusterBlobs
from moerl.runtime.bearer_server import CallerLimits
from tests.helpers.patience import Patience, patience
from tests.helpers.sync_peers import FAMILIES

TOKEN = "of this run"
_others: set[threading.Thread] = set()  # threads of servers of earlier tests
SERVED = {"tie_word_embeddings": False, "mlp_only_layers": []}  # what SGLang serves rightly


@contextlib.contextmanager
def record_server(folder: Path, limits: CallerLimits) -> Iterator[tuple[RangeServer, ClusterBlobs]]:
    """A server with one blob `a`, and a reader on another node."""
    _others.update(threading.enumerate())
    server = RangeServer(folder, "127.0.0.1", 0, TOKEN, limits)
    ClusterBlobs(folder, server.node, TOKEN).seal("a", [np.arange(9, dtype=np.int32)])
    yield server, ClusterBlobs(folder / "none", "", TOKEN, timeout_s=20)
    server.close()


def knock(server: RangeServer) -> socket.socket:
    host, _, port = server.node.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def held_threads() -> int:
    own = [thread for thread in threading.enumerate() if thread not in _others]
    return sum("process_request_thread" in thread.name for thread in own)


# --- the record server ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "limits",
    [
        CallerLimits(connections=64, seconds=1.0),
        pytest.param(CallerLimits(), marks=pytest.mark.full, id="as in a run"),
    ],
)
def test_forty_slow_callers_hold_no_thread(tmp_path: Path, limits: CallerLimits) -> None:
    """A byte every 50 ms, each well within any time limit of a single read."""
    with record_server(tmp_path, limits) as (server, reader):
        lines = [knock(server) for _ in range(40)]
        wait_until(lambda: held_threads() >= 20)
        deadline = time.monotonic() + 2 * limits.seconds + 2.0
        while held_threads() and time.monotonic() < deadline:
            for line in lines:
                with contextlib.suppress(OSError):
                    line.send(b"G")
            time.sleep(0.05)
        assert held_threads() == 0
        assert not reader.missing([f"blob://{server.node}/a"])
        for line in lines:
            line.close()


def test_strangers_are_few_and_keep_no_reader_out(tmp_path: Path) -> None:
    with record_server(tmp_path, CallerLimits(connections=8, seconds=60.0)) as (server, reader):
        assert not reader.missing([f"blob://{server.node}/a"])  # this connection stays open
        lines = [knock(server) for _ in range(40)]
        wait_until(lambda: held_threads() == 8 + 1)
        newcomer = ClusterBlobs(tmp_path / "none", "", TOKEN, timeout_s=20)
        for one in (reader, newcomer):
            begin = time.monotonic()
            assert not one.missing([f"blob://{server.node}/a"])
            assert time.monotonic() - begin < patience(5.0)
        wait_until(lambda: held_threads() == 7 + 2)
        for line in lines:
            line.close()


def test_a_head_without_end_is_cut_off(tmp_path: Path) -> None:
    limits, sent = CallerLimits(num_bytes=32 * 1024), 0
    with record_server(tmp_path, limits) as (server, _), closing(knock(server)) as line:
        line.sendall(b"GET /a HTTP/1.1\r\n")
        with contextlib.suppress(OSError):
            while sent < 50 * 2**20:
                sent += line.send(b"X: " + b"y" * 60_000 + b"\r\n")
        assert sent < 10 * 2**20, "more than what is in transit"


def test_what_strangers_may_cost() -> None:
    assert CallerLimits() == CallerLimits(connections=32, seconds=10.0, num_bytes=96 * 1024)


def test_ranges_outside_a_blob_are_refused(tmp_path: Path) -> None:
    """Also ranges that overlap: together they are never longer than the file."""
    outside = ["0-8,0-100000000000", "-5-3", "8-4", "0-1000000000", "x", ""]
    with record_server(tmp_path, CallerLimits()) as (server, _):
        for spans in (*outside, ",".join(["0-30"] * 40)):
            assert _get(server, spans) == 400, spans
        assert _get(server, "0-8,16-30") == 206


def test_a_body_without_end_is_refused(tmp_path: Path) -> None:
    with record_server(tmp_path, CallerLimits()) as (server, _), closing(knock(server)) as line:
        head = f"POST /missing HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n"
        line.sendall(f"{head}Content-Length: {2**40}\r\n\r\n".encode())
        assert line.recv(12) == b"HTTP/1.1 400"
        while line.recv(4096):
            pass


def _get(server: RangeServer, spans: str) -> int:
    with closing(http.client.HTTPConnection(server.node, timeout=20)) as line:
        headers = {"Authorization": f"Bearer {TOKEN}", "Range": f"bytes={spans}"}
        line.request("GET", "/a", headers=headers)
        reply = line.getresponse()
        reply.read()
        return reply.status


# --- the port of an engine ------------------------------------------------------------------------
ANSWERS = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        with open(sys.argv[2], "a") as file:
            file.write(f"{self.command} {self.path}\\n{self.headers}")
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    do_POST = do_GET

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
SERVES = ["-c", ANSWERS]
HANGS = ["-c", "import time; time.sleep(600)"]


@pytest.mark.parametrize("stranger", [True, False], ids=["a stranger", "our server"])
def test_only_our_own_server_gets_the_token(
    tmp_path: Path, stranger: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang listens 12 to 30 s after its port was chosen: another user may be there before it,
    and answer that it is healthy.
    """
    seen = tmp_path / "seen"
    config = json.loads(FAMILIES.read_text())["qwen3_moe"] | SERVED
    (tmp_path / "config.json").write_text(json.dumps(config))
    server = EngineServer(
        EngineConfig(platform="cpu", start_timeout_s=60.0),
        tmp_path,
        routing=True,
        version="0.0",
        token=TOKEN,
        log=tmp_path / "log",
    )
    others: list[subprocess.Popen[bytes]] = []

    def spawn() -> None:
        ours = HANGS if stranger else [*SERVES, str(server.port), str(seen)]
        server._process = subprocess.Popen([sys.executable, *ours])
        if stranger:
            others.append(subprocess.Popen([sys.executable, *SERVES, str(server.port), str(seen)]))

    async def start() -> None:
        client = EngineClient(server.url)
        try:
            await server.start(client)
        finally:
            await client.close()

    monkeypatch.setattr(server, "_spawn", spawn)
    monkeypatch.setattr(server, "_check_ranks", lambda: None)  # there are none
    match = "another process answers at http://127" if stranger else None
    try:
        with pytest.raises(Exception, match=match) as raised:
            asyncio.run(start())
    finally:
        for process in others:
            process.kill()
            process.wait()
    assert "GET /health" in seen.read_text(), "it was asked"
    assert (TOKEN in seen.read_text()) == (not stranger)
    if stranger:
        assert raised.type is EngineError
        assert "/server_info" not in seen.read_text()


async def test_a_client_without_a_server_it_knows_sends_nothing() -> None:
    client = EngineClient("http://127.0.0.1:9")
    with pytest.raises(EngineError, match="nobody has checked who listens"):
        await client.server_info()
    await client.close()


def wait_until(condition: object) -> None:
    limit = Patience(20)
    while not condition():  # type: ignore[operator]
        assert not limit.over()
        time.sleep(0.02)
