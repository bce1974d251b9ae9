"""Sampling masks: kept vocabulary entries per sampled token, as CSR.

Rows are sorted, unique and contain the sampled token.  A mask is never re-derived from logits:
boundary rules differ between samplers, and one small update moves tokens to -inf.
"""

from __future__ import annotations

import numpy as np

from moerl.core.errors import RecordError
from moerl.core.types import Array


def encode_rows(
    lengths: Array, kept: Array, sampled: Array, *, vocab_size: int
) -> tuple[Array, Array]:
    """Rows of kept ids -> CSR (offsets [n + 1] i64, ids [nnz] i32, sorted inside each row).

    kept: the ids of all rows, in any order inside a row; lengths: of the rows.
    sampled [n] i32: the token each row's distribution produced.
    Raises RecordError: `mask_rows`, `mask_empty`, `mask_range`, `mask_duplicate`, `mask_sampled`.
    """
    if lengths.shape != sampled.shape or lengths.dtype.kind not in "iu":
        raise RecordError("mask_rows", f"{lengths.shape} mask rows for {len(sampled)} tokens")
    lengths, ids = lengths.astype(np.int64), kept.astype(np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    if lengths.min(initial=0) < 0 or ids.shape != (offsets[-1],) or kept.dtype.kind not in "iu":
        raise RecordError("mask_rows", f"{ids.shape} kept ids, the rows have {offsets[-1]}")
    _check_range(ids, vocab_size)
    # One sort of (row, id) packed into 64 bits: a lexsort of the pair takes ten times as long.
    keys = np.repeat(np.arange(len(lengths), dtype=np.int64) << 32, lengths)
    keys |= ids
    keys.sort()
    ids = keys.astype(np.int32)  # the low half
    check_csr(offsets, ids, sampled, vocab_size=vocab_size)
    return offsets, ids


def check_csr(offsets: Array, ids: Array, sampled: Array, *, vocab_size: int) -> None:
    """Contract of a sealed mask; the same reasons as `encode_rows`."""
    lengths = np.diff(offsets)
    if len(offsets) != len(sampled) + 1 or offsets[0] != 0 or offsets[-1] != len(ids):
        raise RecordError(
            "mask_rows", f"offsets of {len(offsets) - 1} rows for {len(sampled)} sampled tokens"
        )
    if not len(sampled):
        return
    if (lengths < 1).any():
        raise RecordError("mask_empty", f"row {int(np.argmax(lengths < 1))} keeps no token")
    _check_range(ids, vocab_size)
    falls = ids[1:] <= ids[:-1]
    falls[offsets[1:-1] - 1] = False  # from one row to the next
    if falls.any():
        raise RecordError("mask_duplicate", "a row is not sorted and unique")
    hit = np.logical_or.reduceat(ids == np.repeat(sampled, lengths), offsets[:-1])
    if not hit.all():
        row = int(np.argmin(hit))
        raise RecordError("mask_sampled", f"row {row} does not keep its own token {sampled[row]}")


def _check_range(ids: Array, vocab_size: int) -> None:
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        raise RecordError("mask_range", f"a kept id lies outside 0..{vocab_size - 1}")
