"""Sampling masks: kept vocabulary entries per sampled token, as CSR.

Rows are sorted, unique and contain the sampled token.  A mask is never re-derived from logits:
boundary rules differ between samplers, and one small update moves tokens to -inf.

The engine's log-probabilities of the entries are stored with them where a run asks for them;
without truncation, of its likeliest entries.
"""

from __future__ import annotations

import numpy as np

from moerl.core.errors import RecordError
from moerl.core.types import Array

MASS_ERROR = 2e-3  # of the probabilities of a row, against 1

Csr = tuple[
    Array, ...
]  # offsets [n + 1] i64, ids [nnz] i32 and, where recorded, logprobs [nnz] f16


def encode_rows(
    lengths: Array,
    kept: Array,
    sampled: Array,
    *,
    vocab_size: int,
    logprobs: Array | None = None,
) -> Csr:
    """Rows of kept ids -> CSR, sorted inside each row.

    kept: the ids of all rows, in any order inside a row; lengths: of the rows.
    sampled [n] i32: the token each row's distribution produced.
    logprobs: the engine's of all kept ids, in their order.
    Raises RecordError: `mask_rows`, `mask_empty`, `mask_range`, `mask_duplicate`, `mask_sampled`,
    `mask_mass` (probabilities of a row that do not sum to 1).
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
    order = None if logprobs is None else keys.argsort()
    if order is None:
        keys.sort()
    else:
        keys = keys[order]
    ids = keys.astype(np.int32)  # the low half
    check_csr(offsets, ids, sampled, vocab_size=vocab_size)
    if logprobs is None:
        return offsets, ids
    _check_mass(offsets, ids, logprobs, whole=True)
    return offsets, ids, logprobs[order].astype(np.float16)


def encode_top(ids: Array, logprobs: Array, *, num_tokens: int, vocab_size: int) -> Csr:
    """The likeliest entries of each token [n, K] -> CSR, sorted inside each row.

    Raises RecordError: `mask_rows`, `mask_range`, `mask_duplicate`, `mask_mass` (above 1).
    """
    if ids.ndim != 2 or len(ids) != num_tokens or ids.dtype.kind not in "iu":
        raise RecordError("mask_rows", f"{ids.dtype} {ids.shape} entries for {num_tokens} tokens")
    order = ids.argsort(1)
    rows = np.take_along_axis(ids, order, 1).astype(np.int64)
    _check_range(rows.reshape(-1), vocab_size)
    if (np.diff(rows) == 0).any():
        raise RecordError("mask_duplicate", "a token's likeliest entries repeat an id")
    offsets = np.arange(num_tokens + 1, dtype=np.int64) * ids.shape[1]
    flat = rows.astype(np.int32).reshape(-1)
    _check_mass(offsets, flat, logprobs.reshape(-1), whole=False)
    return offsets, flat, np.take_along_axis(logprobs, order, 1).astype(np.float16).reshape(-1)


def _check_mass(offsets: Array, ids: Array, logprobs: Array, *, whole: bool) -> None:
    if logprobs.shape != ids.shape or not np.isfinite(logprobs).all():
        raise RecordError(
            "mask_mass", f"{logprobs.shape} log-probabilities for {ids.shape} ids, all finite"
        )
    if not len(ids):
        return
    mass = np.add.reduceat(np.exp(logprobs.astype(np.float64)), offsets[:-1])
    off = np.abs(mass - 1) if whole else mass - 1
    if float(off.max()) > MASS_ERROR:
        row = int(off.argmax())
        raise RecordError(
            "mask_mass",
            f"the probabilities of row {row} sum to {mass[row]:.6g}; want "
            f"{'1' if whole else 'at most 1'} within {MASS_ERROR}",
        )


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
