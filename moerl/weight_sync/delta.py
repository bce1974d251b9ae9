"""Lossless delta of wire bytes: which words changed since a version, and their new values.

Between two publishes few words of the weights change: an update of Adam at a learning rate of 1e-6
is smaller than half a step of most bf16 values.  One delta describes one flat buffer (a bucket or a
region) whose words have one size.  Values are absolute, so applying a delta twice equals applying
it once.

    delta = encode(old, new, word_bytes=2, base=v7, version=v8)      sender, which kept `old`
    apply(delta, buffer, holds=v7)                                   receiver; buffer is now `new`

The encoding follows the density; the smallest is taken, before compression:

    index32   4 bytes + value per changed word      less than one change in 65,536 words or so
    gap16     2 bytes + value                       below 1/16
    bitmap    a bit per word + value                above
    full      every value, no base needed           where no other encoding is smaller

zstd then compresses positions and values, split into byte planes (all lowest bytes first, ...):
high bytes of neighbours resemble each other, low bytes are noise.  `level` 0 skips zstd: a link
faster than about 1 GB/s per core moves the plain bytes sooner than zstd compresses them.

A delta is refused, with the buffer untouched, when it is damaged, when it is for another base
version, or when the buffer does not have the base's digest.  The digest of the result is checked
too.  After a refusal the sender sends the full bytes.

The loop over all words is in csrc/delta.cpp; without the built library numpy replaces it.
Rejected: xor of old and new (applied twice it undoes itself), deltas of the fp32 master weights.
Idea: sparse weight updates of PULSE (arXiv 2602.03839); measured ratios are in docs/weight-sync.md.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from moerl.core.errors import MoerlError
from moerl.core.types import PolicyVersion
from moerl.kernels.library import library

ENCODINGS = ("full", "index32", "gap16", "bitmap")
_WORDS: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
_MAGIC = b"MRD1"
_DIGEST = 16  # bytes of xxh3-128
# encoding, word bytes, level, pad, buffer bytes, changed words, bytes of the positions,
# base and version as (incarnation, step), digests of the base and of the result
_HEADER = struct.Struct("<BBBxQQQQQQQ16s16s")
_FILLER = 0xFFFF  # gap16: advance 65,535 words, no value
_LEVELS = 19

Words = NDArray[Any]
Bytes = NDArray[np.uint8]


class DeltaError(MoerlError):
    """A delta that cannot be applied; the full bytes are needed instead."""


@dataclass(frozen=True, slots=True)
class DeltaInfo:
    """The header of a delta."""

    encoding: str  # one of ENCODINGS
    word_bytes: int
    compressed: bool
    num_bytes: int  # size of the buffer it applies to
    num_changed: int  # changed words
    base: PolicyVersion
    version: PolicyVersion


def encode(
    old: Tensor,
    new: Tensor,
    *,
    word_bytes: int,
    base: PolicyVersion,
    version: PolicyVersion,
    level: int = 1,
) -> bytes:
    """The delta that turns the bytes of `old` (version `base`) into `new` (`version`).

    old, new: flat contiguous uint8 tensors in host memory, equally long, a multiple of word_bytes
    (1, 2 or 4: the item size of the wire dtype).  level: of zstd, 0 = not compressed.
    """
    old_bytes, new_bytes = _host_bytes(old), _host_bytes(new)
    assert len(old_bytes) == len(new_bytes), f"{len(old_bytes)} old, {len(new_bytes)} new bytes"
    assert word_bytes in _WORDS, f"word_bytes = {word_bytes} is not one of {tuple(_WORDS)}"
    assert len(new_bytes) % word_bytes == 0, f"{len(new_bytes)} bytes, words of {word_bytes}"
    assert len(new_bytes) // word_bytes < 2**32, "positions are 32 bits wide"
    assert 0 <= level <= _LEVELS, f"level = {level} is not in 0..{_LEVELS}"
    words = new_bytes.view(_WORDS[word_bytes])
    changed = changed_words(old_bytes, new_bytes, word_bytes)
    encoding, positions = _positions(changed, len(words), word_bytes)
    values = words if encoding == "full" else words[changed]
    body = positions.tobytes() + values.tobytes()
    if level:
        packed = zstandard.ZstdCompressor(level=level).compress(_planes([positions, values]))
        level = level if len(packed) < len(body) else 0
        body = packed if level else body
    header = _HEADER.pack(
        ENCODINGS.index(encoding),
        word_bytes,
        level,
        len(new_bytes),
        len(changed),
        positions.nbytes,
        base.incarnation,
        base.step,
        version.incarnation,
        version.step,
        xxhash.xxh3_128_digest(old_bytes.data),
        xxhash.xxh3_128_digest(new_bytes.data),
    )
    seal = xxhash.xxh3_128(header)
    seal.update(body)
    return b"".join((_MAGIC, seal.digest(), header, body))


def apply(delta: bytes | memoryview, buffer: Tensor, *, holds: PolicyVersion) -> DeltaInfo:
    """Bring `buffer` from the version it holds to the delta's, in place.

    Raises DeltaError: damaged, another size, wrong base version, wrong base bytes.  The buffer is
    then untouched, except when its result has the wrong digest; the error says so.
    """
    info, digests, num_position_bytes, body = _parse(delta)
    data = _host_bytes(buffer)
    if len(data) != info.num_bytes:
        raise DeltaError(f"the delta is for {info.num_bytes} bytes, the buffer has {len(data)}")
    if info.encoding != "full":
        if holds not in (info.base, info.version):
            raise DeltaError(f"the delta is based on {info.base}, the buffer holds {holds}")
        present = xxhash.xxh3_128_digest(data.data)
        if present == digests[1]:
            return info
        if present != digests[0]:
            raise DeltaError(f"the buffer does not hold the bytes of {info.base}")
    words = data.view(_WORDS[info.word_bytes])
    positions, values = _unpack(info, num_position_bytes, body)
    if info.encoding == "full":
        words[:] = values
    else:
        words[_changed(info, positions, len(words))] = values
    if xxhash.xxh3_128_digest(data.data) != digests[1]:
        raise DeltaError(f"the buffer has the wrong digest after the delta to {info.version}")
    return info


# --- which words changed --------------------------------------------------------------------------
def changed_words(old: Bytes, new: Bytes, word_bytes: int) -> NDArray[np.uint32]:
    """Ascending positions of the words that differ."""
    lib = library("cpu")
    if lib is None:
        return changed_reference(old, new, word_bytes)
    num_words = len(new) // word_bytes
    positions = np.empty(num_words, np.uint32)  # untouched pages cost no memory
    function = lib.moerl_changed
    function.restype = ctypes.c_int64
    count = function(
        ctypes.c_void_p(old.ctypes.data),
        ctypes.c_void_p(new.ctypes.data),
        ctypes.c_int64(num_words),
        ctypes.c_int64(word_bytes),
        ctypes.c_void_p(positions.ctypes.data),
    )
    assert count >= 0, f"csrc/delta.cpp does not know words of {word_bytes} bytes"
    return positions[:count].copy()


def changed_reference(old: Bytes, new: Bytes, word_bytes: int) -> NDArray[np.uint32]:
    """`changed_words` in numpy."""
    dtype = _WORDS[word_bytes]
    return np.flatnonzero(old.view(dtype) != new.view(dtype)).astype(np.uint32)


def _positions(changed: NDArray[np.uint32], num_words: int, word_bytes: int) -> tuple[str, Words]:
    """The smallest encoding and its positions."""
    gaps = np.diff(np.concatenate([[-1], changed.astype(np.int64)])) - 1
    num_gaps = len(gaps) + int((gaps // _FILLER).sum())
    value_bytes = len(changed) * word_bytes
    sizes = {
        "full": num_words * word_bytes,
        "index32": 4 * len(changed) + value_bytes,
        "gap16": 2 * num_gaps + value_bytes,
        "bitmap": -(-num_words // 8) + value_bytes,
    }
    encoding = min(sizes, key=sizes.__getitem__)
    if encoding == "index32":
        return encoding, changed.astype("<u4")
    if encoding == "gap16":
        return encoding, _gap16(gaps, num_gaps)
    if encoding == "bitmap":
        flags = np.zeros(num_words, np.uint8)
        flags[changed] = 1
        return encoding, np.packbits(flags, bitorder="little")
    return encoding, np.empty(0, np.uint8)


def _gap16(gaps: NDArray[np.int64], num_gaps: int) -> NDArray[np.uint16]:
    """Words skipped before each changed one; a filler skips 65,535 and has no value."""
    entries = np.full(num_gaps, _FILLER, "<u2")
    entries[np.arange(len(gaps)) + np.cumsum(gaps // _FILLER)] = gaps % _FILLER
    return entries


def _changed(info: DeltaInfo, positions: Words, num_words: int) -> NDArray[np.int64]:
    """Ascending positions from their encoding.  Raises DeltaError."""
    if info.encoding == "index32":
        changed = positions.astype(np.int64)
    elif info.encoding == "gap16":
        ends = np.cumsum(positions.astype(np.int64) + (positions != _FILLER)) - 1
        changed = ends[positions != _FILLER]
    else:
        changed = np.flatnonzero(np.unpackbits(positions, bitorder="little"))
    if len(changed) != info.num_changed:
        raise DeltaError(f"{len(changed)} positions for {info.num_changed} changed words")
    if len(changed) and (changed[-1] >= num_words or (np.diff(changed) <= 0).any()):
        raise DeltaError(f"positions do not ascend within {num_words} words")
    return changed


# --- the bytes ------------------------------------------------------------------------------------
def _parse(
    delta: bytes | memoryview,
) -> tuple[DeltaInfo, tuple[bytes, bytes], int, memoryview]:
    """(header, digests of base and result, bytes of the positions, body)."""
    view = memoryview(delta)
    start = len(_MAGIC) + _DIGEST
    if len(view) < start + _HEADER.size or view[: len(_MAGIC)] != _MAGIC:
        raise DeltaError(f"{len(view)} bytes that are no delta")
    if xxhash.xxh3_128_digest(view[start:]) != view[len(_MAGIC) : start]:
        raise DeltaError("the delta is damaged: its digest does not match")
    (
        encoding,
        word_bytes,
        level,
        num_bytes,
        num_changed,
        num_position_bytes,
        base_incarnation,
        base_step,
        incarnation,
        step,
        old_digest,
        new_digest,
    ) = _HEADER.unpack(view[start : start + _HEADER.size])
    if encoding >= len(ENCODINGS) or word_bytes not in _WORDS or num_bytes % word_bytes:
        raise DeltaError(
            f"the delta has encoding {encoding} of {word_bytes}-byte words in {num_bytes} bytes"
        )
    info = DeltaInfo(
        encoding=ENCODINGS[encoding],
        word_bytes=word_bytes,
        compressed=level > 0,
        num_bytes=num_bytes,
        num_changed=num_changed,
        base=PolicyVersion(base_incarnation, base_step),
        version=PolicyVersion(incarnation, step),
    )
    body = view[start + _HEADER.size :]
    return info, (old_digest, new_digest), num_position_bytes, body


def _unpack(info: DeltaInfo, num_position_bytes: int, body: memoryview) -> tuple[Words, Words]:
    """(positions, values), their sizes as the header says.  Raises DeltaError."""
    num_words = info.num_bytes // info.word_bytes
    num_values = num_words if info.encoding == "full" else info.num_changed
    size = num_position_bytes + num_values * info.word_bytes
    position_bytes = {"index32": 4, "gap16": 2}.get(info.encoding, 1)
    if num_values > num_words or size > 5 * info.num_bytes + 1:
        raise DeltaError(f"a delta of {size} bytes for {info.num_bytes}")
    if num_position_bytes % position_bytes:
        raise DeltaError(f"{num_position_bytes} bytes are no positions of {info.encoding}")
    raw: bytes | memoryview = body
    if info.compressed:
        try:  # limit of a forged frame's allocation; the second bound is for frames without a size
            if zstandard.frame_content_size(body) > size:
                raise DeltaError(f"the delta unpacks to more than {size} bytes")
            raw = zstandard.ZstdDecompressor().decompress(body, max_output_size=max(1, size))
        except zstandard.ZstdError as error:
            raise DeltaError(f"the delta does not decompress: {error}") from error
    if len(raw) != size:
        raise DeltaError(f"the delta has {len(raw)} bytes of content, its header says {size}")
    flat = np.frombuffer(raw, np.uint8)
    positions, values = flat[:num_position_bytes], flat[num_position_bytes:]
    if info.compressed:
        positions, values = _words_of(positions, position_bytes), _words_of(values, info.word_bytes)
    return (
        np.ascontiguousarray(positions).view(_WORDS[position_bytes]),
        np.ascontiguousarray(values).view(_WORDS[info.word_bytes]),
    )


def _planes(arrays: Sequence[Words]) -> bytes:
    """All lowest bytes of an array, then all second bytes, ...; one array after the other."""
    return b"".join(
        array.view(np.uint8).reshape(-1, array.itemsize).T.tobytes() for array in arrays
    )


def _words_of(planes: Bytes, width: int) -> Bytes:
    return planes.reshape(width, -1).T.reshape(-1)


def _host_bytes(tensor: Tensor) -> Bytes:
    flat = tensor.dtype is torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous()
    assert flat, f"not a flat contiguous uint8 tensor: {tensor.dtype} {tuple(tensor.shape)}"
    assert tensor.device.type == "cpu", f"deltas are made in host memory, not on {tensor.device}"
    array: Bytes = tensor.numpy()
    return array
