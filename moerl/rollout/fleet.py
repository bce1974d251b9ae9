"""The engines as the controller knows them: one state each, its version, and its weight updates.

    UP         may be sent requests
    RESTING    failed a call and did not die: used again after a pause
    SUSPENDED  left itself out (a commit failed, it did not answer): a whole publish brings it back
    LOST       its process died and is started again

Engines join while the run goes on (`join`) and leave it (`drain`, then `remove`); a number is never
given twice.  One that joins gets requests once it was published to, or serves the newest weights.

Whether an engine that is up also serves weights of the surviving history is asked for every request
(`serves`): after a restart of the trainer it does not until it was published to.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from moerl.config.schema import RolloutConfig
from moerl.errors import EngineError, ProtocolError, RecordError
from moerl.messages import (
    AskEngine,
    CommitUpdate,
    Engine,
    EngineHolds,
    EngineStatus,
    Message,
    SessionMessage,
    UpdateClosed,
)
from moerl.rollout.blob_uris import blob_uris
from moerl.rollout.ledger import Ledger
from moerl.rollout.loops import Loops
from moerl.types import GenerateRequest, PolicyVersion, Segment

log = logging.getLogger(__name__)

_REST_S = 2.0  # before an engine that failed a call and did not die is used again
_INTERRUPT_S = 0.2  # between interrupts of an engine that leaves: a request may be on its way
_ANSWER_S = 10.0  # for what needs no work of an engine, and beyond the deadline of what does
_MODEL_FOLDER = PolicyVersion(0, 0)  # what an engine serves when it starts

T = TypeVar("T")


class State(StrEnum):
    UP = "up"
    RESTING = "resting"
    SUSPENDED = "suspended"
    LOST = "lost"


@dataclass(slots=True, eq=False)
class Member:
    """One engine."""

    engine: Engine
    version: PolicyVersion = _MODEL_FOLDER
    state: State = State.UP
    generating: int = 0  # groups in its calls
    draining: bool = False  # it starts nothing until the update that is being made
    held_until: float = 0.0  # monotonic seconds: an evaluation keeps updates waiting
    behind: bool = False  # it was started, or joined, after a publish, and is to be published to
    leaving: bool = False  # it starts nothing any more


class Fleet:
    """All engines of a run; one event loop owns it."""

    def __init__(
        self,
        engines: Mapping[int, Engine],
        config: RolloutConfig,
        ledger: Ledger,
        loops: Loops,
    ) -> None:
        self.members = {index: Member(engine) for index, engine in engines.items()}
        self.incarnation: int | None = None  # of the trainer; unknown until it says hello
        self._config, self._ledger, self._loops = config, ledger, loops

    # --- who may be sent requests ---------------------------------------------------------------
    def serves(self, index: int) -> bool:
        """Whether an engine may be sent requests: it is up, and on weights of this history."""
        member = self.members[index]
        if member.state != State.UP or member.draining or member.leaving or member.behind:
            return False
        return member.version.incarnation == self.incarnation

    @property
    def num_serving(self) -> float:
        return float(sum(map(self.serves, self.members)))

    def describe(self) -> str:
        """Who is waited for, in words."""
        return "; ".join(
            f"engine {index} is {member.state} at {member.version}, {member.generating} groups"
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

    def expect_gang(self) -> None:
        """Raises ProtocolError when no gang has said hello."""
        if self.incarnation is None:
            raise ProtocolError(
                "the journal lost what this gang has trained: it has to start from its checkpoint"
            )

    def expect_no_newer(self, incarnation: int) -> None:
        """Raises ProtocolError: a gang that was cut off may live on beside its successor."""
        if self.incarnation is not None and incarnation < self.incarnation:
            raise ProtocolError(
                f"gang {incarnation} was replaced: {self.incarnation} is the newest one"
            )

    async def look(
        self, lost: Collection[int], is_new_run: bool, kept: Sequence[str] | None
    ) -> None:
        """Ask every engine what it serves: for a controller that takes over a running fleet.

        kept: blobs of the groups that it knows; None: no other is deleted.
        """
        for index, member in self.members.items():
            if index in lost:
                member.state = State.LOST
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
        if member.state == State.UP:
            member.state = State.RESTING
            self._loops.spawn(self._wake(member))

    async def _wake(self, member: Member) -> None:
        await asyncio.sleep(_REST_S)
        if member.state == State.RESTING:
            member.state = State.UP
            self._loops.notify()

    def lost(self, index: int) -> None:
        """The engine died and is started again: nothing is sent to it until it is back."""
        member = self.members[index]
        member.state, member.behind = State.LOST, False

    def back(self, index: int, engine: Engine) -> None:
        """The engine serves the model folder; it gets requests once it was published to."""
        member = self.members[index]  # calls to the dead engine may still have to fail
        member.engine, member.version, member.state = engine, _MODEL_FOLDER, State.UP
        member.draining, member.behind = False, True
        self._ledger.engine_restarts += 1
        self._loops.notify()

    async def statuses(self) -> list[EngineStatus]:
        """Of the engines that answer."""
        asked = {i: m.engine for i, m in self.members.items() if m.state != State.LOST}
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
        self.members[index] = Member(engine, behind=not is_new_run)
        self._loops.notify()

    async def drain(self, index: int) -> None:
        """Start nothing on the engine any more; returns when nothing runs on it.

        What runs is interrupted, so that it goes on elsewhere with what it has; with `drain`, which
        promises one version per rollout, it ends here.  An evaluation may end first, within
        evaluation.hold_s.
        """
        member = self.members[index]
        member.leaving = True
        self._loops.notify()
        while (left_s := member.held_until - time.monotonic()) > 0:
            await self._loops.wait_change(left_s)
        while member.generating:
            if self.interrupts:
                with contextlib.suppress(EngineError):  # its calls fail too, and go on elsewhere
                    await _answer(member.engine.interrupt(), "interrupt")
            await self._loops.wait_change(_INTERRUPT_S)

    def remove(self, index: int) -> None:
        """A drained engine that nothing is published to any more."""
        del self.members[index]
        self._loops.notify()

    def table(self) -> list[dict[str, object]]:
        """What each engine does, for people."""
        return [
            {
                "engine": index,
                "state": "leaving"
                if member.leaving
                else "behind"
                if member.behind
                else member.state,
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
            self._loops.spawn(_drop_late(call, drop))
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

    def _member(self, index: int) -> Member:
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
            await self._loops.wait_change(left_s)
        if config.in_flight_mode != "drain" or member.state != State.UP:
            return
        exact = config.fixed_lag >= 0

        def unsettled() -> int:
            if member.state != State.UP:
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
            await self._loops.wait_change(1.0)

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
            if member.state != State.LOST:
                member.state = State.UP
            self._updated(member, message.version, reply)
        return reply

    def _updated(self, member: Member, version: PolicyVersion, closed: UpdateClosed) -> None:
        member.version, member.draining, member.behind = version, False, False
        self._ledger.update_closed(closed)
        self._loops.notify()

    def _answering(self, index: int) -> Engine:
        """The engine, for an update.  Raises EngineError while it is started again, or is gone."""
        member = self._member(index)
        if member.state == State.LOST:
            raise EngineError(f"engine {index} is being started again")
        return member.engine

    async def _ask_fitness(self, index: int) -> None:
        """An engine that suspended itself gets no requests until a commit brings it back."""
        member = self.members[index]
        if member.state in (State.LOST, State.SUSPENDED) or member.leaving:
            return
        with contextlib.suppress(EngineError):
            holds = await _answer(member.engine.session(AskEngine(index)), "AskEngine")
            if isinstance(holds, EngineHolds) and holds.cause:
                log.warning("engine %d is left out until it is refreshed: %s", index, holds.cause)
                self._ledger.engines_suspended += 1
                member.state = State.SUSPENDED


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
