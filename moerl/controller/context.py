"""Objects that the parts of the controller share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from moerl.config import Config
from moerl.config.clusters import takes_turns
from moerl.config.task_mixture import entries_of
from moerl.controller.blob_ref_counts import BlobRefCounts
from moerl.controller.buffer import GroupBuffer, PlannedBatches
from moerl.controller.engine_pool import EnginePool, SyncTargets
from moerl.controller.episode_scores import EpisodeScores
from moerl.controller.journal.journal import Journal
from moerl.controller.journal.recovered_state import Lineage
from moerl.controller.journal.stream_writer import StreamWriter
from moerl.controller.memory_schedule import MemorySchedule
from moerl.controller.reward_models import RewardModels
from moerl.controller.step_metrics import StepMetrics, StepReport
from moerl.controller.task_group import TaskGroup
from moerl.core.messages import Engine, Scorers
from moerl.core.types import ModelShape, Prompt
from moerl.episodes.open_episode import EpisodeRunner
from moerl.records import BlobStore


class PromptSource(Protocol):
    """An endless, deterministic stream (`moerl.data.tasks.PromptMixture`)."""

    def prompt(self, index: int) -> Prompt: ...


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Services:
    """Services that the launcher passes to a controller."""

    model: ModelShape
    engines: Mapping[int, Engine]
    sizes: Mapping[int, int]  # tensor-parallel ranks of each engine
    scorer: Scorers
    prompts: PromptSource
    held_out: PromptSource | None = None  # evaluation prompts, needed with evaluation.every
    decode: Callable[[Sequence[int]], str]
    encode: Callable[[str], list[int]]
    blobs: BlobStore
    journal: Journal
    stream: StreamWriter | None = None  # keeps the trained steps
    bad_steps: Path = Path("bad_steps")  # folder of the records of skipped optimizer steps
    saved_steps: Callable[[], int]  # steps in the newest checkpoint
    on_step: Callable[[StepReport], None]
    on_rewind: Callable[[int], None]  # the run continues from this step; later rows are void
    agents: Mapping[str, EpisodeRunner] = field(default_factory=dict)  # of tasks that have one


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """Made once by the controller and passed to each of its parts."""

    config: Config
    services: Services
    pool: EnginePool
    sync_targets: SyncTargets
    buffer: GroupBuffer
    batches: PlannedBatches
    ref_counts: BlobRefCounts
    lineage: Lineage
    step_metrics: StepMetrics
    tasks: TaskGroup
    scores: EpisodeScores
    reward_models: RewardModels
    memory_turns: MemorySchedule | None = None  # with cluster.colocated: turns


def make_context(config: Config, services: Services, *, pool_changed: bool) -> Context:
    """Call inside a running event loop.  pool_changed: the trainer may have other engines."""
    rollout, step_metrics, tasks = config.rollout, StepMetrics(), TaskGroup()
    ref_counts, reward_models = BlobRefCounts(services.blobs), RewardModels(tasks)
    pool = EnginePool(services.engines, rollout, step_metrics, tasks, ref_counts.release)
    return Context(
        config=config,
        services=services,
        pool=pool,
        memory_turns=MemorySchedule(config, pool, tasks) if takes_turns(config.cluster) else None,
        sync_targets=SyncTargets(config.engine, services.sizes, changed=pool_changed),
        buffer=GroupBuffer(
            rollout.groups_per_step,
            rollout.max_lag,
            rollout.buffer_depth,
            selection=rollout.selection,
            in_flight=(rollout.max_groups_in_flight if rollout.admission == "unbounded" else None),
        ),
        batches=PlannedBatches(services.journal, services.saved_steps),
        ref_counts=ref_counts,
        lineage=Lineage(),
        step_metrics=step_metrics,
        tasks=tasks,
        scores=EpisodeScores(
            entries_of(config),
            services.scorer,
            services.decode,
            step_metrics,
            tasks,
            reward_models,
        ),
        reward_models=reward_models,
    )
