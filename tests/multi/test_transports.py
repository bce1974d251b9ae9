"""Every transport against a peer process: what it promises, and how it fails.

The table of tests/helpers/transport_cases.py says what each transport guarantees and which ones run
here.  `mooncake` runs where its library can be loaded; elsewhere its cases are skipped with the
library's own complaint, while its refusal is always tested.
"""

from __future__ import annotations

import builtins
import json
import signal
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors import safe_open

from moerl.config.schema import SAME_MACHINE, TransportName
from moerl.core.errors import ConfigError
from moerl.weight_sync.transports.base import Transport
from moerl.weight_sync.transports.factory import NAMES, make
from tests.helpers import transport_checks as checks
from tests.helpers.patience import patience
from tests.helpers.transport_cases import CASES, ELSEWHERE, skip_if_missing, transports
from tests.helpers.transport_checks import MIB, PeerProcess, Spawn, connect, leftovers, raised, soon
from tests.helpers.transport_peer import pattern


@pytest.fixture(params=transports(default=["shm"]))
def name(request: pytest.FixtureRequest) -> str:
    skip_if_missing(request.param)
    chosen: str = request.param
    return chosen


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


def test_a_transport_knows_its_name(name: str, transport: Transport) -> None:
    assert transport.name == name


def test_every_transport_is_here_in_the_factory_and_in_the_settings() -> None:
    assert set(NAMES) == {*CASES, *ELSEWHERE} == set(get_args(TransportName)) - {"auto"}
    here = {name for name, case in CASES.items() if case.same_machine}
    assert here == set(SAME_MACHINE) - set(ELSEWHERE)


@pytest.mark.parametrize("name", transports(), indirect=True)
def test_bytes_arrive(transport: Transport, spawn: Spawn) -> None:
    """Odd offsets and sizes, a hole, an empty put, a second round, two senders at once."""
    checks.bytes_arrive(transport, spawn)


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
    checks.a_put_outside_the_buffer_is_refused(transport, spawn)


def test_the_receiver_checks_ranges_itself(name: str, transport: Transport, spawn: Spawn) -> None:
    """A sender that believes in a larger buffer writes nothing past the end."""
    checks.the_receiver_checks_ranges_itself(name, transport, spawn)


def test_dead_receiver(transport: Transport, spawn: Spawn, tmp_path: Path) -> None:
    """Killed between two puts: the sender hears it within the deadline and leaves no file."""
    checks.dead_receiver(transport, spawn, tmp_path)


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
    checks.dead_sender(transport, spawn, tmp_path)


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
    checks.a_stopped_receiver_costs_no_more_than_the_deadline(name, transport, spawn)


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
    checks.a_broken_pair_leaves_the_others_alone(transport, spawn)


def test_a_closed_staging_takes_nothing(transport: Transport, spawn: Spawn) -> None:
    checks.a_closed_staging_takes_nothing(transport, spawn)


def test_foreign_endpoints_are_refused(transport: Transport) -> None:
    for endpoint in (b"", b"{}", b"[1, 2]", b"\xff" * 40, b"1:2:3"):
        assert raised(partial(transport.connect, endpoint, soon())).reason == "refused"


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
