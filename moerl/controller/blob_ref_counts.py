"""Deletes blobs when the last group that names them leaves.

Siblings of one engine call name the rows of their prompt in one blob.  As long as they stay in one
group that group deletes it; when late ones go on in a group of their own (rollout.late_siblings),
two groups name it and leave at different times.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence

from moerl.controller.rollout_builder import group_uris
from moerl.records import BlobStore
from moerl.types import EpisodeGroup


class BlobRefCounts:
    """Any thread."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._others: Counter[str] = Counter()  # groups beside one that name a blob
        self._lock = threading.Lock()
        self._held: frozenset[str] = frozenset()  # rollouts that somebody reads just now
        self._late: list[EpisodeGroup] = []  # that left meanwhile

    def share(self, uris: Iterable[str]) -> None:
        """One group more names each of these blobs."""
        with self._lock:
            self._others.update(uris)

    def release(self, uris: Iterable[str]) -> None:
        """One group names these no more; a blob that nobody else names is deleted."""
        for uri in set(uris):
            with self._lock:
                others = self._others[uri]
                if others > 1:
                    self._others[uri] -= 1
                else:
                    del self._others[uri]
            if not others:
                self._store.delete(uri)

    def hold(self, groups: Sequence[EpisodeGroup]) -> None:
        """From now on only the blobs of these groups outlive their leaving the line."""
        self._held = frozenset(r.rollout_id for group in groups for r in group.rollouts())
        late, self._late = self._late, []
        for group in late:
            self.forget(group)

    def forget(self, group: EpisodeGroup) -> None:
        """Delete the blobs of a group that left the line."""
        if any(rollout.rollout_id in self._held for rollout in group.rollouts()):
            self._late.append(group)
            return
        self.release(group_uris(group))
