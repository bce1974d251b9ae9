"""The controller's view of the engines: state, version, and weight updates.

    UP         accepts requests
    RESTING    failed a call but is alive: used again after a pause
    SUSPENDED  a commit failed or it did not answer: a full publish brings it back
    LOST       its process died and is being restarted
    ASLEEP     the trainer has its memory (`moerl.controller.memory_schedule`)

`EnginePool`: engines join a running run (`join`) and leave it (`drain`, then `remove`); a number is
never reused.  A new engine gets requests after its first publish, or when it serves the newest
weights.  `serves` is checked for every request: after a trainer restart an engine may serve weights
of a discarded history until the next publish.

`SyncTargets`: the engines that the trainer publishes to.  A trainer starts with the configured
engines; a change is sent with the reply to its hello or instead of its next plan (`SetEngines`),
and is in effect when it asks again.  A leaving engine is not ended before that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from moerl.config.schema import EngineConfig, RolloutConfig
from moerl.controller.engine_calls import EngineCalls, host_answer
from moerl.controller.step_metrics import StepMetrics
from moerl.controller.task_group import TaskGroup
from moerl.core.errors import EngineError, ProtocolError
from moerl.core.messages import (
    AskEngine,
    CommitUpdate,
    Engine,
    EngineStatus,
    EngineVersion,
    Message,
    SessionMessage,
    SetEngines,
    SyncTarget,
    UpdateDone,
)
from moerl.core.types import PolicyVersion

log = logging.getLogger(__name__)


_REST_S = 2.0  # pause after a failed call, seconds


_INTERRUPT_S = 0.2  # seconds between interrupts of a leaving engine: a request may be in transit


_MODEL_FOLDER = PolicyVersion(0, 0)  # version of an engine that has just started


class EnginePhase(StrEnum):
    UP = "up"
    RESTING = "resting"
    SUSPENDED = "suspended"
    LOST = "lost"
    ASLEEP = "asleep"


@dataclass(slots=True, eq=False)
class EngineState:
    """State of one engine."""

    host: Engine
    calls: EngineCalls
    version: PolicyVersion = _MODEL_FOLDER
    phase: EnginePhase = EnginePhase.UP
    generating: int = 0  # requests in its calls
    groups: int = 0  # unfinished groups that began on it
    draining: bool = False  # an update is pending: no new requests
    held_until: float = 0.0  # monotonic seconds until which an evaluation delays updates
    behind: bool = False  # missed a publish, so it must be published to
    leaving: bool = False  # leaves the run: no new requests
    # Its last errors in a row: episode and seconds (`moerl.controller.turn_router`)
    errors: list[tuple[str, float]] = field(default_factory=list)


class EnginePool:
    """All engines of a run.  Used by one event loop."""

    def __init__(
        self,
        engines: Mapping[int, Engine],
        config: RolloutConfig,
        step_metrics: StepMetrics,
        tasks: TaskGroup,
        drop: Callable[[Iterable[str]], None],
    ) -> None:
        """No engine has a version yet.  drop: receives the blobs of late replies."""
        self._config, self._step_metrics, self._tasks = config, step_metrics, tasks
        self._drop = drop
        self.engines = {index: self._state(index, host) for index, host in engines.items()}
        self.incarnation: int | None = None  # of the trainer; None until it says hello

    # --- engines that accept requests ------------------------------------------------------------
    def serves(self, index: int) -> bool:
        """True if an engine is up and its weights belong to the current history."""
        engine = self.engines[index]
        if engine.phase != EnginePhase.UP or engine.draining or engine.leaving or engine.behind:
            return False
        return engine.version.incarnation == self.incarnation

    @property
    def num_serving(self) -> float:
        return float(sum(map(self.serves, self.engines)))

    def describe(self) -> str:
        """Engines that do not accept requests, in words."""
        return "; ".join(
            f"engine {index} is {engine.phase} at {engine.version}, {engine.generating} requests"
            for index, engine in self.engines.items()
        )

    def share(self, index: int, wanted: int) -> int:
        """Share of `wanted` groups for this engine, so that all engines have equally many.

        Engines on older weights do not count, because they may have no capacity, unless they are
        drained: then their update is about to end, and the first engine to get its own would
        otherwise take all.
        """
        engine = self.engines[index]
        rivals = [
            other.groups
            for place, other in self.engines.items()
            if self._is_drained(other) or (self.serves(place) and other.version >= engine.version)
        ]
        even = math.ceil((sum(rivals) + wanted) / max(1, len(rivals)))
        return max(0, min(wanted, even - engine.groups))

    @staticmethod
    def _is_drained(engine: EngineState) -> bool:
        waits = engine.draining and not engine.generating
        return waits and engine.phase == EnginePhase.UP and not (engine.leaving or engine.behind)

    @property
    def interrupts(self) -> bool:
        """True if a rollout may be interrupted and continue under other weights."""
        return self._config.in_flight_mode != "drain"

    @property
    def any_behind(self) -> bool:
        return any(engine.behind for engine in self.engines.values())

    @property
    def idle_s(self) -> float:
        """Seconds since any engine with requests made progress; infinite when none has requests."""
        return min((engine.calls.idle_s for engine in self.engines.values()), default=math.inf)

    def expect_trainer(self) -> None:
        """Raises ProtocolError before the trainer's hello."""
        if self.incarnation is None:
            raise ProtocolError(
                "the journal lost what this trainer has trained: "
                "it must restart from its checkpoint"
            )

    def expect_no_newer(self, incarnation: int) -> None:
        """Raises ProtocolError for an older incarnation: a disconnected trainer may still run."""
        if self.incarnation is not None and incarnation < self.incarnation:
            raise ProtocolError(
                f"trainer {incarnation} was replaced: {self.incarnation} is the newest one"
            )

    async def poll(
        self, lost: Collection[int], is_new_run: bool, kept: Sequence[str] | None, life: int
    ) -> None:
        """Ask every engine for its version, when a new controller takes over running engines.

        An engine that does not answer rests; status requests go on until it answers.

        kept: blobs of the groups that the controller knows; None: delete no other blobs.
        life: number of earlier controllers.
        """

        async def is_known(index: int, engine: EngineState) -> bool:
            if engine.phase == EnginePhase.LOST:
                return True
            try:
                await host_answer(engine.host.forget(kept, life), "forget")
                engine.version = (await host_answer(engine.host.status(), "status")).version
                await self._ask_fitness(index)
            except EngineError as error:
                log.warning("engine %d is asked again: %s", index, error)
                return False
            engine.behind |= engine.version == _MODEL_FOLDER and not is_new_run
            if engine.phase == EnginePhase.RESTING:
                engine.phase = EnginePhase.UP
            self._tasks.notify()
            return True

        async def ask_again(index: int, engine: EngineState) -> None:
            while not await is_known(index, engine):
                await asyncio.sleep(_REST_S)

        for index, engine in self.engines.items():
            engine.phase = EnginePhase.LOST if index in lost else EnginePhase.RESTING
            if not await is_known(index, engine):
                self._tasks.spawn(ask_again(index, engine))

    def rest(self, index: int) -> None:
        """The engine failed a call: pause it, unless its process dies."""
        engine = self.engines[index]
        if engine.phase == EnginePhase.UP:
            engine.phase = EnginePhase.RESTING
            self._tasks.spawn(self._wake(engine))

    async def _wake(self, engine: EngineState) -> None:
        await asyncio.sleep(_REST_S)
        if engine.phase == EnginePhase.RESTING:
            engine.phase = EnginePhase.UP
            self._tasks.notify()

    def lost(self, index: int) -> None:
        """The engine died and is being restarted: no requests until `back`."""
        engine = self.engines[index]
        engine.phase, engine.behind = EnginePhase.LOST, False

    def back(self, index: int, host: Engine) -> None:
        """The engine serves the model folder; it gets requests after its next publish."""
        engine = self.engines[index]  # calls to the dead engine may still have to fail
        engine.host, engine.version, engine.phase = host, _MODEL_FOLDER, EnginePhase.UP
        engine.calls.close("its process was replaced")
        engine.calls = self._calls(index, host)
        engine.draining, engine.behind = False, True
        engine.errors.clear()
        self._step_metrics.add("async/engine_restarts")
        self._tasks.notify()

    async def statuses(self) -> list[EngineStatus]:
        """Statuses of the engines that answer."""
        asked = {i: e.host for i, e in self.engines.items() if e.phase != EnginePhase.LOST}
        answers = (host_answer(host.status(), "status") for host in asked.values())
        found = await asyncio.gather(*answers, return_exceptions=True)
        for index, answer in zip(asked, found, strict=True):
            if isinstance(answer, EngineError):
                log.warning("engine %d: %s", index, answer)
            elif isinstance(answer, BaseException):
                raise answer
        return [answer for answer in found if isinstance(answer, EngineStatus)]

    # --- engines that join and leave --------------------------------------------------------------
    def join(self, index: int, host: Engine, *, is_new_run: bool) -> None:
        """Add a started engine that serves the model folder."""
        assert index not in self.engines, f"engine {index} is already in the run"
        self.engines[index] = self._state(index, host, behind=not is_new_run)
        self._tasks.notify()

    async def drain(self, index: int) -> None:
        """Stop sending requests to the engine; returns when none is running.

        Running requests are interrupted and continue elsewhere with their tokens so far; with
        in-flight mode `drain`, which promises one version per rollout, they finish here.  An
        evaluation may finish first, within evaluation.hold_s.
        """
        engine = self.engines[index]
        engine.leaving = True
        self._tasks.notify()
        while (left_s := engine.held_until - time.monotonic()) > 0:
            await self._tasks.wait_change(left_s)
        while engine.generating:
            if self.interrupts:
                with contextlib.suppress(EngineError):  # its calls fail too, and are retried
                    await host_answer(engine.host.interrupt(), "interrupt")
            await self._tasks.wait_change(_INTERRUPT_S)

    def remove(self, index: int) -> None:
        """Remove a drained engine to which the trainer has stopped publishing."""
        self.engines.pop(index).calls.close("it left the run")
        self._tasks.notify()

    def table(self) -> list[dict[str, object]]:
        """State of each engine, for `moerl engines list`."""
        return [
            {
                "engine": index,
                "state": "leaving"
                if engine.leaving
                else "behind"
                if engine.behind
                else engine.phase,
                "version": str(engine.version),
                "requests": engine.generating,
            }
            for index, engine in sorted(self.engines.items())
        ]

    def _state(self, index: int, host: Engine, *, behind: bool = False) -> EngineState:
        return EngineState(host, self._calls(index, host), behind=behind)

    def _calls(self, index: int, host: Engine) -> EngineCalls:
        limit_s = self._config.progress_timeout_s

        def stalled(requests: int) -> None:
            self._step_metrics.add("async/stalled_requests", requests)
            self.rest(index)

        return EngineCalls(index, host, self._tasks, limit_s, self._drop, stalled)

    def _engine(self, index: int) -> EngineState:
        if index not in self.engines:
            known = ", ".join(map(str, sorted(self.engines)))
            raise EngineError(f"engine {index} is not in this run, its engines are {known}")
        return self.engines[index]

    # --- weight updates -------------------------------------------------------------------------
    async def _wait_drained(self, index: int, to_come: Callable[[PolicyVersion], int]) -> None:
        """Before an update: wait for a running evaluation; with `drain` for all requests; with a
        fixed lag for all groups that began here, and until `to_come` is 0.

        Raises EngineError after rollout.drain_timeout_s.
        """
        engine, config = self._engine(index), self._config
        while (left_s := engine.held_until - time.monotonic()) > 0:
            await self._tasks.wait_change(left_s)
        if config.in_flight_mode != "drain" or engine.phase != EnginePhase.UP:
            return
        exact = config.fixed_lag >= 0

        def unsettled() -> int:
            if engine.phase != EnginePhase.UP or engine.behind:
                return 0  # it failed; its groups continue elsewhere, or here after the update
            return engine.groups + to_come(engine.version) if exact else engine.generating

        engine.draining = not exact
        begin = asyncio.get_running_loop().time()
        while unsettled():
            if asyncio.get_running_loop().time() - begin > config.drain_timeout_s:
                kind = "groups" if exact else "requests"
                raise EngineError(
                    f"engine {index}: {unsettled()} {kind} did not finish within "
                    f"rollout.drain_timeout_s = {config.drain_timeout_s:g} s before an update"
                )
            await self._tasks.wait_change(1.0)

    async def session(
        self, message: SessionMessage, to_come: Callable[[PolicyVersion], int]
    ) -> Message:
        """Forward a message of a publish session; the engine reports whether it can continue.

        to_come(version): groups that still need this version; with a fixed lag an update waits
        until it is 0.
        """
        engine = self._engine(message.engine)
        try:
            if isinstance(message, CommitUpdate):
                await self._wait_drained(message.engine, to_come)
            asked = self._answering(message.engine).session(message)
            limit_s = 0.0 if isinstance(message, AskEngine) else message.timeout_s
            reply = await host_answer(asked, type(message).__name__, limit_s)
        except EngineError as error:
            engine.draining = False
            with contextlib.suppress(EngineError):
                await self._ask_fitness(message.engine)
            raise EngineError(f"engine {message.engine}: {error}") from error
        if isinstance(message, CommitUpdate) and isinstance(reply, UpdateDone):
            if engine.phase not in (EnginePhase.LOST, EnginePhase.ASLEEP):
                engine.phase = EnginePhase.UP
            self._updated(engine, message.version, reply)
        return reply

    def _updated(self, engine: EngineState, version: PolicyVersion, closed: UpdateDone) -> None:
        engine.version, engine.draining, engine.behind = version, False, False
        self._step_metrics.add("async/sync_pause_s", closed.pause_s)
        self._step_metrics.add("async/interrupts", closed.aborted)
        self._step_metrics.add("async/recomputed_tokens", closed.recomputed)
        self._tasks.notify()

    def _answering(self, index: int) -> Engine:
        """The engine, for an update.  Raises EngineError while it restarts or after it left."""
        engine = self._engine(index)
        if engine.phase == EnginePhase.LOST:
            raise EngineError(f"engine {index} is being started again")
        return engine.host

    async def _ask_fitness(self, index: int) -> None:
        """Suspend an unfit engine until a commit.  Raises EngineError without an answer."""
        engine = self.engines[index]
        holds = await host_answer(engine.host.session(AskEngine(index)), "AskEngine")
        # only now: its death may have been reported meanwhile
        if engine.phase in (EnginePhase.LOST, EnginePhase.SUSPENDED) or engine.leaving:
            return
        if isinstance(holds, EngineVersion) and holds.asleep:
            engine.phase = EnginePhase.ASLEEP
        elif isinstance(holds, EngineVersion) and holds.cause:
            log.warning("engine %d is suspended until a full publish: %s", index, holds.cause)
            self._step_metrics.add("async/engines_suspended")
            engine.phase = EnginePhase.SUSPENDED


