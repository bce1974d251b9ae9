"""FP8 blocks, made by the sender: 128 x 128 values that share one fp32 scale.

scale = largest magnitude of the block / 448, value = round(weight / scale) in float8_e4m3fn; the
engine multiplies back.  A block depends on its own values only, so quantising a box of whole blocks
equals quantising the whole tensor and cutting it: that is why plans never cut inside a block.
Source: the block format of DeepSeek-V3's released weights (weight_scale_inv is the factor, despite
its name); SGLang 0.5.23 reads it in fp8_utils.block_quant_dequant.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128
_LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(float8_e4m3fn [R, C], fp32 scales [ceil(R/128), ceil(C/128)]) of a matrix [R, C].

    Leading dims of extent 1 are dropped.  A block of zeros has scale 1.
    """
    matrix = weight.float().reshape(weight.shape[-2:])
    rows, cols = matrix.shape
    padded = pad(matrix, (0, -cols % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [r, 128, c, 128]
    largest = blocks.abs().amax(dim=(1, 3))
    # a tensor: by a number CUDA multiplies with its reciprocal, which rounds otherwise than the CPU
    scale = torch.where(largest > 0, largest / torch.full_like(largest, _LARGEST), 1.0)
    values = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)
    return values[:rows, :cols].to(torch.float8_e4m3fn), scale
