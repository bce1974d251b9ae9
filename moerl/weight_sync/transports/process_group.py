"""Point to point over torch's process groups: gloo between hosts' memory, NCCL between GPUs.

Every (sender, staging) pair is its own group of two.  So an engine joins by forming new pairs
without the other engines, and a broken pair blocks no other.  The receiving member is a thread of
the Staging: it reads the announced ranges from a control socket and posts the matching receives.

The control socket checks the token of the endpoint first, and the group's rendezvous runs through
it too, so no store with its own port is open to unauthenticated readers.  The data sockets of gloo
and NCCL have no token: they bind to the address of the private interface, and only there (gloo),
or where NCCL_SOCKET_IFNAME says (NCCL).

One code path serves both; the backend decides the device of the buffer.  NCCL has not been run: no
GPU was available.  Two things differ there: several communicators share one GPU, and NCCL's own
watchdog notices a peer's death, which is why its guarantees promise less.

Rejected: one group over all engines (a dead engine fails the others), TCPStore (no token).
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from moerl.distributed.token_server import (
    Channel,
    ServerAddress,
    TokenServer,
    failure,
    open_channel,
    seconds_left,
)
from moerl.errors import TransportError
from moerl.weight_sync.transports.base import Guarantees, check_range, read_endpoint

_RECEIVER, _SENDER = 0, 1  # ranks in a pair
_KEY, _PUT, _FLUSH, _FLUSHED = range(4)  # kinds of frame on the control socket
_RANGE = struct.Struct("<QQd")  # offset, bytes, time limit of the receive in seconds
_RENDEZVOUS_S = 60.0


class _Endpoint(msgspec.Struct, frozen=True):
    backend: str
    server_address: ServerAddress
    num_bytes: int


class GroupTransport:
    """gloo or NCCL, one group of two per pair."""

    def __init__(self, address: str, *, backend: str = "gloo") -> None:
        """address: of the private interface that trainer and engines share."""
        assert backend in ("gloo", "nccl"), f"backend {backend!r} is neither gloo nor nccl"
        self.name = backend
        self.guarantees = Guarantees(
            one_sided=False,
            late_join=True,
            survives_peer_death=backend == "gloo",
            needs_group=False,
            same_machine=False,
        )
        self._address = address

    def open(self, num_bytes: int) -> GroupStaging:
        return GroupStaging(self._address, self.name, num_bytes)

    def connect(self, endpoint: bytes, deadline: float) -> GroupLink:
        target = read_endpoint(endpoint, _Endpoint, self.name)
        if target.backend != self.name:
            raise TransportError("refused", f"{target.backend} endpoint offered to {self.name}")
        return GroupLink(target, self._address, deadline)


class GroupStaging:
    """The receiving side: a thread per sender."""

    def __init__(self, address: str, backend: str, num_bytes: int) -> None:
        self._address, self._backend = address, backend
        device = "cuda" if backend == "nccl" else "cpu"
        self.buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._server = TokenServer(address, self._serve)
        self.endpoint = msgspec.json.encode(
            _Endpoint(backend, self._server.server_address, num_bytes)
        )

    def fetch(self, deadline: float) -> None:
        """Nothing to do: a flush is answered only after its bytes are in the buffer."""

    def close(self) -> None:
        self._server.close()

    def _serve(self, channel: Channel) -> None:
        """Serve one sender until it leaves, violates the protocol or dies; ends this pair only."""
        deadline = time.monotonic() + _RENDEZVOUS_S
        group = _pair(channel, _RECEIVER, self._backend, self._address, deadline)
        while True:
            self._receive(channel, group, *channel.receive(None))

    def _receive(self, channel: Channel, group: Any, kind: int, payload: bytes) -> None:
        if kind == _FLUSH:
            channel.send(_FLUSHED, payload, time.monotonic() + _RENDEZVOUS_S)
        elif kind == _PUT and len(payload) == _RANGE.size:
            offset, num_bytes, budget_s = _RANGE.unpack(payload)
            check_range(offset, num_bytes, self.buffer.numel())
            work = group.recv([self.buffer[offset : offset + num_bytes]], _SENDER, 0)
            work.wait(timedelta(seconds=min(max(budget_s, 0.001), 3600.0)))
        else:
            raise TransportError("refused", f"frame kind {kind} of {len(payload)} bytes is unknown")


class GroupLink:
    """The sending side of one pair."""

    def __init__(self, target: _Endpoint, address: str, deadline: float) -> None:
        """address: of this side's interface."""
        self._size = target.num_bytes
        self._works: list[tuple[dist.Work, Tensor]] = []  # the tensor stays alive until it is sent
        self._flushes = 0
        self._channel = open_channel(target.server_address, deadline)
        try:
            self._group = _pair(self._channel, _SENDER, target.backend, address, deadline)
        except BaseException:
            self._channel.close()
            raise

    def put(self, offset: int, data: Tensor, deadline: float) -> None:
        check_range(offset, data.numel(), self._size)
        if not data.numel():
            return
        self._channel.send(
            _PUT, _RANGE.pack(offset, data.numel(), seconds_left(deadline)), deadline
        )
        try:
            self._works.append((self._group.send([data], _RECEIVER, 0), data))
        except RuntimeError as error:
            raise failure(deadline, f"put at {offset}: {error}") from error

    def view(self, offset: int, num_bytes: int) -> Tensor | None:
        return None

    def flush(self, deadline: float) -> None:
        works, self._works = self._works, []
        try:
            for work, _data in works:
                work.wait(timedelta(seconds=seconds_left(deadline)))
        except RuntimeError as error:
            raise failure(deadline, f"sending: {error}") from error
        self._flushes += 1
        stamp = self._flushes.to_bytes(8, "little")
        self._channel.send(_FLUSH, stamp, deadline)
        kind, payload = self._channel.receive(deadline)
        if (kind, payload) != (_FLUSHED, stamp):
            raise TransportError("peer", f"flush {self._flushes} was answered with kind {kind}")

    def close(self) -> None:
        self._channel.close()


