"""Point to point over torch's process groups: gloo between hosts' memory, NCCL between GPUs.

Every (sender, staging) pair is its own group of two.  So an engine joins by forming new pairs
without the other engines, and a broken pair blocks no other.  The receiving member is a thread of
the Staging: it reads the announced ranges from a control socket and posts the matching receives.

The control socket checks the token of the endpoint first, and so does the store of the staging, in
which its pairs meet.  The data sockets of gloo and NCCL have no token: they bind to the address of
the private interface, and to no other (gloo), or to NCCL_SOCKET_IFNAME (NCCL).

NCCL does not compare the settings of its members: a group of unlike members hangs or breaks.  So
the endpoint carries the settings of the engine rank, and `connect` refuses others
(`nccl_settings`).

One code path serves both, and the pair's pipe (`pair_pipes`) knows which memory the backend sends.
Staging is host memory with both, page-locked where CUDA works.  NCCL ran on the device double
only, whose groups are gloo's: its promises hold by design, not by a run.

Rejected: one group over all engines (a dead engine fails the others), TCPStore (no token).
"""

from __future__ import annotations

import logging
import math
import secrets
import struct
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from moerl.core.errors import TransportError
from moerl.distributed.store_server import StoreServer
from moerl.distributed.token_server import (
    Channel,
    ServerAddress,
    TokenServer,
    failure,
    open_channel,
    seconds_left,
)
from moerl.distributed.token_store import TokenStore
from moerl.weight_sync.transports.base import Link, Staging, check_range, read_endpoint
from moerl.weight_sync.transports.pair_pipes import (
    DeviceBuckets,
    DevicePipe,
    HostPipe,
    Pipe,
    meet,
    nccl_group,
    nccl_settings,
    set_variables,
)
from moerl.weight_sync.transports.pinned_memory import host_buffer

log = logging.getLogger(__name__)

_RECEIVER, _SENDER = 0, 1  # ranks in a pair
_PAIR, _PUT, _FLUSH, _FLUSHED = range(4)  # kinds of frame on the control socket
_RANGE = struct.Struct("<QQd")  # offset, bytes, time limit of the receive in seconds
_RENDEZVOUS_S = 60.0


class _Endpoint(msgspec.Struct, frozen=True):
    backend: str
    server_address: ServerAddress
    store_address: ServerAddress
    num_bytes: int
    settings: dict[str, str]  # `nccl_settings`; empty for gloo
    variables: dict[str, str]  # all of NCCL and gloo that are set there: for the log


class GroupTransport:
    """gloo or NCCL, one group of two per pair."""

    def __init__(self, address: str, *, backend: str = "gloo") -> None:
        """Make the transport.

        address: of the private interface that trainer and engines share.

        NCCL uses the calling thread's current device; other threads of a process have another one.
        Raises TransportError (missing) for NCCL without CUDA.
        """
        assert backend in ("gloo", "nccl"), f"backend {backend!r} is neither gloo nor nccl"
        self.name = backend
        self._address = address
        self._device = _device(backend)

    def open(self, num_bytes: int) -> GroupStaging:
        return GroupStaging(self._address, self.name, self._device, num_bytes)

    def connect(self, endpoint: bytes, deadline: float) -> GroupLink:
        target = read_endpoint(endpoint, _Endpoint, self.name)
        if target.backend != self.name:
            raise TransportError("refused", f"{target.backend} endpoint offered to {self.name}")
        check_settings(target.settings, _settings(self.name))
        log.info("%s: set in the engine %s, here %s", self.name, target.variables, set_variables())
        return GroupLink(target, self._address, self._device, deadline)


def _device(backend: str) -> torch.device:
    if backend == "gloo":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise TransportError(
            "missing", "nccl needs a CUDA GPU on both sides, torch sees none: use gloo"
        )
    return torch.device("cuda", torch.cuda.current_device())


def _settings(backend: str) -> dict[str, str]:
    return nccl_settings() if backend == "nccl" else {}


def check_settings(engine: dict[str, str], ours: dict[str, str]) -> None:
    """Raises TransportError for the first setting in which the two members differ."""
    for name, value in engine.items():
        if value != ours.get(name):
            there, here = value or "not set", ours.get(name) or "not set"
            raise TransportError(
                "refused",
                f"{name} is {there} in the engine and {here} in this trainer rank, and NCCL needs "
                f"one value: set cluster.environment.{name}, or unset it on all nodes",
            )


