"""Seams between components, and the typed messages between trainer and controller.

The trainer is a plain torchrun trainer that knows nothing of Ray: its rank 0 speaks these messages
over ZeroMQ (request, then reply, one at a time per socket).  Rank 0 uses one socket for the
training loop and one for each publish session, so a publish never delays a plan.

One frozen dataclass per meaning; `moerl.serialization` makes bytes of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moerl.errors import RecordError
from moerl.id_sets import Ranges
from moerl.types import (
    BatchPlan,
    Episode,
    GenerateRequest,
    PolicyVersion,
    Prompt,
    RefScores,
    Score,
    Segment,
)


# --- trainer -> controller ---------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a trainer.  Reply: Ok; SetEngines when other engines than configured are
    there.

    consumed: group ids whose training is part of the checkpoint the trainer started from; the
    controller never plans them again.
    """

    token: str  # the run's random token
    world_size: int
    dp_size: int
    version: PolicyVersion  # weights the trainer holds now
    consumed: Ranges


@dataclass(frozen=True, slots=True)
class TakePlan:
    """Ask for the plan of one optimizer step.

    Reply: Plan; Stop when the run is over; Refresh when an engine must be published to first;
    SetEngines when others are published to from here on.
    """

    step: int
    timeout_s: float
    incarnation: int  # of the asker: one that was replaced gets nothing


@dataclass(frozen=True, slots=True)
class StepDone:
    """An optimizer step is complete.  Reply: Ok.  Its groups count as consumed from here on."""

    step: int
    version: PolicyVersion  # weights after the step
    metrics: dict[str, float]  # names of docs/metrics.md
    checkpoint: str  # path of a checkpoint that includes this step, or empty


@dataclass(frozen=True, slots=True)
class PrepareUpdate:
    """Begin a session: agree on one version for one engine.  Reply: UpdatePrepared.

    Passed on to the receiver of every rank of the engine, which derives what it will receive from
    the same inputs as the trainer.  Refused, with nothing changed, when any of them differs.
    """

    engine: int
    version: PolicyVersion
    plan_engine: int  # id that both ends plan with: the engine's own, or of the one it copies
    plan: str  # fingerprint of the transfer plan, `moerl.weight_sync.transfer_plan.TransferPlan.id`
    layout: str  # fingerprint of the engine's weight layout met last time; empty: not met yet
    transport: str  # name of a transport of `moerl.weight_sync.transports`
    trainer: dict[str, int]  # fields of `moerl.config.schema.ParallelConfig`
    policy: dict[str, int | str]  # fields of `moerl.weight_sync.transfer_plan.WirePolicy`
    layer_spec: str  # layer spec of the trainer's model: local | te
    timeout_s: float
    folder: str = ""  # of the transport disk
    delta: bool = False  # the staging buffer also takes deltas: a region's stand behind it


@dataclass(frozen=True, slots=True)
class VerifyUpdate:
    """All bytes are sent: compare them in staging.  Reply: UpdateVerified, also when they differ.

    digests: per engine rank, 8 bytes per bucket, little endian, buckets in the order of its
    receiver plan.  deltas: per engine rank and bucket, bytes of the delta that was sent in its
    place, 0 = it was sent in full; empty = all were.
    """

    engine: int
    version: PolicyVersion
    digests: tuple[bytes, ...]
    timeout_s: float
    deltas: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class RelayUpdate:
    """Send the version that this engine took last on to another engine.  Reply: Ok, when sent.

    endpoints: of the other engine's staging buffers, by rank; both planned with one id.
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
    """Drop the session of a version; the engine keeps what it serves.  Reply: Ok, also twice."""

    engine: int
    version: PolicyVersion
    cause: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class AskEngine:
    """Which version does an engine serve?  Reply: EngineHolds."""

    engine: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The trainer is about to die of this cause.  Reply: Ok."""

    rank: int
    cause: str
    job: str = "trainer"  # | frozen
    incarnation: int = -1  # of a trainer that knew its own


# --- reference ranks (reference, teacher) -> controller
# ----------------------------------------------
@dataclass(frozen=True, slots=True)
class TakeRecords:
    """Ask for groups that the reference models have not scored yet, those that train next first.

    Reply: Plan; Ok when there was none in time (ask again); Stop when the run is over.
    """

    start: int  # starts of this trainer before this one
    dp_size: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Scored:
    """What the reference models say of every row of the plan asked last.  Reply: Ok."""

    scores: tuple[RefScores, ...]


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


