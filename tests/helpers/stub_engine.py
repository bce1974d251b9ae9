"""Engines without a model for tests of the controller: `StubEngine`, and two that seal records."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from moerl.core.errors import BlobError, EngineError, RecordError
from moerl.core.ids import group_of
from moerl.core.messages import (
    Answers,
    AskEngine,
    CommitUpdate,
    EngineStatus,
    EngineVersion,
    MemoryState,
    Message,
    PrepareUpdate,
    SessionMessage,
    SleepEngine,
    UpdateDone,
    UpdateVerified,
    VerifyUpdate,
    WakeEngine,
    WriteUpdate,
)
from moerl.core.types import (
    Finish,
    GenerateRequest,
    LogprobBlob,
    PolicyVersion,
    RoutingBlob,
    Segment,
)
from moerl.engine.host.host import Mailbox
from moerl.records import BlobStore

Reply = Segment | RecordError
_FILLED = 6  # groups that fill the buffer of `tests.helpers.controllers.CONFIG`
KILLED = "engine 0 is not usable: it was killed"


def never(_request: GenerateRequest) -> bool:
    return False


def always(_request: GenerateRequest) -> bool:
    return True


class StubEngine:
    """Samples four tokens; an update interrupts a call after two of them.

    A message is one call of `generate`; a call that raises fails its requests.
    """

    def __init__(
        self,
        refuse: Sequence[int] = (),
        *,
        number: int = 0,
        lengths: Sequence[int] = (),
        fails_at: int = 0,
        fails: Callable[[GenerateRequest], bool] = never,
        holds: Callable[[GenerateRequest], bool] = never,
        hangs: Callable[[GenerateRequest], bool] = never,
        refuses: Callable[[GenerateRequest], RecordError | None] = lambda _: None,
        spoil: Callable[[Segment], object] | None = None,
        num_spoiled: int = 2,
        streams: bool = False,
        needs_verify: bool = False,
    ) -> None:
        """`fails`, `holds` and `hangs` get the first request of a call.

        refuse: group ids whose next reply is a refusal; one that is listed twice is refused twice.
        number: of the engine in its status.
        lengths: tokens of sibling 0, 1, ...; siblings without a length end at the limit only.
        fails_at: number of the call that raises, from 1 on; the calls after it are answered.
        fails: whether a call raises.
        holds: whether a call is answered only when something interrupts it.
        hangs: whether a call is never answered; `kill` ends it.
        refuses: the refusal that answers a request, or None.
        spoil: changes the first reply of each of the first `num_spoiled` calls; None removes it.
        streams: tells two tokens of requests that stream, and answers once `heard` is set.
        needs_verify: a commit needs the VerifyUpdate of its version before it.
        """
        self.version, self.tokens = PolicyVersion(0, 0), 0
        self.interrupted, self.open = asyncio.Event(), asyncio.Event()
        self.open.set()
        self.refuse, self.number, self.lengths = list(refuse), number, lengths
        self.fails_at, self.fails = fails_at, fails
        self.holds, self.hangs, self.refuses = holds, hangs, refuses
        self.spoil, self.num_spoiled = spoil, num_spoiled
        self.streams, self.heard = streams, asyncio.Event()
        self.needs_verify, self.verified = needs_verify, None
        self.requests: list[GenerateRequest] = []
        self.cut = self.calls = 0  # replies that an update interrupted, calls
        self.dead = self.dies_in_update = False
        self.killed = asyncio.Event()
        self.is_hung = False  # then no message is answered
        self.suspended = ""  # cause of a suspension: every message of a session is refused
        self.waits_for_updates = False  # calls for later groups then end when an update cuts them
        self.kept: Sequence[str] | None = None  # by a new controller
        self.finishes = True  # else every reply is empty and to be asked for again
        self.mailbox = Mailbox()
        self.asleep: set[str] = set()
        self.dirty = False
        self.moved: dict[str, int] = {}  # changes of its memory, by kind
        self.refused = self.refusals = 0  # misuses; sleeps to be refused for now
        self.drops = 0  # tokens whose KV cache each sleep costs
        self._running: set[asyncio.Task[None]] = set()

    def kill(self) -> None:
        """End the calls that hang; every later call raises."""
        self.dead = True
        self.killed.set()

    # --- requests ---------------------------------------------------------------------------------
    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        task = asyncio.create_task(self._run(requests))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _run(self, requests: Sequence[GenerateRequest]) -> None:
        try:
            replies: Sequence[Reply | EngineError] = await self.generate(requests)
            if len(replies) != len(requests):
                raise EngineError(f"{len(replies)} replies to {len(requests)} requests")
        except EngineError as error:
            replies = [error] * len(requests)
        for request, reply in zip(requests, replies, strict=True):
            self.mailbox.put(request.name, reply)

    async def collect(self) -> Answers:
        return await self.mailbox.collect()

    async def abort(self, names: Sequence[str]) -> None: ...

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Reply]:
        await self._may_hang()
        await self.open.wait()
        if self.dead:
            raise EngineError(KILLED)
        version, first = self.version, requests[0]
        self.calls += 1
        if self.calls == self.fails_at or self.fails(first):
            raise EngineError(KILLED)
        self.requests += requests
        await self._tell(requests)
        if self.hangs(first):
            await self.killed.wait()
            raise EngineError(KILLED)
        newest = max(group_of(request.rollout_id.removeprefix("eval-")) for request in requests)
        waits = self.waits_for_updates and newest >= _FILLED
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if waits or self.holds(first) else 0.01):
                await self.interrupted.wait()
        return self._spoiled([self._reply(request, version) for request in requests])

    async def _tell(self, requests: Sequence[GenerateRequest]) -> None:
        for request in requests:
            if self.streams and request.streams:
                self.mailbox.tell(request.name, np.asarray([3, 3], np.int32))
                await self.heard.wait()

    def _reply(self, request: GenerateRequest, version: PolicyVersion) -> Reply:
        if refusal := self.refuses(request):
            return refusal
        group = int(request.rollout_id.split(".")[0].removeprefix("eval-"))
        if group in self.refuse:
            self.refuse.remove(group)
            return RecordError("routing_rows", "too few")
        left = request.sampling.max_new_tokens
        count = min(2, left) if self.interrupted.is_set() else left
        if not self.finishes:
            count = 0
        self.tokens += count
        self.cut += count < left
        ends = count == left and self._ends(request, count)
        return Segment(
            request.rollout_id,
            np.full(count, 3, np.int32),
            np.full(count, -0.1, np.float32),
            version,
            Finish.STOP if ends else Finish.LENGTH if count == left else Finish.ABORT,
            None, None, None, 0, 0, 0.0, 0.0,
        )  # fmt: skip

    def _ends(self, request: GenerateRequest, count: int) -> bool:
        """Whether a sibling has its length with `count` more tokens."""
        if not self.lengths:
            return False
        sibling = int(request.rollout_id.split(".")[1])
        lengths = dict(enumerate(self.lengths))
        return sibling in lengths and request.num_sampled + count >= lengths[sibling]

    def _spoiled(self, replies: list[Reply]) -> list[Reply]:
        if self.spoil is None or not self.num_spoiled:
            return replies
        self.num_spoiled -= 1
        spoiled = self.spoil(replies[0])
        return replies[1:] if spoiled is None else [spoiled, *replies[1:]]

    # --- updates and health -----------------------------------------------------------------------
    async def session(self, message: SessionMessage) -> Message:
        await self._may_hang()
        if self.suspended and not isinstance(message, AskEngine):
            raise EngineError(self.suspended)
        if self.needs_verify and isinstance(message, VerifyUpdate):
            self.verified = message.version
            return UpdateVerified(((),), "d")
        if isinstance(message, PrepareUpdate | WriteUpdate) and not self.dead:
            if self.asleep != {"kv_cache"}:
                self.refused += 1
                raise EngineError("its weights sleep, or requests may read them")
            self.dirty |= isinstance(message, WriteUpdate)
        if not isinstance(message, CommitUpdate):
            asleep = tuple(sorted(self.asleep))
            return EngineVersion(self.version, self.suspended, asleep, self.dirty)
        if self.dead:
            raise EngineError(KILLED)
        if "weights" in self.asleep:
            self.refused += 1
            raise EngineError("the weights sleep")
        if self.needs_verify and self.verified != message.version:
            raise EngineError("nothing was verified")
        self.verified = None
        await self._update(message.version)
        return UpdateDone(pause_s=0.001, aborted=1)

    async def _update(self, version: PolicyVersion) -> None:
        self.open.clear()
        self.interrupted.set()
        await asyncio.sleep(0.005)
        if self.dies_in_update and self.cut:
            self.dead = True
            self.open.set()
            raise EngineError(KILLED)
        self.version, self.dirty = version, False
        self.interrupted.clear()
        if not self.asleep:
            self.open.set()

    async def move_memory(self, message: SleepEngine | WakeEngine) -> MemoryState:
        """Requests that run are interrupted, others wait."""
        await self._may_hang()
        if self.dead:
            raise EngineError(KILLED)
        parts, sleeps = set(message.parts), isinstance(message, SleepEngine)
        if sleeps and self.refusals:
            self.refusals -= 1
            raise EngineError("not now")
        if not sleeps and "kv_cache" in parts and (self.dirty or "weights" in self.asleep - parts):
            self.refused += 1
            raise EngineError("no verified weights")
        kind = "sleep" if sleeps else "wake"
        self.moved[kind] = self.moved.get(kind, 0) + 1
        if sleeps and not self.asleep:
            self.open.clear()
            await self.interrupt()
        self.asleep = self.asleep | parts if sleeps else self.asleep - parts
        self.dirty |= sleeps and "weights" in parts
        if not self.asleep:
            self.open.set()
        dropped = self.drops if sleeps else 0
        return MemoryState(tuple(sorted(self.asleep)), self.dirty, recomputed=dropped)

    async def forget(self, kept: Sequence[str] | None, life: int) -> None:
        await self._may_hang()
        self.kept = kept

    async def interrupt(self) -> None:
        await self._may_hang()
        self.interrupted.set()
        await asyncio.sleep(0.005)
        self.interrupted.clear()

    async def status(self) -> EngineStatus:
        await self._may_hang()
        return EngineStatus(self.number, self.version, 1, 0, self.tokens, 0.1)

    async def _may_hang(self) -> None:
        if self.is_hung:
            await asyncio.Event().wait()


class SealingEngine(StubEngine):
    """Seals the routing rows of each reply; a blob that cannot be written is a refused record."""

    def __init__(self, store: BlobStore, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.store = store

    def _reply(self, request: GenerateRequest, version: PolicyVersion) -> Reply:
        segment = super()._reply(request, version)
        assert isinstance(segment, Segment)
        begin, end = request.rows_from, request.num_tokens + len(segment.output_ids) - 1
        rows = np.zeros((1, end - begin, 2), np.uint8)
        rows[..., 1] = 1
        try:
            name = f"{request.rollout_id}-{version}-{self.calls}-{begin}"
            (ref,) = self.store.seal(name, [rows])
        except BlobError as error:
            return RecordError("blob", str(error))
        return replace(segment, routing=RoutingBlob(ref, begin, end, segment.version, (0,), 4))


class WordEngine(StubEngine):
    """Samples four words, other ones with each call unless it is `greedy`, and seals their
    log-probabilities as engine hosts do.
    """

    def __init__(self, store: BlobStore, *, greedy: bool = False, first_call: int = 0) -> None:
        from tests.helpers.chat_tokenizer import SIZE  # takes seconds, which others need not spend

        super().__init__()
        self.store, self._greedy, self._size = store, greedy, SIZE
        self._calls, self._one = itertools.count(first_call), asyncio.Lock()
        self.hangs_at = 0  # replies after which it hangs; 0 = never
        self.cuts: set[int] = set()  # replies that an update cuts, from 1 on

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        for request in requests:  # each has its reply when it is done
            await super().submit([request])

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Reply]:
        async with self._one:
            if self.hangs_at and len(self.requests) == self.hangs_at:
                self.open.clear()
            if len(self.requests) + 1 in self.cuts:
                self.interrupted.set()
            try:
                return await super().generate(requests)
            finally:
                self.interrupted.clear()

    def _reply(self, request: GenerateRequest, version: PolicyVersion) -> Reply:
        reply = super()._reply(request, version)
        if isinstance(reply, RecordError) or not len(reply.output_ids):
            return reply
        count, call = len(reply.output_ids), 0 if self._greedy else next(self._calls)
        words = (
            np.random.default_rng(call)
            .integers(self._size // 2, self._size, count)
            .astype(np.int32)
        )
        (ref,) = self.store.seal(request.name, [reply.logprobs])
        return replace(
            reply,
            output_ids=words,
            logprobs=np.zeros(0, np.float32),
            sealed_logprobs=LogprobBlob(ref, 0, count),
        )
