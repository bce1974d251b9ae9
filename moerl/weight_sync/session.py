"""Publish sessions of one engine, driven by a thread of trainer rank 0 per engine.

    PREPARE -> TRANSFER -> VERIFY (after damage both once more) -> COMMIT      or ABORT

A sleeping engine takes buckets into its live weights (`writes_live`): TRANSFER then alternates
between a round of buckets and WRITE.  If the session fails, the next one writes everything.

`sync.timeout_s` limits all phases of a session together.  Engines fail independently: each engine
has its own thread, connections and links.  A failed engine is tried again every few seconds while
the snapshot holds the version, so an engine that recovers or joins late gets the current version
without waiting for the next publish.  The session also asks the engine for the version that it
holds, because a restarted engine has lost its weights.

`held` is a version that COMMIT confirmed or that the engine reported; it is never assumed.

A rehearsal is PREPARE and ABORT: the engine derives its plan, compares it with its live tensors and
opens a staging buffer, and the trainer sends no weights.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar

from moerl.config.lora_settings import LoraConfig
from moerl.config.schema import ParallelConfig
from moerl.core.errors import MoerlError, TransportError
from moerl.core.messages import (
    AbortUpdate,
    AskEngine,
    CommitUpdate,
    Destination,
    EngineVersion,
    Message,
    Ok,
    PrepareUpdate,
    PublishFailure,
    PublishResult,
    RelayUpdate,
    SendResult,
    SendVersion,
    UpdateDone,
    UpdatePrepared,
    UpdateVerified,
    VerifyUpdate,
    WriteUpdate,
)
from moerl.core.types import PolicyVersion
from moerl.layout import LayerSpec
from moerl.runtime.trace import Tracer
from moerl.weight_sync.buckets import WirePolicy, version_digest
from moerl.weight_sync.sender import SenderGroup
from moerl.weight_sync.transfer_plan import TRAINER

log = logging.getLogger(__name__)

_AGAIN_S = 2.0  # seconds between checks of an engine that is behind or may have been restarted
_PROBE_S = 5.0  # longest PREPARE of an engine that failed, unless an earlier PREPARE took longer
_ABORT_S = 5.0
_SLACK_S = 2.0  # the controller's reply may come this much after the deadline

Reply = TypeVar("Reply")
Result = PublishResult | PublishFailure


class Control(Protocol):
    """A connection to the controller, used by one thread and closed after its first error."""

    def expect(
        self, message: Message, reply_type: type[Reply], timeout_s: float | None = None
    ) -> Reply: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """Inputs of the plans of trainer and engine, equal for all sessions of an engine."""

    engine: int
    plan_engine: int  # engine id in the transfer plan
    plan: str
    transport: str
    trainer: ParallelConfig
    policy: WirePolicy
    layer_spec: LayerSpec
    timeout_s: float
    drain_s: float  # longest wait for running requests before a commit
    folder: str = ""  # folder of the transport `disk`
    delta: bool = False  # the senders may send deltas
    lora: LoraConfig | None = None  # the senders send factors
    writes_live: bool = False  # as in PrepareUpdate


class EngineSession(threading.Thread):
    """Publish sessions of one engine.

    The training thread calls the methods from `publish` to `remove`; all others run on this thread.
    """

    def __init__(
        self,
        spec: SessionSpec,
        senders: SenderGroup,
        connect: Callable[[], Control],
        tracer: Tracer | None,
        source: EngineSession | None = None,
        on_attempt: Callable[[], None] = lambda: None,
    ) -> None:
        """Make the thread; `start` runs it.

        source: session of the engine that relays to this engine; None = the trainer sends.
        on_attempt: called on this thread after each attempt, before `settle` returns.
        """
        super().__init__(name=f"session-{spec.engine}", daemon=True)
        self._source = source
        self._results: dict[int, dict[int, SendResult]] = {}  # digests of the held version
        self.spec, self._senders, self._connect, self._tracer = spec, senders, connect, tracer
        self._on_attempt = on_attempt
        self.refusals = 0  # attempts in a row that the engine refused
        self.failure: PublishFailure | None = None  # failure of the last attempt
        self._first: PublishFailure | None = None  # failure of the first attempt at the target
        self._rehearses = False
        self._changed = threading.Condition()
        self._target: PolicyVersion | None = None
        self._tried = False  # the first session of the target has ended
        self._result: Result | None = None  # result of the last publish; returned once
        self._held: PolicyVersion | None = None
        self._layout = ""  # layout of the engine at the last session
        self._behind = False
        self._prepare_s = 0.0  # duration of the last answered PREPARE
        self._busy = self._paused = self._left = False

    # --- the training thread ----------------------------------------------------------------------
    def publish(self, version: PolicyVersion) -> None:
        """Start to publish `version`, which the snapshot will hold; call `settle` before."""
        self._begin(version, rehearses=False)

    def rehearse(self, version: PolicyVersion) -> None:
        """Let the engine check the plan of `version` without weights; call `settle` after it."""
        self._begin(version, rehearses=True)

    def _begin(self, version: PolicyVersion, *, rehearses: bool) -> None:
        with self._changed:
            self._target, self._tried, self._result, self._paused = version, False, None, False
            self._first, self._rehearses = None, rehearses
            self._changed.notify_all()

    @property
    def is_tried(self) -> bool:
        """Whether the first attempt at the target has ended."""
        with self._changed:
            return self._tried

    @property
    def first_failure(self) -> PublishFailure | None:
        """Failure of the first attempt at the target."""
        with self._changed:
            return self._first

    def settle(self) -> Result | None:
        """Wait for the first attempt, then pause; returns the result of the publish once.

        The weight snapshot may be overwritten until `resume`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._target is None or self._tried)
            self._paused = True
            self._changed.wait_for(lambda: not self._busy)
            result, self._result = self._result, None
            return result

    def resume(self) -> None:
        """End the pause: the weight snapshot still holds the last published version."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def remove(self) -> None:
        """End the thread after the current session, because the engine left the run."""
        with self._changed:
            self._left = True
            self._changed.notify_all()

    # --- this thread ------------------------------------------------------------------------------
    def run(self) -> None:
        while (version := self._next()) is not None:
            try:
                result = self._ask_engine(version)
            except BaseException as error:  # after a bug the training thread must not wait forever
                log.exception("the session of engine %d failed", self.spec.engine)
                result = PublishFailure(self.spec.engine, version, "session", repr(error))
            with self._changed:
                self.failure = result if isinstance(result, PublishFailure) else None
                self.refusals = self.refusals + 1 if self.failure and self.failure.refused else 0
                if not self._tried and version == self._target:
                    self._tried, self._result, self._first = True, result, self.failure
                self._changed.notify_all()
            self._on_attempt()
            with self._changed:
                self._busy = False
                self._changed.notify_all()
        self._senders.remove()

    def _next(self) -> PolicyVersion | None:
        """Wait for a version to publish or check; None when the engine has left the run."""
        with self._changed:
            if self._tried:  # only a check is due: wait, unless a new version arrives
                self._changed.wait_for(lambda: self._left or not self._tried, _AGAIN_S)
            self._changed.wait_for(lambda: self._left or self._has_work())
            if self._left:
                return None
            self._busy = True
            return self._target

    def taken(self, version: PolicyVersion) -> dict[int, dict[int, SendResult]] | None:
        """Digests of `version` once this engine holds it, for an engine that it relays to.

        Waits for the first session of `version`; returns None if that session failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._left or self._tried or self._target != version)
            return self._results if self._held == version and not self._left else None

    def _has_work(self) -> bool:
        return self._target is not None and not self._paused

    def _ask_engine(self, version: PolicyVersion) -> Result | None:
        """Bring the engine to `version`; None if it holds it already or a rehearsal passed."""
        if self._held == version and not self._has_lost(version):
            return None
        result = self._session(version)
        if isinstance(result, PublishFailure):
            if not self._behind:
                log.warning(
                    "engine %d stays behind %s: %s failed: %s",
                    result.engine, version, result.phase, result.cause,
                )  # fmt: skip
            self._held, self._behind = None, True
        else:
            if self._behind:
                log.warning("engine %d is at %s again", self.spec.engine, version)
            self._held, self._behind = None if self._rehearses else version, False
        return result

    def _has_lost(self, version: PolicyVersion) -> bool:
        """Whether the engine has lost `version`, which it committed before."""
        holds = self._state()
        if holds is None:
            return False  # unknown; the next session will show it
        return holds.version != version or bool(holds.cause) or holds.is_dirty

    def _state(self) -> EngineVersion | None:
        """The engine's report of its version; None: it does not answer."""
        control = self._connect()
        try:
            return control.expect(AskEngine(self.spec.engine), EngineVersion, _PROBE_S)
        except MoerlError:
            return None
        finally:
            control.close()

    def _session(self, version: PolicyVersion) -> Result | None:
        source = None if self._rehearses else self._source
        relayed = source.taken(version) if source is not None else None
        begin = time.time()
        control = self._connect()
        probe_s = max(_PROBE_S, 2 * self._prepare_s) if self._behind else self.spec.timeout_s
        session = _Session(self.spec, version, self._senders, control, self._layout, probe_s)
        if source is not None and relayed is not None:
            session.source, session.relayed = source.spec.engine, relayed
        try:
            if self._rehearses:
                session.rehearse()
                return None
            result = session.run()
            self._layout, self._results = session.layout, session.results
            return result
        except MoerlError as error:
            self._layout = ""
            self._abort(version, str(error))
            state = self._state() if session.phase == "prepare" else None
            refused = state is not None and not state.cause
            return PublishFailure(self.spec.engine, version, session.phase, str(error), refused)
        finally:
            control.close()
            if session.phase != "prepare":
                self._prepare_s = session.spans[0][2] - session.spans[0][1]
            if self._tracer is not None:
                end = time.time()
                engine = float(self.spec.engine)
                ended = "" if session.phase == "done" else session.phase
                what = "rehearsal" if self._rehearses else "publish"
                self._tracer.add(
                    what, begin, end, engine=engine, version=str(version), failed=ended
                )
                for name, start_s, end_s in session.spans if not self._rehearses else ():
                    self._tracer.add(f"publish {name}", start_s, end_s, engine=engine)

    def _abort(self, version: PolicyVersion, cause: str) -> None:
        """Abort, as far as possible; the next PREPARE replaces a staging buffer that remains."""
        self._senders.drop_session()
        control = self._connect()
        try:
            message = AbortUpdate(self.spec.engine, version, cause, _ABORT_S)
            control.expect(message, Ok, _ABORT_S + _SLACK_S)
        except MoerlError as error:
            log.info("engine %d did not get ABORT: %s", self.spec.engine, error)
        finally:
            control.close()