@dataclass(frozen=True, slots=True)
class Stop:
    """No more plans: the run reached its last step, or is being stopped."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refresh:
    """An engine came back with old weights and there is no batch: publish again, then ask again."""


@dataclass(frozen=True, slots=True)
class SyncTarget:
    """An engine that versions are published to."""

    engine: int
    tp: int


@dataclass(frozen=True, slots=True)
class SetEngines:
    """Publish to exactly these engines from here on, then ask again."""

    engines: tuple[SyncTarget, ...]  # ascending


@dataclass(frozen=True, slots=True)
class UpdateClosed:
    pause_s: float  # time the engine had no running request because of the update
    aborted: int  # requests interrupted, all of them resumed
    engines: int = 1
    commit_s: float = 0.0  # of it, copying into the live weights and their post-load hooks
    recomputed: int = 0  # tokens whose KV cache the update gave up under running requests


@dataclass(frozen=True, slots=True)
class UpdatePrepared:
    endpoints: tuple[bytes, ...]  # of each engine rank's staging buffer, for the transport
    starts: tuple[dict[int, int], ...]  # in it, by trainer rank: where its region begins
    layout: str  # fingerprint of the engine's weight layout
    held: PolicyVersion  # what the engine serves


@dataclass(frozen=True, slots=True)
class UpdateVerified:
    """failed: per engine rank, numbers of the buckets that differ; the session stays open."""

    failed: tuple[tuple[int, ...], ...]
    digest: str  # of the staged version, 16 hex digits; empty when any bucket failed


@dataclass(frozen=True, slots=True)
class EngineHolds:
    version: PolicyVersion
    cause: str  # why it is not served requests; empty: it is


SessionMessage = PrepareUpdate | VerifyUpdate | RelayUpdate | CommitUpdate | AbortUpdate | AskEngine
"""What a publish session asks of one engine."""

Message = (
    Hello
    | TakePlan
    | StepDone
    | PrepareUpdate
    | VerifyUpdate
    | RelayUpdate
    | CommitUpdate
    | AbortUpdate
    | AskEngine
    | Failed
    | TakeRecords
    | Scored
    | Ok
    | Refused
    | Plan
    | Stop
    | Refresh
    | SetEngines
    | UpdateClosed
    | UpdatePrepared
    | UpdateVerified
    | EngineHolds
)


# --- seams in the controller's world -------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What an engine host knows without asking its server."""

    engine: int
    version: PolicyVersion
    pid: int
    running: int  # requests in flight
    generated_tokens: int  # since start
    busy_s: float  # seconds with at least one request in flight
    refused: dict[str, int] = field(default_factory=dict)  # records refused, by reason
    layout: str = ""  # fingerprint of how its weights lie; equal engines take equal transfer plans


class Engine(Protocol):
    """One rollout engine as the controller sees it (implemented by `moerl.engine.host`)."""

    async def start(self, version: PolicyVersion) -> EngineStatus: ...

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Segment | RecordError]:
        """Run all requests in one engine call; every record is checked and sealed on return.

        A record that breaks the contract comes back as its RecordError, in its place.
        """
        ...

    async def session(self, message: SessionMessage) -> Message:
        """One step of a publish session.  Raises EngineError: refused, late or broken."""
        ...

    async def interrupt(self) -> None:
        """End the running requests: each returns what it has, to be gone on with elsewhere."""
        ...

    async def forget(self, kept: Sequence[str] | None) -> None:
        """A new controller takes over: end the calls of the one before and seal nothing of them.

        kept: blobs that it knows; all others of the engine's store are deleted.  None: none are.
        """
        ...

    async def status(self) -> EngineStatus: ...

    async def stop(self) -> None: ...


class Scorer(Protocol):
    """Rewards for finished episodes (implemented by `moerl.scoring`)."""

    async def score(
        self, prompt: Prompt, episodes: Sequence[Episode], responses: Sequence[Sequence[str]]
    ) -> list[Score]:
        """said: what the policy said in each episode, turn by turn."""
        ...

    async def reply(self, prompt: Prompt, responses: Sequence[str]) -> str:
        """The environment's answer to a turn, given the policy's turns so far; empty: it ends."""
        ...


@dataclass(frozen=True, slots=True)
class PublishResult:
    """What one publish to one engine cost."""

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
    source: int = -1  # engine that sent it on; -1 = the trainer


@dataclass(frozen=True, slots=True)
class PublishFailure:
    """An engine that did not take a version; it serves the whole version it had, or nothing."""

    engine: int
    version: PolicyVersion
    phase: str  # prepare | transfer | verify | commit
    cause: str
