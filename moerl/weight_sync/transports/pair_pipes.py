"""How the two members of a pair move bytes: host memory as it lies, or through device buckets.

gloo sends host memory.  NCCL sends device memory only, so its pipe copies through buckets:

    trainer rank                                        engine rank
    host memory -> bucket -> send  ===== NCCL =====>    recv -> bucket -> pinned host memory

A sending pipe has two buckets until it settles; the pipes of one staging share two.  So a publish
takes four buckets per pair of an engine and a trainer rank at most, whatever the model's size.
Each bucket works on a side stream: training and decoding never wait for it, and the copy out of one
bucket runs while the other is in transit.

A group of NCCL has no deadline and does not hear of a peer's death in every case.  So the pipe
polls the operation, the control socket and the deadline, and aborts the communicator itself.  The
groups are made without torch's watchdog thread, which ends the whole process on a failed operation;
with `TORCH_NCCL_BLOCKING_WAIT`, `wait` raises instead (read in torch's ProcessGroupNCCL).
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moerl.core.errors import TransportError
from moerl.distributed.token_server import failure, seconds_left

BUCKET_BYTES = 16 * 2**20
_BUCKETS = 2
_CHANNELS = 4  # of NCCL per pair: each takes a multiprocessor and buffers of the GPU
_POLL_S = 0.0002
_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
_UNBOUNDED = timedelta(days=1)  # the pipe aborts at its own deadline

Check = Callable[[], None]  # raises TransportError when the other side is gone


class Pipe(Protocol):
    """One direction of a pair; used by one thread."""

    most: int  # bytes of one send

    def send(self, data: Tensor, deadline: float) -> None:
        """May return early; `data` must stay unchanged until `settle`.  Raises TransportError."""
        ...

    def receive(self, into: Tensor, deadline: float) -> None:
        """`into` is written when `settle` returns.  Raises TransportError."""
        ...

    def settle(self, deadline: float) -> None:
        """Return once all is sent or written.  Raises TransportError."""
        ...

    def close(self) -> None:
        """Repeatable."""
        ...


class HostPipe:
    """Host memory, sent as it lies."""

    most = 2**62

    def __init__(self, group: Any, peer: int) -> None:
        """Pipe to `peer` in a group of two.

        group: torch's ProcessGroupGloo, which its stubs describe in part.
        """
        self._group, self._peer = group, peer
        self._works: list[tuple[dist.Work, Tensor]] = []  # the tensor stays alive until it is sent

    def send(self, data: Tensor, deadline: float) -> None:
        with _named(deadline, "sending"):
            self._works.append((self._group.send([data], self._peer, 0), data))

    def receive(self, into: Tensor, deadline: float) -> None:
        with _named(deadline, "receiving"):
            work = self._group.recv([into], self._peer, 0)
            work.wait(timedelta(seconds=seconds_left(deadline)))

    def settle(self, deadline: float) -> None:
        works, self._works = self._works, []
        with _named(deadline, "sending"):
            for work, _data in works:
                work.wait(timedelta(seconds=seconds_left(deadline)))

    def close(self) -> None:
        self._works = []


# --- through the device ---------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, eq=False)
class _DeviceBucket:
    memory: Tensor
    stream: torch.cuda.Stream


class DeviceBuckets:
    """Two buckets, lent to pipes; allocated when the first pipe takes them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: queue.SimpleQueue[_DeviceBucket] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._made = False

    def take(self, check: Check, deadline: float) -> _DeviceBucket:
        """Wait for a bucket that no pipe uses.  Raises TransportError."""
        self._make()
        while True:
            try:
                return self._free.get(timeout=_POLL_S)
            except queue.Empty:
                _check_both(check, deadline, "waiting for a device bucket")

    def give(self, bucket: _DeviceBucket) -> None:
        """Work on its stream may still run: the next user's work is behind it."""
        self._free.put(bucket)

    def _make(self) -> None:
        with self._lock:
            if self._made:
                return
            for stream in _streams(self.device):
                with torch.cuda.stream(stream):  # the allocator gives it back to this stream only
                    memory = torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=self.device)
                self.give(_DeviceBucket(memory, stream))
            self._made = True


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    """Shared by all pipes: no operation of NCCL is ever waited for on them, only by the host."""
    return tuple(torch.cuda.Stream(device) for _ in range(_BUCKETS))


