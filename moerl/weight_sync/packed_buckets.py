"""Buckets of one transfer plan, packed once for all engines that have this plan.

Engines of one layout plan with one id, so a trainer rank sends the same buckets to all of them.
One thread per engine sends.  The first that needs a bucket packs it (copies its pieces together,
casts or quantises them, computes the digest); the others take it from here.

Memory is bounded: two buffers per engine, because a sender holds two at most, one in transit and
the next one.  So a buffer is always free, and no sender waits for another engine: a sender
that falls behind finds its buckets overwritten and packs them again.  A thread waits for another
only while the other packs the very bucket that it needs.

A transport that maps an engine's host memory gets the bucket packed straight into it: one copy per
engine, where a shared buffer would cost one more.  With the figures of bench/weight_sync.py (pack
0.22 s per GB, plain copy 0.17) sharing would pay from five engines on one machine.  Such copies
share their digests too.

Rejected: all buckets of a version kept (as much memory as the snapshot), engines in step (the
slowest one sets the pace), a thread that packs for all (it must wait for somebody's buffer).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moerl.core.errors import TransportError
from moerl.core.types import PolicyVersion
from moerl.layout import at
from moerl.weight_sync.buckets import Bucket, Digest, Piece, digest, seeds
from moerl.weight_sync.snapshot import WeightSnapshot
from moerl.weight_sync.transfer_plan import SenderPlan
from moerl.weight_sync.transports.pinned_memory import host_buffer
from moerl.weight_sync.wire_formats import FORMATS, PLAIN

_PER_SENDER = 2  # buffers
_NO_DIGEST = Digest(b"", 0)


class BucketKey(NamedTuple):
    """One bucket of the plan."""

    dst: int  # engine rank
    number: int  # in its region


class PieceViews(NamedTuple):
    """The pieces of a bucket: cast into their targets, or quantised first."""

    sources: list[Tensor]
    targets: list[Tensor]
    quantised: list[tuple[Piece, Tensor, Tensor]]  # (values or scales, weight, flat target)


@dataclass(frozen=True, slots=True, eq=False)
class MappedBucket:
    """A bucket's place in the host memory of an engine."""

    key: BucketKey
    data: Tensor
    views: PieceViews


@dataclass(slots=True, eq=False)
class PackedBucket:
    """A buffer with a bucket; unchanged until all senders that took it have given it back."""

    buffer: Tensor
    key: BucketKey | None = None
    version: PolicyVersion | None = None
    num_bytes: int = 0
    found: Digest = _NO_DIGEST
    users: int = 0
    is_packed: bool = False

    @property
    def data(self) -> Tensor:
        """The bucket's bytes."""
        return self.buffer[: self.num_bytes]


