"""Compact sets of group ids.

Almost all ids below the newest are consumed: stored as ranges, a million groups are a few numbers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

import numpy as np

PAGE = 4096  # ids

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


def pages_of(ids: Iterable[int]) -> dict[int, bytes]:
    """Bitmaps of ids by page, so that a store rewrites only the pages of added ids."""
    array = np.sort(np.fromiter(ids, np.int64))
    pages, starts = np.unique(array // PAGE, return_index=True)
    found = {}
    for page, part in zip(pages.tolist(), np.split(array, starts[1:]), strict=False):
        bits = np.zeros(PAGE, np.bool_)
        bits[part - page * PAGE] = True
        found[page] = np.packbits(bits).tobytes()
    return found


def ids_of(page: int, bits: bytes) -> list[int]:
    """Inverse of `pages_of`, for one page.  Raises ValueError when it is not a page."""
    if len(bits) * 8 != PAGE:
        raise ValueError(f"a page of ids has {len(bits)} bytes, want {PAGE // 8}")
    found = np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8))) + page * PAGE
    return [int(one) for one in found]


def both(one: bytes, other: bytes) -> bytes:
    """The union of two pages."""
    bits = np.frombuffer(one, np.uint8) | np.frombuffer(other, np.uint8)
    return bits.tobytes()


class IdSet:
    """A set of integers; membership costs the logarithm of the number of ranges."""

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

    def __len__(self) -> int:
        return sum(self._ends) - sum(self._begins)

    def without(self, parts: Ranges) -> Iterator[int]:
        """Ids that are not in `parts`; the cost is the number of ranges and of results."""
        other = IdSet(parts)
        for begin, end in self.parts:
            at = begin
            for first in range(bisect_right(other._ends, begin), len(parts)):
                low, high = parts[first]
                if low >= end:
                    break
                yield from range(at, low)
                at = high
            yield from range(at, end)

    def update(self, ids: Iterable[int]) -> None:
        for begin, end in ranges(ids):
            first = bisect_left(self._ends, begin)  # the first range that touches this one
            last = bisect_right(self._begins, end)
            if first < last:
                begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
            self._begins[first:last] = [begin]
            self._ends[first:last] = [end]
