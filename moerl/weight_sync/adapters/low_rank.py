"""W0 + s B A, rounded once: the same bits on every rank, whatever part of the weight it holds.

A matrix product sums in an order that depends on the sizes of its operands, so two ranks that hold
different rows of a weight may round one element differently.  Here each element is the sum of its
products in the order of the ranks, with one rounding to fp32 per operation, on any device: trainer
and engines can compare digests.  Runs of rows that fit a cache make it as fast as a product in
fp64, which would only make differences rare.

Rejected: fused multiply-add (`addcmul`), which some devices and the ends of vectors round twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

# elements of a run of rows: on a CPU they fit its cache, on a GPU one launch has enough work
_BLOCK, _BLOCK_ON_GPU = 1 << 16, 1 << 22


@torch.no_grad()
def merge_into(weight: Tensor, base: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """Set weight to base + scale * b @ a, summed in fp32 and rounded to the nearest.

    weight, base: [out, in] of one dtype; a: [rank, in], b: [out, rank], of any floating dtype.
    """
    a, b = a.float(), b.float()
    block = _BLOCK_ON_GPU if weight.is_cuda else _BLOCK
    rows = max(1, block // max(1, a.shape[1]))
    for first in range(0, b.shape[0], rows):
        part = slice(first, first + rows)
        weight[part] = _merged(base[part].float(), a, b[part], scale)


def _merged(base: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    total = torch.zeros_like(base)
    product = torch.empty_like(base)
    for row, column in zip(a, b.unbind(1), strict=True):
        torch.mul(column[:, None], row, out=product)
        total.add_(product)
    return total.mul_(scale).add_(base)
