"""The dithered rounding once more, by numpy on unsigned integers."""

from __future__ import annotations

import numpy as np
import torch
import xxhash
from torch import Tensor


def thresholds(name: str, rows: int, cols: int, seed: int = 0) -> np.ndarray:
    """[rows, cols] of numbers in 0 .. 65535."""
    row, col = (
        _lowbias32(
            np.arange(size, dtype=np.uint32)
            + np.uint32(xxhash.xxh32_intdigest(f"{name} {dim}".encode(), seed=seed))
        )
        for dim, size in (("row", rows), ("column", cols))
    )
    return _lowbias32(row[:, None] + col[None]) & np.uint32(0xFFFF)


def rounded(value: np.ndarray, name: str, seed: int = 0) -> Tensor:
    """A whole tensor in fp32, as bf16: next to 0, or away from it where the rest exceeds."""
    bits = value.astype(np.float32).view(np.uint32)
    rest, limit = bits & np.uint32(0xFFFF), thresholds(name, *value.shape, seed)
    up = rest.astype(np.int64) + limit >= 1 << 16
    found = (bits >> np.uint32(16)) + up
    return torch.from_numpy(found.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


def _lowbias32(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))
