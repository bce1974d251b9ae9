"""`libcuda.so.1` over shared host memory: the functions that moerl calls through ctypes.

An exported allocation is a memory file; its handle names the process and the descriptor, and the
other process maps that file.  So both write the same bytes, as two processes of one machine do.
Arguments are checked as far as the driver would notice: contexts, handles, freed addresses.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from typing import Any

import torch

_OK, _INVALID = 0, 1
_PEER_ACCESS = 1


class DriverDouble:
    """One per library handle; contexts are by thread, as CUDA's are."""

    def __init__(self) -> None:
        self._memory: dict[int, tuple[mmap.mmap, int]] = {}  # address: mapping, descriptor
        self._mapped: set[int] = set()
        self._here = threading.local()

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal
        return _OK if ordinal < torch.cuda.device_count() else _INVALID

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:
        context._obj.value = 0x1000 + device.value
        return _OK

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:
        self._here.context = context.value
        return _OK

    def cuMemAlloc_v2(self, address: Any, size: ctypes.c_size_t) -> int:
        if getattr(self._here, "context", None) is None:
            return _INVALID
        fd = os.memfd_create("device", os.MFD_CLOEXEC)
        os.ftruncate(fd, size.value)
        address._obj.value = self._keep(fd)
        return _OK

    def cuMemFree_v2(self, address: ctypes.c_uint64) -> int:
        if address.value in self._mapped or address.value not in self._memory:
            return _INVALID
        os.close(self._memory.pop(address.value)[1])
        return _OK

    def cuIpcGetMemHandle(self, handle: Any, address: ctypes.c_uint64) -> int:
        told = f"{os.getpid()}:{self._memory[address.value][1]}".encode().ljust(64, b"\0")
        ctypes.memmove(handle._obj.data, told, 64)
        return _OK

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: ctypes.c_uint) -> int:
        pid, _, number = bytes(handle.data).rstrip(b"\0").decode().partition(":")
        if not number or flags.value != _PEER_ACCESS:
            return _INVALID
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        address._obj.value = self._keep(fd)
        self._mapped.add(address._obj.value)
        return _OK

    def cuIpcCloseMemHandle(self, address: ctypes.c_uint64) -> int:
        if address.value not in self._mapped:
            return _INVALID
        self._mapped.remove(address.value)
        return self.cuMemFree_v2(address)

    def cuMemGetAddressRange_v2(self, base: None, size: Any, address: ctypes.c_uint64) -> int:
        size._obj.value = len(self._memory[address.value][0])
        return _OK

    def cuGetErrorString(self, code: int, text: Any) -> int:
        text._obj.value = b"invalid argument"
        return _OK

    def _keep(self, fd: int) -> int:
        memory = mmap.mmap(fd, os.fstat(fd).st_size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._memory[address] = memory, fd
        return address


_Library = ctypes.CDLL


class _CDLL(_Library):
    """`ctypes.CDLL`, which finds the double where no driver is installed."""

    def __new__(cls, name: str | None = None, *_args: Any, **_kwargs: Any) -> Any:
        return DriverDouble() if name == "libcuda.so.1" else super().__new__(cls)


def replace() -> None:
    ctypes.CDLL = _CDLL  # type: ignore[misc]
