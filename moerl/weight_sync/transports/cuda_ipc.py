"""CUDA IPC: staging in the engine's GPU memory, which trainer ranks of the node map and write into.

Packing straight into the mapping makes a transfer one copy, GPU to GPU (over NVLink where
installed), without NCCL and without the receiver's threads.  The memory handle is 64 opaque bytes
inside the endpoint; nothing is unpickled.  Buffers come from the driver and not from torch's
allocator, whose segments hold other tensors too: only the staging buffer is exported.

Each buffer has a memory file without a name (as in `shm`).  It shows senders that the owner is
alive and has not closed the staging, admits the same user only, and carries the lock that tells the
owner when no sender maps the buffer: in CUDA, freeing exported memory that is still mapped is
undefined.  So a late sender delays the free and never writes into memory with another owner.

torch takes a mapping only if it sees the GPU, so a trainer rank's CUDA_VISIBLE_DEVICES names the
GPUs of its node's engines behind its own; it computes on its own, as without them.  A context of
each rank is on each of those GPUs then.  Staging is a second copy of an engine rank's weights.

Rejected: torch's reductions of CUDA tensors (pickle), mapping the trainer's memory into the engine.
Has run on the device double only, with a driver over shared host memory.

CUDA driver functions that torch does not offer, called in torch's primary contexts.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import secrets
import time
import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from moerl.core.errors import TransportError
from moerl.weight_sync.transports.base import Staging, check_range
from moerl.weight_sync.transports.shm import check_memfd, open_memfd

_POLL_S = 0.0002
_HANDLE_BYTES = 64


class _Handle(ctypes.Structure):
    _fields_ = [("data", ctypes.c_ubyte * _HANDLE_BYTES)]


class _Memory:
    """Device memory that torch wraps without a copy; each tensor keeps this object alive."""

    def __init__(self, address: int, num_bytes: int, gone: Callable[[], None]) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
        weakref.finalize(self, gone).atexit = False  # at exit the driver is unloaded first


class Driver:
    """Device memory by address; a failed driver call raises TransportError."""

    def __init__(self) -> None:
        """Allocates on the calling thread's current device, from any thread."""
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._own = torch.cuda.current_device()
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._devices: dict[int, int] = {}  # ordinal by address

    def gpu(self) -> str:
        return _uuid(self._own)

    def allocate(self, num_bytes: int) -> int:
        """Raises TransportError (room)."""
        address, ordinal = ctypes.c_uint64(), self._own
        self._call(
            "room", ordinal, "cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes)
        )
        self._devices[address.value] = ordinal
        return address.value

    def free(self, address: int) -> None:
        self._call("room", self._devices[address], "cuMemFree_v2", ctypes.c_uint64(address))

    def export(self, address: int) -> bytes:
        handle = _Handle()
        where = self._devices[address]
        self._call(
            "room", where, "cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address)
        )
        return bytes(handle.data)

    def map(self, gpu: str, handle: bytes, num_bytes: int) -> int:
        """Raises TransportError (refused): the process does not see the GPU, or bad handle."""
        seen = [_uuid(i) for i in range(torch.cuda.device_count())]
        if gpu not in seen or len(handle) != _HANDLE_BYTES:
            raise TransportError(
                "refused",
                f"GPU {gpu} is not visible here, {seen} are: CUDA_VISIBLE_DEVICES of a sender must "
                "name the receiver's GPU behind its own",
            )
        ordinal, address, size = seen.index(gpu), ctypes.c_uint64(), ctypes.c_size_t()
        given = _Handle(data=(ctypes.c_ubyte * _HANDLE_BYTES)(*handle))
        lazy_peer_access = ctypes.c_uint(1)
        self._call(
            "refused", ordinal, "cuIpcOpenMemHandle_v2",
            ctypes.byref(address), given, lazy_peer_access,
        )  # fmt: skip
        self._devices[address.value] = ordinal
        range_of = "cuMemGetAddressRange_v2"
        self._call("refused", ordinal, range_of, None, ctypes.byref(size), address)
        if size.value < num_bytes:
            self.unmap(address.value)
            raise TransportError("refused", f"{size.value} bytes are mapped, {num_bytes} said")
        return address.value

    def unmap(self, address: int) -> None:
        where = self._devices[address]
        self._call("peer", where, "cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def tensor(self, address: int, num_bytes: int, gone: Callable[[], None]) -> Tensor:
        """Flat uint8 over memory of `allocate` or `map`; gone: called after the last view."""
        memory, where = _Memory(address, num_bytes, gone), self._devices[address]
        with torch.cuda.device(where):
            return torch.as_tensor(memory, device=f"cuda:{where}")

    def wait(self, buffer: Tensor, deadline: float) -> None:
        """Wait until this thread's copies are done or the deadline has passed."""
        with torch.cuda.device(buffer.device):
            done = torch.cuda.Event()
            done.record()
            while not done.query() and time.monotonic() < deadline:
                time.sleep(_POLL_S)

    def _call(self, reason: str, ordinal: int, name: str, *arguments: Any) -> None:
        with torch.cuda.device(ordinal):
            if ordinal not in self._contexts:
                device, context = ctypes.c_int(), ctypes.c_void_p()
                self._check(reason, "cuDeviceGet", ctypes.byref(device), ordinal)
                retain = "cuDevicePrimaryCtxRetain"
                self._check(reason, retain, ctypes.byref(context), device)
                self._contexts[ordinal] = context
            self._check(reason, "cuCtxSetCurrent", self._contexts[ordinal])
            self._check(reason, name, *arguments)

    def _check(self, reason: str, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(text))
            responses = (text.value or b"unknown").decode()
            raise TransportError(
                reason, f"{name} answered {code}: {responses}; sync.transport=shm does without it"
            )


def _uuid(ordinal: int) -> str:
    return str(torch.cuda.get_device_properties(ordinal).uuid)


_GRAIN = 2 * 2**20  # whole pages: the allocation shares none, so only the buffer is exported


class _Endpoint(msgspec.Struct, frozen=True):
    gpu: str  # UUID
    handle: bytes  # CUipcMemHandle
    num_bytes: int
    pid: int
    fd: int  # of the memory file, in that process
    name: str  # of the memory file


class CudaIpc:
    """A `Transport` between GPU processes of one user on one machine."""

    name = "cuda_ipc"

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def open(self, num_bytes: int) -> CudaStaging:
        """Allocates on the device that was current when the transport was made."""
        return CudaStaging(self._driver, num_bytes)

    def connect(self, endpoint: bytes, deadline: float) -> CudaLink:
        return CudaLink(self._driver, endpoint)


def make(address: str) -> CudaIpc:
    """Make the transport.  address: of the private interface, not used."""
    if not torch.cuda.is_available():
        raise TransportError(
            "missing", "cuda_ipc needs a CUDA GPU on both sides, torch sees none: use shm or gloo"
        )
    return _on(torch.cuda.current_device())


@cache
def _on(device: int) -> CudaIpc:
    """One per device of the process."""
    with torch.cuda.device(device):
        return CudaIpc(Driver())


class CudaStaging(Staging):
    """Device memory of one engine rank."""

    def __init__(self, driver: Driver, num_bytes: int) -> None:
        _free_unused()
        name = f"moerl-cuda-{secrets.token_hex(8)}"
        address = driver.allocate(-(-max(1, num_bytes) // _GRAIN) * _GRAIN)
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.fchmod(self._fd, 0o600)
        exported = _Exported(driver, address, os.dup(self._fd))
        self.buffer: Tensor = driver.tensor(address, num_bytes, exported.free)
        try:
            handle = driver.export(address)
        except TransportError:
            self.close()
            raise
        told = _Endpoint(driver.gpu(), handle, num_bytes, os.getpid(), self._fd, name)
        self.endpoint = msgspec.msgpack.encode(told)

    def close(self) -> None:
        """Refuse new senders; the memory is freed when no link and no tensor uses it."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self.buffer = torch.empty(0, dtype=torch.uint8)


class _Exported:
    """Exported memory, freed when no tensor here and no link elsewhere uses it."""

    def __init__(self, driver: Driver, address: int, lock: int) -> None:
        self._driver, self._address, self._lock = driver, address, lock

    def free(self) -> None:
        """Called when its last tensor is gone; links that still map it have a shared lock."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            _in_use.append(self)
            return
        self._driver.free(self._address)
        os.close(self._lock)


_in_use: list[_Exported] = []


def _free_unused() -> None:
    waiting, _in_use[:] = _in_use[:], []
    for exported in waiting:
        exported.free()


class CudaLink:
    """A mapping of one staging buffer."""

    def __init__(self, driver: Driver, endpoint: bytes) -> None:
        try:
            target = msgspec.msgpack.decode(endpoint, type=_Endpoint)
        except msgspec.MsgspecError:
            raise TransportError("refused", f"{endpoint!r} is no endpoint of cuda_ipc") from None
        self._driver, self._name = driver, target.name
        self._path = f"/proc/{target.pid}/fd/{target.fd}"
        lock = open_memfd(self._path, self._name)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            check_memfd(self._path, self._name)  # not closed before the lock was taken
            address = driver.map(target.gpu, target.handle, target.num_bytes)
        except OSError:
            os.close(lock)
            raise TransportError("peer", f"staging {self._name} is closed") from None
        except TransportError:
            os.close(lock)
            raise
        unmap = partial(_unmap, driver, address, lock)
        self._buffer = driver.tensor(address, target.num_bytes, unmap)

    def put(self, offset: int, data: Tensor, deadline: float) -> None:
        check_memfd(self._path, self._name)
        check_range(offset, data.numel(), self._buffer.numel())
        self._buffer[offset : offset + data.numel()].copy_(data, non_blocking=True)

    def view(self, offset: int, num_bytes: int) -> Tensor | None:
        check_range(offset, num_bytes, self._buffer.numel())
        return self._buffer[offset : offset + num_bytes]

    def flush(self, deadline: float) -> None:
        """Wait until the device has done the copies."""
        self._driver.wait(self._buffer, deadline)
        if time.monotonic() > deadline:
            raise TransportError("deadline", f"staging {self._name} was not written in time")
        check_memfd(self._path, self._name)

    def close(self) -> None:
        """The memory is unmapped with its last view."""
        self._buffer = torch.empty(0, dtype=torch.uint8)


def _unmap(driver: Driver, address: int, lock: int) -> None:
    driver.unmap(address)
    os.close(lock)
