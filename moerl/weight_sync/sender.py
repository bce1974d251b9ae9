"""Sends one trainer rank's shard to one engine: packed buckets of the weight snapshot -> transport.

Training continues meanwhile; experts are never gathered.  A bucket is packed straight into the
engine's staging buffer where the transport maps it as host memory (one copy, the cast to the wire
dtype included), else it is packed once for all engines with the same plan (`packed_buckets`) and
put; the next bucket is packed while it is in transit.

Views of sources and destinations are made once per staging buffer: for thousands of small tensors
that costs more than the copies.

For deltas each region sender keeps the bytes that it sent last.  Buffers of failed sessions are
never reused, so these are exactly the bytes the engine committed; the engine still checks the
delta's base version and digest.

Every rank, rank 0 included, has one thread per engine (`SenderThread`), which is a server of
`moerl.core.rpc`; rank 0 asks all ranks at once (`SenderGroup`).  The training threads take no
part, and engines do not wait for one another.
Rejected: a process group (a late rank blocks the others, and it has no deadline per request).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from moerl.core.errors import EngineError, TransportError, cause_of
from moerl.core.messages import (
    Destination,
    DropSession,
    EngineRemoved,
    Message,
    Ok,
    Refused,
    SendResult,
    SendVersion,
    Sent,
)
from moerl.core.rpc import Keys, RpcClient, RpcServer, request_all
from moerl.core.serialization import decode
from moerl.core.types import PolicyVersion
from moerl.weight_sync.buckets import ROUND, Digest, Region, bucket_starts, delta_start
from moerl.weight_sync.delta import encode
from moerl.weight_sync.packed_buckets import BucketKey, BucketPacker, MappedBucket, PackedBucket
from moerl.weight_sync.transports.base import Link, Transport

log = logging.getLogger(__name__)

_REMOVE_S = 5.0  # longest wait for the senders of an engine that left
_LAST_WORDS_S = 1.0  # time in which the last reply of a sender leaves


class _RegionSender:
    """Sends one region to one staging buffer."""

    def __init__(
        self, region: Region, starts: list[int], link: Link, packer: BucketPacker, *, delta: bool
    ) -> None:
        """Start nothing.  starts: offsets of the buckets in the staging buffer."""
        self.region, self.starts, self.link = region, starts, link
        self._packer = packer
        self._memory = _Memory(region) if delta else None
        self._mapped = None if delta else self._map()
        self._in_transit: tuple[PackedBucket, Tensor] | None = None
        count = len(region.buckets)
        self._digests = [b""] * count
        self._totals = [0] * count
        self._deltas = [0] * count

    def send(
        self,
        numbers: Iterable[int],
        version: PolicyVersion,
        deadline: float,
        *,
        again: bool = False,
    ) -> SendResult:
        """Pack and send these buckets; `again`: in full.  Raises TransportError."""
        write = self._put if self._mapped is None else self._write
        try:
            for number in numbers:
                found = write(number, version, deadline, again=again)
                self._digests[number], self._totals[number] = found.bucket, found.total
            self.link.flush(deadline)
        finally:
            self._arrived()
        if self._memory is not None:
            self._memory.version = version
        total = sum(self._totals) % 2**64
        if self._packer.merged is not None:
            factors = total if self._packer.counts_factors else 0
            total = (factors + self._packer.merged(self.region.dst, version)) % 2**64
        sizes = zip(self._deltas, self.region.buckets, strict=True)
        num_bytes = sum(delta or bucket.num_bytes for delta, bucket in sizes)
        return SendResult(b"".join(self._digests), total, num_bytes, tuple(self._deltas))

    def _map(self) -> list[MappedBucket] | None:
        """The buckets in the engine's memory; None = they are put.

        Device memory is not packed into: that would be a copy to the device for each piece.
        """
        mapped = []
        for number, bucket in enumerate(self.region.buckets):
            target = self.link.view(self.starts[number], bucket.num_bytes)
            if target is None or target.is_cuda:
                return None
            mapped.append(self._packer.mapped(BucketKey(self.region.dst, number), target))
        return mapped

    def _write(
        self, number: int, version: PolicyVersion, deadline: float, *, again: bool
    ) -> Digest:
        """Pack into the mapped memory."""
        assert self._mapped is not None
        found = self._packer.pack_into(self._mapped[number], version, fresh=again)
        self.link.flush(deadline)  # is the receiver alive?
        return found

    def _put(self, number: int, version: PolicyVersion, deadline: float, *, again: bool) -> Digest:
        """Put a packed bucket or its delta, when the bucket before has arrived."""
        key = BucketKey(self.region.dst, number)
        packed = self._packer.take(key, version, deadline, fresh=again)
        offset, data = self.starts[number], packed.data
        delta = None
        try:
            if self._memory is not None and not again:
                delta = self._memory.delta(number, data, version)
            if delta is not None:
                offset, data = offset + delta_start(self.region), delta
            self._deltas[number] = 0 if delta is None else delta.numel()
            self.link.flush(deadline)
        except BaseException:
            self._packer.give_back(packed)
            raise
        self._arrived()
        self._in_transit = packed, data
        self.link.put(offset, data, deadline)
        return packed.found

    def _arrived(self) -> None:
        if self._in_transit is not None:
            self._packer.give_back(self._in_transit[0])
        self._in_transit = None


class _Memory:
    """The wire bytes of the version sent last, by bucket, and deltas against them."""

    def __init__(self, region: Region) -> None:
        self.version: PolicyVersion | None = None  # that was sent last
        self._buckets: dict[int, Tensor] = {}
        self._word_bytes = [
            min(getattr(torch, piece.dtype).itemsize for piece in region.pieces[b.first : b.stop])
            for b in region.buckets
        ]

    def delta(self, number: int, new: Tensor, version: PolicyVersion) -> Tensor | None:
        """Delta from the bucket sent last to `new`; None when that is not smaller."""
        if self.version is None:
            self._buckets[number] = new.clone()
            return None
        packed = encode(
            self._buckets[number],
            new,
            word_bytes=self._word_bytes[number],
            base=self.version,
            version=version,
        )
        self._buckets[number].copy_(new)
        if len(packed) >= new.numel():
            return None
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


class WeightSender:
    """Moves a rank's regions to one engine; used by one thread."""

    def __init__(self, packer: BucketPacker, transport: Transport, *, delta: bool = False) -> None:
        """Send nothing yet.  packer: shared by the senders of all engines with its plan."""
        self._packer, self._transport, self._delta = packer, transport, delta
        self.snapshot = packer.snapshot
        self._region_senders: dict[int, tuple[Destination, _RegionSender]] = {}
        packer.join()

    def send(
        self,
        destinations: Mapping[int, Destination],
        deadline: float,
        number: int | None = None,
        *,
        again: bool = False,
    ) -> dict[int, SendResult]:
        """Send all regions, or a round of each, to all engine ranks.

        again: as in SendVersion.  Raises TransportError; call `drop` then.
        """
        version = self.snapshot.version  # first: no other thread gets it for a later one
        if version is None:
            raise TransportError("peer", "no weights are offered")
        self.snapshot.wait()
        in_rounds, results = number is not None, dict[int, SendResult]()
        some = slice(None) if number is None else slice(ROUND * number, ROUND * (number + 1))
        for region in self._packer.plan.regions:
            sender = self._region_sender(region, destinations[region.dst], deadline, in_rounds)
            buckets = range(len(region.buckets))[some]
            results[region.dst] = sender.send(buckets, version, deadline, again=again)
        return results

    def drop(self) -> None:
        """Close all links: their staging buffers are not used again."""
        for _, sender in self._region_senders.values():
            sender.link.close()
        self._region_senders.clear()

    def close(self) -> None:
        """`drop`; the sender is not used again."""
        self.drop()
        self._packer.leave()

    def _region_sender(
        self, region: Region, destination: Destination, deadline: float, in_rounds: bool
    ) -> _RegionSender:
        known = self._region_senders.get(region.dst)
        if known is None or known[0] != destination:
            if known is not None:
                known[1].link.close()
            link = self._transport.connect(destination.endpoint, deadline)
            starts = bucket_starts(region, destination.start, in_rounds=in_rounds)
            known = (
                destination,
                _RegionSender(region, starts, link, self._packer, delta=self._delta),
            )
            self._region_senders[region.dst] = known
        return known[1]


