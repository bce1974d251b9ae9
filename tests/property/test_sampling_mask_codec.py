"""Sampling masks to CSR against a loop over rows; every broken input is refused with its reason."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.core.errors import RecordError
from moerl.records.sampling_mask import check_csr, encode_rows

VOCAB = 1000


@st.composite
def kept_sets(draw: st.DrawFn) -> tuple[list[list[int]], np.ndarray]:
    ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30, unique=True)
    rows = draw(st.lists(ids, max_size=12))
    sampled = [draw(st.sampled_from(row)) for row in rows]
    return rows, np.array(sampled, np.int32)


def encoded(rows: list[list[int]], sampled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(row) for row in rows], np.int32)
    kept = np.array([idx for row in rows for idx in row], np.int32)
    return encode_rows(lengths, kept, sampled, vocab_size=VOCAB)


@settings(max_examples=150, deadline=None)
@given(kept_sets())
def test_rows_are_sorted_each_by_itself(case: tuple[list[list[int]], np.ndarray]) -> None:
    rows, sampled = case
    offsets, ids = encoded(rows, sampled)
    assert offsets.tolist() == np.cumsum([0] + [len(row) for row in rows]).tolist()
    assert ids.tolist() == [idx for row in rows for idx in sorted(row)]
    assert (offsets.dtype, ids.dtype) == (np.int64, np.int32)
    check_csr(offsets, ids, sampled, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("reason", "rows", "sampled"),
    [
        ("mask_rows", [[1]], [1, 2]),
        ("mask_empty", [[1], []], [1, 2]),
        ("mask_empty", [[], [1]], [1, 1]),
        ("mask_range", [[1, VOCAB]], [1]),
        ("mask_range", [[-1, 1]], [1]),
        ("mask_duplicate", [[3, 1, 3]], [1]),
        ("mask_duplicate", [[2], [1, 1]], [2, 1]),
        ("mask_sampled", [[5, 6], [7]], [5, 6]),
        ("mask_sampled", [[5, 6], [7]], [7, 7]),
    ],
)
def test_broken_rows_are_refused(reason: str, rows: list[list[int]], sampled: list[int]) -> None:
    with pytest.raises(RecordError) as caught:
        encoded(rows, np.array(sampled, np.int32))
    assert caught.value.reason == reason


def test_a_sealed_mask_out_of_order_is_refused() -> None:
    sampled = np.array([4, 2], np.int32)
    check_csr(np.array([0, 2, 4]), np.array([3, 4, 1, 2], np.int32), sampled, vocab_size=9)
    with pytest.raises(RecordError, match="not sorted"):
        check_csr(np.array([0, 2, 4]), np.array([4, 3, 1, 2], np.int32), sampled, vocab_size=9)
    with pytest.raises(RecordError, match="offsets"):
        check_csr(np.array([0, 2, 3]), np.array([3, 4, 1, 2], np.int32), sampled, vocab_size=9)
