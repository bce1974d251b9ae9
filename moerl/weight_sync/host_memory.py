"""Page-locked host memory: a GPU copies from it and to it while the host does something else.

torch's own pinned memory is rounded up to a power of two, and memory that torch did not make, such
as a shared memory file, cannot be had from it.  So memory is locked in place.
Idea: `torch.cuda._pin_memory_utils`.
"""

from __future__ import annotations

import mmap
import weakref

import torch
from torch import Tensor

from moerl.errors import TransportError

_ALL_DEVICES = 1  # cudaHostRegisterPortable


def locked_bytes(num_bytes: int) -> Tensor:
    """Flat uint8, unlocked when this very object is gone: keep it as long as its views."""
    # pages of its own: a page cannot be locked twice
    buffer = torch.frombuffer(mmap.mmap(-1, max(1, num_bytes)), dtype=torch.uint8)[:num_bytes]
    page_lock(buffer)
    return buffer


def page_lock(buffer: Tensor) -> None:
    """Lock the memory of a contiguous host tensor, until this very object is gone.

    Raises TransportError (room).
    """
    num_bytes = buffer.numel() * buffer.element_size()
    if not num_bytes or buffer.is_pinned():
        return
    address = buffer.data_ptr()
    code = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _ALL_DEVICES))
    if code:
        raise TransportError("room", f"CUDA error {code} when page-locking {num_bytes} bytes")
    weakref.finalize(buffer, _unlock, address).atexit = False  # at exit the driver is unloaded


def _unlock(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
