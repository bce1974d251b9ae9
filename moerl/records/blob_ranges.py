"""Slices of routing and mask records: only the byte ranges of a rank's layers and tokens.

Log-probabilities are read whole: 4 bytes per sampled token.

A record is stored in one blob per segment, routes layer-major.  A pipeline stage reads its layers,
a data-parallel rank its rollouts, a context- or sequence-parallel rank its tokens; the result stays
u8 or u16.  Bytes read are the touched chunks of 4 KiB, so the waste is at most two
chunks per layer and interval of tokens, plus the digest table (0.2 % of the record).
`BlobStore.bytes_read` counts all of it.

Rejected: slicing after decoding (all layers of all tokens on every rank), a second check of ids.

Legend: L requested layers, n requested tokens, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from moerl.core.errors import RecordError
from moerl.core.types import Array, IndexerBlob, MaskBlob, Rollout, RoutingBlob
from moerl.records import indexer
from moerl.records.blob_store import RecordReads, Run
from moerl.records.header_check import check_logprobs, count_logprobs

Interval = tuple[int, int]  # begin and end (exclusive) of consecutive tokens


def read_routes(
    store: RecordReads,
    blobs: Sequence[RoutingBlob],
    *,
    layers: Sequence[int],
    rows: Sequence[Interval] | None = None,
) -> dict[int, Array]:
    """Expert ids of some layers and tokens of one rollout: {layer: [n, K] u8 or u16}.

    blobs: the rollout's `routing` (or the tiles of one segment), in order.  layers: global 0-based
    numbers.  rows: intervals of fed-in tokens in the rollout's numbering, returned in the order
    given; they may cross segments.  None = all rows of the blobs.
    Example: tokens 4..5 and 0..1 of layer 2: `layers=[2], rows=[(4, 6), (0, 2)]` -> {2: [4, K]}.
    Raises RecordError `routing_layers` (a layer was not recorded), `routing_rows` (tokens outside
    the blobs, or blobs that do not tile); BlobError.
    """
    if not blobs:
        raise RecordError("routing_rows", "no routing was recorded for this rollout")
    where = blobs[0].ids.uri
    top_k, dtype = blobs[0].ids.shape[-1], blobs[0].ids.dtype
    for before, part in pairwise(blobs):
        if (part.row_begin, part.ids.dtype, part.ids.shape[-1]) != (before.row_end, dtype, top_k):
            raise RecordError(
                "routing_rows",
                f"{part.ids.uri}: {part.ids.dtype} rows of {part.ids.shape[-1]} experts from token "
                f"{part.row_begin}, want {dtype} of {top_k} from {before.row_end}",
            )
    first, last = blobs[0].row_begin, blobs[-1].row_end
    rows = [(first, last)] if rows is None else rows
    _check_intervals(rows, first, last, "routing_rows", where)
    joined = np.empty((len(layers), sum(end - begin for begin, end in rows), top_k), dtype)
    for part in blobs:
        pieces = list(_cut(rows, part.row_begin, part.row_end))
        ids = _read_part(store, part, layers, [interval for interval, _ in pieces])
        at = 0
        for (begin, end), place in pieces:
            joined[:, place : place + end - begin] = ids[:, at : at + end - begin]
            at += end - begin
    return dict(zip(layers, joined, strict=True))


def read_indexer(
    store: RecordReads,
    blobs: Sequence[IndexerBlob],
    *,
    layer: int,
    rows: Sequence[Interval],
) -> list[Array]:
    """Positions that one layer chose for some tokens of one rollout, [n, up to K] i32 each.

    One array per interval; within it rows rise, -1 behind the last (`moerl.records.indexer`).
    One layer at a time: decoded, a token of DeepSeek-V3.2 takes 8 KB in each of 61 layers.
    Raises RecordError `indexer_layers` (the layer was not recorded), `indexer_rows` (tokens outside
    the blobs, blobs that do not tile, bytes that are not rows); BlobError.
    """
    if not blobs:
        raise RecordError("indexer_rows", "no positions were recorded for this rollout")
    for before, part in pairwise(blobs):
        if (part.row_begin, part.top_k) != (before.row_end, before.top_k):
            raise RecordError(
                "indexer_rows",
                f"{part.packed.uri}: rows of {part.top_k} positions from token {part.row_begin}, "
                f"want {before.top_k} from {before.row_end}",
            )
    first, last, top_k = blobs[0].row_begin, blobs[-1].row_end, blobs[0].top_k
    _check_intervals(rows, first, last, "indexer_rows", blobs[0].packed.uri)
    found = [np.full((end - begin, min(top_k, end)), -1, np.int32) for begin, end in rows]
    for part in blobs:
        inside = [(max(a, part.row_begin), min(b, part.row_end)) for a, b in rows]
        wanted = [(a, b) if a < b else (part.row_begin, part.row_begin) for a, b in inside]
        for (begin, end), packed, (asked, _), into in zip(
            wanted, _read_packed(store, part, layer, wanted), rows, found, strict=True
        ):
            if begin < end:
                chosen = indexer.decode(packed, begin, end, top_k)
                into[begin - asked : end - asked, : chosen.shape[1]] = chosen
    return found


def read_mask(
    store: RecordReads, blobs: Sequence[MaskBlob], *, tokens: Sequence[Interval] | None = None
) -> tuple[Array, Array]:
    """Sampling masks of some sampled tokens of one rollout, CSR: offsets [n + 1] i64, ids [nnz]
    i32.

    blobs: the rollout's `sampling_mask`, in order.  tokens: intervals of sampled-token indices
    (0..S-1), ascending and apart; None = all.
    Raises RecordError `mask_rows`; BlobError.
    """
    if not blobs:
        raise RecordError("mask_rows", "no sampling mask was recorded for this rollout")
    for before, part in pairwise(blobs):
        if part.first != before.first + before.num_tokens:
            raise RecordError("mask_rows", f"{part.ids.uri}: mask rows start at {part.first}")
    first, last = blobs[0].first, blobs[-1].first + blobs[-1].num_tokens
    tokens = [(first, last)] if tokens is None else tokens
    _check_intervals(tokens, first, last, "mask_rows", blobs[0].ids.uri)
    if any(after[0] < before[1] for before, after in pairwise(tokens)):
        raise RecordError("mask_rows", f"intervals {list(tokens)} are not ascending and apart")
    lengths, ids = [np.zeros(1, np.int64)], [np.zeros(0, np.int32)]
    for part in blobs:
        local = [interval for interval, _ in _cut(tokens, part.first, part.first + part.num_tokens)]
        part_lengths, part_ids = _read_kept(store, part, local)
        lengths.append(part_lengths)
        ids.append(part_ids)
    return np.cumsum(np.concatenate(lengths)), np.concatenate(ids)


def read_logprobs(store: RecordReads, rollout: Rollout) -> Array:
    """Behaviour log-probabilities of one rollout, [S] f32, sealed or inline; checked once more.

    Raises RecordError `length`, `logprob_finite`, `logprob_sign`; BlobError.
    """
    parts, found = rollout.sealed_logprobs, count_logprobs(rollout)
    if found != rollout.num_sampled or (parts and len(rollout.logprobs)):
        raise RecordError(
            "length",
            f"{rollout.rollout_id}: {found} log-probabilities, {len(rollout.logprobs)} of them "
            f"inline, for {rollout.num_sampled} sampled tokens",
        )
    read = [
        store.read_runs(part.values, [(0, part.values.num_bytes)]).view(np.float32)
        for part in parts
    ]
    values = np.concatenate(read) if read else rollout.logprobs
    check_logprobs(values, rollout.rollout_id)
    return values


def _read_part(
    store: RecordReads, blob: RoutingBlob, layers: Sequence[int], rows: Sequence[Interval]
) -> Array:
    """[L, n, K] of one part; rows counted from its first row."""
    missing = sorted(set(layers) - set(blob.layers))
    num_layers, num_rows, top_k = blob.ids.shape
    if missing or num_layers != len(blob.layers):
        raise RecordError(
            "routing_layers",
            f"{blob.ids.uri} holds {num_layers} layers, numbers {list(blob.layers)}; "
            f"want {missing or list(layers)}",
        )
    if num_rows != blob.row_end - blob.row_begin:
        raise RecordError(
            "routing_rows",
            f"{blob.ids.uri} holds {num_rows} rows for tokens {blob.row_begin}..{blob.row_end}",
        )
    row_bytes = top_k * np.dtype(blob.ids.dtype).itemsize
    starts = [blob.layers.index(layer) * num_rows for layer in layers]
    runs: list[Run] = [
        ((start + begin) * row_bytes, (start + end) * row_bytes)
        for start in starts
        for begin, end in rows
    ]
    count = sum(end - begin for begin, end in rows)
    if not count:
        return np.empty((len(layers), 0, top_k), blob.ids.dtype)
    return store.read_runs(blob.ids, runs).view(blob.ids.dtype).reshape(len(layers), count, top_k)


def _read_packed(
    store: RecordReads, blob: IndexerBlob, layer: int, rows: Sequence[Interval]
) -> list[Array]:
    """Stored bytes of some rows of one layer of a part, [bytes] u8 per interval."""
    top_k, of_layer = blob.top_k, indexer.num_bytes(blob.row_begin, blob.row_end, blob.top_k)
    if layer not in blob.layers or blob.packed.shape != (len(blob.layers), of_layer):
        raise RecordError(
            "indexer_layers",
            f"{blob.packed.uri} holds {blob.packed.shape} bytes of layers {list(blob.layers)}; "
            f"want layer {layer} in {(len(blob.layers), of_layer)}",
        )
    start = blob.layers.index(layer) * of_layer
    runs: list[Run] = []
    for begin, end in rows:
        low = start + indexer.num_bytes(blob.row_begin, begin, top_k)
        runs.append((low, low + indexer.num_bytes(begin, end, top_k)))
    flat = store.read_runs(blob.packed, runs)
    ends = np.cumsum([end - begin for begin, end in runs])
    return [flat[stop - end + begin : stop] for (begin, end), stop in zip(runs, ends, strict=True)]


def _read_kept(store: RecordReads, blob: MaskBlob, rows: Sequence[Interval]) -> tuple[Array, Array]:
    """Lengths and ids of some sampling masks of one part; rows counted from its first row."""
    if blob.offsets.shape != (blob.num_tokens + 1,):
        raise RecordError(
            "mask_rows", f"{blob.offsets.uri}: offsets {blob.offsets.shape} of {blob.num_tokens}"
        )
    if not rows:
        return np.zeros(0, np.int64), np.zeros(0, np.int32)
    item, id_bytes = 8, 4
    flat = store.read_runs(
        blob.offsets, [(begin * item, (end + 1) * item) for begin, end in rows]
    ).view(np.int64)
    bounds = np.split(flat, np.cumsum([end - begin + 1 for begin, end in rows])[:-1])
    lengths = np.concatenate([np.diff(one) for one in bounds])
    if (lengths < 1).any() or int(flat.min()) < 0 or int(flat.max()) > blob.ids.shape[0]:
        raise RecordError("mask_rows", f"{blob.offsets.uri}: offsets do not rise within the ids")
    runs = [(int(one[0]) * id_bytes, int(one[-1]) * id_bytes) for one in bounds]
    return lengths, store.read_runs(blob.ids, runs).view(np.int32)


def _cut(intervals: Sequence[Interval], begin: int, end: int) -> Iterator[tuple[Interval, int]]:
    """The parts of intervals in begin..end, counted from begin, and their place in the result."""
    at = 0
    for low, high in intervals:
        inside = max(low, begin), min(high, end)
        if inside[0] < inside[1]:
            yield (inside[0] - begin, inside[1] - begin), at + inside[0] - low
        at += high - low


def _check_intervals(
    intervals: Sequence[Interval], first: int, last: int, reason: str, where: str
) -> None:
    for begin, end in intervals:
        if not first <= begin <= end <= last:
            raise RecordError(
                reason, f"{where}: tokens {begin}..{end} asked for, {first}..{last} recorded"
            )
