"""Checks that the records of waiting groups can be read, and drops groups whose records are lost.

Records stay on the node of the engine that sealed them until they are trained.  If a node or its
store is lost, its groups are regenerated, unless durability `shared` has copies in the run
directory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence

from moerl.controller.context import Context
from moerl.controller.producer import Producer
from moerl.controller.rollout_builder import group_uris
from moerl.controller.scoring_stage import ScoringStage
from moerl.records.blob_store import Found
from moerl.types import EpisodeGroup

log = logging.getLogger(__name__)


class BlobAvailability:
    """Checks and drops records of groups that wait for the trainer."""

    def __init__(self, context: Context, producer: Producer, scoring_stage: ScoringStage) -> None:
        self._blobs, self._journal = context.services.blobs, context.services.journal
        self._buffer, self._batches = context.buffer, context.batches
        self._ref_counts, self._step_metrics, self._tasks = (
            context.ref_counts,
            context.step_metrics,
            context.tasks,
        )
        self._producer, self._scoring_stage = producer, scoring_stage
        # as long as a reader waits for a node that does not answer
        self._patience_s = context.config.sync.timeout_s

    async def are_whole(self, due: list[EpisodeGroup]) -> bool:
        """True if this batch is still the next one and its records can be read."""
        gone, copied = await self._drop_lost(due)
        if gone or self._buffer.due() != due:
            return False
        self._step_metrics.copied += sum(not copied.isdisjoint(group_uris(group)) for group in due)
        return True

    async def drop_lost(self, groups: Sequence[EpisodeGroup]) -> bool:
        """True if the records of these groups can be read.

        Ready groups whose records are lost are regenerated.  A node that does not answer is waited
        for once.
        """
        gone, _ = await self._drop_lost(groups)
        return not gone

    async def _drop_lost(self, groups: Sequence[EpisodeGroup]) -> Found:
        found = await asyncio.to_thread(self._find, groups, self._patience_s)
        if found.gone:  # other records of that store are lost too
            found = await asyncio.to_thread(self._find, self._buffer.ready(), 0.0)
        gone = found.gone
        lost = self._buffer.evict(lambda group: not gone.isdisjoint(group_uris(group)))
        self._journal.left(group.group_id for group in lost)
        for group in lost:
            log.warning("the records of group %d are lost, it is regenerated", group.group_id)
            self._step_metrics.dropped_lost += 1
            self._ref_counts.forget(group)
        return found

    def _find(self, groups: Sequence[EpisodeGroup], patience_s: float) -> Found:
        return self._blobs.find(group_uris(*groups), patience_s)

    def trainable(self) -> Iterator[EpisodeGroup]:
        """Groups that are ready, planned, or could be trained again."""
        yield from self._buffer.ready()
        yield from self._batches.groups()

    async def remove(self, node: str) -> None:
        """Wait until no group that may be trained has records on a node."""
        prefix = f"blob://{node}/"

        def is_named() -> bool:
            partials = (*self._producer.partials(), *self._scoring_stage.partials())
            uris = group_uris(*self.trainable()).union(*(one.blob_uris() for one in partials))
            return any(uri.startswith(prefix) for uri in uris)

        while is_named():
            await self._tasks.wait_change(1.0)
