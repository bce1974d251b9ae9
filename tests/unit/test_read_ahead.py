"""Records that were read early are the records, each read once, and for one step only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moerl.core.errors import BlobError
from moerl.core.types import BlobRef
from moerl.records import BlobStore
from moerl.records.blob_store import ReadAhead, RecordReads

RUNS = [(0, 100), (5000, 9000)]


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path, "n")


def sealed(store: BlobStore, name: str) -> BlobRef:
    data = np.random.default_rng(len(name)).integers(0, 256, 10_000, np.uint8)
    return store.seal(name, [data])[0]


def test_an_early_read_has_the_same_bytes_and_is_not_repeated(store: BlobStore) -> None:
    ref, other = sealed(store, "a"), sealed(store, "bb")
    ahead = ReadAhead(store)
    ahead.begin(lambda records: records.read_records([(ref, RUNS)]))
    ahead.use()
    before = store.bytes_read
    for _ in range(2):  # two passes of a step
        assert np.array_equal(ahead.read_records([(ref, tuple(RUNS))]), store.read_runs(ref, RUNS))
    assert store.bytes_read - before == before * 2, "the early bytes were read again"
    assert len(ahead.read_records([(ref, RUNS[:1])])) == 100, "other runs are another read"
    assert np.array_equal(ahead.read_records([(other, RUNS)]), store.read_runs(other, RUNS))
    assert ahead.drop() == 2


def test_a_step_sees_no_older_reads(store: BlobStore) -> None:
    ref = sealed(store, "a")
    ahead = ReadAhead(store)
    ahead.begin(lambda records: records.read_records([(ref, RUNS)]))
    ahead.use()
    ahead.use()  # a step whose plan did not come ahead
    ahead.read_records([(ref, RUNS)])
    assert ahead.drop() == 0


def test_reads_for_the_next_step_outlive_this_one(store: BlobStore) -> None:
    ref = sealed(store, "a")
    ahead = ReadAhead(store)
    ahead.use()
    ahead.begin(lambda records: records.read_records([(ref, RUNS)]))
    assert ahead.drop() == 0
    ahead.use()
    ahead.read_records([(ref, RUNS)])
    assert ahead.drop() == 1


def test_what_cannot_be_read_is_an_error_of_its_reader_alone(store: BlobStore) -> None:
    good, bad = sealed(store, "a"), sealed(store, "bb")
    path = store.root / "bb"
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    ahead = ReadAhead(store)

    def read(records: RecordReads) -> None:
        records.read_records([(good, RUNS)])
        records.read_records([(bad, RUNS)])

    ahead.begin(read)
    ahead.use()
    ahead.read_records([(good, RUNS)])
    with pytest.raises(BlobError, match="bb"):
        ahead.read_records([(bad, RUNS)])
    assert ahead.drop() == 1
