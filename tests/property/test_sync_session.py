"""Publish sessions that fail in every phase: no version is half taken, no engine forgotten."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from moerl.config.schema import ParallelConfig
from moerl.core.errors import EngineError, TransportError
from moerl.core.messages import (
    AbortUpdate,
    AskEngine,
    CommitUpdate,
    EngineVersion,
    Message,
    Ok,
    PrepareUpdate,
    PublishFailure,
    PublishResult,
    RelayUpdate,
    SendResult,
    SendVersion,
    Sent,
    UpdateDone,
    UpdatePrepared,
    UpdateVerified,
    VerifyUpdate,
    WriteUpdate,
)
from moerl.core.types import PolicyVersion
from moerl.weight_sync import session
from moerl.weight_sync.buckets import WirePolicy
from moerl.weight_sync.session import EngineSession, SessionSpec
from tests.helpers.patience import patience
from tests.helpers.state_machines import explore

START = PolicyVersion(0, 0)
ROUNDS = 2  # of an engine whose live weights are written

# How an engine fails, until another way is chosen: the phase that then fails, "" for none
FAULTS = {
    "well": "",
    "a bucket arrives damaged once": "",
    "a bucket arrives damaged always": "verify",
    "another digest is staged": "verify",
    "no answer": "prepare",
    "refuses": "prepare",
    "is suspended": "prepare",
    "transfer breaks": "transfer",
    "refuses the commit": "commit",
    "the reply to the commit is lost": "commit",
}


@dataclass
class Engine:
    """An engine's side of the protocol, which asserts the order of phases."""

    number: int
    live: bool
    fault: str = "well"
    version: PolicyVersion = START
    is_dirty: bool = False
    staged: PolicyVersion | None = None
    received: list[object] = field(default_factory=list)  # rounds of the staged version, or None
    damage: int = 0  # transfers of the staged version that arrive damaged
    verified: PolicyVersion | None = None
    asked: list[str] = field(default_factory=list)

    def expect(self, message: Message, reply_type: type, timeout_s: float | None = None) -> Any:
        self.asked.append(type(message).__name__)
        if self.fault == "no answer":
            raise TransportError("deadline", "it does not answer")
        reply = self.answer(message)
        assert isinstance(reply, reply_type)
        return reply

    def answer(self, message: Message) -> Message:
        match message:
            case AskEngine():
                cause = self.fault if self.fault == "is suspended" else ""
                return EngineVersion(self.version, cause, (), self.is_dirty)
            case PrepareUpdate():
                if FAULTS[self.fault] == "prepare":
                    raise EngineError(self.fault)
                self.staged, self.received, self.verified = message.version, [], None
                self.damage = {"once": 1, "always": 9}.get(self.fault.split()[-1], 0)
                rounds = ROUNDS if self.live else 0
                return UpdatePrepared((b"door",), ({0: 0},), "layout", self.version, rounds)
            case WriteUpdate():
                assert self.received[-1] == message.round, "a round that did not arrive"
                self.is_dirty = True
            case VerifyUpdate():
                return self.verify(message)
            case CommitUpdate():
                return self.commit(message)
            case AbortUpdate():
                self.staged = self.verified = None
            case RelayUpdate():
                return self.relay(message)
        return Ok()

    def verify(self, message: VerifyUpdate) -> UpdateVerified:
        whole = list(range(ROUNDS)) if self.live else [None]
        assert self.received[-len(whole) :] == whole, "not all has arrived"
        assert message.version == self.staged
        if self.received.count(whole[-1]) <= self.damage:
            return UpdateVerified(((4,),), "")
        self.verified = message.version
        number = 7 if self.fault.startswith("another") else total(message.version)
        return UpdateVerified(((),), f"{number:016x}")

    def commit(self, message: CommitUpdate) -> UpdateDone:
        assert self.verified == message.version, "a version that was not verified"
        assert self.verified is not None
        if self.fault == "refuses the commit":
            raise EngineError(self.fault)
        self.version, self.is_dirty, self.staged = self.verified, False, None
        if self.fault.startswith("the reply"):
            raise TransportError("deadline", self.fault)
        return UpdateDone(pause_s=0.5, aborted=0)

    def relay(self, message: RelayUpdate) -> Message:
        """Set by the machine, for another engine that sends a version on to this one."""
        raise NotImplementedError

    def take(self, number: int | None) -> None:
        if self.fault == "transfer breaks" and number != 0:
            raise TransportError("peer", self.fault)
        self.received.append(number)

    def close(self) -> None: ...


def total(version: PolicyVersion) -> int:
    return 100 + version.step


class Senders:
    """The trainer's ranks, which read the snapshot."""

    def __init__(self, world: Sessions, engine: Engine) -> None:
        self.world, self.engine, self.removed = world, engine, threading.Event()

    def request(self, requests: Mapping[int, SendVersion], deadline: float) -> dict[int, Sent]:
        world = self.world
        assert world.is_readable, "the snapshot is read while it may be overwritten"
        (request,) = requests.values()
        assert request.version == world.version, "a version that the snapshot does not hold"
        self.engine.take(request.round)
        return {0: Sent({0: SendResult(b"digests!", total(request.version), 40, (0,))})}

    def drop_session(self) -> None: ...

    def remove(self) -> None:
        self.removed.set()


FAULTY = st.sampled_from(sorted(FAULTS))


