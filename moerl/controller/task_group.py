"""The tasks of one event loop that share a fate, and the change they wait for.

A task that fails ends the run: its error is kept for whoever awaits `failure`.  Loops that have
nothing to do wait for a change instead of polling.
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

_COLLECT_S = 300.0  # between full passes of the garbage collector
_TRIM_S = 20.0  # between returns of free memory
_NEVER = 2**31 - 1
_M_ARENA_MAX = -8  # malloc.h


async def collect_rarely() -> None:
    """Full garbage collections at long intervals instead of every second; until cancelled.

    With 20,000 episodes in flight half a million records live, and Python looks at all of them
    whenever they grew by a quarter: 0.1 to 0.3 s in which nobody gets a turn.  Records form no
    cycles, so reference counts free them; what does (failed calls with their tracebacks) is found
    young, or waits for the next full pass.  Process-wide: the controller has a process of its own.
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
    """Give free pages back to the system at intervals; until cancelled.

    Records come and go by the hundred thousand and batches are encoded in tens of megabytes: at
    20,000 episodes a third of glibc's heap is holes.  `man malloc_trim`; other C libraries have
    none.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while trim is not None:
        await asyncio.sleep(_TRIM_S)
        await asyncio.to_thread(trim, 0)


def share_one_heap() -> None:
    """Threads that encode batches take turns in one heap; each would keep the holes of its own.

    Seen in `bench/controller_load.py`: memory rose by 25 MiB whenever one more thread had its turn.
    Process-wide, for threads to come.  `man mallopt`.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_ARENA_MAX, 1)


async def look_after_memory() -> None:
    """All of the above."""
    share_one_heap()
    await asyncio.gather(collect_rarely(), return_memory())


class TaskGroup:
    """Made inside a running event loop."""

    def __init__(self) -> None:
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.stopping = False
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside the others; its failure becomes everybody's."""

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
        task.add_done_callback(lambda _: work.close())  # cancelled before its first turn

    def fail(self, error: BaseException) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)

    def notify(self) -> None:
        """Wake everybody who waits for a change: each wait holds the event it began with."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_change(self, timeout_s: float) -> None:
        event = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await event.wait()

    async def stop(self) -> None:
        """Cancel all tasks; `failure` ends without an error if there was none."""
        self.stopping = True
        if not self.failure.done():
            self.failure.set_result(None)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
