"""Sets of group ids that grow with the run, in the space of their holes.

Nearly every id below the line is consumed: as ranges, a million groups are a handful of numbers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

Ranges = tuple[tuple[int, int], ...]  # begin and end (exclusive), ascending and apart


def ranges(ids: Iterable[int]) -> Ranges:
    """{0, 1, 2, 7} -> ((0, 3), (7, 8))."""
    found: list[tuple[int, int]] = []
    for one in sorted(set(ids)):
        if found and found[-1][1] == one:
            found[-1] = (found[-1][0], one + 1)
        else:
            found.append((one, one + 1))
    return tuple(found)


def spread(parts: Ranges) -> Iterator[int]:
    """Inverse of `ranges`."""
    return (one for begin, end in parts for one in range(begin, end))


def joined(parts: Ranges, ids: Iterable[int]) -> Ranges:
    """The union; its cost is that of the holes and of `ids`, not of what `parts` spread to."""
    return IdSet(parts, ids).parts


class IdSet:
    """A set of whole numbers; membership takes the logarithm of the number of ranges."""

    def __init__(self, parts: Ranges = (), ids: Iterable[int] = ()) -> None:
        self._begins = [begin for begin, _ in parts]
        self._ends = [end for _, end in parts]
        self.update(ids)

    @property
    def parts(self) -> Ranges:
        return tuple(zip(self._begins, self._ends, strict=True))

    def __contains__(self, one: int) -> bool:
        at = bisect_right(self._begins, one)
        return at > 0 and one < self._ends[at - 1]

    def __iter__(self) -> Iterator[int]:
        return spread(self.parts)

    def update(self, ids: Iterable[int]) -> None:
        for begin, end in ranges(ids):
            first = bisect_left(self._ends, begin)  # the first range that touches this one
            last = bisect_right(self._begins, end)
            if first < last:
                begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
            self._begins[first:last] = [begin]
            self._ends[first:last] = [end]
