"""Quantised tensors of released checkpoints, dequantised box by box while they are read.

    FP8 block   NAME [.., R, C] fp8 and NAME_scale_inv [.., ceil(R/128), ceil(C/128)]
                value = fp8 * scale of its block                              (DeepSeek-V3)
    MXFP4       NAME_blocks [.., R, C/32, 16] and NAME_scales [.., R, C/32], both bytes
                two values per byte, low half first; value = e2m1 * 2^(scale - 127)   (gpt-oss)

Both give float32; the caller rounds once, to the dtype it keeps.  A bare cast of either gives
plausible noise, so a quantised tensor without its scales is refused by name.
Sources: the OCP Microscaling specification for MXFP4 (e2m1 elements, e8m0 scales, blocks of 32);
weight_dequant in DeepSeek-V3's inference code for the block scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.layout import Box
from moerl.layout.model_files import MXFP4_GROUP

Read = Callable[[Box], Tensor]

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_TABLE = torch.tensor([*_E2M1, *(-x for x in _E2M1)])


@dataclass(frozen=True, slots=True)
class Fp8Block:
    """Reads boxes of one FP8 tensor; `block` is its (rows, columns) per scale."""

    weight: Read
    scale: Read
    block: tuple[int, int]

    def __call__(self, box: Box) -> Tensor:
        if box[-2].step > 1:
            return self(_dense(box))[..., :: box[-2].step, :]
        value = self.weight(box).float()
        *lead, rows, cols = box
        scale_box = (*lead, _blocks(rows, self.block[0]), _blocks(cols, self.block[1]))
        scale = self.scale(scale_box).float()
        for dim, kept, size in ((-2, rows, self.block[0]), (-1, cols, self.block[1])):
            spread = scale.repeat_interleave(size, dim)
            scale = spread.narrow(dim, kept.start % size, len(kept))
        return value * scale


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Reads boxes of one MXFP4 tensor of shape [.., R, C]."""

    blocks: Read
    scales: Read

    def __call__(self, box: Box) -> Tensor:
        *lead, cols = box
        groups = _blocks(cols, MXFP4_GROUP)
        packed = self.blocks((*lead, groups, range(MXFP4_GROUP // 2)))
        halves = torch.stack((packed & 15, packed >> 4), dim=-1)
        value = _E2M1_TABLE[halves.flatten(-2).int()]  # [.., groups, 32]
        exponent = self.scales((*lead, groups)).int() - 127
        value = torch.ldexp(value, exponent.unsqueeze(-1)).flatten(-2)
        return value.narrow(-1, cols.start % MXFP4_GROUP, len(cols))


def _dense(box: Box) -> Box:
    """The box without the step of its rows."""
    return (*box[:-2], range(box[-2].start, box[-2].stop), box[-1])


def _blocks(elements: range, size: int) -> range:
    """The blocks that a range of elements touches."""
    return range(elements.start // size, -(-elements.stop // size))
