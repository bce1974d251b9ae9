"""Asyncio tasks that fail together, and a wake-up event for waiting loops.

A task that fails ends the run: its error is kept for the awaiter of `failure`.  Idle loops wait for
a notification instead of polling.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)

_COLLECT_S = 300.0  # seconds between full passes of the garbage collector
_TRIM_S = 20.0  # seconds between returns of free memory
_NEVER = 2**31 - 1
_M_ARENA_MAX = -8  # malloc.h


async def collect_rarely() -> None:
    """Run full garbage collections at long intervals; until cancelled.

    With 20,000 episodes in flight there are half a million record objects, and each full collection
    stops the loop for 0.1 to 0.3 s; Python's default is one per quarter of growth.  Records form no
    cycles, so reference counts free them; cycles (failed calls with tracebacks) are collected young
    or at the next full pass.  Process-wide: the controller has its own process.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    try:
        while True:
            await asyncio.sleep(_COLLECT_S)
            gc.collect()
    finally:
        gc.set_threshold(young, middle, old)


async def return_memory() -> None:
    """Return free pages to the system at intervals; until cancelled.

    Records are allocated by the hundred thousand and batches encoded in tens of megabytes: at
    20,000 episodes a third of glibc's heap is free fragments.  `man malloc_trim`; glibc only.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while trim is not None:
        await asyncio.sleep(_TRIM_S)
        await asyncio.to_thread(trim, 0)


def share_one_heap() -> None:
    """Use one malloc arena for all threads; each arena would keep its own free fragments.

    `bench/controller_load.py` grew by 25 MiB per additional encoding thread.  Process-wide, for
    threads started later.  `man mallopt`.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_ARENA_MAX, 1)


async def trim_memory_loop() -> None:
    """Apply all of the above."""
    share_one_heap()
    await asyncio.gather(collect_rarely(), return_memory())


class TaskGroup:
    """Create it inside a running event loop."""

    def __init__(self) -> None:
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.stopping = False
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` concurrently; its failure becomes the group's."""

        async def guarded() -> None:
            try:
                await work
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                log.exception("controller loop failed")
                self.fail(error)

        task = asyncio.get_running_loop().create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # cancelled before its first step

    def fail(self, error: BaseException) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)

    def notify(self) -> None:
        """Wake all waiters: each wait uses the event that was current when it began."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_change(self, timeout_s: float) -> None:
        event = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await event.wait()

    async def stop(self) -> None:
        """Cancel all tasks; `failure` then ends without an error if there was none."""
        self.stopping = True
        if not self.failure.done():
            self.failure.set_result(None)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