class BucketPacker:
    """Packs a rank's regions; used by the threads of all engines with this plan."""

    def __init__(
        self,
        sender_plan: SenderPlan,
        snapshot: WeightSnapshot,
        merged: Callable[[int, PolicyVersion], int] | None = None,
        *,
        counts_factors: bool = False,
    ) -> None:
        """Keep the plan; buffers are allocated when buckets are packed.

        merged: for a plan of factors, digests of the weights that engines then have
        (`MergedTotals.total`).  counts_factors: add the digests of the factors, as no weight has
        them.
        """
        self.counts_factors = counts_factors
        self.plan, self.snapshot, self.merged = sender_plan, snapshot, merged
        self.num_packed = 0  # buckets, of all versions
        self._regions = {region.dst: region for region in sender_plan.regions}
        self._seeds = {region.dst: seeds(region) for region in sender_plan.regions}
        every = [bucket.num_bytes for region in sender_plan.regions for bucket in region.buckets]
        self._largest = max(every, default=0)
        self._senders = 0
        self._buffers: list[PackedBucket] = []  # the least recently used first
        self._views: dict[BucketKey, tuple[PackedBucket, PieceViews]] = {}
        self._digests: dict[BucketKey, tuple[PolicyVersion, Digest]] = {}
        self._changed = threading.Condition()

    def join(self) -> None:
        """One more sender, which takes two buckets at a time at most."""
        with self._changed:
            self._senders += 1

    def leave(self) -> None:
        """Count one sender less, which has given back its buffers."""
        with self._changed:
            self._senders -= 1
            free = [one for one in self._buffers if not one.users]
            for one in free[: max(0, len(self._buffers) - _PER_SENDER * self._senders)]:
                self._buffers.remove(one)
            self._views = {k: v for k, v in self._views.items() if v[0] in self._buffers}

    def take(
        self, key: BucketKey, version: PolicyVersion, deadline: float, *, fresh: bool = False
    ) -> PackedBucket:
        """The packed bucket, until `give_back`; fresh: pack it again.  Raises TransportError."""
        with self._changed:
            packed = None if fresh else self._held(key, version, deadline)
            if packed is not None:
                packed.users += 1
                return packed
            packed = self._claim(key, version)
            known = self._views.get(key)
        try:
            if known is None or known[0] is not packed:
                known = (packed, self._views_in(key, packed.data))
            packed.found = self._pack(key, known[1], packed.data)
        except BaseException:
            with self._changed:
                packed.key = None
            self.give_back(packed)
            raise
        with self._changed:
            self._views[key] = known
            packed.is_packed = True
            self._changed.notify_all()
        return packed

    def give_back(self, packed: PackedBucket) -> None:
        with self._changed:
            packed.users -= 1
            self._changed.notify_all()

    def mapped(self, key: BucketKey, data: Tensor) -> MappedBucket:
        """A bucket in an engine's memory, for `pack_into`."""
        return MappedBucket(key, data, self._views_in(key, data))

    def pack_into(
        self, target: MappedBucket, version: PolicyVersion, *, fresh: bool = False
    ) -> Digest:
        """Pack straight into an engine's memory; fresh: do not take another engine's digest."""
        with self._changed:
            known = self._digests.get(target.key)
        if not fresh and known is not None and known[0] == version:
            self._copy(target.views)
            return known[1]
        found = self._pack(target.key, target.views, target.data)
        with self._changed:
            self._digests[target.key] = version, found
        return found

    # --- private ----------------------------------------------------------------------------------
    def _held(self, key: BucketKey, version: PolicyVersion, deadline: float) -> PackedBucket | None:
        """Call with the lock held."""
        while True:
            same = (one for one in self._buffers if one.key == key and one.version == version)
            found = next(same, None)
            if found is None or found.is_packed:
                return found
            if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                raise TransportError("deadline", f"bucket {key.number} was not packed in time")

    def _claim(self, key: BucketKey, version: PolicyVersion) -> PackedBucket:
        """An unused buffer to pack into; call with the lock held."""
        num_bytes, before = self._bucket(key).num_bytes, self._views.get(key)
        if before is not None and not before[0].users:
            packed = before[0]  # its views are made
        elif len(self._buffers) < _PER_SENDER * self._senders:
            make = host_buffer if self.snapshot.is_locked else _plain_bytes
            packed = PackedBucket(make(self._largest))
        else:
            packed = next(one for one in self._buffers if not one.users)
        if packed in self._buffers:
            self._buffers.remove(packed)
        self._buffers.append(packed)
        for other in self._buffers:  # packed again because it arrived damaged
            if other.key == key and other.version == version:
                other.key = None
        packed.key, packed.version, packed.users, packed.is_packed = key, version, 1, False
        packed.num_bytes = num_bytes
        return packed

    def _views_in(self, key: BucketKey, data: Tensor) -> PieceViews:
        region, bucket = self._regions[key.dst], self._bucket(key)
        pieces = region.pieces[bucket.first : bucket.stop]
        return _piece_views(pieces, bucket, data, self.snapshot)

    def _bucket(self, key: BucketKey) -> Bucket:
        return self._regions[key.dst].buckets[key.number]

    def _pack(self, key: BucketKey, views: PieceViews, target: Tensor) -> Digest:
        self._copy(views)
        region = self._regions[key.dst]
        return digest(region, self._seeds[key.dst], self._bucket(key), target.numpy().data)

    @torch.no_grad()
    def _copy(self, views: PieceViews) -> None:
        with self.snapshot.reading():
            if views.targets:
                torch._foreach_copy_(views.targets, views.sources)
            for piece, source, target in views.quantised:
                target.copy_(FORMATS[piece.quantization].pack(source)[piece.is_scale].view(-1))
        with self._changed:
            self.num_packed += 1


def _plain_bytes(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def _piece_views(
    pieces: Sequence[Piece], bucket: Bucket, target: Tensor, snapshot: WeightSnapshot
) -> PieceViews:
    views = PieceViews([], [], [])
    for piece in pieces:
        source = snapshot[piece.src_name][at(piece.src_box)]
        into = target[piece.offset - bucket.offset :][: piece.num_bytes]
        into = into.view(getattr(torch, piece.dtype))
        if piece.quantization != PLAIN.name:
            views.quantised.append((piece, source, into))
        else:
            views.sources.append(source)
            views.targets.append(into.view(source.shape))
    return views
