"""Every transport against a peer process: what it promises, and how it fails.

The table of tests/helpers/transport_cases.py says what each transport guarantees and which ones run
here.  `mooncake` runs where its library can be loaded; elsewhere its cases are skipped with the
library's own complaint, while its refusal is always tested.
"""

from __future__ import annotations

import builtins
import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest
import torch
from safetensors import safe_open

from moerl.config.schema import SAME_MACHINE, TransportName
from moerl.core.errors import ConfigError, TransportError
from moerl.weight_sync.transports.base import Link, Transport
from moerl.weight_sync.transports.factory import NAMES, make
from tests.helpers.patience import patience
from tests.helpers.transport_cases import CASES, ELSEWHERE, skip_if_missing, transports
from tests.helpers.transport_peer import pattern, serve

MIB = 2**20


@pytest.fixture(params=transports(default=["shm"]))
def name(request: pytest.FixtureRequest) -> str:
    skip_if_missing(request.param)
    chosen: str = request.param
    return chosen


class PeerProcess:
    """`transport_peer.serve` in a process forked from a server that has torch loaded."""

    loaded: ClassVar[list[str]] = ["tests.helpers.transport_peer"]

    def __init__(self, name: str, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(self.loaded)
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(name, str(folder), theirs), daemon=True)
        self.process.start()
        theirs.close()

    def answer(self, seconds: float = 60.0) -> Any:
        """The next answer; a TransportError of the peer is raised here."""
        assert self.pipe.poll(patience(seconds)), f"no answer of the peer within {seconds} s"
        got = self.pipe.recv()
        if isinstance(got, TransportError):
            raise got
        return got

    def send(self, do: str, *arguments: object) -> None:
        self.pipe.send((do, arguments))

    def do(self, do: str, *arguments: object) -> Any:
        self.send(do, *arguments)
        return self.answer()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(patience(10))


Spawn = Callable[[], PeerProcess]


@pytest.fixture
def spawn(name: str, tmp_path: Path) -> Iterator[Spawn]:
    peers: list[PeerProcess] = []

    def start() -> PeerProcess:
        peers.append(PeerProcess(name, tmp_path))
        return peers[-1]

    yield start
    for peer in peers:
        peer.kill()


@pytest.fixture
def transport(name: str, tmp_path: Path) -> Transport:
    torch.set_num_threads(1)
    return make(name, address="127.0.0.1", folder=str(tmp_path))


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + patience(seconds)


def connect(transport: Transport, peer: PeerProcess, num_bytes: int) -> Link:
    """A link to a staging of the peer."""
    return transport.connect(peer.do("open", num_bytes), soon())


def raised(work: Callable[[], object]) -> TransportError:
    with pytest.raises(TransportError) as caught:
        work()
    return caught.value


def test_a_transport_knows_its_name(name: str, transport: Transport) -> None:
    assert transport.name == name


def test_every_transport_is_here_in_the_factory_and_in_the_settings() -> None:
    assert set(NAMES) == {*CASES, *ELSEWHERE} == set(get_args(TransportName)) - {"auto"}
    here = {name for name, case in CASES.items() if case.same_machine}
    assert here == set(SAME_MACHINE) - set(ELSEWHERE)


@pytest.mark.parametrize("name", transports(), indirect=True)
def test_bytes_arrive(transport: Transport, spawn: Spawn) -> None:
    """Odd offsets and sizes, a hole, an empty put, a second round, two senders at once."""
    receiver, other = spawn(), spawn()
    size = 3 * MIB
    endpoint = receiver.do("open", size)
    link = transport.connect(endpoint, soon())
    other.do("connect", endpoint, 30)
    other.do("put", 2 * MIB, MIB, 7, 30)
    a, b = pattern(MIB + 13, 1), pattern(5, 2)
    link.put(3, a, soon())
    link.put(MIB + 100, b, soon())
    link.put(size, b[:0], soon())
    link.flush(soon())
    other.do("flush", 30)
    receiver.do("fetch", 30)
    assert receiver.do("same", 3, MIB + 13, 1)
    assert receiver.do("same", MIB + 100, 5, 2)
    assert receiver.do("same", 2 * MIB, MIB, 7)
    assert receiver.do("read", 0, 3) == [0, 0, 0]
    assert not receiver.do("same", 3, MIB + 13, 2)  # negative control
    link.put(3, b, soon())
    link.put(3, b.flip(0), soon())  # the later put wins
    link.flush(soon())
    receiver.do("fetch", 30)
    assert receiver.do("read", 3, 5) == b.flip(0).tolist()
    assert receiver.do("read", 8, 8) == a[5:13].tolist()
    link.close()
    link.close()


