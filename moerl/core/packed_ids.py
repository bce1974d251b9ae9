"""Token ids in three bytes each, for dataclasses that are pickled between processes.

Ids are most of the controller's traffic: requests of interrupted rollouts repeat all of theirs.
Arrays that do not fit (another dtype, a negative id, an id of 2**24 or more) are not packed, so
that the check on admission sees them.

Legend: n tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def packed_state(value: Any, ids: str) -> list[Any]:
    """For `__getstate__`: the fields of a dataclass in order, the [n] i32 field `ids` packed."""
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
