"""Strangers at the ports of torchrun run code with torch's own rendezvous, and not with ours."""

from __future__ import annotations

import ast
import base64
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch.distributed as dist

from moerl.core.errors import TransportError
from moerl.distributed import token_server
from moerl.distributed.store_server import StoreServer, Write
from moerl.distributed.token_server import ServerAddress, open_channel
from moerl.distributed.token_store import TokenStore
from tests.helpers.patience import Patience, patience

ROOT = Path(__file__).resolve().parents[2]
START_S, RUN_S = 60.0, 4.0  # until a port is open; for a planted command to run
LAUNCHERS = {
    "torch": ["torch.distributed.run", "--standalone"],
    "moerl": ["moerl.distributed.torchrun"],
}


class Planted:
    """Unpickling it runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


class Agent:
    """A real torchrun on one machine whose only rank sleeps."""

    def __init__(self, launcher: str) -> None:
        command = [sys.executable, "-m", *LAUNCHERS[launcher], "--local-addr", "127.0.0.1"]
        self.process = subprocess.Popen(
            [*command, "--nproc-per-node", "1", "--no-python", "sleep", "120"],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def listeners(self) -> set[tuple[str, int]]:
        limit = Patience(START_S)
        one = psutil.Process(self.process.pid)
        while not one.children() or not (found := listening(one)):
            assert not limit.over(), "no rank, or no port"
            time.sleep(0.1)
        return found

    def end(self) -> None:
        ranks = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        for rank in ranks:
            rank.kill()


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    return {
        (connection.laddr.ip, connection.laddr.port)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.fixture(scope="module")
def agents() -> Iterator[dict[str, Agent]]:
    started = {name: Agent(name) for name in LAUNCHERS}
    yield started
    for agent in started.values():
        agent.end()


def attack(port: int, command: str) -> None:
    """As a client without any secret: replace the agents' state by a pickle that runs a command."""
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=3), wait_for_workers=False)
    (key,) = [key for key in store.list_keys() if "torch.rendezvous" in key and "/" not in key]
    store.set(key, base64.b64encode(pickle.dumps(Planted(command))).decode())


def runs(agent: Agent, marker: Path) -> bool:
    """True if a stranger's command ran after the attack on all ports of the agent."""
    for _, port in agent.listeners():
        try:
            attack(port, f"touch {marker}")
        except (dist.DistError, ValueError):  # not a store that is open to strangers
            continue
    limit = Patience(RUN_S)
    while not marker.exists() and not limit.over():
        time.sleep(0.1)
    return marker.exists()


def test_a_stranger_runs_code_through_torchs_store(
    agents: dict[str, Agent], tmp_path: Path
) -> None:
    """Control: the same attack, the same torch, its own rendezvous."""
    assert {address for address, _ in agents["torch"].listeners()} == {"::"}
    assert runs(agents["torch"], tmp_path / "torch")


def test_a_stranger_runs_nothing_through_ours(agents: dict[str, Agent], tmp_path: Path) -> None:
    assert {address for address, _ in agents["moerl"].listeners()} == {"127.0.0.1"}
    assert not runs(agents["moerl"], tmp_path / "moerl")
    assert agents["moerl"].process.poll() is None, "and the job goes on"


# --- the token -----------------------------------------------------------------------------------
@pytest.fixture
def server() -> Iterator[StoreServer]:
    made = StoreServer("127.0.0.1")
    yield made
    made.close()


def test_a_wrong_token_is_refused(server: StoreServer) -> None:
    wrong = msgspec.structs.replace(server.server_address, token="0" * 32)
    with pytest.raises(TransportError, match="did not accept the token") as caught:
        open_channel(wrong, time.monotonic() + 5)
    assert caught.value.reason == "refused"
    with pytest.raises(TransportError):
        TokenStore(wrong, timedelta(seconds=0.5)).set("a", "1")
    TokenStore(server.server_address, timedelta(seconds=5)).set("a", "1")  # control


def test_requests_before_the_token_change_nothing(server: StoreServer) -> None:
    address = server.server_address
    with socket.create_connection((address.host, address.port), timeout=5) as stranger:
        stranger.recv(32)
        stranger.sendall(msgspec.msgpack.encode(Write({"a": b"planted"})).ljust(64, b"\0"))
        assert stranger.recv(1) == b"", "sent away"
    assert not TokenStore(address, timedelta(seconds=5)).check(["a"])


def test_silent_strangers_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds a thread until its time is up; those who know the token are not counted."""
    monkeypatch.setattr(token_server, "_STRANGERS", 2)
    server = StoreServer("127.0.0.1")
    where = (server.server_address.host, server.server_address.port)
    store = TokenStore(server.server_address, timedelta(seconds=5))
    store.set("a", "1")
    silent = [socket.create_connection(where, timeout=5) for _ in range(2)]
    assert [len(one.recv(32)) for one in silent] == [32, 32]
    with socket.create_connection(where, timeout=5) as third:
        assert len(third.recv(32)) == 32
        assert silent[0].recv(32) == b"", "the oldest is sent away"
        assert store.get("a") == b"1"
        TokenStore(server.server_address, timedelta(seconds=5)).set("b", "2")
    server.close()
    for one in silent:
        one.close()


def test_silent_strangers_keep_no_caller_out() -> None:
    """As many as a server takes, and as many again while ranks connect."""
    server = StoreServer("127.0.0.1")
    where = (server.server_address.host, server.server_address.port)
    silent = [socket.create_connection(where, timeout=5) for _ in range(token_server._STRANGERS)]
    limit = Patience(20)
    while len(server._server._strangers) < token_server._STRANGERS:
        assert not limit.over()
        time.sleep(0.02)
    for place in range(3):
        begin = time.monotonic()
        TokenStore(server.server_address, timedelta(seconds=5)).set("a", str(place))
        assert time.monotonic() - begin < patience(3)
        silent.append(socket.create_connection(where, timeout=5))
    assert len(server._server._strangers) <= token_server._STRANGERS
    server.close()
    for one in silent:
        one.close()


def test_a_process_that_listens_in_place_of_ours_learns_nothing() -> None:
    """It took the port first: the token must not reach it, and it must not be believed."""
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(bytes(32))
                heard.extend(connection.recv(1024))
                connection.sendall(bytes(32))
                heard.extend(connection.recv(1024))

        thread = threading.Thread(target=pretend)
        thread.start()
        ours = ServerAddress("127.0.0.1", listener.getsockname()[1], "5e" * 16)
        with pytest.raises(TransportError, match="does not know the token"):
            open_channel(ours, time.monotonic() + 5)
        thread.join(patience(5))
    assert len(heard) == 64
    assert ours.token.encode() not in heard
    assert bytes.fromhex(ours.token) not in heard


# --- moerl's own code ----------------------------------------------------------------------------
def names_in(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Name | ast.alias):
            found.add(node.id if isinstance(node, ast.Name) else node.name.split(".")[-1])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def test_moerl_unpickles_nothing_that_crossed_a_socket() -> None:
    """No `*_object` collective of torch, no store of torch's, no torchrun of torch's alone."""
    pickling = {name for name in dir(dist) if "_object" in name}
    assert {"broadcast_object_list", "all_gather_object", "gather_object"} <= pickling
    open_stores = {"TCPStore", "env://", "--standalone", "c10d", "torch.distributed.run"}
    found = {
        (path.name, name)
        for path in (ROOT / "moerl").rglob("*.py")
        for name in names_in(path) & (pickling | open_stores)
    }
    assert found == set()
