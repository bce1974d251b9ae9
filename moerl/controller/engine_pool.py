"""The engines as the controller knows them: one state each, its version, and its weight updates.

    UP         may be sent requests
    RESTING    failed a call and did not die: used again after a pause
    SUSPENDED  left itself out (a commit failed, it did not answer): a whole publish brings it back
    LOST       its process died and is started again

Engines join while the run goes on (`join`) and leave it (`drain`, then `remove`); a number is never
given twice.  One that joins gets requests once it was published to, or serves the newest weights.

Whether an engine that is up also serves weights of the surviving history is asked for every request
(`serves`): after a restart of the trainer it does not until it was published to.

Which engines the trainer publishes to: what it was told last, and what it must be told next.

A trainer opens its publisher for the configured engines.  Where others are in the run, it is told
with its hello or instead of its next plan (`SetEngines`), and has taken that in when it asks again;
an engine that leaves is not ended before.

Which engine has a prompt's leading tokens in its prefix cache, as far as anyone can tell here.

An engine keeps what it was sent under its present weights; every update empties its cache, so what
is known of it is forgotten with its version.  Prompts are remembered by digests of their leading
tokens, at every `CHUNK` tokens and at their end.  The engine's own evictions are not seen: a wrong
guess costs one prefill, never correctness.

A group goes to the engine that knows most of its prompt, if that is at least half of it and one
chunk, unless that engine has too many groups more than the least busy one (the two thresholds of
SGLang's cache-aware router, the second one counted in groups).
Rejected: that router itself in front of the engines (a call names its engine here, because weight
updates, versions and routes are per engine); a tree of tokens (a set of digests answers the same
question for prompts that repeat or share a head).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import TypeVar

import numpy as np
import xxhash

from moerl.config.schema import EngineConfig, RolloutConfig
from moerl.controller.rollout_builder import blob_uris
from moerl.controller.step_metrics import StepMetrics
from moerl.controller.task_group import TaskGroup
from moerl.errors import EngineError, ProtocolError, RecordError
from moerl.messages import (
    AskEngine,
    CommitUpdate,
    Engine,
    EngineHolds,
    EngineStatus,
    Message,
    SessionMessage,
    SetEngines,
    SyncTarget,
    UpdateClosed,
)
from moerl.types import Array, GenerateRequest, PolicyVersion, Segment

log = logging.getLogger(__name__)


_REST_S = 2.0  # before an engine that failed a call and did not die is used again


_INTERRUPT_S = 0.2  # between interrupts of an engine that leaves: a request may be on its way


_ANSWER_S = 10.0  # for what needs no work of an engine, and beyond the deadline of what does


_MODEL_FOLDER = PolicyVersion(0, 0)  # what an engine serves when it starts


T = TypeVar("T")


class EnginePhase(StrEnum):
    UP = "up"
    RESTING = "resting"
    SUSPENDED = "suspended"
    LOST = "lost"


@dataclass(slots=True, eq=False)
class EngineState:
    """One engine."""

    engine: Engine
    version: PolicyVersion = _MODEL_FOLDER
    phase: EnginePhase = EnginePhase.UP
    generating: int = 0  # groups in its calls
    draining: bool = False  # it starts nothing until the update that is being made
    held_until: float = 0.0  # monotonic seconds: an evaluation keeps updates waiting
    behind: bool = False  # it was started, or joined, after a publish, and is to be published to
    leaving: bool = False  # it starts nothing any more


class EnginePool:
    """All engines of a run; one event loop owns it."""

    def __init__(
        self,
        engines: Mapping[int, Engine],
        config: RolloutConfig,
        step_metrics: StepMetrics,
        tasks: TaskGroup,
    ) -> None:
        self.members = {index: EngineState(engine) for index, engine in engines.items()}
        self.incarnation: int | None = None  # of the trainer; unknown until it says hello
        self._config, self._step_metrics, self._tasks = config, step_metrics, tasks

    # --- who may be sent requests ---------------------------------------------------------------
    def serves(self, index: int) -> bool:
        """Whether an engine may be sent requests: it is up, and on weights of this history."""
        member = self.members[index]
        if member.phase != EnginePhase.UP or member.draining or member.leaving or member.behind:
            return False
        return member.version.incarnation == self.incarnation

    @property
    def num_serving(self) -> float:
        return float(sum(map(self.serves, self.members)))

    def describe(self) -> str:
        """Who is waited for, in words."""
        return "; ".join(
            f"engine {index} is {member.phase} at {member.version}, {member.generating} groups"
            for index, member in self.members.items()
        )

    def share(self, index: int, wanted: int) -> int:
        """Of so many new groups, those for this engine: then all have equally many to generate.

        Engines on older weights do not count: they may have no room left to start anything.
        """
        member = self.members[index]
        rivals = [
            other.generating
            for place, other in self.members.items()
            if self.serves(place) and other.version >= member.version
        ]
        even = math.ceil((sum(rivals) + wanted) / max(1, len(rivals)))
        return max(0, min(wanted, even - member.generating))

    @property
    def interrupts(self) -> bool:
        """Whether a rollout may be cut and go on elsewhere, under other weights."""
        return self._config.in_flight_mode != "drain"

    @property
    def any_behind(self) -> bool:
        return any(member.behind for member in self.members.values())

    def expect_trainer(self) -> None:
        """Raises ProtocolError when no trainer has said hello."""
        if self.incarnation is None:
            raise ProtocolError(
                "the journal lost what this trainer has trained: "
                "it has to start from its checkpoint"
            )

    def expect_no_newer(self, incarnation: int) -> None:
        """Raises ProtocolError: a trainer that was cut off may live on beside its successor."""
        if self.incarnation is not None and incarnation < self.incarnation:
            raise ProtocolError(
                f"trainer {incarnation} was replaced: {self.incarnation} is the newest one"
            )

    async def poll(
        self, lost: Collection[int], is_new_run: bool, kept: Sequence[str] | None
    ) -> None:
        """Ask every engine what it serves: for a controller that takes over a running fleet.

        kept: blobs of the groups that it knows; None: no other is deleted.
        """
        for index, member in self.members.items():
            if index in lost:
                member.phase = EnginePhase.LOST
                continue
            try:
                await _answer(member.engine.forget(kept), "forget")
                member.version = (await _answer(member.engine.status(), "status")).version
            except EngineError:
                self.rest(index)
                continue
            member.behind = member.version == _MODEL_FOLDER and not is_new_run
            await self._ask_fitness(index)

    def rest(self, index: int) -> None:
        """The engine failed a call: if it does not die of it, it is used again after a while."""
        member = self.members[index]
        if member.phase == EnginePhase.UP:
            member.phase = EnginePhase.RESTING
            self._tasks.spawn(self._wake(member))

    async def _wake(self, member: EngineState) -> None:
        await asyncio.sleep(_REST_S)
        if member.phase == EnginePhase.RESTING:
            member.phase = EnginePhase.UP
            self._tasks.notify()

    def lost(self, index: int) -> None:
        """The engine died and is started again: nothing is sent to it until it is back."""
        member = self.members[index]
        member.phase, member.behind = EnginePhase.LOST, False

    def back(self, index: int, engine: Engine) -> None:
        """The engine serves the model folder; it gets requests once it was published to."""
        member = self.members[index]  # calls to the dead engine may still have to fail
        member.engine, member.version, member.phase = engine, _MODEL_FOLDER, EnginePhase.UP
        member.draining, member.behind = False, True
        self._step_metrics.engine_restarts += 1
        self._tasks.notify()

    async def statuses(self) -> list[EngineStatus]:
        """Of the engines that answer."""
        asked = {i: m.engine for i, m in self.members.items() if m.phase != EnginePhase.LOST}
        answers = (_answer(engine.status(), "status") for engine in asked.values())
        found = await asyncio.gather(*answers, return_exceptions=True)
        for index, answer in zip(asked, found, strict=True):
            if isinstance(answer, EngineError):
                log.warning("engine %d: %s", index, answer)
            elif isinstance(answer, BaseException):
                raise answer
        return [answer for answer in found if isinstance(answer, EngineStatus)]

    # --- engines that join and leave --------------------------------------------------------------
    def join(self, index: int, engine: Engine, *, is_new_run: bool) -> None:
        """A started engine, which serves the model folder."""
        assert index not in self.members, f"engine {index} is in the fleet"
        self.members[index] = EngineState(engine, behind=not is_new_run)
        self._tasks.notify()

    async def drain(self, index: int) -> None:
        """Start nothing on the engine any more; returns when nothing runs on it.

        What runs is interrupted, so that it goes on elsewhere with what it has; with `drain`, which
        promises one version per rollout, it ends here.  An evaluation may end first, within
        evaluation.hold_s.
        """
        member = self.members[index]
        member.leaving = True
        self._tasks.notify()
        while (left_s := member.held_until - time.monotonic()) > 0:
            await self._tasks.wait_change(left_s)
        while member.generating:
            if self.interrupts:
                with contextlib.suppress(EngineError):  # its calls fail too, and go on elsewhere
                    await _answer(member.engine.interrupt(), "interrupt")
            await self._tasks.wait_change(_INTERRUPT_S)

    def remove(self, index: int) -> None:
        """A drained engine that nothing is published to any more."""
        del self.members[index]
        self._tasks.notify()

    def table(self) -> list[dict[str, object]]:
        """What each engine does, for people."""
        return [
            {
                "engine": index,
                "state": "leaving"
                if member.leaving
                else "behind"
                if member.behind
                else member.phase,
                "version": str(member.version),
                "groups": member.generating,
            }
            for index, member in sorted(self.members.items())
        ]

    def engine(self, index: int) -> Engine:
        """Raises EngineError when it left the run."""
        return self._member(index).engine

    async def generate(
        self,
        index: int,
        requests: Sequence[GenerateRequest],
        limit_s: float,
        drop: Callable[[Iterable[str]], None],
    ) -> list[Segment | RecordError]:
        """One engine call.  drop: takes the blobs of replies that the caller does not get.

        Raises EngineError: it failed, was late, or answered something else.  An engine goes on with
        a call that nobody waits for, and seals what comes of it.
        """
        call = asyncio.ensure_future(self.engine(index).generate(requests))
        try:
            async with asyncio.timeout(limit_s):
                replies = await asyncio.shield(call)
        except TimeoutError as error:
            self._tasks.spawn(_drop_late(call, drop))
            raise EngineError(
                f"engine {index} did not answer {len(requests)} requests within {limit_s:g} s"
            ) from error
        except asyncio.CancelledError:
            call.cancel()
            raise
        if len(replies) != len(requests):
            drop(blob_uris(*replies))
            raise EngineError(f"engine {index}: {len(replies)} replies to {len(requests)} requests")
        return replies

    def _member(self, index: int) -> EngineState:
        if index not in self.members:
            known = ", ".join(map(str, sorted(self.members)))
            raise EngineError(f"engine {index} is not in this run, its engines are {known}")
        return self.members[index]

    # --- weight updates -------------------------------------------------------------------------
    async def _settle(self, index: int, to_come: Callable[[PolicyVersion], int]) -> None:
        """Before an update: no evaluation is cut, with `drain` no request at all; with a fixed lag
        none is left to start.

        Raises EngineError after rollout.request_timeout_s.
        """
        member, config = self._member(index), self._config
        while (left_s := member.held_until - time.monotonic()) > 0:
            await self._tasks.wait_change(left_s)
        if config.in_flight_mode != "drain" or member.phase != EnginePhase.UP:
            return
        exact = config.fixed_lag >= 0

        def unsettled() -> int:
            if member.phase != EnginePhase.UP:
                return 0  # it failed, and what it had goes on elsewhere
            return member.generating + (to_come(member.version) if exact else 0)

        member.draining = not exact
        begin = time.monotonic()
        while unsettled():
            if time.monotonic() - begin > config.request_timeout_s:
                raise EngineError(
                    f"engine {index}: {unsettled()} groups did not finish within "
                    f"rollout.request_timeout_s = {config.request_timeout_s:g} s before an update"
                )
            await self._tasks.wait_change(1.0)

    async def session(
        self, message: SessionMessage, to_come: Callable[[PolicyVersion], int]
    ) -> Message:
        """Pass a step of a publish session on; the engine itself says whether it is still fit.

        to_come: groups beside those in a call that a version of an engine is still needed for; with
        a fixed lag an update waits for them.
        """
        member = self._member(message.engine)
        try:
            if isinstance(message, CommitUpdate):
                await self._settle(message.engine, to_come)
            asked = self._answering(message.engine).session(message)
            limit_s = 0.0 if isinstance(message, AskEngine) else message.timeout_s
            reply = await _answer(asked, type(message).__name__, limit_s)
        except EngineError as error:
            member.draining = False
            await self._ask_fitness(message.engine)
            raise EngineError(f"engine {message.engine}: {error}") from error
        if isinstance(message, CommitUpdate) and isinstance(reply, UpdateClosed):
            if member.phase != EnginePhase.LOST:
                member.phase = EnginePhase.UP
            self._updated(member, message.version, reply)
        return reply

    def _updated(self, member: EngineState, version: PolicyVersion, closed: UpdateClosed) -> None:
        member.version, member.draining, member.behind = version, False, False
        self._step_metrics.update_closed(closed)
        self._tasks.notify()

    def _answering(self, index: int) -> Engine:
        """The engine, for an update.  Raises EngineError while it is started again, or is gone."""
        member = self._member(index)
        if member.phase == EnginePhase.LOST:
            raise EngineError(f"engine {index} is being started again")
        return member.engine

    async def _ask_fitness(self, index: int) -> None:
        """An engine that suspended itself gets no requests until a commit brings it back."""
        member = self.members[index]
        if member.phase in (EnginePhase.LOST, EnginePhase.SUSPENDED) or member.leaving:
            return
        with contextlib.suppress(EngineError):
            holds = await _answer(member.engine.session(AskEngine(index)), "AskEngine")
            if isinstance(holds, EngineHolds) and holds.cause:
                log.warning("engine %d is left out until it is refreshed: %s", index, holds.cause)
                self._step_metrics.engines_suspended += 1
                member.phase = EnginePhase.SUSPENDED


async def _drop_late(
    call: asyncio.Future[list[Segment | RecordError]], drop: Callable[[Iterable[str]], None]
) -> None:
    with contextlib.suppress(Exception):  # nobody waits for what it says
        drop(blob_uris(*await call))


async def _answer(work: Awaitable[T], what: str, limit_s: float = 0.0) -> T:
    """Raises EngineError: the host failed, or hangs.  limit_s: that it gives itself."""
    limit_s += _ANSWER_S
    try:
        async with asyncio.timeout(limit_s):
            return await work
    except TimeoutError as error:
        raise EngineError(f"no answer to {what} within {limit_s:g} s") from error


Engines = tuple[SyncTarget, ...]


class SyncTargets:
    """The engines of a run, by number, with their sizes."""

    def __init__(self, config: EngineConfig, sizes: Mapping[int, int], *, changed: bool) -> None:
        """sizes: tensor-parallel ranks by engine.

        changed: the trainer that lives may have been told of other engines by an earlier
        controller.
        """
        self._configured = engines_of(config.sizes)
        self._sizes = dict(sizes)
        self._published_to: Engines | None = None if changed else self._configured
        self._taken: Engines | None = self._published_to  # what the trainer has taken in

    def join(self, engine: int, tp: int) -> None:
        self._sizes[engine] = tp

    def remove(self, engine: int) -> None:
        """Publish to it no more; `is_free` says when nobody does."""
        del self._sizes[engine]

    def is_free(self, engine: int) -> bool:
        return self._taken is not None and all(one.engine != engine for one in self._taken)

    def begin(self) -> SetEngines | None:
        """A trainer says hello: what it must be told, if anything."""
        self._published_to = self._taken = self._configured
        return self.pending_update()

    def taken_in(self) -> None:
        """The trainer asks for a plan: it has taken in what it was told last."""
        self._taken = self._published_to

    def pending_update(self) -> SetEngines | None:
        """What the trainer must be told before its next plan, once."""
        now = engines_of(self._sizes)
        if now == self._published_to:
            return None
        self._published_to = now
        return SetEngines(now)


def engines_of(sizes: Mapping[int, int]) -> Engines:
    return tuple(SyncTarget(index, sizes[index]) for index in sorted(sizes))


CHUNK = 64  # tokens


class PrefixIndex:
    """What each engine was sent under the weights it serves."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[PolicyVersion, set[bytes]]] = {}

    def sent(self, engine: int, version: PolicyVersion, prompt: Sequence[int]) -> None:
        """The engine, serving `version`, is about to prefill this prompt."""
        held, digests = self._known.get(engine, (version, set()))
        if held != version:
            digests = set()
        digests.update(digest for _, digest in _leads(prompt))
        self._known[engine] = version, digests

    def forget(self, engine: int) -> None:
        """It left the run."""
        self._known.pop(engine, None)

    def length(self, engine: int, version: PolicyVersion, prompt: Sequence[int]) -> int:
        """Leading tokens of a prompt that the engine was sent under this version."""
        held, digests = self._known.get(engine, (None, set[bytes]()))
        if held != version:
            return 0
        known = 0
        for length, digest in _leads(prompt):
            if digest not in digests:
                break
            known = length
        return known


def _leads(prompt: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Lengths and digests of the prompt's leads, shortest first; the whole prompt is the last."""
    tokens: Array = np.asarray(prompt, np.int32)
    state = xxhash.xxh3_64()
    ends = [*range(0, len(tokens), CHUNK), len(tokens)]
    for begin, end in pairwise(ends):
        state.update(tokens[begin:end].tobytes())
        yield end, state.digest()
