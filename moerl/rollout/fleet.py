"""The engines as the controller knows them: one state each, its version, and its weight updates.

    UP         may be sent requests
    RESTING    failed a call and did not die: used again after a pause
    SUSPENDED  left itself out (a commit failed, it did not answer): a whole publish brings it back
    LOST       its process died and is started again

Whether an engine that is up also serves weights of the surviving history is asked for every request
(`serves`): after a restart of the trainer it does not until it was published to.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from moerl.config.schema import RolloutConfig
from moerl.errors import EngineError
from moerl.protocols import (
    AskEngine,
    CloseUpdate,
    CommitUpdate,
    Engine,
    EngineHolds,
    EngineStatus,
    JoinSync,
    Message,
    OpenUpdate,
    SessionMessage,
    UpdateClosed,
)
from moerl.rollout.ledger import Ledger
from moerl.rollout.loops import Loops
from moerl.types import PolicyVersion

log = logging.getLogger(__name__)

_REST_S = 2.0  # before an engine that failed a call and did not die is used again
_MODEL_FOLDER = PolicyVersion(0, 0)  # what an engine serves when it starts


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
    behind: bool = False  # it was started again and not published to yet


class Fleet:
    """All engines of a run; one event loop owns it."""

    def __init__(
        self,
        engines: Sequence[Engine],
        config: RolloutConfig,
        ledger: Ledger,
        loops: Loops,
        to_come: Callable[[PolicyVersion], int],
    ) -> None:
        """to_come: groups beside those in a call that a version of an engine is still needed for;
        with a fixed lag an update waits for them.
        """
        self.members = [Member(engine) for engine in engines]
        self.incarnation: int | None = None  # of the trainer; unknown until it says hello
        self._config, self._ledger, self._loops = config, ledger, loops
        self._to_come = to_come

    # --- who may be sent requests ---------------------------------------------------------------
    def serves(self, index: int) -> bool:
        """Whether an engine may be sent requests: it is up, and on weights of this history."""
        member = self.members[index]
        if member.state != State.UP or member.draining:
            return False
        return member.version.incarnation == self.incarnation

    def describe(self) -> str:
        """Who is waited for, in words."""
        return "; ".join(
            f"engine {index} is {member.state} at {member.version}, {member.generating} groups"
            for index, member in enumerate(self.members)
        )

    def is_least_busy(self, index: int) -> bool:
        """Whether no engine on weights as new as this one's has fewer groups to generate.

        Engines on older weights do not count: they may have no room left to start anything.
        """
        member = self.members[index]
        rivals = (
            other.generating
            for place, other in enumerate(self.members)
            if self.serves(place) and other.version >= member.version
        )
        return member.generating <= min(rivals, default=0)

    @property
    def any_behind(self) -> bool:
        return any(member.behind for member in self.members)

    async def look(self, lost: Collection[int], is_new_run: bool) -> None:
        """Ask every engine what it serves: for a controller that takes over a running fleet."""
        for index, member in enumerate(self.members):
            if index in lost:
                member.state = State.LOST
                continue
            try:
                member.version = (await member.engine.status()).version
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
        found = []
        for member in self.members:
            if member.state != State.LOST:
                with contextlib.suppress(EngineError):
                    found.append(await member.engine.status())
        return found

    # --- weight updates -------------------------------------------------------------------------
    async def _settle(self, index: int) -> None:
        """Before an update: no evaluation is cut, with `drain` no request at all; with a fixed lag
        none is left to start.

        Raises EngineError after rollout.request_timeout_s.
        """
        member, config = self.members[index], self._config
        while (left_s := member.held_until - time.monotonic()) > 0:
            await self._loops.wait_change(left_s)
        if config.in_flight_mode != "drain" or member.state != State.UP:
            return
        exact = config.fixed_lag >= 0

        def unsettled() -> int:
            if member.state != State.UP:
                return 0  # it failed, and what it had goes on elsewhere
            return member.generating + (self._to_come(member.version) if exact else 0)

        member.draining = not exact
        begin = time.monotonic()
        while unsettled():
            if time.monotonic() - begin > config.request_timeout_s:
                raise EngineError(
                    f"engine {index}: {unsettled()} groups did not finish within "
                    f"rollout.request_timeout_s = {config.request_timeout_s:g} s before an update"
                )
            await self._loops.wait_change(1.0)

    async def join_sync(self, message: JoinSync) -> None:
        await self._answering(message.engine).join_sync(message)

    async def open_update(self, message: OpenUpdate) -> None:
        await self._settle(message.engine)
        await self._answering(message.engine).open_update(message)

    async def close_update(self, message: CloseUpdate) -> UpdateClosed:
        closed = await self._answering(message.engine).close_update(message)
        self._updated(self.members[message.engine], message.version, closed)
        return closed

    async def session(self, message: SessionMessage) -> Message:
        """Pass a step of a publish session on; the engine itself says whether it is still fit."""
        member = self.members[message.engine]
        try:
            if isinstance(message, CommitUpdate):
                await self._settle(message.engine)
            reply = await self._answering(message.engine).session(message)
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
        """The engine, for an update.  Raises EngineError while it is started again."""
        if self.members[index].state == State.LOST:
            raise EngineError(f"engine {index} is being started again")
        return self.members[index].engine

    async def _ask_fitness(self, index: int) -> None:
        """An engine that suspended itself gets no requests until a commit brings it back."""
        member = self.members[index]
        if member.state in (State.LOST, State.SUSPENDED):
            return
        with contextlib.suppress(EngineError):
            holds = await member.engine.session(AskEngine(index))
            if isinstance(holds, EngineHolds) and holds.cause:
                log.warning("engine %d is left out until it is refreshed: %s", index, holds.cause)
                self._ledger.engines_suspended += 1
                member.state = State.SUSPENDED