def test_a_mapped_range_is_the_remote_memory(name: str, transport: Transport, spawn: Spawn) -> None:
    receiver = spawn()
    link = connect(transport, receiver, MIB)
    view = link.view(10, 100)
    assert (view is not None) == CASES[name].is_mapped
    if view is not None:
        view.copy_(pattern(100, 3))
        link.flush(soon())
        assert receiver.do("same", 10, 100, 3)


def test_a_put_outside_the_buffer_is_refused(transport: Transport, spawn: Spawn) -> None:
    link = connect(transport, spawn(), MIB)
    for offset in (-1, MIB - 7, MIB, 2**62):
        error = raised(partial(link.put, offset, pattern(8, 1), soon()))
        assert error.reason == "range"


def test_the_receiver_checks_ranges_itself(name: str, transport: Transport, spawn: Spawn) -> None:
    """A sender that believes in a larger buffer writes nothing past the end."""
    receiver = spawn()
    endpoint = receiver.do("open", MIB)
    forged = endpoint.replace(b"%d" % MIB, b"%d" % (64 * MIB))
    assert forged != endpoint

    def write() -> None:
        link = transport.connect(forged, soon())
        link.put(MIB - 4, pattern(4 * MIB, 1), soon())
        link.flush(soon())
        receiver.do("fetch", 30)  # disk: nobody but the fetch looks at the file

    assert raised(write).reason in ("range", "peer", "refused")
    assert receiver.do("read", MIB - 4, 4) == [0] * 4


def test_dead_receiver(transport: Transport, spawn: Spawn, tmp_path: Path) -> None:
    """Killed between two puts: the sender hears it within the deadline and leaves no file."""
    receiver = spawn()
    link = connect(transport, receiver, 64 * MIB)
    link.put(0, pattern(MIB, 1), soon())
    link.flush(soon())
    receiver.kill()
    big = pattern(64 * MIB, 2)

    def write() -> None:
        link.put(0, big, soon())
        link.flush(soon())

    assert raised(write).reason == "peer"
    link.close()
    assert leftovers(tmp_path) == []


def test_dead_receiver_in_the_middle_of_a_transfer(
    transport: Transport, spawn: Spawn, tmp_path: Path
) -> None:
    receiver, sender = spawn(), spawn()
    sender.do("connect", receiver.do("open", 16 * MIB), 30)
    sender.send("stream", 16 * MIB, 30)
    assert sender.answer() == "begun"
    receiver.kill()
    assert raised(sender.answer).reason == "peer"
    sender.do("close")
    assert leftovers(tmp_path) == []


def test_dead_sender(transport: Transport, spawn: Spawn, tmp_path: Path) -> None:
    """The staging answers, serves a new sender and leaves nothing behind."""
    staging = transport.open(64 * MIB)
    sender = spawn()
    sender.do("connect", staging.endpoint, 30)
    sender.do("put", 0, MIB, 1, 30)
    sender.do("flush", 30)
    sender.send("stream", 16 * MIB, 30)
    assert sender.answer() == "begun"
    sender.kill()
    staging.fetch(soon())
    late = spawn()
    late.do("connect", staging.endpoint, 30)
    late.do("put", 48 * MIB, MIB, 9, 30)
    late.do("flush", 30)
    staging.fetch(soon())
    assert torch.equal(staging.buffer[48 * MIB : 49 * MIB], pattern(MIB, 9))
    staging.close()
    staging.close()
    assert leftovers(tmp_path) == []