class SenderThread(threading.Thread):
    """Serves the requests for one engine on one rank, one by one, until the engine leaves."""

    def __init__(self, address: str, keys: Keys, sender: WeightSender) -> None:
        """Binds a free port of `address`; `endpoint` is for rank 0."""
        self._server = RpcServer(f"tcp://{address}:*", keys, self._handle)
        self.endpoint = self._server.endpoint
        super().__init__(name=f"sender-{self.endpoint}", daemon=True)
        self._sender = sender
        self._removed = asyncio.Event()

    def run(self) -> None:
        asyncio.run(self._serve())
        self._sender.close()
        self._server.close()

    async def _serve(self) -> None:
        serving = asyncio.ensure_future(self._server.serve())
        await self._removed.wait()
        await asyncio.sleep(_LAST_WORDS_S)
        serving.cancel()

    async def _handle(self, message: Message) -> Message:
        # Blocks the event loop: the next request is read when this one is answered.
        match message:
            case SendVersion():
                return Sent(self._send(message))
            case DropSession():
                self._sender.drop()
            case EngineRemoved():
                self._removed.set()
            case _:
                raise EngineError(f"{type(message).__name__} is not for a sender")
        return Ok()

    def _send(self, command: SendVersion) -> dict[int, SendResult]:
        deadline, number, again = time.monotonic() + command.timeout_s, command.round, command.again
        try:
            self._sender.snapshot.wait_for(command.version, command.timeout_s)
            return self._sender.send(command.destinations, deadline, number, again=again)
        except Exception as error:
            log.warning("a bucket could not be sent: %s", cause_of(error))
            self._sender.drop()
            raise


class SenderGroup:
    """Rank 0's connections to the senders of one engine, one per rank; used by one thread."""

    def __init__(self, endpoints: Sequence[str], keys: Keys) -> None:
        """Connect to the senders of all ranks.  endpoints: by rank."""
        self._clients = [RpcClient(endpoint, keys) for endpoint in endpoints]

    def request(self, requests: Mapping[int, SendVersion], deadline: float) -> dict[int, Sent]:
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
