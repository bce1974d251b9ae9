"""W0 + s B A, rounded once: the same bits on every rank, whatever part of the weight it holds.

A matrix product sums in an order that depends on the sizes of its operands, so two ranks that hold
different rows of a weight may round one element differently.  Here each element is the sum of its
products in the order of the ranks, with one rounding to fp32 per operation, on any device: trainer
and engines can compare digests.  Runs of rows that fit a cache make it as fast as a product in
fp64, which would only make differences rare.

Rejected: fused multiply-add (`addcmul`), which some devices and the ends of vectors round twice.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moerl.weight_sync.dither import HfPart, round_with_dither

# elements of a run of rows: on a CPU they fit its cache, on a GPU one launch has enough work
_BLOCK, _BLOCK_ON_GPU = 1 << 16, 1 << 22


@torch.no_grad()
def merge_into(
    weight: Tensor,
    base: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float,
    dither: HfPart | None = None,
) -> None:
    """weight = base + scale * b @ a, rounded to the nearest, or with the dither of its place.

    weight, base: [out, in] of one dtype, bf16 with a dither; a: [rank, in], b: [out, rank], of any
    floating dtype.
    """
    assert dither is None or weight.dtype == torch.bfloat16, f"no dither rounds to {weight.dtype}"
    a, b = a.float(), b.float()
    block = _BLOCK_ON_GPU if weight.is_cuda else _BLOCK
    rows = max(1, block // max(1, a.shape[1]))
    for first in range(0, b.shape[0], rows):
        part = slice(first, first + rows)
        total = _merged(base[part].float(), a, b[part], scale)
        if dither is not None:
            total = round_with_dither(total, replace(dither, rows=dither.rows[part]))
        weight[part] = total


def _merged(base: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    total = torch.zeros_like(base)
    product = torch.empty_like(base)
    for row, column in zip(a, b.unbind(1), strict=True):
        torch.mul(column[:, None], row, out=product)
        total.add_(product)
    return total.mul_(scale).add_(base)