def test_both_dead(transport: Transport, spawn: Spawn, tmp_path: Path) -> None:
    """Whoever opens a staging next finds nothing of them."""
    receiver, sender = spawn(), spawn()
    sender.do("connect", receiver.do("open", MIB), 30)
    sender.do("put", 0, MIB, 1, 30)
    receiver.kill()
    sender.kill()
    transport.open(1).close()
    assert leftovers(tmp_path) == []


def test_a_stopped_receiver_costs_no_more_than_the_deadline(
    name: str, transport: Transport, spawn: Spawn
) -> None:
    """One-sided transports without the peer's kernel or file system in between may succeed."""
    receiver = spawn()
    link = connect(transport, receiver, 64 * MIB)
    data = pattern(64 * MIB, 1)
    link.put(0, data[:100], soon())
    link.flush(soon())
    receiver.signal(signal.SIGSTOP)
    begin = time.monotonic()

    def write() -> None:
        link.put(0, data, begin + 1.5)
        link.flush(begin + 1.5)

    if CASES[name].needs_receiver:
        assert raised(write).reason == "deadline"
    else:
        write()
    assert time.monotonic() - begin < patience(30)


def test_a_stopped_receiver_is_not_waited_for_when_connecting(
    name: str, transport: Transport, spawn: Spawn
) -> None:
    receiver = spawn()
    endpoint = receiver.do("open", MIB)
    receiver.signal(signal.SIGSTOP)
    begin = time.monotonic()
    if CASES[name].needs_receiver:
        assert raised(lambda: transport.connect(endpoint, begin + 1.0)).reason == "deadline"
    else:
        transport.connect(endpoint, begin + 1.0)
    assert time.monotonic() - begin < patience(30)


def test_a_passed_deadline_is_an_error(transport: Transport, spawn: Spawn) -> None:
    link = connect(transport, spawn(), 256 * MIB)
    data = pattern(256 * MIB, 1)

    def write() -> None:
        link.put(0, data, time.monotonic() - 1)
        link.flush(time.monotonic() - 1)

    assert raised(write).reason == "deadline"


def test_a_stopped_sender_does_not_stall_another(transport: Transport, spawn: Spawn) -> None:
    staging = transport.open(2 * MIB)
    slow, quick = spawn(), spawn()
    slow.do("connect", staging.endpoint, 30)
    slow.signal(signal.SIGSTOP)
    slow.send("put", 0, MIB, 1, 30)
    quick.do("connect", staging.endpoint, 30)
    quick.do("put", MIB, MIB, 2, 30)
    quick.do("flush", 30)
    staging.fetch(soon())
    assert torch.equal(staging.buffer[MIB:], pattern(MIB, 2))
    staging.close()


def test_a_broken_pair_leaves_the_others_alone(transport: Transport, spawn: Spawn) -> None:
    """One engine dies while another is served, and a third joins late, all from one sender."""
    dead, alive = spawn(), spawn()
    to_dead, to_alive = connect(transport, dead, MIB), connect(transport, alive, MIB)
    to_alive.put(0, pattern(1000, 1), soon())
    dead.kill()
    raised(lambda: (to_dead.put(0, pattern(MIB, 1), soon()), to_dead.flush(soon())))
    to_alive.put(1000, pattern(1000, 2), soon())
    to_alive.flush(soon())
    alive.do("fetch", 30)
    assert alive.do("same", 0, 1000, 1)
    assert alive.do("same", 1000, 1000, 2)
    late = spawn()
    to_late = connect(transport, late, MIB)
    to_late.put(0, pattern(MIB, 4), soon())
    to_late.flush(soon())
    late.do("fetch", 30)
    assert late.do("same", 0, MIB, 4)


def test_a_closed_staging_takes_nothing(transport: Transport, spawn: Spawn) -> None:
    receiver = spawn()
    endpoint = receiver.do("open", MIB)
    link = transport.connect(endpoint, soon())
    receiver.do("close")

    def write() -> None:
        link.put(0, pattern(MIB, 1), soon())
        link.flush(soon())

    assert raised(write).reason == "peer"
    error = raised(lambda: transport.connect(endpoint, soon()))
    assert error.reason in ("peer", "refused")
    again = connect(transport, receiver, MIB)  # the same process opens another one
    again.put(1, pattern(1000, 2), soon())
    again.flush(soon())
    receiver.do("fetch", 30)
    assert receiver.do("same", 1, 1000, 2)


