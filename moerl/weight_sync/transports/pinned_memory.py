"""Page-locked host memory, where CUDA works: a GPU copies to and from it without the CPU.

torch's own allocator of pinned memory rounds up to a power of two and keeps freed memory; a
staging of 33 GB would take 64.  Shared memory needs registered pages anyway.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from moerl.core.errors import TransportError

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every GPU of the process
_ALIGN = 64  # bytes


def host_buffer(num_bytes: int) -> Tensor:
    """Zeroed flat uint8 memory.  Raises TransportError (room)."""
    return tensor_over(_anonymous(num_bytes), num_bytes, page_locked=True)


def host_tensors(like: Sequence[Tensor]) -> list[Tensor]:
    """Zeroed tensors of these shapes and dtypes in one piece of memory.  Raises TransportError
    (room).

    Each has a storage of its own size: torch saves a tensor with its whole storage.
    """
    starts, end = [], 0
    for tensor in like:
        starts.append(end)
        end += -(-tensor.nbytes // _ALIGN) * _ALIGN
    block = _block(_anonymous(end), page_locked=True)
    return [
        torch.frombuffer(block, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(
            tensor.shape
        )
        if tensor.numel()
        else torch.empty(tensor.shape, dtype=tensor.dtype)
        for tensor, start in zip(like, starts, strict=True)
    ]


def tensor_over(mapping: mmap.mmap, num_bytes: int, *, page_locked: bool) -> Tensor:
    """The mapping's first bytes, unmapped when the last view of them goes.

    page_locked: where CUDA works.  Raises TransportError (room).
    """
    return torch.frombuffer(_block(mapping, page_locked=page_locked), dtype=torch.uint8)[:num_bytes]


def _anonymous(num_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, max(1, num_bytes))
    except OSError as error:
        raise TransportError("room", f"no host memory of {num_bytes} bytes: {error}") from None


def _block(mapping: mmap.mmap, *, page_locked: bool) -> ctypes.Array[ctypes.c_uint8]:
    block = (ctypes.c_uint8 * len(mapping)).from_buffer(mapping)
    if page_locked and torch.cuda.is_available():
        _register(block)
    return block


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
