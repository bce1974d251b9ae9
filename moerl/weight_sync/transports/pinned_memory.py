"""Page-locked host memory, where CUDA is there: a GPU copies to and from it without the CPU.

torch's own allocator of pinned memory rounds up to a power of two and keeps what is freed; a
staging of 33 GB would take 64.  Registered pages are also what shared memory needs.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref

import torch
from torch import Tensor

from moerl.errors import TransportError

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every GPU of the process


def host_buffer(num_bytes: int) -> Tensor:
    """Zeroed flat uint8 memory.  Raises TransportError (room)."""
    try:
        return tensor_over(mmap.mmap(-1, max(1, num_bytes)), num_bytes, page_locked=True)
    except OSError as error:
        raise TransportError("room", f"no host memory of {num_bytes} bytes: {error}") from None


def tensor_over(mapping: mmap.mmap, num_bytes: int, *, page_locked: bool) -> Tensor:
    """The mapping's first bytes, unmapped when the last view of them goes.

    page_locked: where CUDA is there.  Raises TransportError (room).
    """
    block = (ctypes.c_uint8 * len(mapping)).from_buffer(mapping)
    if page_locked and torch.cuda.is_available():
        _register(block)
    return torch.frombuffer(block, dtype=torch.uint8)[:num_bytes]


def _register(block: ctypes.Array[ctypes.c_uint8]) -> None:
    address, size = ctypes.addressof(block), ctypes.sizeof(block)
    runtime = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(address, size, _PORTABLE))
    if code:
        raise TransportError(
            "room",
            f"CUDA could not page-lock {size} bytes (error {code}): look at `ulimit -l` and at the "
            "memory limit of the container",
        )
    # before the pages are unmapped; at exit the driver is unloaded first
    weakref.finalize(block, runtime.cudaHostUnregister, address).atexit = False
