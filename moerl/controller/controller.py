"""The controller: loops that produce, score and learn, around one bounded buffer.

The controller sees headers only; routes, masks, logits and weights go point to point.  `producer`
starts and closes groups of episodes, `turn_router` samples their turns, `scoring_stage` checks,
scores and admits groups, `engine_pool` tracks engines, and `trainer_handler` answers the trainer.
The controller is one process with one event loop, and it alone writes versions.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from typing import Any

from moerl.config import Config
from moerl.controller.blob_availability import BlobAvailability
from moerl.controller.context import Services, make_context
from moerl.controller.engine_choice import EngineChoice
from moerl.controller.evaluation import Evaluator
from moerl.controller.journal.recovered_state import RecoveredState
from moerl.controller.player import Player
from moerl.controller.producer import Producer
from moerl.controller.ref_score_queue import RefScoreQueue
from moerl.controller.scoring_stage import ScoringStage
from moerl.controller.task_group import trim_memory_loop
from moerl.controller.trainer_handler import TrainerHandler
from moerl.controller.turn_router import TurnRouter
from moerl.core.messages import Engine
from moerl.core.types import PolicyVersion
from moerl.records.header_check import group_uris

log = logging.getLogger(__name__)


class Controller:
    """Wires the parts together.  A plain class; `moerl.launch` runs it as a Ray actor."""

    def __init__(
        self,
        config: Config,
        services: Services,
        *,
        trainer_alive: bool = False,
        pool_changed: bool = False,
    ) -> None:
        """Make all parts and restore the journal.

        trainer_alive: an earlier controller died while trainer and engines kept running; call
        `rejoin` before `run`.  pool_changed: engines have joined or left since the run started.
        """
        context = make_context(config, services, pool_changed=pool_changed and trainer_alive)
        self.context = context
        self.scoring_stage = ScoringStage(context)
        engines = EngineChoice(context.pool, config.rollout, context.step_metrics)
        self._player = Player(context, TurnRouter(context, engines))
        self.producer = Producer(context, self._player, engines, self.scoring_stage)
        self._evaluator = Evaluator(context, self._player)
        self._availability = BlobAvailability(context, self.producer, self.scoring_stage)
        self._ref_models = RefScoreQueue(context, self._availability)
        self.trainer = TrainerHandler(
            context,
            self.scoring_stage,
            self.producer,
            self._evaluator,
            self._availability,
            self._ref_models,
        )
        self.handle = self.trainer.handle  # answers one message of the trainer
        self._restore(services.journal.load(), trainer_alive)

    # --- life -------------------------------------------------------------------------------
    def _restore(self, recovered: RecoveredState, trainer_alive: bool) -> None:
        """Restore the state of the journal.

        If the trainer is alive, planned groups stay planned.  If the journal lost rows, the groups
        that this trainer has trained are unknown: the controller refuses the trainer until it
        restarts from its checkpoint.
        """
        context, services, state = self.context, self.context.services, recovered.controller_state
        context.lineage.restore(state.begins)
        planned = {group.group_id for groups in recovered.planned.values() for group in groups}
        context.batches.restore(recovered)
        self.trainer.restore(recovered)
        context.buffer.restore(
            max([state.done, *(step + 1 for step in recovered.planned)]),
            recovered.consumed | planned,
            recovered.dropped,
            recovered.ready,
        )
        self.trainer.drop_branch()  # groups whose deletion failed are still here
        self.producer.life = state.lives - 1
        adopted = list(self._availability.trainable())
        named = Counter(uri for group in adopted for uri in group_uris(group))
        context.ref_counts.share((named - Counter(set(named))).elements())
        turns = services.journal.turns
        if turns.lost:
            context.step_metrics.add("agent/lost_turns", turns.lost)
        context.step_metrics.add("journal/adopted_groups", len(adopted))
        context.step_metrics.add("journal/lost_groups", recovered.lost)
        services.blobs.sweep(turns.uris.union(named))
        if trainer_alive and recovered.is_whole and state.begins:
            context.pool.incarnation = state.begins[-1].incarnation
            services.on_rewind(state.done)
        log.info("%d groups restored, %d lost", len(adopted), recovered.lost)

    async def rejoin(self, lost: Collection[int]) -> None:
        """Ask engines for their versions and abort the requests of the earlier controller.

        lost: engines that are being restarted.
        """
        services, is_new_run = self.context.services, not self.context.batches.done
        kept = group_uris(*self._availability.trainable()) | services.journal.turns.uris
        await self.context.pool.poll(lost, is_new_run, sorted(kept), self.producer.life)
        if self.context.memory_turns is not None:
            self.context.memory_turns.took_over()

    async def run(self) -> None:
        """Produce until `stop`.  Raises the first failure of a loop or of the trainer."""
        self.context.tasks.spawn(trim_memory_loop())
        self._availability.check_waiting()
        self.producer.start()
        self._evaluator.start()
        await self.context.tasks.failure

    async def stop(self) -> None:
        tasks = self.context.tasks
        tasks.stopping = True
        await self._player.close()  # also withdraws turns from the engines
        await tasks.stop()
        self.context.services.journal.close()

    def status(self) -> dict[str, float]:
        """Status for the console between steps, with the names of docs/metrics.md."""
        buffer, pool = self.context.buffer, self.context.pool
        rollout = self.context.config.rollout
        siblings = rollout.group_size * rollout.oversample
        incarnation = -1 if pool.incarnation is None else pool.incarnation
        return {
            "async/buffer_depth": float(buffer.num_ready + self.context.batches.num_ahead),
            "async/engines": pool.num_serving,
            "async/in_flight": float(buffer.num_started * siblings),
            "trainer/incarnation": float(incarnation),
            "ref_models/start": float(self._ref_models.start),
            **self.producer.open_episodes(),
            **self.context.step_metrics.totals(),
        }

    def take_notices(self) -> list[str]:
        """Sentences for the console since the last call."""
        metrics = self.context.step_metrics
        notices = list(metrics.notices)
        del metrics.notices[: len(notices)]  # not replaced: waiting writes hold its `append`
        return notices

    # --- engines ----------------------------------------------------------------------------
    def engines_started(self) -> None:
        """Let the trainer's hello be answered; the trainer then publishes and takes plans."""
        self.trainer.engines_up.set()

    def engines(self) -> list[dict[str, object]]:
        """State of each engine."""
        return self.context.pool.table()

    async def close_turn(self) -> None:
        """Returns when the engines sleep: a trainer that starts needs the memory."""
        if self.context.memory_turns is not None:
            await self.context.memory_turns.close(for_a_start=True)

    async def generating(self) -> None:
        """Returns when an engine may be started: the trainer does not have the memory."""
        if self.context.memory_turns is not None:
            await self.context.memory_turns.generating()

    def engine_lost(self, index: int) -> None:
        self.context.pool.lost(index)

    def engine_back(self, index: int, engine: Engine) -> None:
        self.context.pool.back(index, engine)

    def engine_joins(self, index: int, engine: Engine, tp: int) -> None:
        """Add a started engine; it gets requests once it serves the newest weights."""
        is_new_run = self.context.batches.done == 0 and not self.context.pool.incarnation
        self.context.pool.join(index, engine, is_new_run=is_new_run)
        self.context.sync_targets.join(index, tp)
        log.info("engine %d (tp %d) has joined", index, tp)

    def engine_excluded(self, index: int) -> None:
        """Count an engine that keeps dying and has left the run."""
        self.context.step_metrics.add("async/engines_excluded")
        log.error("engine %d keeps dying and is excluded", index)

    async def engine_leaves(self, index: int) -> None:
        """Remove an engine; returns when it has no requests and no publish to it is running."""
        pool, sync_targets = self.context.pool, self.context.sync_targets
        await pool.drain(index)
        sync_targets.remove(index)
        while not sync_targets.is_free(index):
            await self.context.tasks.wait_change(1.0)
        pool.remove(index)
        self.producer.remove(index)
        log.info("engine %d has left", index)

    async def records_leave(self, node: str) -> None:
        """Return when no group that may be trained has records on this engine's node."""
        await self._availability.remove(node)

    async def evaluate(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """`Evaluator.once` of the model folder, in a run that no trainer joins."""
        self.context.lineage.restore([PolicyVersion(0, 0)])
        return await self._evaluator.once()

    async def measure_engines(self, seconds: float) -> float:
        """Tokens/s of idle engines on fresh prompts with both replays; the rollouts are dropped."""
        return await self.producer.measure(seconds)
