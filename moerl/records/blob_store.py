"""Sealed immutable bytes by URI: routes and masks never travel through the controller.

One blob holds the arrays of one (rollout, segment).  It is written to a temporary name and renamed,
so a blob that exists is complete.  Blobs live in a node-local directory (shared memory or NVMe).

A reader of a slice (its layers, its rows) must be able to check it without the rest.  So an array
is followed by a table of xxh3-64 digests, one per chunk of 4 KiB, and the reference carries the
digest of that table: a slice is verified by the table and by the chunks it touches.  The table adds
0.2 % to the file; a page is 4 KiB too, so smaller chunks would not save disk reads.

Rejected: Ray object references (they die with their process), digests in the reference (19,000 for
one 200k-token rollout), slices of a mapped file (SIGBUS when it is truncated).
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import xxhash

from moerl.core.atomic import atomic_parts, atomic_write
from moerl.core.errors import BlobError
from moerl.core.types import Array, BlobRef
from moerl.runtime.private_dir import private_dir

log = logging.getLogger(__name__)

CHUNK_BYTES = 4096  # the smallest range that is checked, and so read
_ALIGN = 64  # so that a mapped array is aligned for any dtype
_DIGEST_BYTES = 8
_DTYPES = {np.dtype(name): name for name in ("uint8", "uint16", "int32", "int64", "float32")}

Run = tuple[int, int]  # begin and end (exclusive), in bytes of an array


class Found(NamedTuple):
    """Result of a search for blobs that are missing where they were sealed."""

    gone: set[str]  # missing or too short everywhere
    copied: set[str]  # found in the run directory (durability `shared`)


class RecordReads(Protocol):
    """The methods of a store that a reader of records calls."""

    def read_runs(self, ref: BlobRef, runs: Sequence[Run]) -> Array:
        """See `BlobStore.read_runs`."""


class BlobStore:
    """The blobs of one node, below one directory."""

    def __init__(self, root: Path, node: str) -> None:
        self.root, self.node = root, node
        self.bytes_read = 0  # bytes read from files by this object: whole chunks, and digest tables
        private_dir(root, "cluster.blob_dir")

    def seal(self, name: str, arrays: Sequence[Array]) -> tuple[BlobRef, ...]:
        """Write arrays as one blob and return a reference to each.

        Raises BlobError when the name is taken, is not a plain file name, or the disk is full.
        """
        target = self.root / name
        if name != target.name or name.startswith("."):
            raise BlobError(f"blob name {name!r} is not a plain file name")
        if target.exists():
            raise BlobError(f"blob {name} is sealed already")
        refs: list[BlobRef] = []
        parts: list[bytes | memoryview] = []
        end = 0  # of the parts so far
        for array in arrays:
            data = np.ascontiguousarray(array)
            if data.dtype not in _DTYPES:
                known = ", ".join(_DTYPES.values())
                raise BlobError(f"blob {name}: dtype {data.dtype} is not one of {known}")
            table = b"".join(_chunk_digests(_bytes_of(data)))
            # an empty array needs no alignment, and must not lie beyond the file's end
            gap = -end % _ALIGN if data.nbytes else 0
            parts += [bytes(gap), _bytes_of(data), table]
            refs.append(
                BlobRef(
                    uri=f"blob://{self.node}/{name}",
                    offset=end + gap,
                    dtype=_DTYPES[data.dtype],
                    shape=tuple(data.shape),
                    digest=xxhash.xxh3_64_hexdigest(table),
                )
            )
            end += gap + data.nbytes + len(table)
        try:
            atomic_parts(str(target), parts, mode=0o600)
        except OSError as error:
            raise BlobError(f"blob {name} could not be written to {self.root}: {error}") from error
        return tuple(refs)

    def load(self, ref: BlobRef) -> Array:
        """The whole array behind a reference, mapped read-only, every chunk verified."""
        with self._open(ref) as file:
            table = self._table(file.fileno(), ref)
        if ref.num_bytes == 0:
            return np.empty(ref.shape, ref.dtype)
        path = self._path(ref.uri)
        data = np.memmap(path, dtype=ref.dtype, mode="r", offset=ref.offset, shape=ref.shape)
        _verify(_bytes_of(data), table, 0, ref)
        self.bytes_read += ref.num_bytes
        return data

    def read_runs(self, ref: BlobRef, runs: Sequence[Run]) -> Array:
        """The bytes of the given runs, joined in the order given: [sum of lengths] u8, owned.

        Reads and verifies the chunks that the runs touch, each once per call, and nothing else.
        Raises BlobError: a run outside the array, a missing, short or altered blob.
        """
        size = ref.num_bytes
        for begin, end in runs:
            if not 0 <= begin <= end <= size:
                raise BlobError(f"{ref.uri}: bytes {begin}..{end} asked for, 0..{size} exist")
        with self._open(ref) as file:
            if size <= CHUNK_BYTES:  # array and table in one read
                data = self._read(file.fileno(), ref, 0, size + _table_bytes(ref))
                return _cut_chunk(data, size, runs, ref)
            joined = np.empty(sum(end - begin for begin, end in runs), np.uint8)
            table = self._table(file.fileno(), ref)
            for span, pieces in _spans(runs):
                begin, end = span[0], min(span[1], ref.num_bytes)
                data = self._read(file.fileno(), ref, begin, end)
                _verify(data, table, begin, ref)
                source = np.frombuffer(data, np.uint8)
                for run, at in pieces:
                    joined[at : at + run[1] - run[0]] = source[run[0] - begin : run[1] - begin]
        return joined

    def missing(self, uris: Iterable[str], patience_s: float = 0.0) -> set[str]:
        """The URIs that cannot be read; bytes of the others are checked when they are read."""
        return self.find(dict.fromkeys(uris, 0), patience_s).gone

    def find(self, sizes: Mapping[str, int], patience_s: float = 0.0) -> Found:
        """Which of these are missing, or too short, where they were sealed.

        sizes: least number of bytes, by URI (`sizes_of`).
        patience_s: how long a request to a silent node is repeated; not used here.
        """
        gone = {uri for uri, size in sizes.items() if not holds(self._path(uri), size)}
        return Found(gone, set())

    def damaged(self, refs: Iterable[BlobRef]) -> set[str]:
        """URIs of blobs whose bytes differ from the sealed bytes; reads every array in full.

        A blob that is missing, cannot be read now, or whose node does not answer is not among them.
        """
        found: set[str] = set()
        for ref in refs:
            try:
                if ref.uri not in found:
                    self.read_runs(ref, [(0, ref.num_bytes)])
            except BlobError as error:
                found.update({error.uri} - {""})
            except OSError as error:
                log.warning("%s could not be checked: %s", ref.uri, error)
        return found

    def read(self, uri: str) -> bytes:
        """The sealed file unchanged, for a copy.  Raises OSError, BlobError."""
        return self._path(uri).read_bytes()

    def put_back(self, uri: str, data: bytes) -> None:
        """Seal a copy made by `read`, unless the blob is as long as it.  Raises OSError."""
        target = self._path(uri)
        if not holds(target, len(data)):
            atomic_write(target, data, mode=0o600)

    def sweep(self, uris: Iterable[str]) -> int:
        """Delete all other blobs, also partial blobs; returns how many.

        Call it only while nothing is being sealed.
        """
        kept = {self._path(uri).name for uri in uris}
        gone = [path for path in self.root.iterdir() if path.name not in kept]
        for path in gone:
            path.unlink(missing_ok=True)
        return len(gone)

    def uris(self) -> list[str]:
        """All blobs of this node, also partial blobs."""
        return [f"blob://{self.node}/{path.name}" for path in self.root.iterdir()]

    def delete_all(self, uris: Iterable[str]) -> None:
        for uri in uris:
            self.delete(uri)

    def delete(self, uri: str) -> None:
        """Remove a blob; a missing blob is no error (deletion is idempotent)."""
        self._path(uri).unlink(missing_ok=True)

    def _open(self, ref: BlobRef) -> FileIO:
        """The blob's file, long enough for the array and its table."""
        try:
            file = FileIO(f"{self.root}/{self._name(ref.uri)}")
        except FileNotFoundError as error:
            raise BlobError(f"{ref.uri} is not in {self.root}") from error
        size = os.fstat(file.fileno()).st_size
        need = ref.offset + ref.num_bytes + _table_bytes(ref)
        if size < need:
            file.close()
            raise BlobError(f"{ref.uri} holds {size} bytes, {need} needed", ref.uri)
        return file

    def _read(self, fd: int, ref: BlobRef, begin: int, end: int) -> bytes:
        """Bytes begin..end counted from the array's start."""
        parts, at = [], begin
        while at < end:
            try:
                part = os.pread(fd, end - at, ref.offset + at)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                raise BlobError(f"{ref.uri} cannot be read: {error}", ref.uri) from error
            if not part:
                raise BlobError(f"{ref.uri} ends at byte {ref.offset + at}", ref.uri)
            parts.append(part)
            at += len(part)
        self.bytes_read += end - begin
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _table(self, fd: int, ref: BlobRef) -> bytes:
        table = self._read(fd, ref, ref.num_bytes, ref.num_bytes + _table_bytes(ref))
        check_table(table, ref)
        return table

    def _path(self, uri: str) -> Path:
        return self.root / self._name(uri)

    def _name(self, uri: str) -> str:
        """File name of a blob of this node."""
        scheme, _, rest = uri.partition("://")
        node, _, name = rest.partition("/")
        if scheme != "blob" or not name or "/" in name:
            raise BlobError(f"{uri!r} is not blob://NODE/NAME")
        if node != self.node:
            raise BlobError(f"{uri} is on node {node}, this process reads node {self.node} only")
        return name