class GroupStaging(Staging):
    """The receiving side: a thread per sender."""

    def __init__(self, address: str, backend: str, device: torch.device, num_bytes: int) -> None:
        self._address, self._backend = address, backend
        self._buckets = DeviceBuckets(device)  # gloo takes none
        self.buffer = host_buffer(num_bytes)
        self._store = StoreServer(address)
        self._server = TokenServer(address, self._serve)
        self.endpoint = msgspec.json.encode(
            _Endpoint(
                backend,
                self._server.server_address,
                self._store.server_address,
                num_bytes,
                _settings(backend),
                set_variables(),
            )
        )

    def close(self) -> None:
        self._server.close()
        self._store.close()

    def _serve(self, channel: Channel) -> None:
        """Serve one sender until it leaves, violates the protocol or dies; ends this pair only."""
        deadline = time.monotonic() + _RENDEZVOUS_S
        kind, name = channel.receive(deadline)
        if kind != _PAIR:
            raise TransportError("refused", f"frame kind {kind} came before the name of the pair")
        store = _store(self._store.server_address, deadline)
        pair = _Pair(
            channel, store, name.decode(), _RECEIVER, self._backend, self._address, deadline
        )
        pipe = pair.pipe(self._buckets.device, self._buckets)
        try:
            while True:
                self._receive(channel, pipe, *channel.receive(None))
        finally:
            pipe.close()

    def _receive(self, channel: Channel, pipe: Pipe, kind: int, payload: bytes) -> None:
        if kind == _FLUSH:
            pipe.settle(time.monotonic() + _RENDEZVOUS_S)
            channel.send(_FLUSHED, payload, time.monotonic() + _RENDEZVOUS_S)
        elif kind == _PUT and len(payload) == _RANGE.size:
            offset, num_bytes, budget_s = _RANGE.unpack(payload)
            check_range(offset, num_bytes, self.buffer.numel())
            check_range(0, num_bytes, pipe.most)
            deadline = time.monotonic() + min(max(budget_s, 0.001), 3600.0)
            pipe.receive(self.buffer[offset : offset + num_bytes], deadline)
        else:
            raise TransportError("refused", f"frame kind {kind} of {len(payload)} bytes is unknown")


class GroupLink(Link):
    """The sending side of one pair."""

    def __init__(
        self, target: _Endpoint, address: str, device: torch.device, deadline: float
    ) -> None:
        """Connect to the staging.  address: of this side's interface."""
        self._size = target.num_bytes
        self._flushes = 0
        self._channel = open_channel(target.server_address, deadline)
        try:
            name, store = secrets.token_hex(8), _store(target.store_address, deadline)
            self._channel.send(_PAIR, name.encode(), deadline)
            self._pair = _Pair(
                self._channel, store, name, _SENDER, target.backend, address, deadline
            )
            self._pipe = self._pair.pipe(device)
        except BaseException:
            self._channel.close()
            raise

    def put(self, offset: int, data: Tensor, deadline: float) -> None:
        check_range(offset, data.numel(), self._size)
        for first in range(0, data.numel(), self._pipe.most):
            part = data[first : first + self._pipe.most]
            frame = _RANGE.pack(offset + first, part.numel(), seconds_left(deadline))
            self._channel.send(_PUT, frame, deadline)
            self._pipe.send(part, deadline)

    def flush(self, deadline: float) -> None:
        self._pipe.settle(deadline)
        self._flushes += 1
        stamp = self._flushes.to_bytes(8, "little")
        self._channel.send(_FLUSH, stamp, deadline)
        kind, payload = self._channel.receive(deadline)
        if (kind, payload) != (_FLUSHED, stamp):
            raise TransportError("peer", f"flush {self._flushes} was answered with kind {kind}")

    def close(self) -> None:
        self._channel.close()
        self._pipe.close()


# --- the group ---------------------------------------------------------------------------------
def _store(address: ServerAddress, deadline: float) -> TokenStore:
    return TokenStore(address, timedelta(seconds=seconds_left(deadline)), deadline)


@dataclass(frozen=True, slots=True)
class _Pair:
    """A group of two, without a default group and unknown to torch's registry.

    Its user keeps it while the pipe lives: torch's groups do not keep the Python part of a store.
    """

    channel: Channel
    store: TokenStore
    name: str  # of the pair in the store
    rank: int
    backend: str
    address: str  # of this side's interface
    deadline: float

    def pipe(self, device: torch.device, buckets: DeviceBuckets | None = None) -> Pipe:
        """Meet the other side.  buckets: of the receiving side.  Raises TransportError."""
        store = dist.PrefixStore(self.name, self.store)
        try:
            if self.backend == "gloo":
                return HostPipe(self._gloo(store), 1 - self.rank)
            group = nccl_group(store, self.rank, device)
            pipe = DevicePipe(group, 1 - self.rank, device, buckets, self.channel.check)
            meet(pipe, receives=self.rank == _RECEIVER, deadline=self.deadline)
            self.store.deadline = math.inf  # of later calls by threads of NCCL
            return pipe
        except RuntimeError as error:
            raise failure(self.deadline, f"the pair could not be formed: {error}") from error

    def _gloo(self, store: dist.Store) -> Any:
        """Returns ProcessGroupGloo, which torch's stubs describe in part."""
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._threads = 1
        options._timeout = timedelta(seconds=seconds_left(self.deadline))
        options._devices = [gloo.create_device(hostname=self.address)]
        return gloo(store, self.rank, 2, options)
