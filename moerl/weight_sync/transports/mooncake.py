"""One-sided writes by Mooncake's Transfer Engine: RDMA on clusters, TCP anywhere.

The engine rank registers its staging buffer, which is host memory, page-locked where CUDA works;
senders write into it without any of its threads.  So an engine's GPU holds no second copy of its
weights.
Both ends check the range of every write here: over TCP the library accepts a write from memory
that its sender never registered, which fails over RDMA, so a test without RDMA hardware would not
find the mistake (seen with mooncake 0.3.13).

The library has no token: any process that reaches its ports and knows an address can write to
registered memory.  Use it on a private interface only (docs/weight-sync.md).  The library's
handshake waits a minute for a stopped process and holds Python's lock meanwhile; `connect`
therefore first connects to a `TokenServer`, which has a token and a deadline.

Writes are submitted and polled, because the library's blocking call has no deadline.  A write that
is abandoned at its deadline may still read its source, which therefore stays registered and
alive; the staging it writes to is closed by then.

A source is registered by its whole storage at the first put from it and stays registered until the
link closes: put from few long-lived buffers (`_MAX_SOURCES` bounds the pinned memory).

Needs `pip install '.[mooncake]'` in a checkout (`'.[mooncake-cpu]'` without CUDA) and the system's
libibverbs.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from functools import cache
from typing import Any

import msgspec
import torch
from torch import Tensor

from moerl.config.transport_rules import DEVICES, PROTOCOL
from moerl.core.errors import TransportError
from moerl.distributed.token_server import ServerAddress, TokenServer, open_channel
from moerl.weight_sync.transports.base import Link, Staging, check_range, read_endpoint
from moerl.weight_sync.transports.pinned_memory import host_buffer

log = logging.getLogger(__name__)

_POLL_S = 0.0002
_MAX_SOURCES = 64
_DONE = 1  # result of transfer_check_status


class _Endpoint(msgspec.Struct, frozen=True):
    protocol: str
    server_address: ServerAddress  # TokenServer that shows whether the process answers
    session: str  # host:port of the library's handshake
    address: int  # address of the buffer in the receiving process
    num_bytes: int


class Mooncake:
    """A `Transport` by remote memory access; one Transfer Engine per process and instance."""

    name = "mooncake"

    def __init__(self, address: str, *, protocol: str = "tcp", devices: str = "") -> None:
        """Start the engine of the library.  Raises TransportError (missing).

        address: of the private interface; devices: RDMA cards, with commas; empty = all.
        """
        engine_type = _library()
        self._protocol = protocol
        self._engine = engine_type()
        code = self._engine.initialize(address, "P2PHANDSHAKE", protocol, devices)
        if code != 0:
            with_cards = f" with {devices}" if devices else ""
            raise TransportError(
                "missing",
                f"mooncake cannot use {protocol} on {address}{with_cards}: it answered {code}; see "
                "ibv_devices and `ulimit -l`, or set sync.mooncake_protocol=tcp",
            )
        log.info("mooncake uses %s on %s, cards: %s", protocol, address, devices or "all")
        self._address = address
        self._session = f"{address}:{self._engine.get_rpc_port()}"
        self._table = _Registered(self._engine)

    def open(self, num_bytes: int) -> MooncakeStaging:
        return MooncakeStaging(self._table, self._protocol, self._session, self._address, num_bytes)

    def connect(self, endpoint: bytes, deadline: float) -> MooncakeLink:
        target = read_endpoint(endpoint, _Endpoint, self.name)
        if target.protocol != self._protocol:
            raise TransportError(
                "refused", f"the engine speaks {target.protocol}, this side {self._protocol}"
            )
        open_channel(target.server_address, deadline).close()
        self._engine.get_first_buffer_address(target.session)  # the library's handshake, now
        return MooncakeLink(self._engine, self._table, target)


def make(address: str) -> Mooncake:
    """Protocol and cards as the launcher set them in the environment; TCP where it did not."""
    return _shared(address, os.environ.get(PROTOCOL, "tcp"), os.environ.get(DEVICES, ""))


@cache
def _shared(address: str, protocol: str, devices: str) -> Mooncake:
    """One per process and address, since each listens on ports."""
    if protocol == "tcp":
        log.warning("mooncake uses TCP: cluster.nodes.*.rdma does not name cards on all nodes")
    return Mooncake(address, protocol=protocol, devices=devices)


class _Registered:
    """Memory that this process registered, by base address: every write is checked against it.

    Holds the tensors, so that no address is freed and reused while registered; counts users,
    because the library accepts an address once.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._known: dict[int, tuple[Tensor, int]] = {}  # base -> whole storage, users
        self._lock = threading.Lock()

    def add(self, tensor: Tensor) -> int:
        """Register the storage of a tensor, or count one more user; returns the base address."""
        storage = tensor.untyped_storage()
        base = storage.data_ptr()
        with self._lock:
            if base in self._known:
                whole, users = self._known[base]
            else:
                whole, users = torch.empty(0, dtype=torch.uint8, device=tensor.device), 0
                whole.set_(storage)
                code = self._engine.register_memory(base, whole.numel())
                if code != 0:
                    raise TransportError(
                        "room", f"mooncake could not register {whole.numel()} bytes: {code}"
                    )
            self._known[base] = whole, users + 1
        return base

    def release(self, base: int) -> None:
        with self._lock:
            whole, users = self._known.pop(base)
            if users > 1:
                self._known[base] = whole, users - 1
            else:
                self._engine.unregister_memory(base)

    def check(self, base: int, address: int, num_bytes: int) -> None:
        """Raise TransportError (range) unless the range lies in the registered memory at `base`."""
        with self._lock:
            whole, _users = self._known.get(base, (None, 0))
        if whole is None or not base <= address <= address + num_bytes <= base + whole.numel():
            raise TransportError("range", f"{num_bytes} bytes at {address:#x} are not registered")


