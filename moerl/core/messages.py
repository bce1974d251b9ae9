"""Interfaces between components, and the typed messages between trainer and controller.

The trainer is a plain torchrun job without Ray: its rank 0 sends these messages by `moerl.core.rpc`
(request, then reply, one at a time per socket).  Rank 0 uses one socket for the training loop and
one for each publish session, so a publish never delays a plan.  The same channel joins rank 0 and
the senders of all ranks, and an engine's host and its receivers.

Each message is an immutable dataclass; `moerl.core.serialization` encodes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moerl.core.episode_view import ScoreRequest
from moerl.core.errors import EngineError, RecordError, ScoreError
from moerl.core.ids import Ranges
from moerl.core.types import (
    Array,
    BatchPlan,
    GenerateRequest,
    PolicyVersion,
    Prompt,
    RefScores,
    Score,
    Segment,
)

# A value of `moerl.config.lora_settings.LoraConfig`
LoraField = bool | int | float | str | list[str] | dict[str, int]


# --- trainer rank 0 -> the sender threads of all ranks ------------------------------------------
@dataclass(frozen=True, slots=True)
class Destination:
    """The staging buffer of an engine rank, and the offset of the region in it."""

    endpoint: bytes
    start: int


@dataclass(frozen=True, slots=True)
class SendResult:
    """Result for one engine rank: digests of all buckets of the region, and the sum over pieces."""

    digests: bytes  # of buckets not sent yet: empty
    total: int  # of factors: over the pieces of the merged weights
    num_bytes: int  # of all buckets
    deltas: tuple[int, ...]  # per bucket: bytes of the delta sent in its place, 0 = sent in full


@dataclass(frozen=True, slots=True)
class SendVersion:
    """Send all of one version, or one round of it.  Reply: Sent."""

    version: PolicyVersion
    destinations: dict[int, Destination]  # by engine rank
    timeout_s: float
    round: int | None = None  # as in WriteUpdate; None = all buckets
    again: bool = False  # the buckets arrived damaged: pack them again, and send no delta


@dataclass(frozen=True, slots=True)
class DropSession:
    """The session failed: its staging buffers are gone.  Reply: Ok; nothing waits for it."""


@dataclass(frozen=True, slots=True)
class EngineRemoved:
    """The engine left the run: its sender ends.  Reply: none."""


@dataclass(frozen=True, slots=True)
class Sent:
    results: dict[int, SendResult]  # by engine rank


# --- trainer -> controller ---------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a trainer.  Reply: Ok; SetEngines when engines were added or removed.

    consumed: group ids trained before the checkpoint that the trainer loaded; the controller never
    plans them again.
    begins: first version of each trainer in the history of its weights, this trainer last; it comes
    from the checkpoint, because the controller's journal may be of another node.
    pair_cost: of the model (`moerl.data.batching`).
    """

    world_size: int
    dp_size: int
    version: PolicyVersion  # current weights of the trainer
    consumed: Ranges
    begins: tuple[PolicyVersion, ...]
    pair_cost: float = 0.0
    weights: str = ""  # digest of the current weights, with stream.keep_steps


@dataclass(frozen=True, slots=True)
class TakePlan:
    """Ask for the plan of one optimizer step.

    Reply: Plan; SamePlan when the plan that came ahead stands; Stop when the run is over; Refresh
    when an engine must be published to first; SetEngines when the set of engines has changed; Ok
    when answers take longer (ask again).
    """

    step: int
    timeout_s: float
    incarnation: int  # of the sender; older incarnations are refused
    came_ahead: bool = False  # the sender has this step's plan from `Plan.ahead`


@dataclass(frozen=True, slots=True)
class StepDone:
    """An optimizer step is complete.  Reply: Ok.  Its groups are consumed from here on."""

    step: int
    version: PolicyVersion  # weights after the step
    metrics: dict[str, float]  # names of docs/metrics.md
    checkpoint: str  # path of a checkpoint that includes this step, or empty
    weights: str = ""  # digest of the weights after the step, with stream.keep_steps


