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
from typing import NamedTuple

import numpy as np

from moerl.core.errors import RecordError
from moerl.core.types import (
    Array,
    BlobRef,
    IndexerBlob,
    LogprobBlob,
    MaskBlob,
    Rollout,
    RoutingBlob,
)
from moerl.records import indexer
from moerl.records.blob_store import RecordReads, Run, Wanted
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
    Raises as `read_all_routes`.
    """
    if rows is None and blobs:
        rows = [(blobs[0].row_begin, blobs[-1].row_end)]
    found = read_all_routes(store, [(blobs, rows or [])], layers=layers)
    return dict(zip(layers, found, strict=True))


def read_all_routes(
    store: RecordReads,
    wanted: Sequence[tuple[Sequence[RoutingBlob], Sequence[Interval]]],
    *,
    layers: Sequence[int],
) -> Array:
    """Expert ids of some layers and tokens of many rollouts: [L, n, K] u8 or u16.

    wanted: blobs and rows as in `read_routes`, for each rollout; n counts the rows of all, in their
    order.  All have one K and type.
    Raises RecordError `routing_layers` (a layer was not recorded), `routing_rows` (tokens outside
    the blobs, blobs that do not tile or differ in K or type); BlobError.
    """
    routes = RouteReads(wanted, layers)
    return routes.decode(store.read_records(routes.reads))


class RouteReads:
    """The reads of routes, to be made in one call with others.  As `read_all_routes`."""

    def __init__(
        self,
        wanted: Sequence[tuple[Sequence[RoutingBlob], Sequence[Interval]]],
        layers: Sequence[int],
    ) -> None:
        """Raises RecordError; reads nothing."""
        if not wanted or not wanted[0][0]:
            raise RecordError("routing_rows", "no routing was recorded for this rollout")
        like = wanted[0][0][0].ids
        self.reads: list[Wanted] = []
        self._top_k, self._dtype = like.shape[-1], like.dtype
        self._num_layers, self._num_rows = len(layers), 0
        # place in the result, place in the bytes, rows of the part, first of its rows, rows
        self._copies: list[tuple[int, int, int, int, int]] = []
        row_bytes = self._top_k * np.dtype(self._dtype).itemsize
        places: dict[tuple[int, ...], list[int]] = {}  # of the layers, in blobs of some layers
        self._read = 0  # rows in the bytes
        for blobs, rows in wanted:
            _check_tiles(blobs, self._top_k, self._dtype)
            begin, end = blobs[0].row_begin, blobs[-1].row_end
            _check_intervals(rows, begin, end, "routing_rows", blobs[0].ids.uri)
            for part in blobs:
                if part.layers not in places:
                    places[part.layers] = _places(part, layers)
                _check_shape(part)
                self._add(part, places[part.layers], rows, row_bytes)
            self._num_rows += sum([end - begin for begin, end in rows])

    def _add(
        self, part: RoutingBlob, places: Sequence[int], rows: Sequence[Interval], row_bytes: int
    ) -> None:
        pieces = list(_cut(rows, part.row_begin, part.row_end))
        count = sum([end - begin for (begin, end), _ in pieces])
        at = 0
        for (begin, end), place in pieces:
            self._copies.append((self._num_rows + place, self._read, count, at, end - begin))
            at += end - begin
        if count:
            self.reads.append((part.ids, _runs(part, places, pieces, row_bytes)))
            self._read += self._num_layers * count

    @property
    def num_bytes(self) -> int:
        """Bytes of `reads`."""
        return self._read * self._top_k * np.dtype(self._dtype).itemsize

    def decode(self, data: Array) -> Array:
        """[L, n, K] u8 or u16, from the bytes of `reads`, joined."""
        ids = data.view(self._dtype).reshape(self._read, self._top_k)
        joined = np.empty((self._num_layers, self._num_rows, self._top_k), self._dtype)
        for place, first, count, at, length in self._copies:
            of_part = ids[first : first + self._num_layers * count]
            of_part = of_part.reshape(self._num_layers, count, self._top_k)
            joined[:, place : place + length] = of_part[:, at : at + length]
        return joined


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
    if tokens is None and blobs:
        tokens = [(blobs[0].first, blobs[-1].first + blobs[-1].num_tokens)]
    found = read_sampled(store, masks=[(blobs, tokens or [])])
    return found.offsets, found.ids


def read_logprobs(store: RecordReads, rollout: Rollout) -> Array:
    """Behaviour log-probabilities of one rollout, [S] f32, sealed or inline; checked once more.

    Raises RecordError `length`, `logprob_finite`, `logprob_sign`; BlobError.
    """
    return read_sampled(store, logprobs=[rollout]).logprobs


class SampledRecords(NamedTuple):
    """Records of sampled tokens of many rollouts, in their order."""

    offsets: Array  # [n + 1] i64
    ids: Array  # [nnz] i32
    logprobs: Array  # [N] f32
    support: Array  # [nnz] f16, the engine's log-probabilities of the ids; empty when not read


def read_sampled(
    store: RecordReads,
    *,
    masks: Sequence[tuple[Sequence[MaskBlob], Sequence[Interval]]] = (),
    logprobs: Sequence[Rollout] = (),
) -> SampledRecords:
    """Sampling masks and log-probabilities of many rollouts, each blob opened once.

    masks: blobs and tokens as in `read_mask`, for each rollout.
    Raises as `read_mask` and `read_logprobs`.
    """
    sampled = SampledReads(masks, logprobs)
    return sampled.decode(store.read_records(sampled.reads), store)


class SampledReads:
    """The reads of masks and log-probabilities, for one call with others.  As `read_sampled`."""

    def __init__(
        self,
        masks: Sequence[tuple[Sequence[MaskBlob], Sequence[Interval]]],
        logprobs: Sequence[Rollout],
        *,
        support: bool = False,
    ) -> None:
        """Read nothing yet.  support: also log-probabilities of the masks.  Raises RecordError."""
        parts = [part for blobs, tokens in masks for part in _mask_parts(blobs, tokens)]
        sealed = [part.values for rollout in logprobs for part in _sealed_logprobs(rollout)]
        # The offsets say which ids belong to some tokens; all ids of a blob are read with them.
        self._whole = all(rows == [(0, blob.num_tokens)] for blob, rows in parts)
        self._parts, self._rollouts = parts, logprobs
        self.reads = [_offsets_of(blob, rows) for blob, rows in parts]
        self._support = [_support_of(blob) for blob, _ in parts] if support else []
        self._ids_bytes = sum([blob.ids.num_bytes for blob, _ in parts])
        if self._whole:
            every = [*(blob.ids for blob, _ in parts), *self._support]
            self.reads += [(ref, ((0, ref.num_bytes),)) for ref in every]
        self.reads += [(ref, ((0, ref.num_bytes),)) for ref in sealed]
        self._sealed_bytes = sum([ref.num_bytes for ref in sealed])

    def decode(self, data: Array, store: RecordReads) -> SampledRecords:
        """Decode the joined bytes of `reads`; reads the ids of masks, where some were wanted."""
        parts = self._parts
        size = 8 * sum([end - begin + 1 for _, rows in parts for begin, end in rows])
        end = len(data) - self._sealed_bytes
        lengths, bounds = _mask_lengths(parts, data[:size].view(np.int64))
        if self._whole:
            middle = size + self._ids_bytes
            ids = _within(data[size:middle].view(np.int32), parts, bounds)
            support = data[middle:end].view(np.float16)
            support = _within(support, parts, bounds) if self._support else support
        else:
            ids = _read_within(store, [blob.ids for blob, _ in parts], parts, bounds)
            support = _read_within(store, self._support, parts, bounds)
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        logprobs = _joined_logprobs(data[end:].view(np.float32), self._rollouts)
        return SampledRecords(offsets, ids, logprobs, support)


def _sealed_logprobs(rollout: Rollout) -> tuple[LogprobBlob, ...]:
    parts, found = rollout.sealed_logprobs, count_logprobs(rollout)
    if found != rollout.num_sampled or (parts and len(rollout.logprobs)):
        raise RecordError(
            "length",
            f"{rollout.rollout_id}: {found} log-probabilities, {len(rollout.logprobs)} of them "
            f"inline, for {rollout.num_sampled} sampled tokens",
        )
    return parts


def _joined_logprobs(sealed: Array, rollouts: Sequence[Rollout]) -> Array:
    """Checked log-probabilities of all rollouts.  sealed: sealed arrays, in order."""
    values, at = sealed, 0
    if any(len(rollout.logprobs) for rollout in rollouts):
        pieces = []
        for rollout in rollouts:
            num = sum(part.num_tokens for part in rollout.sealed_logprobs)
            pieces += [sealed[at : at + num], rollout.logprobs]
            at += num
        values = np.concatenate(pieces)
    try:
        check_logprobs(values, "")
    except RecordError:
        ends = np.cumsum([count_logprobs(rollout) for rollout in rollouts])
        for rollout, own in zip(rollouts, np.split(values, ends[:-1]), strict=True):
            check_logprobs(own, rollout.rollout_id)
    return values


def _check_tiles(blobs: Sequence[RoutingBlob], top_k: int, dtype: str) -> None:
    """Refuse parts that do not follow each other, or have another K or type."""
    if not blobs:
        raise RecordError("routing_rows", "no routing was recorded for this rollout")
    at = blobs[0].row_begin
    for part in blobs:
        if (part.row_begin, part.ids.dtype, part.ids.shape[-1]) != (at, dtype, top_k):
            raise RecordError(
                "routing_rows",
                f"{part.ids.uri}: {part.ids.dtype} rows of {part.ids.shape[-1]} experts from token "
                f"{part.row_begin}, want {dtype} of {top_k} from {at}",
            )
        at = part.row_end


def _check_shape(blob: RoutingBlob) -> None:
    num_layers, num_rows, _ = blob.ids.shape
    if num_layers != len(blob.layers):
        raise RecordError(
            "routing_layers",
            f"{blob.ids.uri} holds {num_layers} layers, numbers {list(blob.layers)}",
        )
    if num_rows != blob.row_end - blob.row_begin:
        raise RecordError(
            "routing_rows",
            f"{blob.ids.uri} holds {num_rows} rows for tokens {blob.row_begin}..{blob.row_end}",
        )


def _places(blob: RoutingBlob, layers: Sequence[int]) -> list[int]:
    """Places of the layers in a blob."""
    if missing := sorted(set(layers) - set(blob.layers)):
        raise RecordError(
            "routing_layers",
            f"{blob.ids.uri} holds layers {list(blob.layers)}; want {missing}",
        )
    return [blob.layers.index(layer) for layer in layers]


def _runs(
    blob: RoutingBlob,
    places: Sequence[int],
    pieces: Sequence[tuple[Interval, int]],
    row_bytes: int,
) -> Sequence[Run]:
    """Bytes of some rows of the layers at `places`, layer by layer."""
    num_layers, num_rows, _ = blob.ids.shape
    is_whole = len(pieces) == 1 and pieces[0][0] == (0, num_rows)
    if is_whole and places == list(range(num_layers)):
        return ((0, num_layers * num_rows * row_bytes),)
    starts = [place * num_rows for place in places]
    return [
        ((start + begin) * row_bytes, (start + end) * row_bytes)
        for start in starts
        for (begin, end), _ in pieces
    ]


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
    flat = store.read_records([(blob.packed, runs)])
    ends = np.cumsum([end - begin for begin, end in runs])
    return [flat[stop - end + begin : stop] for (begin, end), stop in zip(runs, ends, strict=True)]


MaskPart = tuple[MaskBlob, list[Interval]]  # a blob, and its rows that are read


def _mask_parts(blobs: Sequence[MaskBlob], tokens: Sequence[Interval]) -> list[MaskPart]:
    """The blobs of some sampled tokens, with the intervals counted from their first rows."""
    if not blobs:
        raise RecordError("mask_rows", "no sampling mask was recorded for this rollout")
    first = at = blobs[0].first
    for part in blobs:
        if part.first != at:
            raise RecordError("mask_rows", f"{part.ids.uri}: mask rows start at {part.first}")
        if part.offsets.shape != (part.num_tokens + 1,):
            raise RecordError(
                "mask_rows",
                f"{part.offsets.uri}: offsets {part.offsets.shape} of {part.num_tokens}",
            )
        at += part.num_tokens
    _check_intervals(tokens, first, at, "mask_rows", blobs[0].ids.uri)
    if any(after[0] < before[1] for before, after in pairwise(tokens)):
        raise RecordError("mask_rows", f"intervals {list(tokens)} are not ascending and apart")
    found = []
    for part in blobs:
        rows = [piece for piece, _ in _cut(tokens, part.first, part.first + part.num_tokens)]
        if rows:
            found.append((part, rows))
    return found


def _offsets_of(blob: MaskBlob, rows: Sequence[Interval]) -> Wanted:
    return blob.offsets, [(8 * begin, 8 * (end + 1)) for begin, end in rows]


def _mask_lengths(parts: Sequence[MaskPart], flat: Array) -> tuple[Array, Array]:
    """Lengths of the masks, and the first and last offset of each interval of rows, [intervals, 2].

    flat: the offsets of all intervals, one more than rows each.
    """
    counts = np.array([end - begin + 1 for _, rows in parts for begin, end in rows], np.int64)
    if not len(counts):
        return np.zeros(0, np.int64), np.zeros((0, 2), np.int64)
    lasts = np.cumsum(counts) - 1
    lengths = np.delete(np.diff(flat), lasts[:-1])
    bounds = np.stack([flat[lasts - counts + 1], flat[lasts]], axis=1)
    sizes = np.array([blob.ids.shape[0] for blob, rows in parts for _ in rows])
    if (lengths < 1).any() or (bounds[:, 0] < 0).any() or (bounds[:, 1] > sizes).any():
        firsts = lasts - counts + 1 - np.arange(len(lasts))
        rising = np.minimum.reduceat(lengths, firsts)
        bad = (rising < 1) | (bounds[:, 0] < 0) | (bounds[:, 1] > sizes)
        uris = [blob.offsets.uri for blob, rows in parts for _ in rows]
        raise RecordError(
            "mask_rows", f"{uris[int(np.argmax(bad))]}: offsets do not rise within the ids"
        )
    return lengths, bounds


def _within(ids: Array, parts: Sequence[MaskPart], bounds: Array) -> Array:
    """The ids, or their log-probabilities, inside the offsets' bounds.  ids: all of the blobs'."""
    sizes = np.array([blob.ids.shape[0] for blob, _ in parts], np.int64)
    if (bounds == np.stack([np.zeros_like(sizes), sizes], axis=1)).all():
        return ids
    starts = np.cumsum(sizes) - sizes
    return np.concatenate(
        [ids[at + low : at + high] for at, (low, high) in zip(starts, bounds, strict=True)]
    )


def _read_within(
    store: RecordReads, refs: Sequence[BlobRef], parts: Sequence[MaskPart], bounds: Array
) -> Array:
    """The same, read now.  refs: the array of each part; none: [0] f16."""
    if not refs:
        return np.zeros(0, np.float16)
    dtype = np.dtype(refs[0].dtype)
    runs = [(dtype.itemsize * int(first), dtype.itemsize * int(last)) for first, last in bounds]
    reads: list[Wanted] = []
    at = 0
    for ref, (_, rows) in zip(refs, parts, strict=True):
        reads.append((ref, runs[at : at + len(rows)]))
        at += len(rows)
    found: Array = store.read_records(reads).view(dtype)
    return found


def _support_of(blob: MaskBlob) -> BlobRef:
    if blob.logprobs is None or blob.logprobs.shape != blob.ids.shape:
        raise RecordError(
            "mask_mass", f"{blob.ids.uri}: no log-probability of the engine for each kept entry"
        )
    return blob.logprobs


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