class DevicePipe:
    """Any memory, through device buckets."""

    most = BUCKET_BYTES

    def __init__(
        self,
        group: Any,
        peer: int,
        device: torch.device,
        buckets: DeviceBuckets | None,
        check: Check,
    ) -> None:
        """Pipe to `peer`.  group: ProcessGroupNCCL.  buckets: None = two, kept until `settle`."""
        self._group, self._peer, self._device, self._check = group, peer, device, check
        self._shared = buckets
        self._own: DeviceBuckets | None = None
        self._sending: deque[tuple[_DeviceBucket, dist.Work, Tensor]] = deque()
        self._copied: dict[torch.cuda.Stream, torch.cuda.Event] = {}

    def send(self, data: Tensor, deadline: float) -> None:
        if len(self._sending) == _BUCKETS:
            self._sent(deadline)
        bucket = self._buckets().take(self._check, deadline)
        part = bucket.memory[: data.numel()]
        if data.is_cuda:
            bucket.stream.wait_stream(torch.cuda.current_stream(data.device))
        with torch.cuda.stream(bucket.stream), self._aborting(deadline, "sending"):
            part.copy_(data, non_blocking=True)
            self._sending.append((bucket, self._group.send([part], self._peer, 0), data))

    def receive(self, into: Tensor, deadline: float) -> None:
        bucket = self._buckets().take(self._check, deadline)
        part = bucket.memory[: into.numel()]
        try:
            with torch.cuda.stream(bucket.stream), self._aborting(deadline, "receiving"):
                self._finish(self._group.recv([part], self._peer, 0), deadline)
                into.copy_(part, non_blocking=True)
                self._copied[bucket.stream] = bucket.stream.record_event()
        finally:  # other senders of the staging need it
            self._buckets().give(bucket)

    def settle(self, deadline: float) -> None:
        while self._sending:
            self._sent(deadline)
        for copied in self._copied.values():
            copied.synchronize()
        self._copied.clear()
        self._own = None

    def close(self) -> None:
        self._group.abort()
        self._sending.clear()

    def _buckets(self) -> DeviceBuckets:
        if self._shared is not None:
            return self._shared
        if self._own is None:
            self._own = DeviceBuckets(self._device)
        return self._own

    def _sent(self, deadline: float) -> None:
        """Wait for the oldest send."""
        bucket, work, _data = self._sending[0]
        with torch.cuda.stream(bucket.stream), self._aborting(deadline, "sending"):
            self._finish(work, deadline)
        self._sending.popleft()
        self._buckets().give(bucket)

    def _finish(self, work: dist.Work, deadline: float) -> None:
        while not work.is_completed():
            _check_both(self._check, deadline, "an operation of NCCL")
            time.sleep(_POLL_S)
        work.wait()  # done: orders the stream behind it, or raises its error

    @contextmanager
    def _aborting(self, deadline: float, doing: str) -> Iterator[None]:
        """Abort the communicator on any failure: its kernel would wait for the peer for ever."""
        try:
            with _named(deadline, doing):
                yield
        except BaseException:
            self._group.abort()
            raise


def _check_both(check: Check, deadline: float, doing: str) -> None:
    check()
    if time.monotonic() > deadline:
        raise TransportError("deadline", f"{doing} did not end in time")


@contextmanager
def _named(deadline: float, doing: str) -> Iterator[None]:
    """Raise errors of torch's groups as TransportError."""
    try:
        yield
    except RuntimeError as error:
        raise failure(deadline, f"{doing}: {error}") from error


_building = threading.Lock()
# A group whose members differ in one of these hangs or breaks.  Not in the list: NVLS, which NCCL
# leaves off between two ranks, and choices of each host, as its interfaces and cards.
_SWITCHES = "CUMEM_ENABLE CUMEM_HOST_ENABLE P2P_DISABLE P2P_LEVEL SHM_DISABLE IB_DISABLE"
AGREED = tuple(f"NCCL_{name}" for name in f"{_SWITCHES} NET NET_PLUGIN ALGO PROTO".split())


def nccl_settings() -> dict[str, str]:
    """Settings of this process that both members of a pair must share; empty text: not set."""
    found = {"NCCL's version": ".".join(map(str, torch.cuda.nccl.version()))}
    return found | {name: os.environ.get(name, "") for name in AGREED}


def set_variables() -> dict[str, str]:
    """All variables of NCCL and gloo that this process has."""
    return {name: v for name, v in os.environ.items() if name.startswith(("NCCL_", "GLOO_"))}


def nccl_group(store: dist.Store, rank: int, device: torch.device) -> Any:
    """A group of two that raises in `wait` and has no watchdog.

    torch reads the choice from the environment, when a group is made.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _UNBOUNDED
    options.config.max_ctas = _CHANNELS
    with _building, torch.cuda.device(device):
        before = os.environ.get(_BLOCKING)
        os.environ[_BLOCKING] = "1"
        try:
            return dist.ProcessGroupNCCL(store, rank, 2, options)
        finally:
            if before is None:
                del os.environ[_BLOCKING]
            else:
                os.environ[_BLOCKING] = before


def meet(pipe: Pipe, *, receives: bool, deadline: float) -> None:
    """Move a byte, so that NCCL forms its communicator here.  Raises TransportError."""
    byte = torch.zeros(1, dtype=torch.uint8)
    if receives:
        pipe.receive(byte, deadline)
    else:
        pipe.send(byte, deadline)
    pipe.settle(deadline)
