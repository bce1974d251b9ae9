"""Reference counts of blobs; a blob is deleted with the last group that refers to it.

Siblings of one engine call share one blob for the rows of their prompt.  Within one group the group
deletes it; when late siblings form a second group (rollout.late_siblings), both refer to it and
leave the buffer at different times.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Sequence

from moerl.core.types import EpisodeGroup
from moerl.records import BlobStore
from moerl.records.header_check import group_uris

log = logging.getLogger(__name__)


class BlobRefCounts:
    """Reference counts of blobs.  Thread-safe."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._others: Counter[str] = Counter()  # references beyond the first, per blob
        self._lock = threading.Lock()
        self._held: frozenset[str] = frozenset()  # rollouts whose blobs are being read
        # Arguments of `forget` for groups whose blobs were being read
        self._late: list[tuple[EpisodeGroup, EpisodeGroup | None]] = []

    def share(self, uris: Iterable[str]) -> None:
        """Add one reference to each of these blobs."""
        with self._lock:
            self._others.update(uris)

    def release(self, uris: Iterable[str]) -> None:
        """Drop one reference to each; a blob without references is deleted."""
        for uri in set(uris):
            with self._lock:
                others = self._others[uri]
                if others > 1:
                    self._others[uri] -= 1
                else:
                    del self._others[uri]
            if not others:
                self._delete(uri)

    def _delete(self, uri: str) -> None:
        """A blob that stays is removed when the run ends, or by the next controller."""
        try:
            self._store.delete(uri)
        except OSError as error:
            log.error("%s was not deleted: %s", uri, error)

    def hold(self, groups: Sequence[EpisodeGroup]) -> None:
        """Protect the blobs of exactly these groups from deletion until the next call."""
        self._held = frozenset(r.rollout_id for group in groups for r in group.rollouts())
        late, self._late = self._late, []
        for group, part in late:
            self.forget(group, part)

    def forget(self, group: EpisodeGroup, part: EpisodeGroup | None = None) -> None:
        """Delete the blobs of a group that left the buffer, except those of `part`."""
        if any(rollout.rollout_id in self._held for rollout in group.rollouts()):
            self._late.append((group, part))
            return
        self.release(group_uris(group) - (group_uris(part) if part else set()))
