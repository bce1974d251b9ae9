"""One version of the weights, copied into flat buckets so that training can go on.

Tensors carry Hugging Face names, one matrix per expert.  A bucket is one flat uint8 buffer, tensors
back to back in the order of `Bucket`; the cut into buckets is made once and the buffers are used
again for every version (fresh ones would fault in every page of every publish).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.protocols import Bucket
from moerl.types import PolicyVersion


@dataclass(frozen=True, slots=True, eq=False)
class FrozenWeights:
    """Set by the training thread, read by the publishing thread, overwritten only after it."""

    version: PolicyVersion
    buckets: tuple[Bucket, ...]
    buffers: tuple[Tensor, ...]  # one flat uint8 tensor per bucket

    @property
    def num_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self.buffers)


def freeze(
    tensors: Mapping[str, Tensor],
    version: PolicyVersion,
    before: FrozenWeights | None,
    *,
    bucket_bytes: int,
) -> FrozenWeights:
    """Copy Hugging Face tensors (CPU, contiguous) into buckets, those of `before` if given."""
    if before is None:
        buckets = make_buckets(
            list(tensors),
            [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            [tuple(tensor.shape) for tensor in tensors.values()],
            bucket_bytes=bucket_bytes,
        )
        sizes = [num_bytes(bucket.dtypes, bucket.shapes) for bucket in buckets]
        buffers = tuple(torch.empty(size, dtype=torch.uint8) for size in sizes)
    else:
        buckets, buffers = before.buckets, before.buffers
    for bucket, buffer in zip(buckets, buffers, strict=True):
        at = 0
        for name in bucket.names:
            data = tensors[name].reshape(-1).view(torch.uint8)
            buffer[at : at + len(data)] = data
            at += len(data)
    return FrozenWeights(version, buckets, buffers)


def make_buckets(
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    *,
    bucket_bytes: int,
) -> tuple[Bucket, ...]:
    """Cut tensors, in order, into buckets of at most `bucket_bytes` (a larger tensor gets its own).

    Tensors of one dtype stay together, so every tensor starts at a multiple of its item size.
    """
    buckets: list[Bucket] = []
    open_: list[tuple[str, str, tuple[int, ...]]] = []
    filled = 0
    for item in zip(names, dtypes, shapes, strict=True):
        size = num_bytes([item[1]], [item[2]])
        if open_ and (filled + size > bucket_bytes or item[1] != open_[0][1]):
            buckets.append(_bucket(open_))
            open_, filled = [], 0
        open_.append(item)
        filled += size
    if open_:
        buckets.append(_bucket(open_))
    return tuple(buckets)


def num_bytes(dtypes: Iterable[str], shapes: Iterable[tuple[int, ...]]) -> int:
    """Bytes of tensors back to back."""
    return sum(
        getattr(torch, dtype).itemsize * torch.Size(shape).numel()
        for dtype, shape in zip(dtypes, shapes, strict=True)
    )


def _bucket(items: Sequence[tuple[str, str, tuple[int, ...]]]) -> Bucket:
    names, dtypes, shapes = zip(*items, strict=True)
    return Bucket(names=names, dtypes=dtypes, shapes=shapes)
