"""An event loop whose time passes only when nothing can run: then it jumps to the next timer.

Work for threads is done at once, so that no time passes meanwhile.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):
    now = 1.0
    sockets_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            return super().select()
        events = super().select(self.sockets_s if timeout > 0 else 0)
        if not events and timeout > 0:
            self.now += timeout
        return events


class _FakeClockLoop(asyncio.SelectorEventLoop):
    def __init__(self, sockets_s: float) -> None:
        self.clock = _Jumping()
        self.clock.sockets_s = sockets_s
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


async def _at_once(function: Callable[..., T], /, *args: Any, **fields: Any) -> T:
    return function(*args, **fields)


def run_with_fake_clock(
    work: Coroutine[Any, Any, T], patch: pytest.MonkeyPatch, *, sockets_s: float = 0.0
) -> T:
    """Run `work`; `time.monotonic` is the loop's time.

    sockets_s: real seconds in which bytes between two sockets of the loop arrive before time jumps.
    """
    loop = _FakeClockLoop(sockets_s)
    patch.setattr(time, "monotonic", loop.time)
    patch.setattr(asyncio, "to_thread", _at_once)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(work)
