"""The controller: three loops (produce, score, learn) around one bounded buffer and one version.

It sees headers only.  Routes, masks, logits and weights go point to point.  `producer` starts
requests and joins segments, `admission` checks, scores and admits groups, `fleet` knows the
engines, `trainer_handler` answers the trainer; here they are made, and engines join and leave.
One process, one event loop, one writer of versions.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection

from moerl.config import Config
from moerl.messages import Engine, Message
from moerl.rollout.admission import Admission
from moerl.rollout.blob_uris import group_uris
from moerl.rollout.context import Services, make_context
from moerl.rollout.evaluation import Evaluator
from moerl.rollout.frozen import FrozenLine
from moerl.rollout.loops import look_after_memory
from moerl.rollout.past import Past
from moerl.rollout.producer import Producer
from moerl.rollout.trainer_handler import TrainerHandler
from moerl.rollout.whereabouts import Whereabouts

log = logging.getLogger(__name__)


class Controller:
    """Plain class; `moerl.launch` puts it on an actor."""

    def __init__(
        self,
        config: Config,
        services: Services,
        *,
        gang_lives: bool = False,
        fleet_changed: bool = False,
    ) -> None:
        """gang_lives: a controller died, its trainer and engines did not; first call `rejoin`.

        fleet_changed: engines have joined or left since this start of the run.
        """
        context = make_context(config, services, fleet_changed=fleet_changed and gang_lives)
        self.context = context
        self.admission = Admission(context)
        self.producer = Producer(context, self.admission)
        self._evaluator = Evaluator(context)
        self._whereabouts = Whereabouts(context, self.producer, self.admission)
        self._frozen = FrozenLine(context, self._whereabouts)
        self.trainer = TrainerHandler(
            context,
            self.admission,
            self.producer,
            self._evaluator,
            self._whereabouts,
            self._frozen,
        )
        self._restore(services.journal.load(), gang_lives)

    # --- life -------------------------------------------------------------------------------
    def _restore(self, past: Past, gang_lives: bool) -> None:
        """Take over what the journal holds.

        Beside a living gang plans stay planned.  A journal that lost anything cannot say what that
        gang has trained: it is refused until it started again from its checkpoint.
        """
        context, services, facts = self.context, self.context.services, past.facts
        for version in facts.begins:
            context.history.begin(version)
        planned = {group.group_id for groups in past.planned.values() for group in groups}
        context.batches.restore(past)
        self.trainer.restore(past)
        context.buffer.restore(
            max([facts.done, *(step + 1 for step in past.planned)]),
            past.consumed | planned,
            past.dropped,
            past.ready,
        )
        self.producer.life = facts.lives - 1
        adopted = list(self._whereabouts.trainable())
        named = Counter(uri for group in adopted for uri in group_uris(group))
        context.holders.share((named - Counter(set(named))).elements())
        context.ledger.journal_adopted, context.ledger.journal_lost = len(adopted), past.lost
        if services.records is None:
            services.blobs.sweep(named)
        if gang_lives and past.is_whole and facts.begins:
            context.fleet.incarnation = facts.begins[-1].incarnation
            services.on_rewind(facts.done)
        log.info("%d groups are taken over, %d were lost", len(adopted), past.lost)

    async def rejoin(self, lost: Collection[int]) -> None:
        """Ask the engines what they serve, and end what the controller before had asked of them.

        lost: those that are being started again.
        """
        deletes, is_new_run = self.context.services.records is None, not self.context.batches.done
        kept = sorted(group_uris(*self._whereabouts.trainable())) if deletes else None
        await self.context.fleet.look(lost, is_new_run, kept)

    async def run(self) -> None:
        """Produce until `stop`; raises the first failure of any loop or of the trainer."""
        self.context.loops.spawn(look_after_memory())
        self.producer.start()
        self._evaluator.start()
        await self.context.loops.failure

    async def handle(self, message: Message) -> Message:
        """Answer one message of the trainer.  Raises MoerlError."""
        return await self.trainer.handle(message)

    async def stop(self) -> None:
        await self.context.loops.stop()
        self.context.services.journal.close()

    def status(self) -> dict[str, float]:
        """For the live panel, between steps; names of docs/metrics.md."""
        buffer, fleet = self.context.buffer, self.context.fleet
        rollout = self.context.config.rollout
        siblings = rollout.group_size * rollout.oversample
        incarnation = -1 if fleet.incarnation is None else fleet.incarnation
        return {
            "async/buffer_depth": float(buffer.num_ready),
            "async/engines": fleet.num_serving,
            "async/in_flight": float(buffer.num_started * siblings),
            "trainer/incarnation": float(incarnation),
            "frozen/start": float(self._frozen.start),
        } | {f"refused/{reason}": float(n) for reason, n in self.context.ledger.refused.items()}

    # --- engines ----------------------------------------------------------------------------
    def engines_started(self) -> None:
        """The trainer's hello is answered from here on: it may publish and ask for plans."""
        self.trainer.engines_up.set()

    def engine_lost(self, index: int) -> None:
        self.context.fleet.lost(index)

    def engine_back(self, index: int, engine: Engine) -> None:
        self.context.fleet.back(index, engine)

    def engine_joins(self, index: int, engine: Engine, tp: int) -> None:
        """A started engine: it gets requests as soon as it serves the newest weights."""
        is_new_run = self.context.batches.done == 0 and not self.context.fleet.incarnation
        self.context.fleet.join(index, engine, is_new_run=is_new_run)
        self.context.roster.join(index, tp)
        self.producer.add(index)
        log.info("engine %d (tp %d) has joined", index, tp)

    async def engine_leaves(self, index: int) -> None:
        """Returns when nothing runs on the engine and nothing is published to it."""
        fleet, roster = self.context.fleet, self.context.roster
        await fleet.drain(index)
        roster.leave(index)
        while not roster.is_free(index):
            await self.context.loops.wait_change(1.0)
        fleet.remove(index)
        log.info("engine %d has left", index)

    async def records_leave(self, node: str) -> None:
        """Returns when no group that may be trained has records on the node of an engine."""
        await self._whereabouts.leave(node)

    async def measure_engines(self, seconds: float) -> float:
        """Tokens/s of idle engines on fresh prompts, both replays on; nothing is kept."""
        return await self.producer.measure(seconds)
