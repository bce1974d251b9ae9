"""Sends one trainer rank's shard to one engine: weight snapshot -> packed buckets -> transport.

The rank's own parameters are copied after the optimizer step, so training continues; experts are
never gathered.  A bucket is packed straight into the engine's staging buffer where the transport
maps it (one copy, the cast to the wire dtype included), else into one of two local buffers, so that
one is packed while the other is in transit.

Views of sources and destinations are made once per staging buffer: for thousands of small tensors
that costs more than the copies.

For deltas each region sender keeps the bytes that it sent last.  Buffers of failed sessions are
never reused, so these are exactly the bytes the engine committed; the engine still checks the
delta's base version and digest.

Every rank, rank 0 included, has one thread per engine (`SenderThread`), which is a server of
`moerl.rpc`; rank 0 asks all ranks at once (`SenderGroup`).  The training threads take no part, and
engines do not wait for one another.
Rejected: a process group (a late rank blocks the others, and it has no deadline per request).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moerl.errors import EngineError, TransportError, cause_of
from moerl.layout import at
from moerl.messages import (
    Destination,
    DropSession,
    EngineRemoved,
    Message,
    Moved,
    Ok,
    Refused,
    SendBuckets,
    SendVersion,
    Sent,
)
from moerl.rpc import Keys, RpcClient, RpcServer, request_all
from moerl.serialization import decode
from moerl.types import PolicyVersion
from moerl.weight_sync.buckets import Bucket, Piece, Region, delta_start, digest, seeds
from moerl.weight_sync.delta import encode
from moerl.weight_sync.quantize import quantize_blocks
from moerl.weight_sync.transfer_plan import SenderPlan
from moerl.weight_sync.transports.base import Link, Transport

log = logging.getLogger(__name__)

_REMOVE_S = 5.0  # longest wait for the senders of an engine that left
_LAST_WORDS_S = 1.0  # time in which the last reply of a sender leaves


class WeightSnapshot:
    """One version of a rank's parameters; its memory is reused for every version."""

    def __init__(self) -> None:
        self.version: PolicyVersion | None = None
        self._tensors: dict[str, Tensor] = {}

    @torch.no_grad()
    def store(self, live: Mapping[str, Tensor], version: PolicyVersion) -> None:
        """Copy `live`; no sender may be reading the previous version."""
        if self._tensors.keys() != live.keys():
            self._tensors = {name: torch.empty_like(tensor) for name, tensor in live.items()}
        torch._foreach_copy_(list(self._tensors.values()), [live[name] for name in self._tensors])
        self.version = version

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]


