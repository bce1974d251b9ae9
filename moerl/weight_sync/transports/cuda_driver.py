"""CUDA driver functions that torch does not offer, called in torch's primary contexts."""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moerl.core.errors import TransportError

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
