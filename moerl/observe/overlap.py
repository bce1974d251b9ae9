"""Interval arithmetic on timeline spans: how long does the engine decode while the trainer works?

Pure functions on half-open intervals `(start, end)` in seconds.

Waiting for a batch is subtracted from the trainer's step time.  Otherwise a synchronous run, where
the trainer waits exactly while the engine decodes, would look perfectly overlapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Interval = tuple[float, float]
Span = Mapping[str, Any]  # one line of a trace file, see moerl.runtime.trace

STEP, WAIT, GENERATE = "step", "wait", "generate"  # span names that carry the overlap


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The union as disjoint intervals in ascending order, without empty intervals."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Seconds covered by at least one of the intervals."""
    return sum(end - start for start, end in merge(intervals))


def intersect(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """Time covered by both sides, as disjoint ascending intervals."""
    return _covered(a, b, wanted=True)


def subtract(a: Iterable[Interval], holes: Iterable[Interval]) -> list[Interval]:
    """Time covered by `a` and by none of the holes, as disjoint ascending intervals."""
    return _covered(a, holes, wanted=False)


def _covered(a: Iterable[Interval], b: Iterable[Interval], *, wanted: bool) -> list[Interval]:
    """Time inside of `a` where being inside of `b` is `wanted`; a sweep over all ends."""
    sides = (merge(a), merge(b))
    ends = sorted((t, side) for side in (0, 1) for pair in sides[side] for t in pair)
    inside, begin, found = [False, False], 0.0, []
    for at, side in ends:
        if inside[0] and inside[1] == wanted and begin < at:
            found.append((begin, at))
        inside[side] = not inside[side]
        begin = at
    return merge(found)


def busy_fraction(spans_a: Iterable[Interval], spans_b: Iterable[Interval]) -> float:
    """Share of the time of spans_a during which any of spans_b runs, in [0, 1].

    Raises ValueError when spans_a cover no time, because the share is undefined then.
    """
    work = merge(spans_a)
    total = length(work)
    if total <= 0.0:
        raise ValueError("busy_fraction of spans_a that cover no time")
    return min(1.0, length(intersect(work, spans_b)) / total)


def intervals(spans: Iterable[Span], process: str, name: str) -> list[Interval]:
    """Intervals of the spans called `name` of every process whose name starts with `process`."""
    return [
        (float(span["start_s"]), float(span["end_s"]))
        for span in spans
        if span["name"] == name and str(span["process"]).startswith(process)
    ]


def trainer_work(spans: Sequence[Span]) -> list[Interval]:
    """Step spans less waits of the first traced trainer process.

    A union over all ranks would count the time in which one rank waits for another.
    """
    traced = sorted({str(s["process"]) for s in spans if str(s["process"]).startswith("trainer")})
    if not traced:
        return []
    own = [span for span in spans if span["process"] == traced[0]]
    return subtract(intervals(own, traced[0], STEP), intervals(own, traced[0], WAIT))


def decode_overlap(spans: Sequence[Span]) -> float | None:
    """Share of the trainer's working time during which any engine decodes; None without a step."""
    work = trainer_work(spans)
    return busy_fraction(work, intervals(spans, "engine", GENERATE)) if work else None