class _Session:
    """One attempt to publish a version to one engine."""

    def __init__(
        self,
        spec: SessionSpec,
        version: PolicyVersion,
        senders: SenderGroup,
        control: Control,
        layout: str,
        prepare_s: float,
    ) -> None:
        """Set up the attempt without sending.  prepare_s: longest PREPARE, in seconds."""
        self.spec, self.version, self._senders, self._control = spec, version, senders, control
        self.layout, self._prepare_s = layout, prepare_s
        self.source = TRAINER
        self.relayed: dict[int, dict[int, SendResult]] = {}  # digests of the source engine
        self.results: dict[int, dict[int, SendResult]] = {}  # by trainer rank and engine rank
        self.phase = "prepare"
        self.spans: list[tuple[str, float, float]] = []
        self._deadline = time.monotonic() + spec.timeout_s

    def run(self) -> PublishResult:
        """Run all phases.  Raises MoerlError; `phase` is then the phase that failed."""
        prepared = self._timed("prepare", self._prepare)
        transfer = self._relay if self.source != TRAINER else self._transfer
        self.results = self._timed("transfer", lambda: transfer(prepared))
        num_bytes = sum(m.num_bytes for to in self.results.values() for m in to.values())
        resent, digest = self._timed("verify", lambda: self._verify(self.results, prepared))
        closed = self._timed("commit", self._commit)
        self.phase, self.layout = "done", prepared.layout
        took = {name: end - begin for name, begin, end in self.spans}
        log.info("engine %d serves %s, digest %s", self.spec.engine, self.version, digest)
        return PublishResult(
            engine=self.spec.engine,
            version=self.version,
            num_bytes=num_bytes,
            transfer_s=took["transfer"],
            pause_s=closed.pause_s,
            aborted=closed.aborted,
            prepare_s=took["prepare"],
            verify_s=took["verify"],
            commit_s=closed.commit_s,
            resent=resent,
            source=self.source,
        )

    def rehearse(self) -> None:
        """Run PREPARE and ABORT.  Raises MoerlError if the engine would not take this version."""
        self._timed("prepare", self._prepare)
        engine, wait_s = self.spec.engine, self._left()
        message = AbortUpdate(engine, self.version, "it was a rehearsal", wait_s)
        self._control.expect(message, Ok, wait_s + _SLACK_S)
        self.phase = "done"

    def _timed(self, phase: str, work: Callable[[], Reply]) -> Reply:
        self.phase = phase
        begin = time.time()
        try:
            return work()
        finally:
            self.spans.append((phase, begin, time.time()))

    def _left(self) -> float:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TransportError(
                "deadline", f"the session did not end in {self.spec.timeout_s:g} s"
            )
        return left_s

    def _prepare(self) -> UpdatePrepared:
        spec = self.spec
        wait_s = min(self._left(), self._prepare_s)
        message = PrepareUpdate(
            engine=spec.engine,
            version=self.version,
            plan_engine=spec.plan_engine,
            plan=spec.plan,
            layout=self.layout,
            transport=spec.transport,
            trainer=asdict(spec.trainer),
            policy=asdict(spec.policy),
            layer_spec=spec.layer_spec,
            timeout_s=wait_s,
            folder=spec.folder,
            delta=spec.delta,
            lora=asdict(spec.lora) if spec.lora else None,
            writes_live=spec.writes_live,
        )
        return self._control.expect(message, UpdatePrepared, wait_s + _SLACK_S)

    def _transfer(
        self, prepared: UpdatePrepared, *, again: bool = False
    ) -> dict[int, dict[int, SendResult]]:
        """Let each trainer rank send its regions; returns results by trainer and engine rank."""
        destinations: dict[int, dict[int, Destination]] = {}
        for dst, starts in enumerate(prepared.starts):
            for src, start in starts.items():
                destinations.setdefault(src, {})[dst] = Destination(prepared.endpoints[dst], start)
        results = dict[int, dict[int, SendResult]]()
        for number in range(prepared.rounds) or (None,):
            left_s = self._left()
            requests = {
                src: SendVersion(self.version, to, left_s, number, again)
                for src, to in destinations.items()
            }
            replies = self._senders.request(requests, self._deadline)
            results = {src: sent.results for src, sent in replies.items()}
            if number is not None:
                left_s = self._left()
                message = WriteUpdate(self.spec.engine, self.version, number, left_s)
                self._control.expect(message, Ok, left_s + _SLACK_S)
        return results

    def _relay(self, prepared: UpdatePrepared) -> dict[int, dict[int, SendResult]]:
        """Let the source engine send the same regions, whose digests are equal."""
        left_s = self._left()
        message = RelayUpdate(self.source, self.version, prepared.endpoints, left_s)
        self._control.expect(message, Ok, left_s + _SLACK_S)
        return self.relayed

    def _verify(
        self, results: dict[int, dict[int, SendResult]], prepared: UpdatePrepared
    ) -> tuple[int, str]:
        """Compare digests; returns (buckets sent twice, digest of the version on this engine)."""
        verified = self._compare(results)
        damaged = sum(map(len, verified.failed))
        if damaged:
            log.warning("engine %d: %d buckets arrived damaged", self.spec.engine, damaged)
            if self.source != TRAINER:
                self._relay(prepared)
            else:
                results |= self._transfer(prepared, again=True)
            verified = self._compare(results)
        if any(verified.failed):
            raise TransportError("digest", "buckets arrived damaged twice")
        totals = [
            sum(m.total for _, m in _results_of(dst, results)) for dst in _engine_ranks(results)
        ]
        digests = "-".join(f"{total % 2**64:016x}" for total in totals)
        if digests != verified.digest:
            raise TransportError("digest", f"{verified.digest} is staged, {digests} was sent")
        return damaged, version_digest(totals)

    def _compare(self, results: Mapping[int, Mapping[int, SendResult]]) -> UpdateVerified:
        digests = tuple(
            b"".join(m.digests for _, m in _results_of(dst, results))
            for dst in _engine_ranks(results)
        )
        deltas = tuple(
            tuple(size for _, m in _results_of(dst, results) for size in m.deltas)
            for dst in _engine_ranks(results)
        )
        left_s = self._left()
        message = VerifyUpdate(self.spec.engine, self.version, digests, left_s, deltas)
        return self._control.expect(message, UpdateVerified, left_s + _SLACK_S)

    def _commit(self) -> UpdateDone:
        left_s = self._left()
        message = CommitUpdate(self.spec.engine, self.version, left_s)
        wait_s = left_s + self.spec.drain_s + _SLACK_S
        return self._control.expect(message, UpdateDone, wait_s)


def _engine_ranks(results: Mapping[int, Mapping[int, SendResult]]) -> list[int]:
    return sorted({dst for to in results.values() for dst in to})


def _results_of(
    dst: int, results: Mapping[int, Mapping[int, SendResult]]
) -> list[tuple[int, SendResult]]:
    """(trainer rank, result for engine rank `dst`), in the order of the receiver's plan."""
    return [(src, results[src][dst]) for src in sorted(results) if dst in results[src]]
