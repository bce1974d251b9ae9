"""Count what a GPU would make the host wait for, by the line of code that caused it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch

OPS = torch.ops.device_double
ROOT = Path(__file__).resolve().parents[2]
OWN = str(ROOT / "moerl") + "/"
_TORCH = str(Path(torch.__file__).parent) + "/"
_DOUBLE = str(Path(__file__).parent) + "/"
_PYTHON = str(Path(os.__file__).parent) + "/"
_PACKAGES = "/site-packages/"

# The host waits: for a value, for a stream, for a copy of pinned memory that is not asynchronous.
# A copy from pageable memory waits for the driver's own copy of it.
WAITS = ("sync", "d2h_sync", "h2d_sync")
PAGEABLE = "h2d_pageable"


@dataclass(frozen=True)
class Seen:
    """One event."""

    kind: str
    what: str
    bytes: int
    stream: int
    line: str  # moerl/FILE:LINE, or the first folder of a package that is not ours


@dataclass
class Watch:
    """Everything seen in a block."""

    seen: list[Seen] = field(default_factory=list)

    def count(self, *kinds: str, own: bool = False) -> int:
        """own: only what lines of ours cause directly, not inside of a library that they call."""
        return sum(event.kind in kinds and (not own or is_own(event)) for event in self.seen)

    def own_lines(self, *kinds: str) -> Counter[str]:
        return Counter(event.line for event in self.seen if event.kind in kinds and is_own(event))

    def own_files(self, *kinds: str) -> Counter[str]:
        """By file: line numbers change with every edit."""
        lines = self.own_lines(*kinds)
        files: Counter[str] = Counter()
        for line, times in lines.items():
            files[line.rpartition(":")[0]] += times
        return files


def is_own(event: Seen) -> bool:
    return event.line.startswith("moerl/")


def guilty_line(frame: FrameType | None) -> str:
    """The innermost line that is neither torch's nor the double's nor Python's."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(OWN):
            return f"{name.removeprefix(str(ROOT) + '/')}:{frame.f_lineno}"
        if not _is_hidden(name):
            package = name.partition(_PACKAGES)[2].partition("/")[0]
            return package or f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "autograd"  # a thread of its own, without a line of Python


def _is_hidden(name: str) -> bool:
    if name.startswith(_DOUBLE):
        return "/on_" not in name
    if name.startswith((_TORCH, "<")):
        return True
    return name.startswith(_PYTHON) and _PACKAGES not in name


_watches: list[Watch] = []
_purposes = ["other"]


def _listen(kind: bytes, what: bytes, num: int, stream: int) -> None:
    if _watches:
        line = guilty_line(sys._getframe().f_back)  # a thread of autograd has none
        event = Seen(kind.decode(), what.decode(), num, stream, line)
        for watch in _watches:
            watch.seen.append(event)


_LISTENER = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64
)(_listen)


@contextlib.contextmanager
def watch() -> Iterator[Watch]:
    """Watch a block; blocks may be nested."""
    mine = Watch()
    _watches.append(mine)
    OPS.listen(ctypes.cast(_LISTENER, ctypes.c_void_p).value)
    try:
        yield mine
    finally:
        _watches.remove(mine)
        if not _watches:
            OPS.listen(0)


@dataclass(frozen=True)
class Bytes:
    """Of tensors on one device; temporaries inside a kernel are not seen."""

    live: int
    peak: int
    total: int
    held: int  # live ones and what was freed since the purpose's cache was emptied; not of all


def memory(purpose: str = "", device: int = 0) -> Bytes:
    """purpose: "" = all."""
    return Bytes(*OPS.memory(device, purpose))


@contextlib.contextmanager
def purpose(name: str) -> Iterator[None]:
    """Book what is allocated in a block, by any thread, under a name; blocks may be nested."""
    _purposes.append(name)
    OPS.set_purpose(name)
    try:
        yield
    finally:
        _purposes.pop()
        OPS.set_purpose(_purposes[-1])
