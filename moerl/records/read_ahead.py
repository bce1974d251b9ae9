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
from moerl.records.blob_store import RecordReads, Run

log = logging.getLogger(__name__)

Kept = dict[tuple[str, int, tuple[Run, ...]], Array]  # by blob, place in it, and runs


class ReadAhead:
    """The records of a store, some of which were read early.  Calls come from any thread."""

    def __init__(self, store: RecordReads) -> None:
        self._store = store
        self._hits = 0  # reads that early ones have answered, since `use`
        self._kept: Kept = {}
        self._coming: Future[Kept] | None = None
        self._thread = ThreadPoolExecutor(1, "read-ahead")

    def read_runs(self, ref: BlobRef, runs: Sequence[Run]) -> Array:
        """As `BlobStore.read_runs`.  The bytes of an early read are shared: do not change them."""
        found = self._kept.get(_key(ref, runs))
        if found is None:
            return self._store.read_runs(ref, runs)
        self._hits += 1
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
        """Drop the bytes of `use`; returns the number of reads that they answered."""
        self._kept = {}
        return self._hits


class _Gathering:
    """Reads of a store, kept."""

    def __init__(self, store: RecordReads) -> None:
        self.kept: Kept = {}
        self._store = store

    def read_runs(self, ref: BlobRef, runs: Sequence[Run]) -> Array:
        read = self._store.read_runs(ref, runs)
        self.kept[_key(ref, runs)] = read
        return read


def _gather(store: RecordReads, read: Callable[[RecordReads], None]) -> Kept:
    gathering = _Gathering(store)
    try:
        read(gathering)
    except (MoerlError, OSError) as error:
        log.info("records were not read ahead: %s", error)
    return gathering.kept


def _key(ref: BlobRef, runs: Sequence[Run]) -> tuple[str, int, tuple[Run, ...]]:
    return ref.uri, ref.offset, tuple(runs)
