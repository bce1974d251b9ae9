"""Digests of a version in transit: the same numbers from the sender's bytes and the receiver's.

A piece's digest is xxh3-64 of its bytes, seeded with where they belong, so equal bytes for another
tensor have another digest.  A bucket's digest covers its pieces and is what is compared; the
digest of a rank is the sum over its pieces, whoever sent them and in whatever buckets, so two
engines of one layout that hold the same weights have the same digest.

xxh3 finds every accident (a flipped bit, a torn or missing write, a wrong offset) at the speed of
memory.  It is no defence against forgery; that is the token's and the network's task.
Rejected: SHA-256 and BLAKE (a tenth of the speed), CRC32 (a fifth, and 32 bits are few for
thousands of buckets per step).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from moerl.layout.wire import Bucket, Region

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
    """data: the bucket's bytes."""
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
    """Of an engine, from the sums of its ranks: 16 hex digits."""
    joined = b"".join((total % _MODULUS).to_bytes(_BYTES, "little") for total in totals)
    return str(xxhash.xxh3_64_hexdigest(joined))