def sizes_of(refs: Iterable[BlobRef]) -> dict[str, int]:
    """Least number of bytes of each blob: up to the end of its last array and table."""
    sizes: dict[str, int] = {}
    for ref in refs:
        end = ref.offset + ref.num_bytes + _table_bytes(ref)
        sizes[ref.uri] = max(end, sizes.get(ref.uri, 0))
    return sizes


def holds(path: Path, size: int) -> bool:
    """True if the file exists and has at least `size` bytes."""
    try:
        return path.stat().st_size >= size
    except OSError:
        return False


def check_table(table: bytes, ref: BlobRef) -> None:
    """Raises BlobError when the digests of an array's chunks were altered."""
    if xxhash.xxh3_64_hexdigest(table) != ref.digest:
        raise BlobError(f"{ref.uri}: the table at {ref.offset} does not match its digest", ref.uri)


def _cut_chunk(data: bytes, size: int, runs: Sequence[Run], ref: BlobRef) -> Array:
    """Runs of an array of `size` bytes, at most one chunk: [sum of lengths] u8, owned.

    data: the array's bytes, then its table.  Most records of short answers are so small, and a rank
    reads hundreds of them per microbatch.
    Raises BlobError, as `BlobStore.read_runs`.
    """
    check_table(data[size:], ref)
    _verify(memoryview(data)[:size], data[size:], 0, ref)
    return np.frombuffer(b"".join([data[begin:end] for begin, end in runs]), np.uint8).copy()