@dataclass(frozen=True, slots=True)
class PrepareUpdate:
    """Begin a session: agree on one version for one engine.  Reply: UpdatePrepared.

    Forwarded to the receiver of every engine rank, which derives its own receiver plan from the
    same inputs as the trainer.  Refused, with nothing changed, when an input differs.
    """

    engine: int
    version: PolicyVersion
    plan_engine: int  # engine id of the transfer plan
    plan: str  # fingerprint of the transfer plan, `moerl.weight_sync.transfer_plan.TransferPlan.id`
    layout: str  # fingerprint of the engine's last known weight layout; empty: unknown
    transport: str  # name of a transport of `moerl.weight_sync.transports`
    trainer: dict[str, int]  # fields of `moerl.config.schema.ParallelConfig`
    policy: dict[str, int | str]  # fields of `moerl.weight_sync.transfer_plan.WirePolicy`
    layer_spec: str  # layer spec of the trainer's model: local | te
    timeout_s: float
    folder: str = ""  # only for the transport disk
    delta: bool = False  # the staging buffer also takes deltas: each follows its region
    # Fields of `moerl.config.lora_settings.LoraConfig` of the adapters whose factors are sent;
    # None = weights are sent
    lora: dict[str, LoraField] | None = None
    writes_live: bool = False  # WriteUpdate follows each round: the engine must sleep


