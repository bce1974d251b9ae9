"""What the parts of the controller share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from moerl.config import Config
from moerl.messages import Engine, Scorer
from moerl.records import BlobStore
from moerl.rollout.blob_holders import BlobHolders
from moerl.rollout.buffer import GroupBuffer
from moerl.rollout.episodes import Environment
from moerl.rollout.fleet import Fleet
from moerl.rollout.history import History
from moerl.rollout.journal import Journal
from moerl.rollout.ledger import Ledger
from moerl.rollout.loops import Loops
from moerl.rollout.planned_batches import PlannedBatches
from moerl.rollout.roster import Roster
from moerl.rollout.samples import StepReport
from moerl.rollout.timely import TimelyScorer
from moerl.types import ModelShape, Prompt


class PromptSource(Protocol):
    """An endless, deterministic stream (`moerl.data.tasks.PromptStream`)."""

    def prompt(self, index: int) -> Prompt: ...


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Services:
    """What the launcher gives to a controller."""

    model: ModelShape
    engines: Mapping[int, Engine]
    sizes: Mapping[int, int]  # tensor-parallel ranks of each engine
    scorer: Scorer
    prompts: PromptSource
    held_out: PromptSource | None = None  # prompts of evaluations, needed with evaluation.every
    decode: Callable[[Sequence[int]], str]
    encode: Callable[[str], list[int]]
    blobs: BlobStore
    journal: Journal
    # Where headers of trained groups go; None: they are dropped, and their blobs are deleted.
    records: Path | None
    saved_steps: Callable[[], int]  # in the newest checkpoint, the one a restart begins with
    on_step: Callable[[StepReport], None]
    on_rewind: Callable[[int], None]  # the run continues from this step; later rows are void


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """Made once by the controller; each of its parts takes from here what it needs."""

    config: Config
    services: Services  # the scorer has a deadline
    environment: Environment
    fleet: Fleet
    roster: Roster
    buffer: GroupBuffer
    batches: PlannedBatches
    holders: BlobHolders
    history: History
    ledger: Ledger
    loops: Loops


def make_context(config: Config, services: Services, *, fleet_changed: bool) -> Context:
    """Inside a running event loop.

    fleet_changed: the trainer may publish to other engines than the configured ones.
    """
    rollout, ledger, loops = config.rollout, Ledger(), Loops()
    scorer = TimelyScorer(services.scorer, config.task.score_timeout_s)
    return Context(
        config=config,
        services=replace(services, scorer=scorer),
        environment=Environment(scorer, services.decode, services.encode),
        fleet=Fleet(services.engines, rollout, ledger, loops),
        roster=Roster(config.engine, services.sizes, changed=fleet_changed),
        buffer=GroupBuffer(
            rollout.groups_per_step,
            rollout.max_lag,
            rollout.buffer_depth,
            selection=rollout.selection,
        ),
        batches=PlannedBatches(services.journal, services.saved_steps),
        holders=BlobHolders(services.blobs),
        history=History(),
        ledger=ledger,
        loops=loops,
    )
