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

Rank 0 binds one socket per engine (`SenderChannel`) and sends requests; a thread on every rank,
rank 0 included, replies (`SenderThread`).  The training threads take no part, and engines do not
wait for one another.  A reply repeats the number of its request: replies after their deadline are
dropped.  Frames of a request: [sender, number, message]; of a reply: [token, number, message].
Rejected: a process group (a late rank blocks the others, and it has no deadline per request).
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch
import zmq
from torch import Tensor

from moerl.errors import EngineError, MoerlError, TrainerError, TransportError
from moerl.layout import at
from moerl.types import PolicyVersion
from moerl.weight_sync.buckets import Bucket, Piece, Region, delta_start, digest, seeds
from moerl.weight_sync.delta import encode
from moerl.weight_sync.quantize import quantize_blocks
from moerl.weight_sync.transfer_plan import SenderPlan
from moerl.weight_sync.transports.base import Link, Transport


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


@dataclass(frozen=True, slots=True)
class Destination:
    """The staging buffer of an engine rank, and the offset of the region in it."""

    endpoint: bytes
    start: int


@dataclass(frozen=True, slots=True)
class Moved:
    """Result for one engine rank: digests of all buckets of the region, and the sum over pieces."""

    digests: bytes
    total: int
    num_bytes: int  # bytes sent by this call
    deltas: tuple[int, ...]  # per bucket: bytes of the delta sent in its place, 0 = sent in full


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


log = logging.getLogger(__name__)


_HELLO = b"hello"


_MAX_MESSAGE = 64 * 2**20  # bytes; read before the token is checked; at most 8 per bucket


_LAST_WORDS_MS = 5000  # longest time that a closed channel may take to deliver queued messages


class SendVersion(msgspec.Struct, frozen=True, tag=True):
    """Send all of one snapshot."""

    version: PolicyVersion
    destinations: dict[int, Destination]  # by engine rank
    timeout_s: float


class SendBuckets(msgspec.Struct, frozen=True, tag=True):
    """Send some buckets again."""

    buckets: dict[int, tuple[int, ...]]  # by engine rank
    timeout_s: float


class DropSession(msgspec.Struct, frozen=True, tag=True):
    """The session failed: its staging buffers are gone."""


class EngineRemoved(msgspec.Struct, frozen=True, tag=True):
    """The engine left the run: its sender ends."""


class Sent(msgspec.Struct, frozen=True, tag=True):
    moved: dict[int, Moved]  # by engine rank


class Broken(msgspec.Struct, frozen=True, tag=True):
    """This rank could not send."""

    cause: str


SenderRequest = SendVersion | SendBuckets | DropSession | EngineRemoved


SenderReply = Sent | Broken


_REQUEST = msgspec.msgpack.Decoder(SenderRequest)


_REPLY = msgspec.msgpack.Decoder(SenderReply)


class SenderChannel:
    """Rank 0's socket to the senders of one engine; used by one thread after `wait_for_senders`."""

    def __init__(self, address: str, token: str, world_size: int) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE)
        self.endpoint = f"tcp://{address}:{self._socket.bind_to_random_port(f'tcp://{address}')}"
        self._token, self._world_size = token.encode(), world_size
        self._senders: dict[int, bytes] = {}
        self._number = 0

    def wait_for_senders(self, deadline: float) -> None:
        """Wait for a hello of every rank.  Raises TrainerError when one is late."""
        while len(self._senders) < self._world_size:
            frames = self._receive(deadline)
            if frames is None:
                missing = sorted(set(range(self._world_size)) - self._senders.keys())
                raise TrainerError(f"the senders of ranks {missing} did not say hello")
            identity, word, rank = frames
            if word == _HELLO:
                self._senders[int(rank)] = identity

    def request(self, requests: Mapping[int, SenderRequest], deadline: float) -> dict[int, Sent]:
        """Send one request per rank, all at once.  Raises TransportError: late or failed."""
        self._number += 1
        number = str(self._number).encode()
        for rank, request in requests.items():
            body = msgspec.msgpack.encode(request)
            self._socket.send_multipart([self._senders[rank], number, body])
        ranks = {self._senders[rank]: rank for rank in requests}
        replies: dict[int, Sent] = {}
        while len(replies) < len(requests):
            frames = self._receive(deadline)
            if frames is None:
                late = sorted(requests.keys() - replies.keys())
                raise TransportError("deadline", f"trainer ranks {late} did not send in time")
            identity, word, body = frames
            if word != number or identity not in ranks:
                continue  # the reply to a request whose deadline has passed
            reply = _REPLY.decode(body)
            if isinstance(reply, Broken):
                raise TransportError("peer", f"trainer rank {ranks[identity]}: {reply.cause}")
            replies[ranks[identity]] = reply
        return replies

    def tell(self, message: DropSession | EngineRemoved) -> None:
        """Send to all ranks without waiting for a reply."""
        body = msgspec.msgpack.encode(message)
        for identity in self._senders.values():
            self._socket.send_multipart([identity, b"0", body])

    def close(self) -> None:
        self._socket.close(_LAST_WORDS_MS)

    def _receive(self, deadline: float) -> tuple[bytes, bytes, bytes] | None:
        """(sender, number, body) of the next message with the right token, or None when late."""
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._socket.poll(int(left_s * 1000) + 1):
                return None
            frames = self._socket.recv_multipart()
            if len(frames) == 4 and hmac.compare_digest(frames[1], self._token):
                return frames[0], frames[2], frames[3]


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


class SenderThread(threading.Thread):
    """Serves the requests for one engine on one rank, until the engine leaves."""

    def __init__(
        self, endpoint: str, token: str, rank: int, sender: WeightSender, snapshot: SharedSnapshot
    ):
        super().__init__(name=f"sender-{endpoint}", daemon=True)
        self._token, self._rank = token.encode(), rank
        self._sender, self._snapshot = sender, snapshot
        self._endpoint = endpoint

    def run(self) -> None:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self._endpoint)
        socket.send_multipart([self._token, _HELLO, str(self._rank).encode()])
        while True:
            number, body = socket.recv_multipart()
            request = _REQUEST.decode(body)
            if isinstance(request, EngineRemoved):
                self._sender.drop()
                socket.close()
                return
            reply = self._reply(request)
            if reply is not None:
                socket.send_multipart([self._token, number, msgspec.msgpack.encode(reply)])

    def _reply(self, request: SendVersion | SendBuckets | DropSession) -> SenderReply | None:
        try:
            match request:
                case SendVersion():
                    deadline = time.monotonic() + request.timeout_s
                    self._snapshot.wait_for(request.version, request.timeout_s)
                    return Sent(self._sender.send(request.destinations, deadline))
                case SendBuckets():
                    deadline = time.monotonic() + request.timeout_s
                    return Sent(self._sender.resend(request.buckets, deadline))
                case DropSession():
                    self._sender.drop()
                    return None
        except Exception as error:
            log.warning("a bucket could not be sent", exc_info=not isinstance(error, MoerlError))
            self._sender.drop()
            return Broken(f"{type(error).__name__}: {error}")
