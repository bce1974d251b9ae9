"""What every transport must do, against a peer in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from moerl.core.errors import TransportError
from moerl.weight_sync.transports.base import Link, Transport
from tests.helpers.patience import patience
from tests.helpers.transport_cases import CASES
from tests.helpers.transport_peer import pattern, serve

MIB = 2**20


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


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + patience(seconds)


def connect(transport: Transport, peer: PeerProcess, num_bytes: int) -> Link:
    """A link to a staging of the peer."""
    return transport.connect(peer.do("open", num_bytes), soon())


def raised(work: Callable[[], object]) -> TransportError:
    with pytest.raises(TransportError) as caught:
        work()
    return caught.value


def leftovers(folder: Path) -> list[str]:
    """What a transport left on disk or in shared memory."""
    shared = [entry for entry in os.listdir("/dev/shm") if entry.startswith("moerl-staging")]
    return shared + [str(path) for path in folder.rglob("*")]


def bytes_arrive(transport: Transport, spawn: Spawn) -> None:
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


def a_put_outside_the_buffer_is_refused(transport: Transport, spawn: Spawn) -> None:
    link = connect(transport, spawn(), MIB)
    for offset in (-1, MIB - 7, MIB, 2**62):
        error = raised(partial(link.put, offset, pattern(8, 1), soon()))
        assert error.reason == "range"


def the_receiver_checks_ranges_itself(name: str, transport: Transport, spawn: Spawn) -> None:
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


def dead_receiver(transport: Transport, spawn: Spawn, tmp_path: Path) -> None:
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


def dead_sender(transport: Transport, spawn: Spawn, tmp_path: Path) -> None:
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


def a_stopped_receiver_costs_no_more_than_the_deadline(
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


def a_broken_pair_leaves_the_others_alone(transport: Transport, spawn: Spawn) -> None:
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


def a_closed_staging_takes_nothing(transport: Transport, spawn: Spawn) -> None:
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
