"""Copies of staged bytes into the live weights, in place: of a COMMIT, or of a round.

Staging on the device of the weights, or both on the CPU: one copy per piece.  Staging in host
memory under weights on a GPU goes through two device buckets, so that the GPU holds the weights
once and two buckets more:

    side stream      stage 0 in A | stage 1 in B | stage 2 in A | ...
    current stream                | pieces of A  | pieces of B  | ...

An event orders each two neighbours: pieces are copied when their bucket has arrived, and a bucket
is filled again when its pieces have been copied.  The buckets are allocated in PREPARE, where a
failure is a refusal: a commit allocates nothing.

Rejected: pieces copied from host memory one by one (thousands of small transfers in the pause), a
whole version on the device (a second copy of the weights, next to the KV cache).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.core.errors import LayoutError
from moerl.layout import at, num_elements
from moerl.layout.tiles import Box, overlap
from moerl.weight_sync.buckets import ROUND, Piece, Region, bucket_starts
from moerl.weight_sync.transfer_plan import ReceiverPlan


def device_of(tensors: Mapping[str, Tensor]) -> torch.device | None:
    """The GPU of the live weights; None = they are on the CPU."""
    return next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)


class CommitBuckets:
    """Two buffers for the largest bucket of a plan, and the stream that fills them."""

    def __init__(self, receiver_plan: ReceiverPlan, device: torch.device) -> None:
        sizes = [bucket.num_bytes for region in receiver_plan.regions for bucket in region.buckets]
        self.plan, self.device = receiver_plan, device
        self.stream = torch.cuda.Stream(device)
        self.pair = [
            torch.empty(max(sizes, default=0), dtype=torch.uint8, device=device) for _ in "ab"
        ]


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """One bucket; without `on_device` its pieces are copied straight from staging."""

    round: int
    staged: Tensor
    on_device: Tensor | None
    sources: list[Tensor]
    targets: list[Tensor]


class CommitCopies:
    """Source and destination views of a session, kept across versions.

    Making thousands of slices takes longer than the copies.
    """

    def __init__(
        self,
        receiver_plan: ReceiverPlan,
        starts: Sequence[int],
        staging: Tensor,
        tensors: Mapping[str, Tensor],
        buckets: CommitBuckets | None = None,
        *,
        in_rounds: bool = False,
    ) -> None:
        """Make the views of both sides.

        starts: of the regions in `staging`.  buckets: for staging in host memory under weights on a
        GPU.  in_rounds: `staging` takes a round of each region.
        """
        self._pointers = _pointers(tensors)
        self._buckets = buckets
        self._steps: list[_Step] = []
        for region, start in zip(receiver_plan.regions, starts, strict=True):
            for number, begin in enumerate(bucket_starts(region, start, in_rounds=in_rounds)):
                self._steps.append(self._step(region, number, staging[begin:], tensors))

    def fit(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the live weights have not moved."""
        return self._pointers == _pointers(tensors)

    def run(self, number: int | None = None) -> None:
        """Copy all buckets, or a round.  On a GPU it returns before the copies are complete."""
        steps = [step for step in self._steps if number in (None, step.round)]
        if self._buckets is not None:
            self._stream(self._buckets, steps)
            return
        targets = [target for step in steps for target in step.targets]
        if targets:
            sources = [source for step in steps for source in step.sources]
            torch._foreach_copy_(targets, sources)

    def read_back(self, number: int) -> Tensor:
        """Bytes of a bucket as the live weights hold it, in staging.  number: over all regions."""
        step = self._steps[number]
        torch._foreach_copy_(step.sources, step.targets)
        if step.on_device is not None:
            step.staged.copy_(step.on_device)
        return step.staged

    def _step(
        self, region: Region, number: int, staging: Tensor, tensors: Mapping[str, Tensor]
    ) -> _Step:
        bucket, on_device = region.buckets[number], None
        staged = staging[: bucket.num_bytes]
        if self._buckets is not None:
            on_device = self._buckets.pair[len(self._steps) % 2][: bucket.num_bytes]
        step = _Step(number // ROUND, staged, on_device, [], [])
        data = staged if on_device is None else on_device
        for piece in region.pieces[bucket.first : bucket.stop]:
            target = tensors[piece.dst_name][at(piece.dst_box)]
            source = data[piece.offset - bucket.offset :][: piece.num_bytes]
            step.targets.append(target)
            step.sources.append(source.view(target.dtype).view(target.shape))
        return step

    def _stream(self, buckets: CommitBuckets, steps: Sequence[_Step]) -> None:
        current = torch.cuda.current_stream(buckets.device)
        copied: dict[int, torch.cuda.Event] = {}  # by address: the pieces of that bucket are copied
        buckets.stream.wait_stream(current)
        for step in steps:
            assert step.on_device is not None
            if (before := copied.get(step.on_device.data_ptr())) is not None:
                buckets.stream.wait_event(before)
            with torch.cuda.stream(buckets.stream):
                step.on_device.copy_(step.staged, non_blocking=True)
            current.wait_event(buckets.stream.record_event())
            torch._foreach_copy_(step.targets, step.sources)
            copied[step.on_device.data_ptr()] = current.record_event()


def _pointers(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


# --- the plan against live tensors ---------------------------------------------------------------
def check_targets(receiver_plan: ReceiverPlan, tensors: Mapping[str, Tensor]) -> None:
    """Check that every piece fits a live tensor and that the pieces fill all tensors but padding.

    Raises LayoutError naming the tensor.
    """
    boxes: dict[str, list[Box]] = {}
    for region in receiver_plan.regions:
        for piece in region.pieces:
            if piece.dst_name not in tensors:
                raise LayoutError(f"{piece.dst_name}: the plan fills it, the live model lacks it")
            target = tensors[piece.dst_name]
            _check_piece(piece, target)
            boxes.setdefault(piece.dst_name, []).append(piece.dst_box)
    padding = dict(receiver_plan.padding)
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
