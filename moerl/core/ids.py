"""Sets of group ids, names of rollouts, and token ids in three bytes each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from pyroaring import BitMap64

_LIFE = re.compile(r"\.r(\d+)-\d+")

# --- sets of group ids ----------------------------------------------------------------------------
Ranges = tuple[tuple[int, int], ...]  # begin and end (exclusive), ascending and apart
_BIAS = 1 << 63  # a bitmap holds no negative number, and ids of late siblings are negative


class IdSet:
    """A set of ids as a compressed bitmap: almost all ids below the newest are consumed, so a
    million of them take a few bytes.
    """

    def __init__(self, parts: Ranges = (), ids: Iterable[int] = ()) -> None:
        self._bits = BitMap64()
        for begin, end in parts:
            self._bits.add_range(begin + _BIAS, end + _BIAS)
        self.update(ids)

    @property
    def parts(self) -> Ranges:
        after = self._bits.shift(1)
        both = zip(self._bits - after, after - self._bits, strict=True)
        return tuple((begin - _BIAS, end - _BIAS) for begin, end in both)

    def __contains__(self, one: int) -> bool:
        return one + _BIAS in self._bits

    def __iter__(self) -> Iterator[int]:
        return (one - _BIAS for one in self._bits)

    def __len__(self) -> int:
        return len(self._bits)

    def without(self, parts: Ranges) -> Iterator[int]:
        """Ids that are not in `parts`."""
        return (one - _BIAS for one in self._bits - IdSet(parts)._bits)

    def update(self, ids: Iterable[int]) -> None:
        self._bits.update(one + _BIAS for one in ids)


def ranges(ids: Iterable[int]) -> Ranges:
    """{0, 1, 2, 7} -> ((0, 3), (7, 8)).  `IdSet` is the inverse."""
    return IdSet(ids=ids).parts


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
