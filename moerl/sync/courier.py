"""What one trainer rank moves to one engine: frozen shard -> packed buckets -> transport.

The rank's own parameters are copied (frozen) after the optimizer step, so training goes on;
experts are never gathered.  A bucket is packed straight into the engine's staging buffer where the
transport maps it (one copy, the wire's dtype cast included), else into one of two local buffers, so
that one is packed while the other is on its way.

Views of sources and destinations are made once per staging buffer: for thousands of small tensors
that costs more than the copies.

With deltas a lane remembers what it sent last through it.  A staging buffer that failed is never
used again, so a lane that lives on knows that the engine committed exactly those bytes; a delta
says which version it is for all the same, and the engine checks both version and digest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moerl.errors import EngineError
from moerl.layout import at
from moerl.layout.digest import digest, seeds
from moerl.layout.transfer import SenderPlan
from moerl.layout.wire import Bucket, Piece, Region, delta_start
from moerl.sync.quantize import quantize_blocks
from moerl.transport.base import Link, Transport
from moerl.transport.delta import encode
from moerl.types import PolicyVersion


class FrozenShard:
    """One version of a rank's parameters, in memory that is used again for every version."""

    def __init__(self) -> None:
        self.version: PolicyVersion | None = None
        self._tensors: dict[str, Tensor] = {}

    @torch.no_grad()
    def freeze(self, live: Mapping[str, Tensor], version: PolicyVersion) -> None:
        """Copy `live`; nobody may be reading the version before."""
        if self._tensors.keys() != live.keys():
            self._tensors = {name: torch.empty_like(tensor) for name, tensor in live.items()}
        torch._foreach_copy_(list(self._tensors.values()), [live[name] for name in self._tensors])
        self.version = version

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]


@dataclass(frozen=True, slots=True)
class Berth:
    """Where a region goes: the staging buffer of an engine rank, and where it begins in it."""

    endpoint: bytes
    start: int


@dataclass(frozen=True, slots=True)
class Moved:
    """Of one engine rank: the digests of all buckets of the region, and the sum over its pieces."""

    digests: bytes
    total: int
    num_bytes: int  # sent by this call
    deltas: tuple[int, ...]  # per bucket: bytes of the delta sent in its place, 0 = sent in full


class _Lane:
    """One region on its way to one staging buffer."""

    def __init__(
        self, region: Region, start: int, link: Link, shard: FrozenShard, *, delta: bool
    ) -> None:
        self.region, self.start, self.link = region, start, link
        self._memory = _Memory(region, shard) if delta else None
        self._seeds = seeds(region)
        sizes = [bucket.num_bytes for bucket in region.buckets]
        mapped = [
            None if delta else link.view(start + bucket.offset, bucket.num_bytes)
            for bucket in region.buckets
        ]
        self._is_mapped = all(view is not None for view in mapped)
        largest = max(sizes, default=0)
        pair = [torch.empty(0 if self._is_mapped else largest, dtype=torch.uint8) for _ in "ab"]
        self._targets: list[Tensor] = [
            view if view is not None else pair[number % 2][: sizes[number]]
            for number, view in enumerate(mapped)
        ]
        self._views = [
            _views(region.pieces[bucket.first : bucket.stop], bucket, target, shard)
            for bucket, target in zip(region.buckets, self._targets, strict=True)
        ]
        self._digests = [b""] * len(sizes)
        self._totals = [0] * len(sizes)
        self._deltas = [0] * len(sizes)

    @torch.no_grad()
    def send(self, numbers: Iterable[int], deadline: float, *, again: bool = False) -> Moved:
        """Pack and send these buckets; `again`: in full.  Raises TransportError."""
        num_bytes = 0
        for number in numbers:
            bucket, target = self.region.buckets[number], self._targets[number]
            views = self._views[number]
            if again:  # any two of them may share a buffer, not every second one as in a whole send
                self.link.flush(deadline)
            if views.targets:
                torch._foreach_copy_(views.targets, views.sources)
            for is_scale, source, blocks in views.quantised:
                blocks.copy_(quantize_blocks(source)[is_scale].view(-1))
            found = digest(self.region, self._seeds, bucket, target.cpu().numpy().data)
            self._digests[number], self._totals[number] = found.bucket, found.total
            packed = self._memory.delta(number, target) if self._memory and not again else None
            self._deltas[number] = 0 if packed is None else packed.numel()
            self.link.flush(deadline)  # mapped: is the receiver alive; else: the buffer before
            if packed is not None:
                behind = self.start + delta_start(self.region)
                self.link.put(behind + bucket.offset, packed, deadline)
            elif not self._is_mapped:
                self.link.put(self.start + bucket.offset, target, deadline)
            num_bytes += self._deltas[number] or bucket.num_bytes
        self.link.flush(deadline)
        if self._memory is not None:
            self._memory.sent()
        total = sum(self._totals) % 2**64
        return Moved(b"".join(self._digests), total, num_bytes, tuple(self._deltas))


