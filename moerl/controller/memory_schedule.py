"""Engines and trainer take turns with one memory (`cluster.colocated: turns`).

    GENERATE  engines serve; the trainer is parked and waits for a plan
    CLOSING   a batch is planned: every engine retracts its requests and gives its memory back,
              unless it is on GPUs that the trainer lacks
    TRAIN     the trainer has the memory
    HANDING   the trainer has parked its optimizer and publishes: an engine takes back its weights
              when its session begins, and is dirty until its commit
    OPENING   the trainer asks for a plan and none is ready: engines take back their KV cache

The phase is a memory of this process only.  A controller that takes over asks the engines; the
trainer's messages say the rest, since it is parked whenever it publishes or asks for a plan.
Requests stay where they are, or wait for an engine, and go on under the new weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from enum import StrEnum

from moerl.config import Config
from moerl.config.clusters import moved_parts, sleeping_engines
from moerl.controller.engine_calls import host_answer
from moerl.controller.engine_pool import EnginePhase, EnginePool, EngineState
from moerl.controller.task_group import TaskGroup
from moerl.core.errors import EngineError
from moerl.core.messages import AskEngine, EngineVersion, MemoryState, SleepEngine, WakeEngine

log = logging.getLogger(__name__)

_AGAIN_S = 0.5  # after an engine refused
_NAMES = {"kv_cache": "kv_cache", "engine_weights": "weights"}  # of SGLang


class MemoryPhase(StrEnum):
    GENERATE = "generate"
    CLOSING = "closing"
    TRAIN = "train"
    HANDING = "handing"
    OPENING = "opening"


class MemorySchedule:
    """Moves the memory of all engines.  Used by one event loop."""

    def __init__(self, config: Config, pool: EnginePool, tasks: TaskGroup) -> None:
        self._pool, self._tasks, self._budget_s = pool, tasks, config.turn.budget_s
        self._limit_s = config.sync.timeout_s
        self._sleepers = sleeping_engines(config)  # others serve on
        self._parts = tuple(_NAMES[part] for part in moved_parts(config) if part in _NAMES)
        self.phase = MemoryPhase.GENERATE
        self._since, self._late = time.monotonic(), 0  # of GENERATE, and budgets that have passed
        # Batches of a turn, and the most that buffer_depth lets be ready at once
        self._batches, self._most = 1, config.rollout.buffer_depth + 1
        self._batch, self._sampled = config.rollout.groups_per_step, 0
        self._changing = asyncio.Lock()
        self._trainer_starts = False  # a message of the trainer before it may still wait here
        self._row: dict[str, float] = {}

    def took_over(self) -> None:
        """All engines have answered: unless all are awake, the trainer may have the memory."""
        away = (EnginePhase.ASLEEP, EnginePhase.LOST)
        if any(engine.phase in away for engine in self._shared()):
            self._enter(MemoryPhase.TRAIN)

    # --- phases -----------------------------------------------------------------------------------
    async def close(self, *, for_a_start: bool = False) -> None:
        """Before a plan is given out or a trainer starts: every engine sleeps, or has no process.

        An engine that is being started needs the memory, and is waited for.  Without a trainer
        (for_a_start) a waiting engine may be started: a first publish must reach an engine.
        """
        async with self._changing:
            begin = time.monotonic()
            self._trainer_starts |= for_a_start
            if for_a_start and self._is_starting():
                self._enter(MemoryPhase.GENERATE)
            if self.phase == MemoryPhase.GENERATE:
                await self._wait_while(self._is_starting)
                await self._wait_while(self._is_held)
                if not for_a_start:
                    self._count("turn/generate_s", begin - self._since)
                    self._count("turn/late", float(self._late))
            is_turn = self.phase == MemoryPhase.GENERATE and not for_a_start
            self._enter(MemoryPhase.CLOSING)
            moved = await self._each(self._sleep)
            self._enter(MemoryPhase.TRAIN)
            self._count("turn/close_s", time.monotonic() - begin)
            if is_turn:
                await self._weigh(sum(one.recomputed for one in moved))
                self._count("turn/interrupted", float(sum(one.aborted for one in moved)))

    async def _weigh(self, recomputed: int) -> None:
        """Adapt the turn's length to the share of dropped tokens."""
        before = self._sampled
        self._sampled = sum(one.generated_tokens for one in await self._pool.statuses())
        sampled = max(0, self._sampled - before)  # of requests that have ended
        self._batches += (recomputed > sampled) - (2 * recomputed < sampled)
        self._batches = min(max(1, self._batches), self._most)
        self._count("turn/recomputed_tokens", float(recomputed))
        self._count("turn/sampled_tokens", float(sampled))

    def goes_on(self, num_ready: int, num_left: int) -> bool:
        """Whether generation continues.  Arguments: ready groups, steps to come."""
        is_late = time.monotonic() - self._since > self._budget_s
        if self.phase != MemoryPhase.GENERATE or is_late:
            return False
        return self._batch <= num_ready < min(self._batches, num_left) * self._batch

    def trainer_is_up(self) -> None:
        """A trainer has connected: its next request ends its start."""
        self._trainer_starts = False

    async def hand(self, index: int) -> None:
        """Wake an engine's weights, without requests, for a session.  Raises EngineError."""
        if self.phase in (MemoryPhase.TRAIN, MemoryPhase.HANDING):
            self._enter(MemoryPhase.HANDING)
        engine = self._pool.engines.get(index)
        if engine is None or engine.phase == EnginePhase.LOST or index not in self._sleepers:
            return
        if engine.phase != EnginePhase.ASLEEP:  # it was started in GENERATE
            engine.phase = EnginePhase.ASLEEP
            await self._move(engine, SleepEngine(index, ("kv_cache",), self._limit_s))
        await self._move(engine, WakeEngine(index, ("weights",), self._limit_s))

    async def open(self) -> None:
        """The trainer waits for a batch: engines with verified weights serve again.

        An engine without is behind, so that the trainer publishes to it first.
        """
        if self._trainer_starts:
            return
        asleep = [m for m in self._pool.engines.values() if m.phase == EnginePhase.ASLEEP]
        if self.phase == MemoryPhase.GENERATE and not asleep:
            self._late = int((time.monotonic() - self._since) / self._budget_s)
            return
        async with self._changing:
            begin = time.monotonic()
            if self.phase != MemoryPhase.GENERATE:
                self._enter(MemoryPhase.OPENING)
            await self._each(self._wake)
            if self.phase == MemoryPhase.OPENING:
                self._enter(MemoryPhase.GENERATE)
                self._since, self._late = time.monotonic(), 0
                self._count("turn/open_s", self._since - begin)
            self._tasks.notify()

    async def generating(self) -> None:
        """Returns in GENERATE: an engine may be started, and `close` waits for it."""
        await self._wait_while(lambda: self.phase != MemoryPhase.GENERATE)

    def row(self) -> dict[str, float]:
        """Metrics since the last call, with the names of docs/metrics.md."""
        row, self._row = self._row, {}
        return row

    def _enter(self, phase: MemoryPhase) -> None:
        if phase != self.phase:
            log.info("turn: %s", phase)
        self.phase = phase

    # --- engines ----------------------------------------------------------------------------------
    async def _sleep(self, index: int, engine: EngineState) -> MemoryState | None:
        if engine.phase != EnginePhase.LOST and index in self._sleepers:
            engine.phase = EnginePhase.ASLEEP
        while engine.phase == EnginePhase.ASLEEP:
            try:
                return await self._move(engine, SleepEngine(index, self._parts, self._limit_s))
            except EngineError as error:  # refused for now; a broken engine is about to be lost
                log.warning("engine %d does not sleep yet: %s", index, error)
                await self._tasks.wait_change(_AGAIN_S)
        return None

    async def _wake(self, index: int, engine: EngineState) -> MemoryState | None:
        if engine.phase != EnginePhase.ASLEEP:
            return None
        try:
            found = await host_answer(engine.host.session(AskEngine(index)), "AskEngine")
            assert isinstance(found, EngineVersion), "the reply to AskEngine"
            engine.behind |= found.is_dirty or "weights" in found.asleep or bool(found.cause)
            if engine.behind:
                return None
            moved = await self._move(engine, WakeEngine(index, self._parts, self._limit_s))
        except EngineError as error:  # `open` is called again
            log.warning("engine %d does not wake yet: %s", index, error)
            return None
        if engine.phase == EnginePhase.ASLEEP:  # else its death was reported meanwhile
            engine.phase = EnginePhase.UP
        return moved

    async def _move(self, engine: EngineState, message: SleepEngine | WakeEngine) -> MemoryState:
        moving = engine.host.move_memory(message)
        return await host_answer(moving, type(message).__name__, message.timeout_s)

    async def _each(
        self, work: Callable[[int, EngineState], Awaitable[MemoryState | None]]
    ) -> list[MemoryState]:
        engines = list(self._pool.engines.items())
        moved = await asyncio.gather(*(work(index, engine) for index, engine in engines))
        return [one for one in moved if one is not None]

    def _shared(self) -> list[EngineState]:
        return [m for index, m in self._pool.engines.items() if index in self._sleepers]

    def _is_starting(self) -> bool:
        return any(m.phase == EnginePhase.LOST and not m.leaving for m in self._shared())

    def _is_held(self) -> bool:
        """An evaluation ends first."""
        now = time.monotonic()
        return any(engine.held_until > now for engine in self._pool.engines.values())

    async def _wait_while(self, waits: Callable[[], bool]) -> None:
        while waits():
            await self._tasks.wait_change(1.0)

    def _count(self, name: str, value: float) -> None:
        self._row[name] = self._row.get(name, 0.0) + value
