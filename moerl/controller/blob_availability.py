"""Checks that the records of waiting groups can be read, and drops groups whose records cannot.

Records stay on the node of the engine that sealed them until they are trained.  If a node or its
store is lost, its groups are regenerated, unless durability `shared` has copies in the run
directory.

Before a batch is planned, existence and size of its blobs are checked.  Their bytes are checked by
their readers; a reader that finds a damaged blob ends and names it (`Failed.blob`), and the blob's
groups are regenerated.  Damage rarely comes alone: after a report, and for groups adopted from an
earlier controller, all bytes of waiting groups are checked too, before they are planned.
Rejected: checking the bytes of every batch, which would read all records twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence, Set

from moerl.controller.context import Context
from moerl.controller.producer import Producer
from moerl.controller.scoring_stage import ScoringStage
from moerl.core.types import EpisodeGroup
from moerl.records.blob_store import Found, sizes_of
from moerl.records.header_check import group_refs, group_uris

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
        self._unchecked: set[int] = set()  # groups whose bytes are checked before they are planned

    async def are_whole(self, due: list[EpisodeGroup]) -> bool:
        """True if this batch is still the next one and its records can be read."""
        gone, copied = await self._drop_lost(due)
        if gone or not await self._drop_damaged(due) or self._buffer.due() != due:
            return False
        self._step_metrics.add(
            "async/copied_groups", sum(not copied.isdisjoint(group_uris(group)) for group in due)
        )
        return True

    async def drop_lost(self, groups: Sequence[EpisodeGroup]) -> bool:
        """True if the records of these groups can be read.

        Ready groups whose records are lost are regenerated.  A node that does not answer is waited
        for once.
        """
        gone, _ = await self._drop_lost(groups)
        return not gone and await self._drop_damaged(groups)

    async def _drop_lost(self, groups: Sequence[EpisodeGroup]) -> Found:
        found = await asyncio.to_thread(self._find, groups, self._patience_s)
        if found.gone:  # other records of that store are lost too
            found = await asyncio.to_thread(self._find, self._buffer.ready(), 0.0)
        self._step_metrics.add("async/dropped_lost_groups", len(self._evict(found.gone, "lost")))
        return found

    def _evict(self, uris: Set[str], what: str) -> list[EpisodeGroup]:
        """Regenerate ready groups with records in these blobs.  what: their fault."""
        if not uris:  # nearly always: thousands of ready groups need not be read
            return []
        gone = self._buffer.evict(lambda group: not uris.isdisjoint(group_uris(group)))
        self._journal.left(group.group_id for group in gone)
        for group in gone:
            log.warning("records of group %d are %s, it is regenerated", group.group_id, what)
            self._ref_counts.forget(group)
        return gone

    def _find(self, groups: Sequence[EpisodeGroup], patience_s: float) -> Found:
        return self._blobs.find(sizes_of(group_refs(*groups)), patience_s)

    # --- damaged records --------------------------------------------------------------------------
    def check_waiting(self) -> None:
        """Check the bytes of all groups that may be trained, in the background."""
        self._unchecked.update(group.group_id for group in self.trainable())
        if self._unchecked:
            self._tasks.spawn(self._check_ready())

    def report(self, uri: str) -> None:
        """A reader found a damaged blob: its groups are regenerated, a planned step planned again.

        A blob that no group needs is ignored: it was reported before.
        """
        if not any(uri in group_uris(group) for group in self.trainable()):
            return
        planned = self._batches.planned
        hit = [step for step in planned if any(uri in group_uris(group) for group in planned[step])]
        for step in sorted(planned, reverse=True):  # a later step may have been planned ahead
            if hit and step >= min(hit):
                self._buffer.unplan(step, self._batches.unplan(step))
        self._evict_damaged({uri})
        self.check_waiting()
        self._tasks.notify()

    async def _check_ready(self) -> None:
        while waiting := [g for g in self._buffer.ready() if g.group_id in self._unchecked]:
            await self._drop_damaged(waiting[:1])

    async def _drop_damaged(self, groups: Sequence[EpisodeGroup]) -> bool:
        """True if none of these groups, where they are still unchecked, has a damaged blob."""
        unchecked = [group for group in groups if group.group_id in self._unchecked]
        if not unchecked:
            return True
        damaged = await asyncio.to_thread(self._blobs.damaged, list(group_refs(*unchecked)))
        self._unchecked.difference_update(group.group_id for group in unchecked)
        self._evict_damaged(damaged)
        self._tasks.notify()
        return not damaged

    def _evict_damaged(self, uris: Set[str]) -> None:
        for _ in self._evict(uris, "damaged"):
            self._step_metrics.add("refused/damaged")
        for uri in uris:  # a trained group or late siblings may refer to it: they will miss it
            self._blobs.delete(uri)

    def trainable(self) -> Iterator[EpisodeGroup]:
        """Groups that are ready, planned, or could be trained again."""
        yield from self._buffer.ready()
        yield from self._batches.groups()

    async def remove(self, node: str) -> None:
        """Wait until no group that may be trained has records on a node."""
        prefix = f"blob://{node}/"

        def is_named() -> bool:
            uris = group_uris(*self.trainable())
            uris = uris.union(*(episode.uris for episode in self._producer.episodes()))
            uris = uris.union(*(episode.uris for episode in self._scoring_stage.episodes()))
            return any(uri.startswith(prefix) for uri in uris)

        while is_named():
            await self._tasks.wait_change(1.0)