class _RegionSender:
    """Sends one region to one staging buffer."""

    def __init__(
        self, region: Region, start: int, link: Link, shard: WeightSnapshot, *, delta: bool
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
            if again:  # any two buckets may share a buffer, unlike in a whole send
                self.link.flush(deadline)
            if views.targets:
                torch._foreach_copy_(views.targets, views.sources)
            for is_scale, source, blocks in views.quantised:
                blocks.copy_(quantize_blocks(source)[is_scale].view(-1))
            found = digest(self.region, self._seeds, bucket, target.cpu().numpy().data)
            self._digests[number], self._totals[number] = found.bucket, found.total
            packed = self._memory.delta(number, target) if self._memory and not again else None
            self._deltas[number] = 0 if packed is None else packed.numel()
            self.link.flush(deadline)  # mapped: is the receiver alive? else: wait for the put
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

    def __init__(self, region: Region, shard: WeightSnapshot) -> None:
        self._shard = shard
        self._version: PolicyVersion | None = None
        self._buckets: dict[int, Tensor] = {}
        self._word_bytes = [
            min(getattr(torch, piece.dtype).itemsize for piece in region.pieces[b.first : b.stop])
            for b in region.buckets
        ]

    def delta(self, number: int, new: Tensor) -> Tensor | None:
        """Delta from the bucket sent last to `new`; None when that is not smaller."""
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


def _views(
    pieces: Sequence[Piece], bucket: Bucket, target: Tensor, shard: WeightSnapshot
) -> _Views:
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


class WeightSender:
    """Moves a rank's regions to one engine; used by one thread."""

    def __init__(
        self, plan: SenderPlan, shard: WeightSnapshot, transport: Transport, *, delta: bool = False
    ) -> None:
        self.plan, self._shard, self._transport = plan, shard, transport
        self._delta = delta
        self._region_senders: dict[int, tuple[Destination, _RegionSender]] = {}

    def send(self, destinations: Mapping[int, Destination], deadline: float) -> dict[int, Moved]:
        """Send all regions to all engine ranks.  Raises TransportError; call `drop` then."""
        return {
            region.dst: self._region_sender(region, destinations[region.dst], deadline).send(
                range(len(region.buckets)), deadline
            )
            for region in self.plan.regions
        }

    def resend(self, buckets: Mapping[int, Sequence[int]], deadline: float) -> dict[int, Moved]:
        """Send some buckets of the last regions again, by engine rank."""
        if not buckets.keys() <= self._region_senders.keys():
            raise EngineError(f"no bucket was sent to the engine ranks {sorted(buckets)}")
        return {
            dst: self._region_senders[dst][1].send(some, deadline, again=True)
            for dst, some in buckets.items()
        }

    def drop(self) -> None:
        """Close all links: their staging buffers are not used again."""
        for _, sender in self._region_senders.values():
            sender.link.close()
        self._region_senders.clear()

    def _region_sender(
        self, region: Region, destination: Destination, deadline: float
    ) -> _RegionSender:
        known = self._region_senders.get(region.dst)
        if known is None or known[0] != destination:
            if known is not None:
                known[1].link.close()
            link = self._transport.connect(destination.endpoint, deadline)
            known = (
                destination,
                _RegionSender(region, destination.start, link, self._shard, delta=self._delta),
            )
            self._region_senders[region.dst] = known
        return known[1]


@dataclass(slots=True, eq=False)
class SharedSnapshot:
    """The weight snapshot as senders see it; `changed` is notified after each `weights.store`."""

    weights: WeightSnapshot
    changed: threading.Condition

    def wait_for(self, version: PolicyVersion, timeout_s: float) -> None:
        """Raises TransportError when the rank does not hold that version in time."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.weights.version == version, timeout_s):
                raise TransportError(
                    "deadline", f"version {version} is not stored, {self.weights.version} is"
                )


SenderRequest = SendVersion | SendBuckets


class SenderThread(threading.Thread):
    """Serves the requests for one engine on one rank, one by one, until the engine leaves."""

    def __init__(
        self, address: str, keys: Keys, sender: WeightSender, snapshot: SharedSnapshot
    ) -> None:
        """Binds a free port of `address`; `endpoint` is for rank 0."""
        self._server = RpcServer(f"tcp://{address}:*", keys, self._handle)
        self.endpoint = self._server.endpoint
        super().__init__(name=f"sender-{self.endpoint}", daemon=True)
        self._sender, self._snapshot = sender, snapshot
        self._removed = asyncio.Event()

    def run(self) -> None:
        asyncio.run(self._serve())
        self._sender.drop()
        self._server.close()

    async def _serve(self) -> None:
        serving = asyncio.ensure_future(self._server.serve())
        await self._removed.wait()
        await asyncio.sleep(_LAST_WORDS_S)
        serving.cancel()

    async def _handle(self, message: Message) -> Message:
        # Blocks the event loop: the next request is read when this one is answered.
        match message:
            case SendVersion() | SendBuckets():
                return Sent(self._send(message))
            case DropSession():
                self._sender.drop()
            case EngineRemoved():
                self._removed.set()
            case _:
                raise EngineError(f"{type(message).__name__} is not for a sender")
        return Ok()

    def _send(self, request: SenderRequest) -> dict[int, Moved]:
        deadline = time.monotonic() + request.timeout_s
        try:
            if isinstance(request, SendBuckets):
                return self._sender.resend(request.buckets, deadline)
            self._snapshot.wait_for(request.version, request.timeout_s)
            return self._sender.send(request.destinations, deadline)
        except Exception as error:
            log.warning("a bucket could not be sent: %s", cause_of(error))
            self._sender.drop()
            raise


class SenderGroup:
    """Rank 0's connections to the senders of one engine, one per rank; used by one thread."""

    def __init__(self, endpoints: Sequence[str], keys: Keys) -> None:
        """endpoints: by rank."""
        self._clients = [RpcClient(endpoint, keys) for endpoint in endpoints]

    def request(self, requests: Mapping[int, SenderRequest], deadline: float) -> dict[int, Sent]:
        """Send one request per rank, all at once.  Raises TransportError: late or failed."""
        asked = {rank: (self._clients[rank], request) for rank, request in requests.items()}
        replies: dict[int, Sent] = {}
        for rank, data in request_all(asked, deadline):
            reply = decode(data)
            if not isinstance(reply, Sent):
                cause = reply.cause if isinstance(reply, Refused) else type(reply).__name__
                raise TransportError("peer", f"trainer rank {rank}: {cause}")
            replies[rank] = reply
        if late := sorted(requests.keys() - replies.keys()):
            raise TransportError("deadline", f"trainer ranks {late} did not send in time")
        return replies

    def drop_session(self) -> None:
        """Tell all ranks without waiting for a reply."""
        for client in self._clients:
            client.post(DropSession())

    def remove(self) -> None:
        """Let all senders end; the group is not used again."""
        asked = {rank: (client, EngineRemoved()) for rank, client in enumerate(self._clients)}
        answered = dict(request_all(asked, time.monotonic() + _REMOVE_S))
        if late := sorted(asked.keys() - answered.keys()):
            log.info("the senders of ranks %s were not told that their engine left", late)
        for client in self._clients:
            client.close()
