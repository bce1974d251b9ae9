"""Rounding to bf16 with a dither that is fixed for each element of a Hugging Face tensor.

Rounding to the nearest loses every change below half a step of bf16, for as long as it stays below:
weights of a model lie on the grid, so small updates of a low-rank adapter, or of fp32 master
weights, change nothing.  Here an element is rounded up where the part that bf16 drops exceeds a
threshold of that element.  Over many elements the rounding error has mean 0; a value that bf16
holds stays as it is; and one that grows slowly moves once, when it passes its threshold.

The threshold is a hash of (tensor name, row, column): no state, and the same on the trainer and on
an engine, whatever part of the tensor a rank holds.  Integer operations are exact on any device.
Hash: the mixer "lowbias32" of C. Wellons (hash-prospector), on integers below 2^32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

_MASK = 0xFFFFFFFF
_DROPPED = 0xFFFF  # bits of an fp32 number that bf16 does not have
# the second factor modulo 2^32: a product of both with a number below 2^32 fits 64 bits
_FACTORS = (0x7FEB352D, 0x846CA68B - (1 << 32))
_SEED = 0


@dataclass(frozen=True, slots=True)
class HfPart:
    """A matrix that is a part of a Hugging Face tensor."""

    name: str
    rows: range
    cols: range


def round_with_dither(value: Tensor, part: HfPart) -> Tensor:
    """value [rows, cols] in fp32, as bf16; the error is below one step."""
    return round_past(value, thresholds(part, value.device))


def round_past(value: Tensor, limits: Tensor) -> Tensor:
    """value in fp32, as bf16; limits: `thresholds` of its elements."""
    bits = value.contiguous().view(torch.int32) + limits
    return (bits & ~_DROPPED).view(torch.float32).bfloat16()


def thresholds(part: HfPart, device: torch.device) -> Tensor:
    """[rows, cols] of int32, uniform in 0 .. 65535."""
    seeds = (
        xxhash.xxh32_intdigest(f"{part.name} {dim}".encode(), seed=_SEED)
        for dim in ("row", "column")
    )
    row, col = (
        _mixed((_arange(held, device) + seed) & _MASK)
        for held, seed in zip((part.rows, part.cols), seeds, strict=True)
    )
    return _mixed((row[:, None] + col) & _MASK).bitwise_and_(_DROPPED).int()


def _arange(held: range, device: torch.device) -> Tensor:
    return torch.arange(held.start, held.stop, held.step, device=device)


def _mixed(x: Tensor) -> Tensor:
    """Each number below 2^32 as another one."""
    for shift, factor in zip((16, 15), _FACTORS, strict=True):
        x = (x ^ (x >> shift)).mul_(factor).bitwise_and_(_MASK)
    return x ^ (x >> 16)