class Sessions(RuleBasedStateMachine):
    """Model: each engine's fault and version.  Sessions are paused between two rules."""

    @initialize(live=st.booleans(), relays=st.booleans())
    def begin(self, live: bool, relays: bool) -> None:
        self.patch = mock.patch.object(session, "_AGAIN_S", 0.002)
        self.patch.start()
        self.version, self.is_readable, self.rehearses = START, False, False
        self.relays, self.live = relays and not live, live
        self.engines = [Engine(0, live), Engine(1, live)]
        self.engines[1].relay = self.send_on  # type: ignore[method-assign]
        self.senders = [Senders(self, engine) for engine in self.engines]
        self.attempts = [threading.Semaphore(0), threading.Semaphore(0)]
        self.sessions: list[EngineSession] = []
        for engine in self.engines:
            self.sessions.append(self.open(engine))
            self.sessions[-1].start()

    def open(self, engine: Engine) -> EngineSession:
        number = engine.number
        spec = SessionSpec(
            number, number, "plan", "shm", ParallelConfig(), WirePolicy("bfloat16"), "local",
            timeout_s=patience(30), drain_s=0.0, writes_live=self.live,
        )  # fmt: skip
        source = self.sessions[0] if self.relays and number else None
        senders: Any = self.senders[number]
        ended = self.attempts[number].release
        return EngineSession(spec, senders, lambda: engine, None, source, ended)

    def teardown(self) -> None:
        for one in self.sessions:
            one.remove()
        for one, senders in zip(self.sessions, self.senders, strict=True):
            one.join(patience(20))
            assert not one.is_alive(), "a session outlives its engine"
            assert senders.removed.is_set()
        self.patch.stop()

    def send_on(self, message: RelayUpdate) -> Message:
        """Engine 0 sends the version that it serves to engine 1."""
        assert self.engines[0].version == message.version, "a version that it does not hold"
        self.engines[1].take(None)
        return Ok()

    # --- rules ------------------------------------------------------------------------------------
    @rule(number=st.integers(0, 1))
    def restart(self, number: int) -> None:
        """A new server has the model folder's weights."""
        engine = self.engines[number]
        engine.version, engine.is_dirty, engine.staged = START, False, None

    @rule(faults=st.tuples(FAULTY, FAULTY))
    def publish(self, faults: tuple[str, str]) -> None:
        for engine, fault in zip(self.engines, faults, strict=True):
            engine.fault = fault
        before = [engine.version for engine in self.engines]
        for one in self.sessions:
            assert one.settle() is None, "a result is told twice"
        self.version, self.rehearses = PolicyVersion(0, self.version.step + 1), False
        self.is_readable = True
        for one in self.sessions:
            one.publish(self.version)
        for one, engine, old in zip(self.sessions, self.engines, before, strict=True):
            self.check_result(one, engine, old)
        self.is_readable = False

    def check_result(self, one: EngineSession, engine: Engine, old: PolicyVersion) -> None:
        result, phase = one.settle(), FAULTS[engine.fault]
        assert one.is_tried
        if not phase:
            assert isinstance(result, PublishResult), result
            assert (result.version, engine.version) == (self.version, self.version)
            assert result.resent == (engine.fault != "well")
            sent_on = self.relays and engine.number and self.engines[0].fault in CLEAN
            assert result.source == (0 if sent_on else -1)
            assert one.first_failure is None
            return
        assert isinstance(result, PublishFailure), result
        assert result == one.first_failure
        assert (result.phase, result.version) == (phase, self.version), result
        assert result.refused == (engine.fault == "refuses")
        assert (one.refusals > 0) == result.refused
        took = engine.fault.startswith("the reply")
        assert engine.version == (self.version if took else old)
        assert engine.staged is None or engine.fault == "no answer", "no ABORT"

    @precondition(lambda self: self.version != START)
    @rule(restarted=st.sampled_from([None, 0, 1]), heals=st.booleans())
    def look_again(self, restarted: int | None, heals: bool) -> None:
        """Until the next publish: an engine that is behind, or was restarted, gets the version."""
        if restarted is not None:
            self.restart(restarted)
        for engine in self.engines if heals else ():
            engine.fault = "well"
        self.is_readable = not self.rehearses
        before = [engine.version for engine in self.engines]
        for one, attempts in zip(self.sessions, self.attempts, strict=True):
            while attempts.acquire(blocking=False):
                pass
            one.resume()
        for attempts in self.attempts:
            assert attempts.acquire(timeout=patience(20))
        for one, engine, old in zip(self.sessions, self.engines, before, strict=True):
            assert one.settle() is None, "a result is told twice"
            assert one.failure is None or one.failure.phase != "session", one.failure
            if self.rehearses:
                assert engine.version == old
            elif not FAULTS[engine.fault]:
                assert engine.version == self.version, "an engine is left behind"
                assert not engine.is_dirty
        self.is_readable = False

    @rule()
    def rehearse(self) -> None:
        """No weights are sent, and no engine changes."""
        self.version, self.rehearses = PolicyVersion(0, self.version.step + 1), True
        before = [(engine.version, engine.is_dirty) for engine in self.engines]
        for one, engine in zip(self.sessions, self.engines, strict=True):
            engine.asked.clear()
            one.settle()
            one.rehearse(self.version)
        for one, engine in zip(self.sessions, self.engines, strict=True):
            result = one.settle()
            assert isinstance(result, PublishFailure) == (FAULTS[engine.fault] == "prepare")
            assert {*engine.asked} <= {"PrepareUpdate", "AbortUpdate", "AskEngine"}
        assert [(engine.version, engine.is_dirty) for engine in self.engines] == before


CLEAN = ("well", "a bucket arrives damaged once")


def test_any_history() -> None:
    explore(Sessions, 25, 12)
