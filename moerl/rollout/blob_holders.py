"""Deletes blobs when the last group that names them leaves.

Siblings of one engine call name the rows of their prompt in one blob.  As long as they stay in one
group that group deletes it; when late ones go on in a group of their own (rollout.late_siblings),
two groups name it and leave at different times.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from moerl.blob import BlobStore


class BlobHolders:
    """Any thread."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._others: Counter[str] = Counter()  # groups beside one that name a blob
        self._lock = threading.Lock()

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