class _Memory:
    """The wire bytes of the version sent last, by bucket, and deltas against them."""

    def __init__(self, region: Region, shard: FrozenShard) -> None:
        self._shard = shard
        self._version: PolicyVersion | None = None
        self._buckets: dict[int, Tensor] = {}
        self._word_bytes = [
            min(getattr(torch, piece.dtype).itemsize for piece in region.pieces[b.first : b.stop])
            for b in region.buckets
        ]

    def delta(self, number: int, new: Tensor) -> Tensor | None:
        """What turns the bucket sent last into `new`; None when that is not smaller."""
        if self._version is None or self._shard.version is None:
            self._buckets[number] = new.clone()
            return None
        packed = encode(
            self._buckets[number],
            new,
            word_bytes=self._word_bytes[number],
            base=self._version,
            version=self._shard.version,
        )
        self._buckets[number].copy_(new)
        if len(packed) >= new.numel():
            return None
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    def sent(self) -> None:
        self._version = self._shard.version


class _Views(NamedTuple):
    """The pieces of a bucket: cast into their targets, or quantised first."""

    sources: list[Tensor]
    targets: list[Tensor]
    quantised: list[tuple[bool, Tensor, Tensor]]  # (scales or values, weight, flat target)


def _views(pieces: Sequence[Piece], bucket: Bucket, target: Tensor, shard: FrozenShard) -> _Views:
    views = _Views([], [], [])
    for piece in pieces:
        source = shard[piece.src_name][at(piece.src_box)]
        into = target[piece.offset - bucket.offset :][: piece.num_bytes]
        into = into.view(getattr(torch, piece.dtype))
        if piece.is_scale or piece.dtype == "float8_e4m3fn":
            views.quantised.append((piece.is_scale, source, into))
        else:
            views.sources.append(source)
            views.targets.append(into.view(source.shape))
    return views


class Courier:
    """Moves a rank's regions to one engine; used by one thread."""

    def __init__(
        self, plan: SenderPlan, shard: FrozenShard, transport: Transport, *, delta: bool = False
    ) -> None:
        self.plan, self._shard, self._transport = plan, shard, transport
        self._delta = delta
        self._lanes: dict[int, tuple[Berth, _Lane]] = {}

    def send(self, berths: Mapping[int, Berth], deadline: float) -> dict[int, Moved]:
        """Everything, to all engine ranks.  Raises TransportError; `drop` then."""
        return {
            region.dst: self._lane(region, berths[region.dst], deadline).send(
                range(len(region.buckets)), deadline
            )
            for region in self.plan.regions
        }

    def resend(self, buckets: Mapping[int, Sequence[int]], deadline: float) -> dict[int, Moved]:
        """Some buckets of the regions sent last, by engine rank."""
        if not buckets.keys() <= self._lanes.keys():
            raise EngineError(f"no bucket was sent to the engine ranks {sorted(buckets)}")
        return {
            dst: self._lanes[dst][1].send(some, deadline, again=True)
            for dst, some in buckets.items()
        }

    def drop(self) -> None:
        """Forget all links: the staging buffers behind them are not used again."""
        for _, lane in self._lanes.values():
            lane.link.close()
        self._lanes.clear()

    def _lane(self, region: Region, berth: Berth, deadline: float) -> _Lane:
        known = self._lanes.get(region.dst)
        if known is None or known[0] != berth:
            if known is not None:
                known[1].link.close()
            link = self._transport.connect(berth.endpoint, deadline)
            known = berth, _Lane(region, berth.start, link, self._shard, delta=self._delta)
            self._lanes[region.dst] = known
        return known[1]