def _spans(runs: Sequence[Run]) -> Iterator[tuple[Run, list[tuple[Run, int]]]]:
    """Whole-chunk spans that do not touch, each with its runs and their places in the result."""
    places, at = [], 0
    for run in runs:
        if run[0] < run[1]:
            places.append((run, at))
        at += run[1] - run[0]
    places.sort()
    while places:
        begin = end = places[0][0][0] // CHUNK_BYTES * CHUNK_BYTES
        count = 0
        for run, _ in places:
            if run[0] // CHUNK_BYTES * CHUNK_BYTES > end:
                break
            end = max(end, -(-run[1] // CHUNK_BYTES) * CHUNK_BYTES)
            count += 1
        yield (begin, end), places[:count]
        places = places[count:]


def _verify(data: bytes | memoryview, table: bytes, begin: int, ref: BlobRef) -> None:
    """Check whole chunks that start at byte `begin` of the array."""
    first = begin // CHUNK_BYTES
    for idx, digest in enumerate(_chunk_digests(data), first):
        if digest != table[idx * _DIGEST_BYTES : (idx + 1) * _DIGEST_BYTES]:
            raise BlobError(
                f"{ref.uri} at byte {ref.offset + idx * CHUNK_BYTES} does not match its digest",
                ref.uri,
            )


def _chunk_digests(data: bytes | memoryview) -> Iterator[bytes]:
    view = memoryview(data)
    for at in range(0, len(view), CHUNK_BYTES):
        yield xxhash.xxh3_64_digest(view[at : at + CHUNK_BYTES])


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _table_bytes(ref: BlobRef) -> int:
    return -(-ref.num_bytes // CHUNK_BYTES) * _DIGEST_BYTES