class MooncakeStaging(Staging):
    """A registered buffer."""

    def __init__(
        self, table: _Registered, protocol: str, session: str, address: str, num_bytes: int
    ) -> None:
        # at least one byte: an empty range cannot be registered
        self._memory = host_buffer(max(1, num_bytes))
        self.buffer = self._memory[:num_bytes]
        self._base = table.add(self._memory)
        self._table: _Registered | None = table
        try:
            self._server = TokenServer(address, lambda _caller: None)
        except TransportError:
            table.release(self._base)
            raise
        self.endpoint = msgspec.json.encode(
            _Endpoint(
                protocol, self._server.server_address, session, self._memory.data_ptr(), num_bytes
            )
        )

    def close(self) -> None:
        self._server.close()
        if self._table is not None:
            self._table.release(self._base)
        self._table = None


class MooncakeLink(Link):
    """Writes of one sender to one staging."""

    def __init__(self, engine: Any, table: _Registered, target: _Endpoint) -> None:
        self._engine, self._table, self._target = engine, table, target
        self._sources: set[int] = set()  # bases that this link registered
        self._running: list[int] = []  # batch ids

    def put(self, offset: int, data: Tensor, deadline: float) -> None:
        check_range(offset, data.numel(), self._target.num_bytes)
        if not data.numel():
            return
        base = data.untyped_storage().data_ptr()
        if base not in self._sources:
            self._sources.add(self._table.add(data))
        self._table.check(base, data.data_ptr(), data.numel())
        batch = self._engine.transfer_submit_write(
            self._target.session, data.data_ptr(), self._target.address + offset, data.numel()
        )
        if batch in (0, -1, 2**64 - 1):
            raise TransportError(
                "peer", f"{self._target.session} took no write at {offset}: answer {batch}"
            )
        self._running.append(batch)

    def flush(self, deadline: float) -> None:
        while self._running:
            status = self._engine.transfer_check_status(self._running[0])
            if status == _DONE:
                self._running.pop(0)
            elif status < 0:
                raise TransportError(
                    "peer", f"a write to {self._target.session} failed with status {status}"
                )
            elif time.monotonic() > deadline:
                raise TransportError(
                    "deadline", f"{len(self._running)} writes to {self._target.session} are open"
                )
            else:
                time.sleep(_POLL_S)
        if len(self._sources) > _MAX_SOURCES:
            self._release()

    def close(self) -> None:
        """Unfinished writes keep their sources registered, and so alive, for good."""
        if not self._running:
            self._release()
        self._running = []

    def _release(self) -> None:
        for base in self._sources:
            self._table.release(base)
        self._sources = set()


def _library() -> Any:
    """The Transfer Engine's class.  Raises TransportError (missing) with the extra to install."""
    try:
        from mooncake.engine import TransferEngine
    except ModuleNotFoundError as error:
        raise TransportError(
            "missing",
            "mooncake is not installed: in a checkout, pip install '.[mooncake]', "
            "or '.[mooncake-cpu]' without CUDA",
        ) from error
    except ImportError as error:
        raise TransportError(
            "missing",
            f"mooncake cannot be loaded ({error}): it needs libibverbs.so.1, on Debian the "
            "packages libibverbs1, libnl-3-200 and libnl-route-3-200",
        ) from error
    return TransferEngine