def test_foreign_endpoints_are_refused(transport: Transport) -> None:
    for endpoint in (b"", b"{}", b"[1, 2]", b"\xff" * 40, b"1:2:3"):
        assert raised(partial(transport.connect, endpoint, soon())).reason == "refused"


def leftovers(folder: Path) -> list[str]:
    """What a transport left on disk or in shared memory."""
    shared = [entry for entry in os.listdir("/dev/shm") if entry.startswith("moerl-staging")]
    return shared + [str(path) for path in folder.rglob("*")]


# --- particular transports ------------------------------------------------------------------------
@pytest.mark.parametrize("listening", transports(listening=True))
def test_a_listening_socket_wants_the_token(listening: str) -> None:
    """A stranger hears a random number only; a wrong token makes no link, the right one does."""
    skip_if_missing(listening)
    transport = make(listening, address="127.0.0.1")
    staging = transport.open(MIB)
    told = json.loads(staging.endpoint)
    place = told["server_address"]
    with socket.create_connection(("127.0.0.1", place["port"]), timeout=10) as stranger:
        number = stranger.recv(100)
        assert len(number) == 32
        stranger.sendall(b"x" * 64)  # a number of its own and what should be a proof
        assert stranger.recv(100) == b""
    forged = told | {"server_address": place | {"token": "0" * len(place["token"])}}
    connecting = partial(transport.connect, json.dumps(forged).encode(), soon())
    assert raised(connecting).reason == "refused"
    transport.connect(staging.endpoint, soon()).close()
    staging.close()


def test_gloo_binds_to_the_given_address_only() -> None:
    staging = make("gloo", address="127.0.0.2").open(8)
    port = json.loads(staging.endpoint)["server_address"]["port"]
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=10)
    staging.close()


def test_staged_files_are_plain_safetensors_and_are_verified(tmp_path: Path) -> None:
    transport = make("disk", address="", folder=str(tmp_path))
    staging = transport.open(MIB)
    link = transport.connect(staging.endpoint, soon())
    link.put(5, pattern(1000, 1), soon())
    (file,) = tmp_path.glob("*/*.safetensors")
    with safe_open(file, "pt") as opened:
        assert torch.equal(opened.get_tensor("5"), pattern(1000, 1))
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    assert "digest" in raised(lambda: staging.fetch(soon())).detail
    file.write_bytes(raw[:-200])
    assert "ends before" in raised(lambda: staging.fetch(soon())).detail
    file.write_bytes(b"\xff" * 30)
    assert "no staged file" in raised(lambda: staging.fetch(soon())).detail
    staging.close()


def test_disk_writes_below_its_root_only(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    endpoint = make("disk", address="", folder=str(outside)).open(8).endpoint
    transport = make("disk", address="", folder=str(inside))
    assert raised(lambda: transport.connect(endpoint, soon())).reason == "refused"


def test_mooncake_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package, and with a package that does not find libibverbs."""
    real = builtins.__import__
    for failure, named in (
        (ModuleNotFoundError("No module named 'mooncake'"), "'.[mooncake]'"),
        (ImportError("libibverbs.so.1: cannot open shared object file"), "libibverbs1"),
    ):

        def broken(
            module: str, *args: Any, _failure: ImportError = failure, **kwargs: Any
        ) -> object:
            if module.startswith("mooncake"):
                raise _failure
            return real(module, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", broken)
        error = raised(lambda: make("mooncake", address="127.0.0.9"))  # not made yet
        monkeypatch.setattr(builtins, "__import__", real)
        assert error.reason == "missing"
        assert named in error.detail
        assert "\n" not in str(error)


def test_unknown_transports_are_refused() -> None:
    with pytest.raises(ConfigError, match="shm") as caught:
        make("rsync", address="127.0.0.1")
    assert caught.value.value == "rsync"
