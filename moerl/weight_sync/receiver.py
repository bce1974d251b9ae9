"""The receiving end of a publish session, inside each scheduler process of an engine.

    PREPARE   derive the pieces of this rank, compare fingerprints, open a staging buffer
    TRANSFER  trainer ranks write into it; this process keeps decoding
    VERIFY    digests of the staged bytes against the sender's
    COMMIT    claim on every rank, then copy into the live weights; or release on every rank
    ABORT     drop the staging buffer; the live weights stay as they are

A session of a sleeping engine writes the live weights (`writes_live`).  Its staging buffer has two
buckets of each region: WRITE copies a round of them into the weights, VERIFY reads those back, and
COMMIT is left with the hooks and the version.  From the first WRITE on the weights are mixed,
whatever becomes of the session; the host calls the engine dirty until a COMMIT.

State of a session: open -> verified -> claimed -> (committed).  Everything before COMMIT runs on a
control thread while the scheduler decodes.  A claim is a promise: from then on no ABORT and no
other PREPARE is accepted, so either all ranks copy or none does (`moerl.engine.plugin.update_hooks`
asks all ranks before any of them copies).  Live weights are written by `commit` and `write`.

Staging is in host memory, or on the device where the transport maps it so; `commit_copies` brings
either into the live weights.

A failed session closes its staging buffer and the next session opens a new one, since a late sender
may still write into the old buffer.  A committed session keeps its buffer for the next version of
the same trainer: fresh memory costs a page fault per page.

A version older than the live one is refused: it comes from a trainer that was replaced.  This
file imports no SGLang, so that a bare process can run it (tests/multi).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from moerl.config.lora_settings import LoraConfig
from moerl.config.schema import ParallelConfig
from moerl.core.errors import EngineError, LayoutError, TransportError, cause_of
from moerl.core.messages import (
    AbortUpdate,
    Message,
    Ok,
    PrepareUpdate,
    RelayUpdate,
    UpdatePrepared,
    UpdateVerified,
    VerifyUpdate,
    WriteUpdate,
)
from moerl.core.rpc import Keys, RpcServer
from moerl.core.types import PolicyVersion
from moerl.layout import ModelSpec
from moerl.weight_sync.adapters.engine_adapters import (
    EngineAdapters,
    LiveModel,
    SlotAdapters,
    check_same,
)
from moerl.weight_sync.adapters.factor_plan import FactorPlan
from moerl.weight_sync.buckets import (
    ROUND,
    WirePolicy,
    delta_start,
    digest,
    round_bytes,
    seeds,
    split,
)
from moerl.weight_sync.commit_copies import CommitBuckets, CommitCopies, check_targets, device_of
from moerl.weight_sync.delta import DeltaError, apply
from moerl.weight_sync.held_shards import EngineLayout
from moerl.weight_sync.transfer_plan import ReceiverPlan, TransferPlan, starts_of
from moerl.weight_sync.transports.base import Staging, Transport

log = logging.getLogger(__name__)

_RELAY_BYTES = 16 * 2**20  # bytes per put when a staging buffer is relayed

MakeTransport = Callable[[str, str], Transport]  # name, folder of the transport disk


@dataclass(frozen=True, slots=True)
class ReceiverContext:
    """Rank and layout of this process; the trainer plans with the same values."""

    spec: ModelSpec
    engine: EngineLayout
    rank: int
    layout: str  # fingerprint of the engine's weight layout (`moerl.engine.weight_layout`)


@dataclass(frozen=True, slots=True, eq=False)
class _Planned:
    """The plan of this rank; the same for every version."""

    plan: ReceiverPlan
    seeds: list[list[int]]  # one per region and piece
    merged: ReceiverPlan | None = None  # of whole weights, where factors are received


@dataclass(slots=True, eq=False)
class _Session:
    message: PrepareUpdate
    planned: _Planned
    staging: Staging
    verified: bool = False
    claimed: bool = False
    total: int = 0  # digest of the rank's staged bytes
    copies: CommitCopies | None = None  # once live weights were written

    @property
    def plan(self) -> ReceiverPlan:
        return self.planned.plan

    @property
    def starts(self) -> list[int]:
        return _places(self.plan, self.message)[0]


@dataclass(slots=True, eq=False)
class Receiver:
    """One engine rank's end.  `held`: version of the live weights, set at start and by `commit`."""

    context: ReceiverContext
    model: LiveModel
    transports: MakeTransport
    held: PolicyVersion
    total: int | None = None  # digest of the live weights; None = not received here
    _session: _Session | None = None
    _taken: _Session | None = None  # committed last; its staging is used again
    _buckets: CommitBuckets | None = None
    _device: torch.device | None = None  # GPU of the live weights
    _plans: dict[str, _Planned] = field(default_factory=dict)
    _adapters: EngineAdapters | SlotAdapters | None = None  # once factors were announced
    _lock: threading.Lock = field(default_factory=threading.Lock)

    # --- the control thread -----------------------------------------------------------------------
    def handle(self, message: Message) -> Message:
        """Answer one control message.  Raises MoerlError: refused, and nothing has changed."""
        match message:
            case PrepareUpdate():
                return self.prepare(message)
            case WriteUpdate():
                return self.write(message)
            case VerifyUpdate():
                return self.verify(message)
            case RelayUpdate():
                return self.relay(message)
            case AbortUpdate():
                return self.abort(message)
            case _:
                raise EngineError(f"{type(message).__name__} is not for a receiver")

    def prepare(self, update: PrepareUpdate) -> UpdatePrepared:
        context = self.context
        if update.version < self.held:
            raise EngineError(f"version {update.version} is older than {self.held}, served now")
        if update.layout and update.layout != context.layout:
            raise LayoutError(
                f"the engine's weight layout is {context.layout}, the sender knows {update.layout}"
            )
        planned = self._plan(update)
        plan = planned.plan
        with self._lock:
            before = self._session
            if before is not None and before.claimed:
                raise EngineError(f"version {before.message.version} is being committed")
            self._close_session()
            staging = self._staging(update, plan)
            self._make_buckets(plan, staging)
            self._session = session = _Session(update, planned, staging)
        starts = {r.src: start for r, start in zip(plan.regions, session.starts, strict=True)}
        most = max(len(region.buckets) for region in plan.regions)
        rounds = -(-most // ROUND) if update.writes_live else 0
        return UpdatePrepared((staging.endpoint,), (starts,), context.layout, self.held, rounds)

    @torch.no_grad()
    def write(self, update: WriteUpdate) -> Ok:
        """Copy a round of buckets into the live weights, which no forward pass may read."""
        session = self._opened(update.version)
        if not session.message.writes_live or session.claimed:
            raise EngineError(f"the session of {update.version} does not write live weights now")
        session.staging.fetch(time.monotonic() + update.timeout_s)
        session.verified = False
        if session.copies is None:
            for hook in _around(session.plan.hooks)[0]:
                self.model.run_hook(hook)
            for name, first_row in session.plan.padding:  # it has slept, too
                self.model.tensors()[name][first_row:] = 0
            session.copies = self._copies(session)
        session.copies.run(update.round)
        _finish(self._device)  # staging may be written again
        return Ok()

    def verify(self, update: VerifyUpdate) -> UpdateVerified:
        deadline = time.monotonic() + update.timeout_s
        session = self._opened(update.version)
        if session.message.writes_live and session.copies is None:
            raise EngineError(f"nothing of {update.version} was written")
        session.staging.fetch(deadline)
        self._apply_deltas(session, update.deltas[self.context.rank] if update.deltas else ())
        wanted = iter(split(update.digests[self.context.rank]))
        failed, total, number = [], 0, 0
        for region, start, seeds_ in zip(
            session.plan.regions, session.starts, session.planned.seeds, strict=True
        ):
            for bucket in region.buckets:
                data = session.staging.buffer[start + bucket.offset :][: bucket.num_bytes]
                if session.copies is not None:
                    data = session.copies.read_back(number)
                found = digest(region, seeds_, bucket, data.cpu().numpy().data)
                total += found.total
                if found.bucket != next(wanted, b""):
                    failed.append(number)
                number += 1
        extra = sum(1 for _ in wanted)
        if extra:
            raise EngineError(f"{extra} digests more than the {number} buckets of this rank")
        if session.planned.merged is not None and not failed:
            total = self._merged_total(session, session.planned.merged, total)
        with self._lock:
            if self._session is not session:
                raise EngineError(f"the session of {update.version} ended while it was verified")
            session.verified, session.total = not failed, total % 2**64
        return UpdateVerified((tuple(failed),), "" if failed else f"{session.total:016x}")

    def relay(self, update: RelayUpdate) -> Ok:
        """Write the staging buffer of the live version into another engine's, unchanged.

        It stays as it is until the next PREPARE, which runs on this thread too.
        """
        deadline = time.monotonic() + update.timeout_s
        taken = self._taken
        if taken is None or taken.message.version != update.version or self._session is not None:
            raise EngineError(f"rank {self.context.rank} has no staged {update.version} to send on")
        transport = self.transports(taken.message.transport, taken.message.folder)
        link = transport.connect(update.endpoints[self.context.rank], deadline)
        try:
            for first in range(0, taken.plan.staging_bytes, _RELAY_BYTES):
                data = taken.staging.buffer[first : first + _RELAY_BYTES]
                link.put(first, data, deadline)
            link.flush(deadline)
        finally:
            link.close()
        return Ok()

    def abort(self, update: AbortUpdate) -> Ok:
        with self._lock:
            session = self._session
            if session is not None and session.message.version == update.version:
                if session.claimed:
                    raise EngineError(f"version {update.version} is being committed")
                log.warning("version %s is dropped: %s", update.version, update.cause)
                self._close_session()
        return Ok()

    # --- the scheduler, between two forward passes ------------------------------------------------
    def claim(self, version: str) -> str:
        """Promise to commit `version`; returns the reason of a refusal, or an empty string."""
        with self._lock:
            session = self._session
            if session is None or str(session.message.version) != version:
                return f"rank {self.context.rank} has no session of {version}"
            if not session.verified:
                return f"rank {self.context.rank} has not verified {version}"
            session.claimed = True
            return ""

    def release(self) -> None:
        """Undo a claim because another rank could not claim: the session is verified again."""
        with self._lock:
            if self._session is not None:
                self._session.claimed = False

    @torch.no_grad()
    def commit(self) -> None:
        """Copy the claimed session into the live weights and run the loader's hooks.

        An exception here leaves mixed weights: let it end the process.
        """
        session = self._session
        assert session is not None, "claim first"
        assert session.claimed, "claim first"
        before, after = _around(session.plan.hooks)
        _finish(self._device)  # the last forward pass, on whatever stream it runs
        for hook in before if not session.message.writes_live else ():
            self.model.run_hook(hook)
        if session.planned.merged is not None:
            assert self._adapters is not None, "PREPARE made them"
            self._adapters.commit(self.model, str(session.message.version))
        elif not session.message.writes_live:
            session.copies = self._copies(session)
            session.copies.run()
        for hook in after:
            self.model.run_hook(hook)
        _finish(self._device)  # also: staging may be written again, and errors are raised here
        with self._lock:
            self.held, self.total = session.message.version, session.total
            self._taken, self._session = session, None

    # --- private ----------------------------------------------------------------------------------
    def _plan(self, update: PrepareUpdate) -> _Planned:
        """Derive and check this rank's plan; cached, since it is the same for every version."""
        if update.plan not in self._plans:
            context = self.context
            try:
                trainer = ParallelConfig(**update.trainer)
                policy = WirePolicy(**update.policy)  # type: ignore[arg-type]
                lora = LoraConfig(**update.lora) if update.lora else None  # type: ignore[arg-type]
            except TypeError as error:
                raise LayoutError(f"the sender's layout is not readable: {error}") from error
            weights = TransferPlan(
                context.spec,
                trainer,
                context.engine,
                update.plan_engine,
                policy,
                "te" if update.layer_spec == "te" else "local",
            )
            whole = plan = weights.receiver(context.rank)
            if lora is not None:
                plan = FactorPlan(weights, lora).receiver(context.rank)
            if plan.plan_id != update.plan:
                raise LayoutError(
                    f"the sender's transfer plan is {update.plan}, this engine derives "
                    f"{plan.plan_id}: model, layouts, wire or code differ"
                )
            check_targets(whole, self.model.tensors())
            if lora is not None:
                check_targets(plan, self._with_adapters(lora).factors)
            merged = whole if lora is not None else None
            seeds_ = [seeds(region) for region in plan.regions]
            self._plans = {update.plan: _Planned(plan, seeds_, merged)}
        return self._plans[update.plan]

    def _with_adapters(self, lora: LoraConfig) -> EngineAdapters | SlotAdapters:
        """The adapters on W0, which is the model that this process loaded, for every trainer."""
        if self._adapters is None:
            if self.total is not None:
                raise EngineError("W0 is gone: whole weights were received; start the engine again")
            who = self.context.spec, self.context.engine, self.context.rank, lora
            try:
                self._adapters = (
                    SlotAdapters(*who, self.model)
                    if lora.serves_adapters
                    else EngineAdapters(*who, self.model.tensors())
                )
            except torch.OutOfMemoryError as error:
                raise TransportError("room", f"W0 of adapters: {cause_of(error)}") from error
        check_same(self._adapters.lora, lora)
        return self._adapters

    @torch.no_grad()
    def _merged_total(self, session: _Session, whole: ReceiverPlan, sent: int) -> int:
        """Take the staged factors; digest of the weights that they give, before any is written.

        sent: digest of the factors, which counts where no weight has them.
        """
        assert self._adapters is not None, "PREPARE made them"
        factors, staged = self._adapters.factors, session.staging.buffer
        CommitCopies(session.plan, session.starts, staged, factors, self._buckets).run()
        found = self._adapters.total(whole, self.model.tensors())
        return found + sent if self._adapters.lora.serves_adapters else found

    def _staging(self, update: PrepareUpdate, receiver_plan: ReceiverPlan) -> Staging:
        kept = self._taken
        if kept is not None:
            same = (
                kept.plan is receiver_plan
                and kept.message.transport == update.transport
                and kept.message.folder == update.folder
                and kept.message.delta == update.delta
                and kept.message.writes_live == update.writes_live
                and kept.message.version.incarnation == update.version.incarnation
            )
            if same:
                return kept.staging
            kept.staging.close()
            self._taken = None
        num_bytes = _places(receiver_plan, update)[1]
        return self.transports(update.transport, update.folder).open(num_bytes)

    def _make_buckets(self, receiver_plan: ReceiverPlan, staging: Staging) -> None:
        """Make the device buckets of a commit.  Raises TransportError, and closes the staging."""
        self._device = device = device_of(self.model.tensors())
        if device is None or staging.buffer.is_cuda:
            self._buckets = None
        elif self._buckets is None or self._buckets.plan is not receiver_plan:
            self._buckets = None  # frees the old buffers first
            try:
                self._buckets = CommitBuckets(receiver_plan, device)
            except torch.OutOfMemoryError as error:
                staging.close()
                self._taken = None
                raise TransportError("room", f"two device buckets: {cause_of(error)}") from error

    def _copies(self, session: _Session) -> CommitCopies:
        """The copies of a commit; of the version before, if staging and weights are the same."""
        taken, tensors = self._taken, self.model.tensors()
        if taken is not None and taken.copies is not None:
            same = taken.staging is session.staging and taken.plan is session.plan
            if same and taken.copies.fit(tensors):
                return taken.copies
        return CommitCopies(
            session.plan,
            session.starts,
            session.staging.buffer,
            tensors,
            self._buckets,
            in_rounds=session.message.writes_live,
        )

    def _apply_deltas(self, session: _Session, sizes: Sequence[int]) -> None:
        """Apply deltas to buckets of the version held; size 0 = the bucket was sent in full.

        A delta that does not fit leaves its bucket as it is, and so its digest fails.
        """
        places = [
            (region, start, bucket)
            for region, start in zip(session.plan.regions, session.starts, strict=True)
            for bucket in region.buckets
        ]
        if any(sizes) and (len(sizes) != len(places) or not session.message.delta):
            raise EngineError(f"{len(sizes)} sizes of deltas for {len(places)} buckets")
        buffer = session.staging.buffer
        for size, (region, start, bucket) in zip(sizes, places, strict=False):
            if size:
                begin = start + bucket.offset
                behind = begin + delta_start(region)
                packed = buffer[behind : behind + min(size, bucket.num_bytes)].cpu()
                target = buffer[begin : begin + bucket.num_bytes]
                data = target.cpu()  # itself in host memory
                try:
                    apply(packed.numpy().tobytes(), data, holds=self.held)
                except DeltaError as error:
                    log.warning("rank %d, a delta is refused: %s", self.context.rank, error)
                if target.is_cuda:
                    target.copy_(data)

    def _opened(self, version: PolicyVersion) -> _Session:
        with self._lock:
            session = self._session
            if session is None or session.message.version != version:
                raise EngineError(f"rank {self.context.rank} has no session of {version}")
            return session

    def _close_session(self) -> None:
        """Call with the lock held."""
        if self._session is not None:
            self._session.staging.close()
            if self._taken is not None and self._taken.staging is self._session.staging:
                self._taken = None
        self._session = None

    def close(self) -> None:
        with self._lock:
            self._close_session()
            if self._taken is not None:
                self._taken.staging.close()
                self._taken = None


def _places(receiver_plan: ReceiverPlan, update: PrepareUpdate) -> tuple[list[int], int]:
    """Offsets of the regions in the staging buffer, and its bytes."""
    regions = receiver_plan.regions
    if update.writes_live:
        sizes: Iterable[int] = map(round_bytes, regions)
    else:
        sizes = (2 * delta_start(r) if update.delta else r.num_bytes for r in regions)
    *starts, end = starts_of((*sizes, 0))
    return starts, end


def _finish(device: torch.device | None) -> None:
    """Wait until all work of the device is done."""
    if device is not None:
        torch.cuda.synchronize(device)


def _around(hooks: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(hooks that make the live weights writable, hooks that run on the written weights)."""
    before = tuple(hook for hook in hooks if hook.startswith("restore_"))
    return before, tuple(hook for hook in hooks if hook not in before)


# --- the socket -----------------------------------------------------------------------------------
class ReceiverSocket(threading.Thread):
    """Answers the engine host, one request at a time, on a Unix socket of this user only."""

    def __init__(self, handle: Callable[[Message], Message], path: Path, keys: Keys) -> None:
        """Bind the socket.  handle: answers a message; raises MoerlError to refuse it."""
        super().__init__(name="receiver", daemon=True)
        self._handle = handle
        self._server = RpcServer(f"ipc://{path}", keys, self._answer)
        path.chmod(0o600)

    def run(self) -> None:
        asyncio.run(self._server.serve())

    async def _answer(self, message: Message) -> Message:
        return self._handle(message)  # blocks the event loop: the next request waits