Engines = tuple[SyncTarget, ...]


class SyncTargets:
    """The engines that the trainer publishes to, with their sizes."""

    def __init__(self, config: EngineConfig, sizes: Mapping[int, int], *, changed: bool) -> None:
        """Start with the configured engines; sizes: tensor-parallel ranks by engine.

        changed: an earlier controller may have sent the living trainer other engines.
        """
        self._configured = engines_of(config.sizes)
        self._sizes = dict(sizes)
        self._published_to: Engines | None = None if changed else self._configured
        self._taken: Engines | None = self._published_to  # the set that the trainer has in effect

    def join(self, engine: int, tp: int) -> None:
        self._sizes[engine] = tp

    def remove(self, engine: int) -> None:
        """Stop publishing to it; `is_free` is True when the trainer has."""
        del self._sizes[engine]

    def is_free(self, engine: int) -> bool:
        return self._taken is not None and all(one.engine != engine for one in self._taken)

    def begin(self) -> SetEngines | None:
        """The trainer says hello: returns the set to send it, if it differs."""
        self._published_to = self._taken = self._configured
        return self.pending_update()

    def acknowledge(self) -> None:
        """The trainer asks for a plan: the set sent last is in effect."""
        self._taken = self._published_to

    def pending_update(self) -> SetEngines | None:
        """The set to send before the next plan, once; None if unchanged."""
        now = engines_of(self._sizes)
        if now == self._published_to:
            return None
        self._published_to = now
        return SetEngines(now)


def engines_of(sizes: Mapping[int, int]) -> Engines:
    return tuple(SyncTarget(index, sizes[index]) for index in sorted(sizes))
