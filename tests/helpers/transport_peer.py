"""The other side of a transport, in a process of its own: commands and answers on a pipe.

It is killed and stopped by the tests, never asked to be nice.
"""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import torch

from moerl.core.errors import TransportError
from moerl.weight_sync.transports import mooncake
from moerl.weight_sync.transports.base import Link, Staging
from moerl.weight_sync.transports.factory import make
from tests.helpers.patience import Patience


def mooncake_missing() -> str:
    """Why the library cannot be loaded here, and what to install; empty when it can."""
    try:
        mooncake._library()
    except TransportError as error:
        return f"{error.detail}; these cases run where that is installed"
    return ""


def pattern(num_bytes: int, seed: int) -> torch.Tensor:
    """Bytes that both sides can compute."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


class Peer:
    def __init__(self, name: str, folder: str, pipe: Connection) -> None:
        self.transport = make(name, address="127.0.0.1", folder=folder)
        self.pipe: Connection | None = pipe
        self.staging: Staging | None = None
        self.link: Link | None = None
        self.kept: list[torch.Tensor] = []  # sources of puts, unchanged until the flush

    def open(self, num_bytes: int) -> bytes:
        self.staging = self.transport.open(num_bytes)
        return self.staging.endpoint

    def fetch(self, seconds: float) -> None:
        assert self.staging is not None
        self.staging.fetch(time.monotonic() + seconds)

    def read(self, offset: int, num_bytes: int) -> list[int]:
        assert self.staging is not None
        return self.staging.buffer[offset : offset + num_bytes].tolist()

    def same(self, offset: int, num_bytes: int, seed: int) -> bool:
        assert self.staging is not None
        there = self.staging.buffer[offset : offset + num_bytes].cpu()
        return torch.equal(there, pattern(num_bytes, seed))

    def connect(self, endpoint: bytes, seconds: float) -> None:
        self.link = self.transport.connect(endpoint, time.monotonic() + seconds)

    def put(self, offset: int, num_bytes: int, seed: int, seconds: float) -> None:
        assert self.link is not None
        self.kept.append(pattern(num_bytes, seed))
        self.link.put(offset, self.kept[-1], time.monotonic() + seconds)

    def flush(self, seconds: float) -> None:
        assert self.link is not None
        self.link.flush(time.monotonic() + seconds)
        self.kept.clear()

    def stream(self, num_bytes: int, seconds: float) -> None:
        """Write the same bytes until something fails; says `begun` after the first round."""
        limit = Patience(seconds)
        while not limit.over():
            self.put(0, num_bytes, 1, seconds)
            self.flush(seconds)
            if self.pipe is not None:
                self.pipe.send("begun")
                self.pipe = None

    def close(self) -> None:
        for end in (self.link, self.staging):
            if end is not None:
                end.close()


def serve(name: str, folder: str, pipe: Connection) -> None:
    """Run (method, arguments) pairs until the pipe closes; an answer is a result or an error."""
    torch.set_num_threads(1)
    peer = Peer(name, folder, pipe)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(getattr(peer, method)(*arguments))
        except TransportError as error:
            pipe.send(error)