# --- the group ---------------------------------------------------------------------------------
class _PairStore(dist.Store):
    """Rendezvous of a group of two: a value that one side sets is sent to the other."""

    def __init__(self, channel: Channel, deadline: float) -> None:
        super().__init__()
        self._channel, self._deadline = channel, deadline
        self._values: dict[str, bytes] = {}
        self._lock = threading.RLock()

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        name = key.encode()
        with self._lock:
            self._values[key] = data
            frame = len(name).to_bytes(4, "little") + name + data
            self._channel.send(_KEY, frame, self._deadline)

    def get(self, key: str) -> bytes:
        with self._lock:
            while key not in self._values:
                kind, frame = self._channel.receive(self._deadline)
                if kind != _KEY:
                    raise TransportError("peer", f"frame kind {kind} during the rendezvous")
                end = 4 + int.from_bytes(frame[:4], "little")
                self._values[frame[4:end].decode()] = frame[end:]
            return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)


def _pair(channel: Channel, rank: int, backend: str, address: str, deadline: float) -> Any:
    """The group of two, without a default group and unknown to torch's registry.

    Returns ProcessGroupGloo or ProcessGroupNCCL, which torch's stubs describe in part.
    """
    gloo: Any = dist.ProcessGroupGloo
    store = _PairStore(channel, deadline)
    try:
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=seconds_left(deadline))
            return dist.ProcessGroupNCCL(store, rank, 2, options)
        options = gloo._Options()
        options._threads = 1
        options._timeout = timedelta(seconds=seconds_left(deadline))
        options._devices = [gloo.create_device(hostname=address)]
        return gloo(store, rank, 2, options)
    except RuntimeError as error:
        raise failure(deadline, f"the pair could not be formed: {error}") from error
