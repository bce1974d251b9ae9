"""Wire format of a weight transfer: pieces, buckets, regions, and their digests.

A *region* is everything that one trainer rank sends to one engine rank for one version: *pieces*
back to back, cut into *buckets* of consecutive whole pieces.  A piece is a box of one Hugging Face
tensor in the wire dtype, contiguous, in row-major order of the box.  The sender casts and
quantises; the receiver only copies.

A quantised weight has its scales as a second piece (`moerl.weight_sync.wire_formats`).

A piece's digest is xxh3-64 of its bytes, seeded with its destination's name and box, so equal bytes
for another tensor have another digest.  A bucket's digest covers its pieces; sender and receiver
compare it.  The digest of a rank is the sum over its pieces and does not depend on senders or
buckets, so two engines of one layout that hold the same weights have the same digest.

xxh3 detects accidents (a flipped bit, a torn or missing write, a wrong offset) at memory speed.  It
does not protect against forgery; the token and the private network do.
Rejected: SHA-256 and BLAKE (a tenth of the speed), CRC32 (a fifth, and only 32 bits).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from moerl.core.errors import ConfigError
from moerl.layout.tiles import Box, full_box
from moerl.weight_sync.wire_formats import FORMATS, PLAIN, WireFormat, format_of

ALIGN = 16  # bytes; regions start at multiples of it in a staging segment


@dataclass(frozen=True, slots=True)
class WirePolicy:
    """Dtype, quantisation and bucket size of a transfer."""

    dtype: str  # dtype of the engine's weights; tensors that it keeps in fp32 travel in fp32
    quantization: str = PLAIN.name  # a name of FORMATS, for projections
    bucket_bytes: int = 16 * 2**20

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ConfigError("engine.dtype", self.dtype, "use float32, bfloat16 or float16")
        if self.quantization not in FORMATS:
            problem = f"weights travel in one of {tuple(FORMATS)}"
            raise ConfigError("engine.args.quantization", self.quantization, problem)
        if self.bucket_bytes < 1:
            raise ConfigError("sync.bucket_bytes", self.bucket_bytes, "must be at least 1")

    def format_of(self, hf: str) -> WireFormat:
        """Format of a tensor, by its Hugging Face name."""
        return format_of(hf, self.quantization)


class Piece(NamedTuple):
    """One box of a tensor, from its source on the trainer to its destination on the engine."""

    hf: str  # Hugging Face name of the weight, also for its scales
    hf_box: Box  # box of the weight
    src_name: str  # name in megatron_tiles
    src_box: Box  # box of the weight, also for scales: the sender derives them from it
    dst_name: str  # name in SGLang's named_parameters()
    dst_box: Box  # same extents as the piece, apart from leading dims of extent 1
    dtype: str  # dtype on the wire
    num_bytes: int
    offset: int  # inside the region
    is_scale: bool
    quantization: str = PLAIN.name  # its format, of FORMATS


class Bucket(NamedTuple):
    """Consecutive pieces [first, stop) of a region: the unit of sending and checking."""

    offset: int  # inside the region
    num_bytes: int
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class Region:
    """All bytes that trainer rank `src` sends to engine rank `dst`, in wire order."""

    src: int
    dst: int
    pieces: tuple[Piece, ...]
    buckets: tuple[Bucket, ...]
    num_bytes: int


ROUND = 2  # buckets of each region that a staging buffer for rounds takes at a time


def bucket_starts(region: Region, start: int, *, in_rounds: bool) -> list[int]:
    """Offsets of the buckets in a staging buffer in which the region begins at `start`."""
    buckets = region.buckets
    firsts = (number - number % ROUND if in_rounds else 0 for number in range(len(buckets)))
    return [
        start + bucket.offset - buckets[first].offset
        for bucket, first in zip(buckets, firsts, strict=True)
    ]


def round_bytes(region: Region) -> int:
    """Bytes of the largest round."""
    sizes = [bucket.num_bytes for bucket in region.buckets]
    return max((sum(sizes[at : at + ROUND]) for at in range(0, len(sizes), ROUND)), default=0)


def delta_start(region: Region) -> int:
    """Offset of a region's deltas from its start, in a staging buffer that takes deltas.

    Such staging buffers have twice the bytes, and their regions start at twice their `starts`.
    """
    return -(-region.num_bytes // ALIGN) * ALIGN


def wire_bytes(hf: str, shape: Sequence[int], policy: WirePolicy) -> int:
    """Bytes of a whole Hugging Face tensor in the dtype that most engines keep it in."""
    return policy.format_of(hf).num_bytes(full_box(shape), policy.dtype)


_BYTES = 8


_MODULUS = 1 << 64


class Digest(NamedTuple):
    bucket: bytes  # 8 bytes, little endian
    total: int  # sum over the pieces, modulo 2**64


def seeds(region: Region) -> list[int]:
    """One seed per piece: the name and box of its destination."""
    return [
        xxhash.xxh3_64_intdigest(f"{piece.dst_name} {piece.dst_box} {piece.is_scale}".encode())
        for piece in region.pieces
    ]


def digest(region: Region, seeds_: Sequence[int], bucket: Bucket, data: memoryview) -> Digest:
    """Digest of one bucket; data: the bucket's bytes."""
    values = [
        xxhash.xxh3_64_intdigest(data[piece.offset - bucket.offset :][: piece.num_bytes], seed=seed)
        for piece, seed in zip(
            region.pieces[bucket.first : bucket.stop],
            seeds_[bucket.first : bucket.stop],
            strict=True,
        )
    ]
    joined = b"".join(value.to_bytes(_BYTES, "little") for value in values)
    return Digest(xxhash.xxh3_64_digest(joined)[::-1], sum(values) % _MODULUS)


def split(digests: bytes) -> list[bytes]:
    """The digests of a control message, one per bucket."""
    return [digests[i : i + _BYTES] for i in range(0, len(digests), _BYTES)]


def version_digest(totals: Sequence[int]) -> str:
    """Digest of an engine, from the sums of its ranks: 16 hex digits."""
    joined = b"".join((total % _MODULUS).to_bytes(_BYTES, "little") for total in totals)
    return str(xxhash.xxh3_64_hexdigest(joined))
