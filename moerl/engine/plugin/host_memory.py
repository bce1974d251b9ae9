"""SGLang's memory saver for a plain CPU: pages of a tag go back to the system, addresses stay.

    region(tag)   storages that are allocated inside belong to the tag
    pause(tag)    their whole pages are given back and become unreadable
    resume(tag)   they may be touched again, and hold zeros

As with torch_memory_saver on a GPU contents are lost and views stay valid.  Reading a paused page
ends the process (SIGSEGV, on a GPU an illegal access) in place of a computation with zeros.

Read at sglang 0.5.23: srt/utils/torch_memory_saver_adapter.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moerl.core.errors import EngineError

_PAGE = mmap.PAGESIZE
_NONE, _READ_WRITE = 0, 3  # PROT_NONE, PROT_READ | PROT_WRITE
_DONTNEED = 4  # MADV_DONTNEED
_libc = ctypes.CDLL(None, use_errno=True)

Pages = dict[int, int]  # bytes by address of the first page


class HostMemory:
    """The `TorchMemorySaverAdapter` of a process; all instances share its regions."""

    enabled = True
    _storages: ClassVar[dict[str, dict[int, StorageWeakRef]]] = {}
    # tag -> its pages and their storages, which may not be freed: malloc would write there
    _paused: ClassVar[dict[str, tuple[Pages, list[torch.UntypedStorage]]]] = {}

    def check_validity(self, caller_name: str) -> None: ...

    @contextlib.contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        if enable_cpu_backup:
            raise EngineError(f"engine: host memory of {tag!r} has no backup")
        with _Allocations() as seen:
            yield
        self._storages.setdefault(tag, {}).update(seen.storages)

    @contextlib.contextmanager
    def _unchanged(self, **_fields: object) -> Iterator[None]:
        yield

    configure_subprocess = disable = cuda_graph = _unchanged

    def _alive(self, tag: str) -> list[torch.UntypedStorage]:
        refs = self._storages.get(tag, {}).values()
        made = torch.UntypedStorage._new_with_weak_ptr
        return [made(ref.cdata) for ref in refs if not ref.expired()]

    def pause(self, tag: str) -> None:
        storages = self._alive(tag)
        pages = {start: size for start, size in map(_whole_pages, storages) if size > 0}
        for start, size in pages.items():
            _call("madvise", start, size, _DONTNEED)
            _call("mprotect", start, size, _NONE)
        self._paused[tag] = pages, storages

    def resume(self, tag: str) -> None:
        pages, _ = self._paused.pop(tag)
        for start, size in pages.items():
            _call("mprotect", start, size, _READ_WRITE)

    def resident(self, tag: str) -> int:
        """Bytes that `pause` would give back; pages that were never touched are no bytes."""
        return sum(_resident(*_whole_pages(storage)) for storage in self._alive(tag))


class _Allocations(TorchDispatchMode):
    """Notes the storages that operators allocate."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(out):
            if storage.nbytes() > 2 * _PAGE and storage._cdata not in given:
                self.storages.setdefault(storage._cdata, StorageWeakRef(storage))
        return out


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
            yield leaf.untyped_storage()


def _whole_pages(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Address and bytes; without the first page, into which malloc writes when it frees."""
    first = storage.data_ptr()
    start = (first // _PAGE + 1) * _PAGE
    return start, (first + storage.nbytes()) // _PAGE * _PAGE - start


def _resident(start: int, size: int) -> int:
    if size <= 0:
        return 0
    pages = ctypes.create_string_buffer(size // _PAGE)
    _call("mincore", start, size, pages)
    return sum(page & 1 for page in pages.raw) * _PAGE


def _call(name: str, start: int, size: int, how: Any) -> None:
    if getattr(_libc, name)(ctypes.c_void_p(start), ctypes.c_size_t(size), how):
        error = ctypes.get_errno()
        raise OSError(error, f"{name}({start:#x}, {size}, {how}): {os.strerror(error)}")


def create(original: Any, enable: bool) -> Any:
    """AROUND TorchMemorySaverAdapter.create."""
    return HostMemory() if enable else original(enable)
