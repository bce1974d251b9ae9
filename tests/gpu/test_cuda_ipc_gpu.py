"""Staging in GPU memory between two processes on one GPU: bytes, deaths, memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from moerl.core.errors import TransportError
from moerl.weight_sync.transports.cuda_ipc import make

MIB = 2**20
SIZE = 24 * MIB + 5


def soon() -> float:
    return time.monotonic() + 60


def serve(pipe: Connection) -> None:
    """The engine's end: opens, tells its bytes and its free memory, closes."""
    staging: Any = None
    while True:
        match pipe.recv():
            case ("open", size):
                staging = make("127.0.0.1").open(size)
                pipe.send(staging.endpoint)
            case ("read", _):
                pipe.send(staging.buffer.cpu().numpy().tobytes())
            case ("free", _):
                pipe.send(torch.cuda.mem_get_info()[0])
            case ("close", _):
                staging.close()
                pipe.send(None)


class Peer:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()

    def ask(self, what: str, value: int = 0) -> Any:
        self.pipe.send((what, value))
        assert self.pipe.poll(120), f"no answer to {what}"
        return self.pipe.recv()


@pytest.fixture
def peer() -> Iterator[Peer]:
    started = Peer()
    yield started
    started.process.kill()
    started.process.join()


def test_bytes_cast_on_the_way_arrive(peer: Peer) -> None:
    link = make("127.0.0.1").connect(peer.ask("open", SIZE), soon())
    weights = torch.randn(8 * MIB // 2, device="cuda")
    view = link.view(0, 8 * MIB)
    assert view is not None
    assert view.is_cuda
    view.view(torch.bfloat16).copy_(weights)
    link.put(SIZE - 3, torch.tensor([1, 2, 3], dtype=torch.uint8, device="cuda"), soon())
    link.flush(soon())
    got = torch.frombuffer(bytearray(peer.ask("read")), dtype=torch.uint8)
    assert torch.equal(got[: 8 * MIB].view(torch.bfloat16), weights.bfloat16().cpu())
    assert got[-3:].tolist() == [1, 2, 3]
    with pytest.raises(TransportError, match="range"):
        link.view(SIZE, 1)


def test_a_dead_receiver_is_an_error_and_a_stopped_one_is_not_needed(peer: Peer) -> None:
    link = make("127.0.0.1").connect(peer.ask("open", SIZE), soon())
    data = torch.ones(SIZE, dtype=torch.uint8, device="cuda")
    os.kill(peer.process.pid or 0, signal.SIGSTOP)
    link.put(0, data, soon())
    link.flush(soon())
    peer.process.kill()
    peer.process.join()
    with pytest.raises(TransportError, match="peer"):
        link.flush(soon())
    link.close()
    assert data.sum().item() == SIZE, "this process' context is alive"


def test_memory_is_given_back_after_the_last_mapping(peer: Peer) -> None:
    peer.ask("open", 1)  # the context is there
    before = peer.ask("free")
    endpoint = peer.ask("open", 512 * MIB)
    link = make("127.0.0.1").connect(endpoint, soon())
    peer.ask("close")
    assert peer.ask("free") < before - 256 * MIB, "freed under a mapping"
    with pytest.raises(TransportError, match="peer"):
        link.flush(soon())
    with pytest.raises(TransportError, match="peer"):
        make("127.0.0.1").connect(endpoint, soon())
    link.close()
    peer.ask("open", 1)  # looks after what was in use
    assert peer.ask("free") > before - 256 * MIB
