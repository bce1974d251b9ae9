"""Records of the next step, read while this step is trained.

A step begins with a read that nothing hides: the read of each pass's first microbatch.  When the
controller has the next plan already, a thread makes those reads early and keeps the verified bytes
until that plan is trained.  Records that were not read early, or failed, are read as usual, so the
reader of the data gets the error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from moerl.core.errors import MoerlError
from moerl.core.types import Array, BlobRef
from moerl.records.blob_store import RecordReads, Run, Wanted

log = logging.getLogger(__name__)

Key = tuple[tuple[BlobRef, tuple[Run, ...]], ...]
Kept = dict[Key, Array]  # by the runs of a call


class ReadAhead:
    """The records of a store, some of which were read early.  Calls come from any thread."""

    def __init__(self, store: RecordReads) -> None:
        self._store = store
        self._hits = 0  # arrays that early calls have answered, since `use`
        self._kept: Kept = {}
        self._coming: Future[Kept] | None = None
        self._thread = ThreadPoolExecutor(1, "read-ahead")

    def read_records(self, wanted: Sequence[Wanted]) -> Array:
        """As `BlobStore.read_records`.  The bytes of an early call are shared: do not change them.

        A call is answered early as a whole or not at all.
        """
        found = self._kept.get(_key(wanted)) if self._kept else None
        if found is None:
            return self._store.read_records(wanted)
        self._hits += len(wanted)
        return found

    def begin(self, read: Callable[[RecordReads], None]) -> None:
        """Call `read` in the thread and keep its bytes for the next `use`."""
        self._coming = self._thread.submit(_gather, self._store, read)

    def use(self) -> None:
        """Wait for the reads of `begin` and answer with their bytes, and no others, from now on."""
        coming, self._coming = self._coming, None
        self._hits = 0
        self._kept = {} if coming is None else coming.result()

    def drop(self) -> int:
        """Drop the bytes of `use`; returns the number of arrays that they answered."""
        self._kept = {}
        return self._hits


class _Gathering:
    """Reads of a store, kept."""

    def __init__(self, store: RecordReads) -> None:
        self.kept: Kept = {}
        self._store = store

    def read_records(self, wanted: Sequence[Wanted]) -> Array:
        read = self._store.read_records(wanted)
        self.kept[_key(wanted)] = read
        return read


def _gather(store: RecordReads, read: Callable[[RecordReads], None]) -> Kept:
    gathering = _Gathering(store)
    try:
        read(gathering)
    except (MoerlError, OSError) as error:
        log.info("records were not read ahead: %s", error)
    return gathering.kept


def _key(wanted: Sequence[Wanted]) -> Key:
    return tuple((ref, tuple(runs)) for ref, runs in wanted)