@dataclass(frozen=True, slots=True)
class WriteUpdate:
    """The buckets of a round are sent: copy them into the live weights.  Reply: Ok.

    The engine is dirty from the first one until COMMIT.
    """

    engine: int
    version: PolicyVersion
    round: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class VerifyUpdate:
    """All bytes are sent: compare them, in staging or in the live weights.  Reply: UpdateVerified,
    also when they differ.

    digests: per engine rank, 8 bytes per bucket, little endian, buckets in the order of its
    receiver plan.  deltas: per engine rank and bucket, bytes of the delta that was sent instead, 0
    = sent in full; empty = all in full.
    """

    engine: int
    version: PolicyVersion
    digests: tuple[bytes, ...]
    timeout_s: float
    deltas: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class RelayUpdate:
    """Send the last version of this engine on to another engine.  Reply: Ok, when sent.

    endpoints: of the other engine's staging buffers, by rank; both use one plan id.
    """

    engine: int
    version: PolicyVersion
    endpoints: tuple[bytes, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class CommitUpdate:
    """Serve the verified version from now on.  Reply: UpdateClosed."""

    engine: int
    version: PolicyVersion
    timeout_s: float


@dataclass(frozen=True, slots=True)
class AbortUpdate:
    """Drop the session of a version; the engine keeps its weights.  Reply: Ok; idempotent."""

    engine: int
    version: PolicyVersion
    cause: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class AskEngine:
    """Ask for the version that an engine serves.  Reply: EngineVersion."""

    engine: int


@dataclass(frozen=True, slots=True)
class SleepEngine:
    """Give memory back: kv_cache, weights.  Reply: MemoryState; idempotent.

    Running requests keep their tokens and wait; without their weights engines wait for a commit.
    """

    engine: int
    parts: tuple[str, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class WakeEngine:
    """Take memory again.  Idempotent; no KV cache before intact weights.  Reply: MemoryState."""

    engine: int
    parts: tuple[str, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The trainer is about to end with this cause.  Reply: Ok.

    blob: URI of the damaged blob that it has read, if that is the cause; its groups are generated
    again.  ends_run: a restart would meet the cause again.
    """

    rank: int
    cause: str
    job: str = "trainer"  # trainer | ref_models
    incarnation: int = -1  # -1 = unknown
    blob: str = ""
    ends_run: bool = False


@dataclass(frozen=True, slots=True)
class Notice:
    """A sentence for the console, such as a wait for room on a disk.  Reply: Ok."""

    text: str


@dataclass(frozen=True, slots=True)
class BadStep:
    """A step's loss or gradient is not finite.  Reply: Ok, when its records are kept."""

    step: int
    number: int  # of such optimizer steps of the batch, from 1
    text: str  # a sentence that names cause, microbatches and rollouts
    rollouts: tuple[str, ...]  # ids; empty: unknown, so the whole batch is kept


# --- reference ranks (reference, teacher) -> controller ------------------------------------------
@dataclass(frozen=True, slots=True)
class TakeRecords:
    """Ask for groups without reference scores, in training order, or rows for a reward model.

    Reply: Plan; ValueRows; Ok when none came in time (ask again); Stop when the run is over.
    """

    start: int  # earlier starts of these ranks
    dp_size: int
    timeout_s: float
    pair_cost: float = 0.0  # as in Hello


@dataclass(frozen=True, slots=True)
class Scored:
    """Reference scores of every row of the last plan, or none: a teacher's version is gone.

    exchange_s: seconds that each teacher took for its version, by name.  Reply: Ok.
    """

    scores: tuple[RefScores, ...]
    exchange_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Values:
    """The scores that a reward model gives the parts of each row of `ValueRows`.  Reply: Ok."""

    number: int
    values: tuple[Array, ...]  # by row: [parts] f32


@dataclass(frozen=True, slots=True)
class ValueRow:
    """A conversation, of which a reward model values parts that begin where it begins."""

    token_ids: Array  # [T] i32, to the end of the last part
    ends: tuple[int, ...]  # tokens of each part, ascending, in 1..T


@dataclass(frozen=True, slots=True)
class ValueRows:
    """Rows for a reward model, in reply to TakeRecords."""

    number: int  # of the question
    folder: str  # of the model
    rows: tuple[ValueRow, ...]


# --- controller -> trainer (replies) -------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Ok:
    pass


@dataclass(frozen=True, slots=True)
class Refused:
    """The request cannot be served; `cause` is one sentence.  The trainer stops."""

    cause: str


@dataclass(frozen=True, slots=True)
class Plan:
    plan: BatchPlan
    ahead: BatchPlan | None = None
    """Of the next step, if its batch is complete: its records may be read; not yet to be trained.
    """


@dataclass(frozen=True, slots=True)
class SamePlan:
    """The plan that came ahead is the step's plan; ahead: as in `Plan`."""

    ahead: BatchPlan | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """No further plans: the run reached its last step or is being stopped."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refresh:
    """An engine restarted with old weights and no batch is ready: publish again, then ask again."""


@dataclass(frozen=True, slots=True)
class SyncTarget:
    """An engine that the trainer publishes to."""

    engine: int
    tp: int


@dataclass(frozen=True, slots=True)
class SetEngines:
    """Publish to exactly these engines from here on, then ask again."""

    engines: tuple[SyncTarget, ...]  # ascending


@dataclass(frozen=True, slots=True)
class UpdateDone:
    pause_s: float  # seconds without a running request because of the update
    aborted: int  # requests interrupted, all of them resumed
    engines: int = 1
    commit_s: float = 0.0  # part of it: copy into the live weights and post-load hooks
    recomputed: int = 0  # tokens whose KV cache the update dropped under running requests


@dataclass(frozen=True, slots=True)
class UpdatePrepared:
    endpoints: tuple[bytes, ...]  # of each engine rank's staging buffer, for the transport
    starts: tuple[dict[int, int], ...]  # by trainer rank: offset of its region
    layout: str  # fingerprint of the engine's weight layout
    held: PolicyVersion  # version that the engine serves
    rounds: int = 0  # of WriteUpdate; 0 = staging takes all buckets at once


@dataclass(frozen=True, slots=True)
class UpdateVerified:
    """The result of a comparison.  failed: per engine rank, numbers of unequal buckets."""

    failed: tuple[tuple[int, ...], ...]
    # of the staged version, of factors: of the weights that they give, 16 hex digits; empty when
    # any bucket failed
    digest: str


@dataclass(frozen=True, slots=True)
class EngineVersion:
    version: PolicyVersion
    cause: str  # why it gets no requests; empty: it does
    asleep: tuple[str, ...] = ()  # as in SleepEngine
    is_dirty: bool = False  # its weights slept or were written, and no commit came since


@dataclass(frozen=True, slots=True)
class MemoryState:
    """The sleeping parts, and the cost of the change."""

    asleep: tuple[str, ...]
    is_dirty: bool
    seconds: float = 0.0
    num_bytes: int = 0  # that rank 0 gave back
    recomputed: int = 0  # tokens of running requests whose KV cache was dropped
    aborted: int = 0  # requests that were interrupted, and are resumed


SessionMessage = (
    PrepareUpdate
    | WriteUpdate
    | VerifyUpdate
    | RelayUpdate
    | CommitUpdate
    | AbortUpdate
    | AskEngine
)
"""What a publish session asks of one engine."""

Message = (
    SessionMessage
    | SleepEngine
    | WakeEngine
    | MemoryState
    | Hello
    | TakePlan
    | StepDone
    | Failed
    | Notice
    | BadStep
    | TakeRecords
    | Scored
    | Values
    | ValueRows
    | Ok
    | Refused
    | Plan
    | SamePlan
    | Stop
    | Refresh
    | SetEngines
    | UpdateDone
    | UpdatePrepared
    | UpdateVerified
    | EngineVersion
    | SendVersion
    | DropSession
    | EngineRemoved
    | Sent
)


# --- interfaces of the controller ----------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class EngineStatus:
    """State of an engine host, without a call to its server."""

    engine: int
    version: PolicyVersion
    pid: int
    running: int  # requests in flight
    generated_tokens: int  # since start
    busy_s: float  # seconds with at least one request in flight
    refused: dict[str, int] = field(default_factory=dict)  # records refused, by reason
    layout: str = ""  # fingerprint of the weight layout; equal prints take equal transfer plans


@dataclass(frozen=True, slots=True)
class Answers:
    """Replies of an engine host since the controller's last call; each is given out once.

    A record that breaks the contract is replaced by its RecordError; EngineError: the engine failed
    while it ran the request.
    """

    replies: tuple[tuple[str, Segment | RecordError | EngineError], ...]  # by GenerateRequest.name
    progress: int  # grows while the engine prefills, samples or is updated
    # Tokens that requests with `streams` have so far; the newest of each, in front of its reply.
    partial: tuple[tuple[str, Array], ...] = ()


class Engine(Protocol):
    """One rollout engine as the controller sees it (implemented by `moerl.engine.host.host`)."""

    async def start(self, version: PolicyVersion) -> EngineStatus: ...

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Run these requests; returns at once.  `collect` gives the reply to each."""
        ...

    async def collect(self) -> Answers:
        """Replies so far; waits some seconds for the first.  Every record is checked and sealed."""
        ...

    async def abort(self, names: Sequence[str]) -> None:
        """Interrupt these requests: `collect` gives their tokens so far."""
        ...

    async def session(self, message: SessionMessage) -> Message:
        """One step of a publish session.  Raises EngineError: refused, late or broken."""
        ...

    async def move_memory(self, message: SleepEngine | WakeEngine) -> MemoryState:
        """Sleep or wake.  Raises EngineError: refused, late or broken."""
        ...

    async def interrupt(self) -> None:
        """Interrupt the running requests: each returns its tokens so far, to continue elsewhere."""
        ...

    async def forget(self, kept: Sequence[str] | None, life: int) -> None:
        """A new controller takes over: abort the earlier one's calls and seal none of their
        records.

        kept: blobs that it knows; other blobs of earlier controllers are deleted from the
        engine's store.  None: delete none.
        life: number of controllers before it; the message of an earlier controller is ignored.
        """
        ...

    async def status(self) -> EngineStatus: ...

    async def stop(self) -> None: ...


class Scorer(Protocol):
    """One scorer, in any of its homes (implemented by `moerl.scoring` and `moerl.launch`)."""

    async def score(self, asked: Sequence[ScoreRequest]) -> Sequence[Score | ScoreError]:
        """Answers, in order.  ScoreError: this request has no score.

        Raises ScorerDown when the scorer did not answer: the requests may be repeated.
        """
        ...


class Scorers(Protocol):
    """The scorers of a run, and the environments that share their processes."""

    async def score(
        self, task: str, term: str, asked: Sequence[ScoreRequest]
    ) -> Sequence[Score | ScoreError]:
        """As `Scorer.score`, of a term of the reward of the task with this label."""
        ...

    async def reply(self, prompt: Prompt, responses: Sequence[str]) -> str:
        """The environment's reply to the policy's turns; empty: it ends.  Raises ScoreError."""
        ...


@dataclass(frozen=True, slots=True)
class PublishResult:
    """Cost of one publish to one engine."""

    engine: int
    version: PolicyVersion
    num_bytes: int
    transfer_s: float
    pause_s: float
    aborted: int
    prepare_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    resent: int = 0  # buckets sent twice because they arrived damaged
    source: int = -1  # engine that relayed it; -1 = the trainer


@dataclass(frozen=True, slots=True)
class PublishFailure:
    """An engine that did not take a version; it serves its earlier version, or nothing."""

    engine: int
    version: PolicyVersion
    phase: str  # prepare | transfer | verify | commit
    cause: str
    refused: bool = False  # the engine is well and answered no: the same attempt fails again
