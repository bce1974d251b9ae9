"""Whether requests may be sent to an engine, and why not.

`admit` is set while requests may be sent (cleared during an update); `idle` is set while none is in
flight; `cause` says why the engine is unusable.  Used from one event loop.

    state       cause                               serves again after
    broken      its server died                     a restart
    suspended   no answer in time, failed commit    a whole publish session (it writes all weights)
    asleep      (none)                              a wake: until then requests wait
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from moerl.core.errors import EngineError
from moerl.engine.host.sglang_client import BadRequest

WATCH_S = 0.5  # seconds between checks of the server process

T = TypeVar("T")


class EngineHealth:
    """State of one engine.  `usable` and `guard` raise EngineError with the cause."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.cause: str | None = "it was not started"
        self.broken = asyncio.Event()  # calls fail; also while suspended
        self.ended = asyncio.Event()  # broken for good
        self.admit, self.idle = asyncio.Event(), asyncio.Event()
        self.is_asleep = False
        self.running = 0  # requests in flight
        self._calls = 0
        self._busy_s = self._busy_since = 0.0

    # --- usable, suspended, broken ---------------------------------------------------------------
    def open(self) -> None:
        """A new server is up, and nothing is in flight."""
        self.cause, self.broken, self.ended = None, asyncio.Event(), asyncio.Event()
        self.is_asleep = False
        self.admit.set()
        self.idle.set()

    def reopen(self) -> None:
        """A whole session succeeded: a suspended engine serves again.

        Raises EngineError when the engine broke meanwhile.
        """
        if self.ended.is_set():
            raise self.failure()
        if self.cause is not None:
            self.cause, self.broken = None, asyncio.Event()
        self.let_in()

    def let_in(self) -> None:
        """Admit requests, unless the engine sleeps or is unusable."""
        if not self.is_asleep and self.cause is None:
            self.admit.set()

    def close(self, cause: str) -> None:
        """Fail every pending and later call; the first cause of a break stays."""
        if self.cause is None or not self.ended.is_set():
            self.cause = cause
        self.admit.clear()
        self.broken.set()
        self.ended.set()

    def suspend(self, cause: str) -> EngineError:
        """Fail calls in flight and admit none until a publish session succeeds."""
        self.cause = self.cause or cause
        self.admit.clear()
        self.broken.set()
        return self.failure()

    def failure(self) -> EngineError:
        return EngineError(f"engine {self.index} is not usable: {self.cause}")

    def usable(self) -> None:
        if self.cause is not None:
            raise self.failure()

    async def guard(self, work: Awaitable[T], until: asyncio.Event | None = None) -> T:
        """Await work, or raise as soon as the engine breaks (`until`: as soon as that is set)."""
        event = until or self.broken
        task, broken = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait((task, broken), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self.failure()
            return await task
        except BadRequest:
            raise
        except EngineError as error:
            # The connection to a dying server breaks before the watch has seen the cause.
            await asyncio.wait((broken,), timeout=2 * WATCH_S)
            raise (self.failure() if event.is_set() else error) from error
        finally:
            broken.cancel()
            task.cancel()

    # --- calls in flight -------------------------------------------------------------------------
    @property
    def busy_s(self) -> float:
        """Seconds with a call in flight, so far."""
        now = time.monotonic() - self._busy_since if self._calls else 0.0
        return self._busy_s + now

    def enter(self, requests: int) -> None:
        if self._calls == 0:
            self._busy_since = time.monotonic()
        self._calls += 1
        self.running += requests
        self.idle.clear()

    def leave(self, requests: int) -> None:
        self._calls -= 1
        self.running -= requests
        if self._calls == 0:
            self._busy_s += time.monotonic() - self._busy_since
            self.idle.set()


class Heartbeat:
    """Checks that a server answers: a process that hangs is alive for the kernel.

    It sends one question at a time, and the next some time after the answer.  `check` reports a
    server without an answer for `limit_s`.  Time without a check does not count: this process may
    have been suspended.
    """

    _QUESTIONS = 12  # per limit_s
    _LONGEST_LOOK_S = 5.0

    def __init__(
        self,
        ask: Callable[[], Awaitable[object]],
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask, self._limit_s, self._clock = ask, limit_s, clock
        self._question: asyncio.Future[object] | None = None
        self._looked = clock()
        self._silent_s = 0.0  # since the last sign of life
        self._answers = 0  # of other work, at the last look
        self._awaited: int | None = None  # the attempt that was in progress at the limit

    def check(self, *, attempt: int | None = None, answers: int = 0) -> str | None:
        """Return a sentence when the server hangs, else None.

        attempt: number of the attempt in progress at work with a deadline of its own.  The attempt
        in progress at the limit is waited for; the next is not, since work that is tried again and
        again would hide a server that hangs.  answers: how often such work was answered.
        """
        now = self._clock()
        self._silent_s += min(now - self._looked, self._LONGEST_LOOK_S)
        self._looked = now
        if self._was_answered() or answers != self._answers:
            self._silent_s, self._answers, self._awaited = 0.0, answers, None
        if self._question is None and self._silent_s >= self._limit_s / self._QUESTIONS:
            self._question = asyncio.ensure_future(self._ask())
        if self._silent_s < self._limit_s:
            return None
        if self._awaited is None:
            self._awaited = attempt
        if attempt is not None and attempt == self._awaited:
            return None
        return f"the server hangs: it answered nothing for {self._silent_s:.0f} s"

    def _was_answered(self) -> bool:
        """True once per answer; a refusal is one, a connection that failed is none."""
        question = self._question
        if question is None or not question.done():
            return False
        self._question = None
        error = question.exception()
        return error is None or isinstance(error, EngineError)

    def close(self) -> None:
        if self._question is not None:
            self._question.cancel()
