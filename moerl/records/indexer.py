"""Positions that sparse attention reads: from the engine's rows to bytes by layer, checked.

A layer with an indexer attends, for the token at position t, to `top_k` of the positions 0..t.  The
engine records [rows, layers that choose, top_k], -1 = none.
Source: SGLang 0.5.23 `srt/state_capturer/indexer_topk.py`.

The choice is a set, so its order is dropped.  A stored row has the smallest of these forms; which
one follows from t and top_k alone, so a record holds no lengths:

    none     t < top_k: every position up to t is chosen
    bitmap   one bit per position 0..t, lowest first, whole bytes
    ids      top_k rising positions, u16 up to position 65,535, u32 after it

Rejected: a form per segment (one long row would cost all rows its form); entropy coding (a rank
could not find a row without decoding those before it).

Legend: n rows, L layers that choose, K = top_k, t position of a row's token.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from moerl.core.errors import RecordError
from moerl.core.types import Array

_U16_END = 1 << 16
_FAR = 1 << 62  # beyond every position
_CHUNK_BYTES = 1 << 26  # of the temporary matrix of bits


class _Form(NamedTuple):
    """Rows first..end (positions, end exclusive) that are stored in one way."""

    first: int
    end: int
    kind: str  # none, bitmap, or the numpy name of ids


def num_bytes(first: int, end: int, top_k: int) -> int:
    """Bytes of the rows at positions first..end (exclusive) of one layer."""
    return sum(_size(form, top_k) for form in _forms(first, end, top_k))


def check_engine_rows(rows: Array, *, num_rows: int, num_layers: int, top_k: int) -> None:
    """Check the shape of one request's rows, from position 0; `encode` checks their content.

    Raises RecordError `indexer_rows`.
    """
    want = (num_rows, num_layers, top_k)
    if rows.shape != want or rows.dtype.kind not in "iu":
        raise RecordError("indexer_rows", f"{rows.dtype} {rows.shape}, want rows, layers, K {want}")


def encode(chosen: Array, first_row: int) -> Array:
    """[n, L, K] positions of consecutive rows -> [L, bytes] u8.

    Rows below K say nothing and are not read.  Raises RecordError naming the first bad row:
    `indexer_range` (below 0), `indexer_future` (after the row's own token), `indexer_duplicate`.
    """
    num_rows, num_layers, top_k = chosen.shape
    end = first_row + num_rows
    packed = np.empty((num_layers, num_bytes(first_row, end, top_k)), np.uint8)
    for layer in range(num_layers):
        at = 0
        for form in _forms(first_row, end, top_k):
            for part in _blocks(form):
                rows = chosen[part.first - first_row : part.end - first_row, layer]
                data = _packed(rows, part, layer)
                packed[layer, at : at + len(data)] = data
                at += len(data)
    return packed


def decode(packed: Array, first_row: int, end: int, top_k: int) -> Array:
    """[bytes] u8 of one layer -> [n, min(K, end)] i32, rising, -1 behind the last.

    Raises RecordError `indexer_rows` when the bytes do not hold the rows, or a row does not
    name K positions up to its own.
    """
    want = num_bytes(first_row, end, top_k)
    if packed.shape != (want,):
        raise RecordError(
            "indexer_rows",
            f"rows {first_row}..{end} of {top_k} positions need {want} bytes, got {packed.shape}",
        )
    columns = np.arange(min(top_k, end), dtype=np.int32)
    own = np.arange(first_row, end)[:, None]
    found = np.where(columns <= own, columns, np.int32(-1))  # right for the rows below K
    at = 0
    for form in _forms(first_row, end, top_k):
        for part in _blocks(form):
            size = _size(part, top_k)
            rows = found[part.first - first_row : part.end - first_row]
            _unpack(packed[at : at + size], part, rows)
            at += size
    return found


def _forms(first: int, end: int, top_k: int) -> Iterator[_Form]:
    """The forms of rows first..end, in order."""
    few, many = 8 * 2 * top_k, 8 * 4 * top_k  # up to here a bitmap is not longer than ids
    near, far = min(few, _U16_END), max(many, _U16_END)
    whole = (
        _Form(0, top_k, "none"),
        _Form(top_k, near, "bitmap"),
        _Form(max(near, top_k), _U16_END, "uint16"),
        _Form(max(_U16_END, top_k), far, "bitmap"),
        _Form(max(far, top_k), _FAR, "uint32"),
    )
    for form in whole:
        part = _Form(max(first, form.first), min(end, form.end), form.kind)
        if part.first < part.end:
            yield part


def _size(form: _Form, top_k: int) -> int:
    if form.kind == "none":
        return 0
    if form.kind == "bitmap":
        return _bitmap_bytes(form.end) - _bitmap_bytes(form.first)
    return (form.end - form.first) * top_k * np.dtype(form.kind).itemsize


def _bitmap_bytes(num_rows: int) -> int:
    """Bytes of the bitmaps of rows 0..num_rows: the sum of ceil((t + 1) / 8)."""
    whole, rest = divmod(num_rows, 8)
    return (4 * whole + rest) * (whole + 1)


def _blocks(form: _Form) -> Iterator[_Form]:
    """Pieces whose matrix of bits is small; nothing for rows that are not stored."""
    if form.kind == "none":
        return
    step = max(_CHUNK_BYTES // form.end, 1)
    for first, end in pairwise([*range(form.first, form.end, step), form.end]):
        yield _Form(first, end, form.kind)


def _packed(rows: Array, form: _Form, layer: int) -> Array:
    """[n, K] -> the bytes of one block."""
    bits = _bits(rows, form, layer)
    if form.kind == "bitmap":
        wide = np.packbits(bits, axis=1, bitorder="little")
        return wide[np.arange(wide.shape[1]) < _row_bytes(form)[:, None]]
    return bits.nonzero()[1].astype(form.kind).view(np.uint8)


def _bits(rows: Array, form: _Form, layer: int) -> Array:
    """[n, end] bool: the chosen positions of each row, checked."""
    own = np.arange(form.first, form.end)
    low, high = rows.min(1), rows.max(1)
    for bad, reason in ((low < 0, "indexer_range"), (high > own, "indexer_future")):
        if bad.any():
            _refuse(reason, rows, form, layer, int(np.argmax(bad)))
    bits = np.zeros((len(rows), form.end), np.bool_)
    np.put_along_axis(bits, rows, True, 1)
    repeated = np.count_nonzero(bits, axis=1) != rows.shape[1]
    if repeated.any():
        _refuse("indexer_duplicate", rows, form, layer, int(np.argmax(repeated)))
    return bits


def _refuse(reason: str, rows: Array, form: _Form, layer: int, row: int) -> None:
    at = form.first + row
    raise RecordError(
        reason,
        f"layer {layer} of those that choose, token {at}: {rows.shape[1]} different positions in "
        f"0..{at} are needed, got {rows[row, :8].tolist()} ..",
    )


def _row_bytes(form: _Form) -> Array:
    return np.arange(form.first, form.end) // 8 + 1


def _unpack(packed: Array, form: _Form, rows: Array) -> None:
    """Write the positions of one block into rows [n, >= K]."""
    top_k = rows.shape[1]
    own = np.arange(form.first, form.end)
    if form.kind == "bitmap":
        width = (form.end + 7) // 8
        wide = np.zeros((len(rows), width), np.uint8)
        wide[np.arange(width) < _row_bytes(form)[:, None]] = packed
        row, column = np.unpackbits(wide, axis=1, bitorder="little").nonzero()
        counts = np.bincount(row, minlength=len(rows))
        good = bool((counts == top_k).all())
        found = column.reshape(-1, top_k) if good else None
    else:
        found = packed.view(form.kind).reshape(len(rows), top_k)
        good = bool((found[:, 1:] > found[:, :-1]).all())
    if found is None or not good or (found[:, -1] > own).any():
        raise RecordError(
            "indexer_rows",
            f"a row of tokens {form.first}..{form.end} does not name {top_k} positions up to its "
            "own",
        )
    rows[:] = found
