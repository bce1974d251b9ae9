"""Do the pieces of a plan fill the tensors that they are for, exactly?"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from moerl.core.errors import LayoutError
from moerl.layout import num_elements
from moerl.layout.tiles import Box, overlap
from moerl.weight_sync.buckets import Piece
from moerl.weight_sync.transfer_plan import ReceiverPlan


def check_targets(plan: ReceiverPlan, tensors: Mapping[str, Tensor]) -> None:
    """Check that every piece fits a live tensor and that the pieces fill all tensors but padding.

    Raises LayoutError naming the tensor.
    """
    boxes: dict[str, list[Box]] = {}
    for region in plan.regions:
        for piece in region.pieces:
            if piece.dst_name not in tensors:
                raise LayoutError(f"{piece.dst_name}: the plan fills it, the live model lacks it")
            target = tensors[piece.dst_name]
            _check_piece(piece, target)
            boxes.setdefault(piece.dst_name, []).append(piece.dst_box)
    padding = dict(plan.padding)
    for name, target in tensors.items():
        rows = padding.get(name, target.shape[0] if target.dim() else 1)
        wanted = target.numel() // max(1, target.shape[0] if target.dim() else 1) * rows
        parts = boxes.get(name, [])
        filled = sum(map(num_elements, parts))
        if filled != wanted:
            raise LayoutError(f"{name}: the plan fills {filled} of {wanted} elements")
        if twice := overlap(parts):  # then something else is never filled
            raise LayoutError(f"{name}: the plan fills {twice[0]} and {twice[1]}, which overlap")


def _check_piece(piece: Piece, target: Tensor) -> None:
    if len(piece.dst_box) != target.dim() or any(
        r and (r[-1] >= n or r[0] < 0) for r, n in zip(piece.dst_box, target.shape, strict=True)
    ):
        raise LayoutError(f"{piece.dst_name} {tuple(target.shape)} has no box {piece.dst_box}")
    if str(target.dtype) != f"torch.{piece.dtype}":
        raise LayoutError(f"{piece.dst_name} is {target.dtype} live, {piece.dtype} on the wire")
