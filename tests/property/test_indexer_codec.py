"""Recorded positions of sparse attention: round trip over every form, sizes, and each refusal."""

from __future__ import annotations

import numpy as np
import pytest

from moerl.core.errors import RecordError
from moerl.records import indexer

RELEASED = (61, 2048)  # layers and top-k of DeepSeek-V3.2


def choose(rng: np.random.Generator, first: int, end: int, layers: int, top_k: int) -> np.ndarray:
    """[n, L, K] i32 in random order; -1 where a row has fewer positions, as the engine sends."""
    rows = np.full((end - first, layers, top_k), -1, np.int32)
    for at in range(first, end):
        for layer in range(layers):
            some = rng.permutation(at + 1)[:top_k]
            rows[at - first, layer, : len(some)] = some
    return rows


def sets(rows: np.ndarray) -> list[set[int]]:
    return [set(row[row >= 0].tolist()) for row in rows]


SPANS = [
    (0, 5, 8),  # below top-k only
    (0, 40, 8),  # from none to bitmaps
    (120, 140, 8),  # from bitmaps (16 bytes) to u16 ids
    (65_530, 65_545, 8),  # from u16 to u32
    (65_533, 65_539, 3000),  # u32 ids are longer than a bitmap: bitmaps again
    (95_998, 96_003, 3000),  # and then not
    (7, 9, 1),
]


@pytest.mark.parametrize(("first", "end", "top_k"), SPANS)
def test_every_form_returns_the_chosen_sets(first: int, end: int, top_k: int) -> None:
    rows = choose(np.random.default_rng(end), first, end, 2, top_k)
    packed = indexer.encode(rows, first)
    assert packed.shape == (2, indexer.num_bytes(first, end, top_k))
    for layer in range(2):
        found = indexer.decode(packed[layer], first, end, top_k)
        assert sets(found) == sets(rows[:, layer])
        assert (np.diff(np.where(found < 0, end + np.arange(found.shape[1]), found)) > 0).all()


def test_a_slice_is_found_without_the_rows_before_it() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        top_k, end = int(rng.integers(1, 12)), int(rng.integers(2, 260))
        first = int(rng.integers(0, end))
        packed = indexer.encode(choose(rng, first, end, 1, top_k), first)[0]
        low, high = sorted(int(at) for at in rng.integers(first, end + 1, 2))
        begin = indexer.num_bytes(first, low, top_k)
        part = packed[begin : begin + indexer.num_bytes(low, high, top_k)]
        whole = indexer.decode(packed, first, end, top_k)[low - first : high - first]
        assert sets(indexer.decode(part, low, high, top_k)) == sets(whole)


def test_bytes_per_token_of_the_released_model() -> None:
    """61 layers: nothing up to 2,048 tokens, a bitmap to 32,768, then u16, from 65,536 on u32."""
    layers, top_k = RELEASED

    def last(length: int) -> int:
        return layers * indexer.num_bytes(length - 1, length, top_k)

    assert [last(n) for n in (1, 2048, 8192, 32_768, 65_536, 131_072)] == [
        0, 0, 62_464, 249_856, 249_856, 499_712,
    ]  # fmt: skip
    assert layers * top_k * 4 == 499_712, "what the engine sends for each token"
    mean = {n: layers * indexer.num_bytes(0, n, top_k) // n for n in (2048, 8192, 32_768, 65_536)}
    assert mean == {2048: 0, 8192: 29_302, 32_768: 124_468, 65_536: 187_162}


def test_no_row_is_longer_than_another_form() -> None:
    for top_k in (1, 8, 300, 2048, 3000, 5000):
        for at in (top_k, 9 * top_k, 16 * top_k - 1, 16 * top_k, 65_535, 65_536, 32 * top_k + 9):
            if at >= top_k:
                ids = top_k * (2 if at < 65_536 else 4)
                want = min((at + 8) // 8, ids)
                assert indexer.num_bytes(at, at + 1, top_k) == want, (top_k, at)


WRONG = {
    "indexer_range": lambda rows: rows.__setitem__((3, 1, 2), -1),
    "indexer_future": lambda rows: rows.__setitem__((3, 1, 0), 24),  # its own position is 23
    "indexer_duplicate": lambda rows: rows.__setitem__((3, 1, 0), rows[3, 1, 1]),
}


@pytest.mark.parametrize("reason", WRONG)
def test_a_bad_row_is_refused_by_name(reason: str) -> None:
    rows = choose(np.random.default_rng(0), 20, 30, 2, 4)
    indexer.encode(rows, 20)
    WRONG[reason](rows)
    with pytest.raises(RecordError, match=r"layer 1 .* token 23: 4 different positions") as found:
        indexer.encode(rows, 20)
    assert found.value.reason == reason


def test_a_row_below_top_k_is_not_read() -> None:
    """An engine may skip the scores of a short prompt; every position is chosen anyway."""
    rows = np.full((4, 1, 8), 99, np.int32)
    assert indexer.encode(rows, 0).shape == (1, 0)
    assert indexer.decode(np.zeros(0, np.uint8), 0, 4, 8)[3].tolist() == [0, 1, 2, 3]


def test_the_engines_rows_are_checked() -> None:
    rows = choose(np.random.default_rng(0), 0, 9, 2, 4)
    asked = {"num_rows": 9, "num_layers": 2, "top_k": 4}
    indexer.check_engine_rows(rows, **asked)
    for other in (rows[1:], rows.reshape(9, 1, 8), rows.astype(np.float32)):
        with pytest.raises(RecordError) as found:
            indexer.check_engine_rows(other, **asked)
        assert found.value.reason == "indexer_rows"


def test_damaged_bytes_do_not_decode() -> None:
    """A bitmap with a bit too many, a bit after its own token, ids out of order, a byte short."""
    bitmap = indexer.encode(choose(np.random.default_rng(0), 20, 21, 1, 4), 20)[0]
    ids = indexer.encode(choose(np.random.default_rng(0), 90, 91, 1, 4), 90)[0]
    assert (len(bitmap), len(ids)) == (3, 8)
    late = bitmap.copy()
    late[2] |= 0x80
    for data, at in ((bitmap | 1 | 2 | 4 | 8 | 16, 20), (late, 20), (ids[::-1].copy(), 90)):
        with pytest.raises(RecordError, match="indexer_rows"):
            indexer.decode(data, at, at + 1, 4)
    with pytest.raises(RecordError, match="need 8 bytes"):
        indexer.decode(ids[:-1], 90, 91, 4)
