"""Slices of records equal slices of the whole; damage inside a slice is refused, and counted bytes
are the touched chunks.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.core.errors import BlobError, RecordError
from moerl.core.types import IndexerBlob, MaskBlob, PolicyVersion, RoutingBlob
from moerl.records import BlobStore
from moerl.records.blob_ranges import Interval, read_indexer, read_mask, read_routes
from moerl.records.blob_store import CHUNK_BYTES
from moerl.records.indexer import encode

VERSION = PolicyVersion(0, 0)
NAMES = itertools.count()


@pytest.fixture(scope="module")
def store() -> Iterator[BlobStore]:
    with tempfile.TemporaryDirectory() as folder:
        yield BlobStore(Path(folder), "n")


def routing(
    store: BlobStore, layers: tuple[int, ...], tiles: list[int], top_k: int, dtype: str, seed: int
) -> tuple[list[RoutingBlob], np.ndarray]:
    """One blob per segment beside another array, and all rows [L, T - 1, K] for comparison."""
    rng = np.random.default_rng(seed)
    high = 256 if dtype == "uint8" else 1000
    whole = rng.integers(0, high, (len(layers), sum(tiles), top_k)).astype(dtype)
    parts, at = [], 0
    for rows in tiles:
        ids = whole[:, at : at + rows]
        other = rng.integers(0, 9, 7).astype(np.int64)
        _, ref = store.seal(f"r{next(NAMES)}", [other, ids])
        parts.append(RoutingBlob(ref, at, at + rows, VERSION, layers, high))
        at += rows
    return parts, whole


@st.composite
def intervals(draw: st.DrawFn, limit: int, *, apart: bool = False) -> list[Interval]:
    count = draw(st.integers(0, 4))
    cuts = draw(st.lists(st.integers(0, limit), min_size=2 * count, max_size=2 * count))
    cuts = sorted(cuts) if apart else cuts
    return [(min(pair), max(pair)) for pair in zip(cuts[::2], cuts[1::2], strict=True)]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_slices_of_routes_equal_slices_of_the_whole(store: BlobStore, data: st.DataObject) -> None:
    layers = tuple(sorted(data.draw(st.sets(st.integers(0, 60), min_size=1, max_size=6))))
    tiles = data.draw(st.lists(st.integers(1, 900), min_size=1, max_size=4))
    top_k, dtype = data.draw(st.integers(1, 8)), data.draw(st.sampled_from(["uint8", "uint16"]))
    parts, whole = routing(store, layers, tiles, top_k, dtype, data.draw(st.integers(0, 99)))
    mine = data.draw(st.permutations(layers))[: data.draw(st.integers(1, len(layers)))]
    rows = data.draw(intervals(sum(tiles)))

    before = store.bytes_read
    got = read_routes(store, parts, layers=mine, rows=rows)
    read = store.bytes_read - before

    assert list(got) == list(mine)
    for layer, ids in got.items():
        want = whole[layers.index(layer)]
        want = np.concatenate([want[begin:end] for begin, end in rows] + [want[:0]])
        assert ids.dtype == want.dtype
        assert np.array_equal(ids, want)
    wanted = sum(ids.nbytes for ids in got.values())
    tables = sum(-(-part.ids.num_bytes // CHUNK_BYTES) * 8 for part in parts)
    edges = 2 * CHUNK_BYTES * len(mine) * len(rows) * len(tiles)
    assert read <= wanted + edges + tables
    if not wanted:
        assert read == 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_slices_of_masks_equal_slices_of_the_whole(store: BlobStore, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    parts, kept = [], []
    for num_tokens in data.draw(st.lists(st.integers(1, 700), min_size=1, max_size=3)):
        rows = [rng.integers(0, 99, rng.geometric(0.2)).astype(np.int32) for _ in range(num_tokens)]
        offsets = np.cumsum([0] + [len(row) for row in rows])
        refs = store.seal(f"m{next(NAMES)}", [offsets, np.concatenate(rows)])
        parts.append(MaskBlob(*refs, len(kept), num_tokens))
        kept += rows
    tokens = data.draw(intervals(len(kept), apart=True))
    offsets, ids = read_mask(store, parts, tokens=tokens)
    want = [row for begin, end in tokens for row in kept[begin:end]]
    assert offsets.tolist() == np.cumsum([0] + [len(row) for row in want]).tolist()
    assert ids.dtype == np.int32
    assert np.array_equal(ids, np.concatenate([*want, np.zeros(0, np.int32)]))
    all_offsets, all_ids = read_mask(store, parts)
    assert len(all_offsets) == len(kept) + 1
    assert np.array_equal(all_ids, np.concatenate(kept))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 7))
def test_one_flipped_bit_is_refused_where_it_is_read(
    store: BlobStore, place: int, bit: int
) -> None:
    (part,), whole = routing(store, (1, 2, 5), [3000], 4, "uint8", 0)
    path = store.root / part.ids.uri.rpartition("/")[2]
    data = bytearray(path.read_bytes())
    at = part.ids.offset + place % (part.ids.num_bytes + 8 * 9)  # the array or its digest table
    data[at] ^= 1 << bit
    path.write_bytes(data)
    inside = at - part.ids.offset
    with pytest.raises(BlobError, match="does not match its digest"):
        store.load(part.ids)
    for idx, layer in enumerate(part.layers):
        begin, end = idx * 12000 // CHUNK_BYTES, -(-(idx + 1) * 12000 // CHUNK_BYTES)
        if inside >= part.ids.num_bytes or begin <= inside // CHUNK_BYTES < end:
            with pytest.raises(BlobError, match="does not match its digest"):
                read_routes(store, [part], layers=[layer])
        else:
            got = read_routes(store, [part], layers=[layer])[layer]
            assert np.array_equal(got, whole[idx]), "damage elsewhere does not reach this slice"


def test_arrays_of_many_blobs_are_read_together_and_once(store: BlobStore) -> None:
    arrays = [[np.arange(5 + n), np.arange(3000 * n, dtype=np.int32)] for n in range(3)]
    refs = [ref for n in arrays for ref in store.seal(f"t{next(NAMES)}", n)]
    flat = [array.view(np.uint8) for pair in arrays for array in pair]
    wanted = [(ref, [(0, ref.num_bytes // 2), (0, ref.num_bytes)]) for ref in reversed(refs * 2)]
    before = store.bytes_read
    found = store.read_records(wanted)
    once = store.bytes_read - before
    want = [np.concatenate([one[: len(one) // 2], one]) for one in reversed(flat * 2)]
    assert np.array_equal(found, np.concatenate(want))
    assert found.flags.writeable, "owned by the caller"
    store.read_records(wanted[: len(refs)])
    assert store.bytes_read - before == 2 * once, "the same runs are read once in a call"
    other = replace(refs[3], digest="0123456789abcdef")
    with pytest.raises(BlobError, match="does not match its digest"):
        store.read_records([(refs[3], [(0, 4)]), (other, [(0, 4)])])
    assert len(store.read_records([])) == 0


def test_short_and_missing_blobs_are_refused(store: BlobStore) -> None:
    (part,), _ = routing(store, (0, 1), [5000], 2, "uint16", 1)
    with pytest.raises(BlobError, match="does not match its digest"):
        store.read_runs(replace(part.ids, digest="0123456789abcdef"), [(0, 1)])
    for shape in ((2, 4999, 2), (1, 5000, 2)):
        with pytest.raises(BlobError, match="does not match its digest"):
            store.read_runs(replace(part.ids, shape=shape), [(0, 8)])
    path = store.root / part.ids.uri.rpartition("/")[2]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BlobError, match="needed"):
        read_routes(store, [part], layers=[0], rows=[(0, 1)])
    store.delete(part.ids.uri)
    with pytest.raises(BlobError, match="is not in"):
        read_routes(store, [part], layers=[0], rows=[(0, 1)])


def test_a_sealed_blob_is_never_written_again(store: BlobStore) -> None:
    (ref,) = store.seal("once", [np.arange(3)])
    with pytest.raises(BlobError, match="sealed already"):
        store.seal("once", [np.zeros(3, np.int64)])
    assert store.load(ref).tolist() == [0, 1, 2]


@pytest.mark.parametrize("run", [(-1, 3), (5, 4), (0, 40001), (40000, 40001)])
def test_bytes_outside_the_array_are_refused(store: BlobStore, run: tuple[int, int]) -> None:
    (part,), _ = routing(store, (0, 1), [5000], 2, "uint16", 2)
    assert part.ids.num_bytes == 40000
    with pytest.raises(BlobError, match=r"0\.\.40000 exist"):
        store.read_runs(part.ids, [(0, 4), run])


def test_rows_and_layers_that_were_not_recorded_are_refused(store: BlobStore) -> None:
    parts, _ = routing(store, (3, 4), [10, 5], 2, "uint8", 3)
    refusals = [
        ("routing_layers", {"layers": [3, 5]}),
        ("routing_rows", {"layers": [3], "rows": [(0, 16)]}),
        ("routing_rows", {"layers": [3], "rows": [(-1, 2)]}),
        ("routing_rows", {"layers": [3], "rows": [(4, 2)]}),
    ]
    for reason, request in refusals:
        with pytest.raises(RecordError) as caught:
            read_routes(store, parts, **request)
        assert caught.value.reason == reason
    gap = [parts[0], replace(parts[1], row_begin=11, row_end=16)]
    overlap = [parts[0], replace(parts[1], row_begin=9, row_end=14)]
    shorter = [replace(parts[0], row_end=9), replace(parts[1], row_begin=9, row_end=14)]
    for broken in (gap, overlap, shorter, []):
        with pytest.raises(RecordError) as caught:
            read_routes(store, broken, layers=[3])
        assert caught.value.reason == "routing_rows"


def test_mask_tokens_that_were_not_recorded_are_refused(store: BlobStore) -> None:
    refs = store.seal(f"m{next(NAMES)}", [np.array([0, 2, 3]), np.arange(3, dtype=np.int32)])
    part = MaskBlob(*refs, 0, 2)
    for parts, tokens in (
        ([part], [(0, 3)]),
        ([part], [(1, 2), (0, 1)]),
        ([part, replace(part, first=3)], None),
        ([replace(part, num_tokens=3)], None),
        ([], None),
    ):
        with pytest.raises(RecordError) as caught:
            read_mask(store, parts, tokens=tokens)
        assert caught.value.reason == "mask_rows"


def positions(
    store: BlobStore, layers: tuple[int, ...], tiles: list[int], top_k: int, seed: int
) -> tuple[list[IndexerBlob], np.ndarray]:
    """One blob per segment, and all rows [L, T - 1, K] for comparison, rising, -1 behind."""
    rng = np.random.default_rng(seed)
    whole = np.full((len(layers), sum(tiles), top_k), -1, np.int32)
    for layer, at in itertools.product(range(len(layers)), range(sum(tiles))):
        chosen = np.sort(rng.permutation(at + 1)[:top_k])
        whole[layer, at, : len(chosen)] = chosen
    parts, at = [], 0
    for rows in tiles:
        packed = encode(whole[:, at : at + rows].transpose(1, 0, 2), at)
        _, ref = store.seal(f"i{next(NAMES)}", [np.zeros(5, np.uint8), packed])
        parts.append(IndexerBlob(ref, at, at + rows, VERSION, layers, top_k))
        at += rows
    return parts, whole


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_slices_of_positions_are_those_of_the_whole(store: BlobStore, data: st.DataObject) -> None:
    tiles = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=3))
    top_k = data.draw(st.sampled_from([1, 3, 7, 200]))
    layers = (0, 2, 5)
    parts, whole = positions(store, layers, tiles, top_k, data.draw(st.integers(0, 99)))
    rows = data.draw(intervals(sum(tiles)))
    layer = data.draw(st.sampled_from(layers))
    found = read_indexer(store, parts, layer=layer, rows=rows)
    for (begin, end), chosen in zip(rows, found, strict=True):
        want = whole[layers.index(layer), begin:end, : min(top_k, end)]
        assert np.array_equal(chosen, want)


def test_slices_of_positions_read_the_touched_chunks_only(store: BlobStore) -> None:
    parts, _ = positions(store, (0, 1), [900], 20, 0)
    before = store.bytes_read
    read_indexer(store, parts, layer=1, rows=[(700, 710)])
    assert store.bytes_read - before <= 2 * CHUNK_BYTES + parts[0].packed.num_bytes // 100


def test_positions_outside_the_record_are_refused(store: BlobStore) -> None:
    parts, _ = positions(store, (0, 2), [30, 20], 4, 0)

    def reason(parts: list[IndexerBlob], layer: int, rows: Interval) -> str:
        with pytest.raises(RecordError) as caught:
            read_indexer(store, parts, layer=layer, rows=[rows])
        return caught.value.reason

    assert reason(parts, 1, (0, 9)) == "indexer_layers"
    assert reason(parts, 2, (40, 51)) == "indexer_rows"
    assert reason([], 2, (0, 1)) == "indexer_rows"
    assert reason([parts[1], parts[0]], 2, (31, 40)) == "indexer_rows"
    assert reason([parts[0], replace(parts[1], top_k=5)], 2, (31, 40)) == "indexer_rows"
    short = replace(parts[1], row_end=49)  # bytes of another number of rows
    assert reason([parts[0], short], 2, (31, 40)) == "indexer_layers"
