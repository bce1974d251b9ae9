"""Group ids as ranges and pages, names of rollouts, and token ids in three bytes each."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

PAGE = 4096  # ids
_LIFE = re.compile(r"\.r(\d+)-\d+")

# --- sets of group ids ----------------------------------------------------------------------------
# Almost all ids below the newest are consumed: as ranges, a million groups are a few numbers.
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


def page_union(page: bytes, other: bytes) -> bytes:
    """The ids of both pages."""
    bits = np.frombuffer(page, np.uint8) | np.frombuffer(other, np.uint8)
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


# --- names of rollouts, episodes and turns --------------------------------------------------------
# GROUP.SIBLING, then .rLIFE-TRIES, then .tTURN
def name_rollout(group_id: int, sibling: int, life: int = 0, tries: int = 0) -> str:
    """Id of a rollout, unique in a run: blobs of an earlier try may still exist.

    life: number of earlier controllers.  tries: number of earlier tries of this controller.
    """
    return f"{group_id}.{sibling}" + (f".r{life}-{tries}" if life or tries else "")


def life_of(name: str) -> int:
    """The life of the controller that requested a rollout, from its id or a blob's name."""
    found = _LIFE.search(name)
    return int(found[1]) if found else 0


def without_life(name: str) -> str:
    """The part of a rollout's or turn's id that is the same in every life and try."""
    return _LIFE.sub("", name)


def group_of(name: str) -> int:
    """The group of a rollout or turn, from its id."""
    return int(name.partition(".")[0])


def episode_of(name: str) -> str:
    """The episode of a turn, which is named EPISODE.tNUMBER."""
    return name.rpartition(".")[0]


# --- token ids in pickled dataclasses -------------------------------------------------------------
# Ids are most of the controller's traffic: requests of interrupted rollouts repeat all of theirs.
# Arrays that do not fit (another dtype, a negative id, an id of 2**24 or more) are not packed, so
# that the check on admission sees them.
def packed_state(value: Any, ids: str) -> list[Any]:
    """For `__getstate__`: the fields of a dataclass in order, its [n] i32 field `ids` packed."""
    return [
        _pack(getattr(value, name)) if name == ids else getattr(value, name)
        for name in value.__dataclass_fields__
    ]


def set_packed_state(value: Any, state: list[Any], ids: str) -> None:
    """For `__setstate__`: inverse of `packed_state`.  Raises ValueError for other fields."""
    for name, kept in zip(value.__dataclass_fields__, state, strict=True):
        object.__setattr__(value, name, _unpack(kept) if name == ids else kept)


def _pack(tokens: np.ndarray) -> np.ndarray | bytes:
    if tokens.dtype != np.int32 or tokens.ndim != 1 or (tokens >> 24).any():
        return tokens
    little = np.ascontiguousarray(tokens, "<i4").view(np.uint8).reshape(-1, 4)
    return little[:, :3].tobytes()


def _unpack(kept: np.ndarray | bytes) -> np.ndarray:
    if not isinstance(kept, bytes):
        return kept
    little = np.zeros((len(kept) // 3, 4), np.uint8)
    little[:, :3] = np.frombuffer(kept, np.uint8).reshape(-1, 3)
    return little.view("<i4").ravel().astype(np.int32, copy=False)
