"""Interval arithmetic against a grid of moments, and what counts as trainer work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moerl.observe.overlap import (
    Interval,
    busy_fraction,
    decode_overlap,
    intersect,
    length,
    merge,
    subtract,
)

# Whole seconds in 0..30, so that a set of seconds is an exact oracle.  Some intervals are empty.
sets = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def seconds(intervals: list[Interval]) -> set[int]:
    return {moment for start, end in intervals for moment in range(int(start), int(end))}


def assert_disjoint_ascending(intervals: list[Interval]) -> None:
    edges = [edge for interval in intervals for edge in interval]
    assert edges == sorted(set(edges))


@given(sets, sets)
def test_set_operations_equal_those_on_seconds(a: list[Interval], b: list[Interval]) -> None:
    for result, want in (
        (merge(a), seconds(a)),
        (intersect(a, b), seconds(a) & seconds(b)),
        (subtract(a, b), seconds(a) - seconds(b)),
    ):
        assert seconds(result) == want
        assert_disjoint_ascending(result)
    assert length(a) == len(seconds(a))


@given(sets.filter(seconds), sets)
def test_busy_fraction_is_the_share_of_seconds(a: list[Interval], b: list[Interval]) -> None:
    assert busy_fraction(a, b) == pytest.approx(len(seconds(a) & seconds(b)) / len(seconds(a)))
    assert busy_fraction(a, b) + busy_fraction(a, subtract(a, b)) == pytest.approx(1.0)


@given(sets)
def test_busy_fraction_of_nothing_is_refused(b: list[Interval]) -> None:
    with pytest.raises(ValueError, match="cover no time"):
        busy_fraction([(3.0, 3.0)], b)


def span(process: str, name: str, start: float, end: float) -> dict[str, str | float]:
    return {"process": process, "name": name, "start_s": start, "end_s": end}


def test_waiting_is_not_work() -> None:
    """A synchronous run: the engine decodes exactly while the trainer waits."""
    synchronous = [
        span("trainer0", "step", 0, 10),
        span("trainer0", "wait", 0, 6),
        span("engine0", "generate", 0, 6),
    ]
    assert decode_overlap(synchronous) == 0.0
    assert decode_overlap([s for s in synchronous if s["name"] != "wait"]) == 0.6


def test_overlap_counts_any_engine_once_and_one_rank() -> None:
    spans = [
        span("trainer0", "step", 0, 10),
        span("trainer1", "step", 0, 100),  # another rank does not dilute the first
        span("engine0", "generate", 0, 4),
        span("engine1", "generate", 2, 6),
        span("engine1", "update", 6, 10),
    ]
    assert decode_overlap(spans) == pytest.approx(0.6)


def test_overlap_without_a_step_is_unknown() -> None:
    assert decode_overlap([]) is None
    assert decode_overlap([span("engine0", "generate", 0, 4)]) is None
