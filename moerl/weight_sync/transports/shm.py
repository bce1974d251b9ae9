"""Shared memory: the receiver's staging buffer is a memory file that senders map and write into.

The file has no name in any folder (memfd), so a crash on either side leaves no file behind: it
exists as long as a process maps it.  A sender opens it through /proc/PID/fd, which the kernel
allows to the same user only.  The size is sealed: a receiver cannot shrink the file under a sender
(a write beyond the end would kill the sender).

Packing straight into the mapping makes a transfer one copy, at the speed of memcpy.  The receiver
page-locks its mapping where CUDA works, so that a commit copies to the GPU without the CPU.

Rejected: files in /dev/shm (stay after a crash), multiprocessing.shared_memory (its resource
tracker removes memory that other processes use).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import stat
import time

import torch
from torch import Tensor

from moerl.core.errors import TransportError
from moerl.weight_sync.transports.base import Staging, check_range
from moerl.weight_sync.transports.pinned_memory import tensor_over

_NAME = "moerl-staging"
_F_ADD_SEALS = 1033  # linux/fcntl.h; fcntl of Python 3.11 lacks the names
_SEALS = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW


class SharedMemory:
    """A `Transport` between processes of one user on one machine."""

    name = "shm"

    def open(self, num_bytes: int) -> SharedStaging:
        return SharedStaging(num_bytes)

    def connect(self, endpoint: bytes, deadline: float) -> SharedLink:
        return SharedLink(endpoint)


def make(address: str) -> SharedMemory:
    """Make the transport.  address: of the private interface, not used."""
    return SharedMemory()


class SharedStaging(Staging):
    """The memory file of one engine rank."""

    def __init__(self, num_bytes: int) -> None:
        name = f"{_NAME}-{secrets.token_hex(8)}"
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self._fd, 0o600)
            os.ftruncate(self._fd, max(1, num_bytes))
            fcntl.fcntl(self._fd, _F_ADD_SEALS, _SEALS)
            self.buffer: Tensor = _mapped(self._fd, num_bytes, page_locked=True)
        except TransportError:
            os.close(self._fd)
            raise
        except OSError as error:
            os.close(self._fd)
            raise TransportError(
                "room", f"no shared memory of {num_bytes} bytes: {error}"
            ) from None
        self.endpoint = f"{os.getpid()}:{self._fd}:{name}:{num_bytes}".encode()

    def close(self) -> None:
        """Refuse new senders; the memory is freed with the last mapping."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self.buffer = torch.empty(0, dtype=torch.uint8)


class SharedLink:
    """A mapping of one staging buffer."""

    def __init__(self, endpoint: bytes) -> None:
        try:
            pid, number, name, size = endpoint.decode().split(":")
            self._path, self._name, num_bytes = (
                f"/proc/{int(pid)}/fd/{int(number)}",
                name,
                int(size),
            )
        except ValueError:
            raise TransportError("refused", f"{endpoint!r} is no endpoint of shm") from None
        fd = open_memfd(self._path, self._name)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_size < num_bytes:
                raise TransportError("refused", f"{self._path} has {info.st_size} bytes")
            self._buffer = _mapped(fd, num_bytes)
        finally:
            os.close(fd)

    def put(self, offset: int, data: Tensor, deadline: float) -> None:
        self._alive(deadline)
        check_range(offset, data.numel(), self._buffer.numel())
        self._buffer[offset : offset + data.numel()] = data

    def view(self, offset: int, num_bytes: int) -> Tensor | None:
        check_range(offset, num_bytes, self._buffer.numel())
        return self._buffer[offset : offset + num_bytes]

    def flush(self, deadline: float) -> None:
        """Stores to shared memory are done when they return; only the receiver can have failed."""
        self._alive(deadline)

    def close(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def _alive(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise TransportError("deadline", f"staging {self._name} was not written in time")
        check_memfd(self._path, self._name)


def open_memfd(path: str, name: str) -> int:
    """A descriptor of another process's memory file.

    Raises TransportError: `peer` when it is gone, `refused` for a file of another user.
    """
    check_memfd(path, name)
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise TransportError("refused", f"cannot open {path}: {error}") from None


def check_memfd(path: str, name: str) -> None:
    """Check that the owner of /proc/PID/fd/N is alive and still holds this very file open."""
    try:
        found = os.readlink(path)
    except OSError as error:
        raise TransportError("peer", f"the process of {path} is gone: {error}") from None
    if found.split(" ")[0] != f"/memfd:{name}":
        raise TransportError("peer", f"{path} is another file now: {found}")


def _mapped(fd: int, num_bytes: int, *, page_locked: bool = False) -> Tensor:
    """The whole file as a flat uint8 tensor; unmapped when the last view of it goes."""
    return tensor_over(mmap.mmap(fd, max(1, num_bytes)), num_bytes, page_locked=page_locked)
