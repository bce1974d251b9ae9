"""Sets of ids as bitmaps are the sets that they stand for."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from moerl.core.ids import IdSet, ranges

IDS = st.sets(st.integers(-20, 60))


@given(IDS)
def test_ranges_are_lossless(numbers: set[int]) -> None:
    parts = ranges(numbers)
    assert list(IdSet(parts)) == sorted(numbers)
    assert all(a[1] < b[0] for a, b in pairwise(parts))


@given(st.lists(IDS, max_size=6))
def test_a_set_that_grows(batches: list[set[int]]) -> None:
    grown, known = IdSet(), set()
    for batch in batches:
        grown.update(batch)
        known |= batch
        assert grown.parts == ranges(known)
        assert [one in grown for one in range(-25, 65)] == [one in known for one in range(-25, 65)]
        assert list(grown) == sorted(known)


@given(IDS, IDS)
def test_without(numbers: set[int], others: set[int]) -> None:
    assert list(IdSet(ids=numbers).without(ranges(others))) == sorted(numbers - others)
    assert len(IdSet(ids=numbers)) == len(numbers)


def test_a_long_run_takes_no_more_room_than_its_holes() -> None:
    grown = IdSet()
    for step in range(1000):
        grown.update(range(64 * step, 64 * (step + 1) - 1))  # the last of each step is dropped
        grown.update([64 * step - 1])  # and consumed a step later
    assert grown.parts == ((-1, 63999),)
