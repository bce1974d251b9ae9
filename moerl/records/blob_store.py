"""Sealed immutable bytes by URI: routes and masks never travel through the controller.

One blob holds the arrays of one (rollout, segment).  It is written to a temporary name and renamed,
so a blob that exists is complete.  Blobs live in a node-local directory (shared memory or NVMe).

A reader of a slice (its layers, its rows) must be able to check it without the rest.  So an array
is followed by a table of xxh3-64 digests, one per chunk of 4 KiB, and the reference carries the
digest of that table: a slice is verified by the table and by the chunks it touches.  The table adds
0.2 % to the file; a page is 4 KiB too, so smaller chunks would not save disk reads.

Rejected: Ray object references (they die with their process), digests in the reference (19,000 for
one 200k-token rollout), slices of a mapped file (SIGBUS when it is truncated).

Records of the next step, read while this step is trained.

A step begins with a read that nothing hides: the read of each pass's first microbatch.  When the
controller has the next plan already, a thread makes those reads early and keeps the verified bytes
until that plan is trained.  Records that were not read early, or failed, are read as usual, so the
reader of the data gets the error.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import xxhash

from moerl.core.atomic import atomic_parts, atomic_write
from moerl.core.errors import BlobError, MoerlError
from moerl.core.types import Array, BlobRef
from moerl.runtime.private_dir import private_dir

log = logging.getLogger(__name__)

CHUNK_BYTES = 4096  # the smallest range that is checked, and so read
_ALIGN = 64  # so that a mapped array is aligned for any dtype
_DIGEST_BYTES = 8
_DTYPES = {
    np.dtype(name): name for name in ("uint8", "uint16", "int32", "int64", "float16", "float32")
}

Run = tuple[int, int]  # begin and end (exclusive), in bytes of an array
Bytes = bytes | bytearray | memoryview
Wanted = tuple[BlobRef, Sequence[Run]]  # an array, and its runs to read


class Found(NamedTuple):
    """Result of a search for blobs that are missing where they were sealed."""

    gone: set[str]  # missing or too short everywhere
    copied: set[str]  # found in the run directory (durability `shared`)


class RecordReads(Protocol):
    """The methods of a store that a reader of records calls."""

    def read_records(self, wanted: Sequence[Wanted]) -> Array:
        """See `BlobStore.read_records`."""


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
        if not name or name.startswith(".") or "/" in name:
            raise BlobError(f"blob name {name!r} is not a plain file name")
        target = f"{self.root}/{name}"
        if os.path.lexists(target):
            raise BlobError(f"blob {name} is sealed already")
        refs: list[BlobRef] = []
        parts: list[bytes | memoryview] = []
        end = 0  # of the parts so far
        for array in arrays:
            data = np.ascontiguousarray(array)
            if data.dtype not in _DTYPES:
                known = ", ".join(_DTYPES.values())
                raise BlobError(f"blob {name}: dtype {data.dtype} is not one of {known}")
            stored = _bytes_of(data)
            table = b"".join(_chunk_digests(stored))
            # an empty array needs no alignment, and must not lie beyond the file's end
            gap = -end % _ALIGN if data.nbytes else 0
            parts += [bytes(gap), stored, table]
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
            atomic_parts(target, parts, mode=0o600)
        except OSError as error:
            raise BlobError(f"blob {name} could not be written to {self.root}: {error}") from error
        return tuple(refs)

    def load(self, ref: BlobRef) -> Array:
        """The whole array behind a reference, mapped read-only, every chunk verified."""
        ((table,),) = self._fetch({ref.uri: [_table_span(ref)]})
        check_table(table, ref)
        if ref.num_bytes == 0:
            return np.empty(ref.shape, ref.dtype)
        path = self._path(ref.uri)
        data = np.memmap(path, dtype=ref.dtype, mode="r", offset=ref.offset, shape=ref.shape)
        _verify(_bytes_of(data), table, 0, ref)
        self.bytes_read += ref.num_bytes
        return data

    def read_records(self, wanted: Sequence[Wanted]) -> Array:
        """The bytes of runs of many arrays, joined in the order given: [sum of lengths] u8, owned.

        Reads and verifies the chunks that the runs touch, each once per array, and nothing else; a
        blob is opened once, and repeated runs are read once.
        Raises BlobError: a run outside the array, a missing, short or altered blob.
        """
        seen: dict[tuple[BlobRef, tuple[Run, ...]], int] = {}
        order = [seen.setdefault((ref, tuple(runs)), len(seen)) for ref, runs in wanted]
        by_blob: dict[str, list[tuple[int, BlobRef, tuple[Run, ...]]]] = {}
        spans: dict[str, list[Run]] = {}
        for (ref, runs), number in seen.items():
            by_blob.setdefault(ref.uri, []).append((number, ref, runs))
            spans.setdefault(ref.uri, []).extend(_spans(ref, runs))
        found: list[Sequence[Bytes]] = [()] * len(seen)
        for arrays, views in zip(by_blob.values(), self._fetch(spans), strict=True):
            rest = iter(views)
            for number, ref, runs in arrays:
                found[number] = _cut(ref, runs, rest)
        parts = [part for number in order for part in found[number]]
        alone = parts[0] if len(parts) == 1 else None
        joined = alone if isinstance(alone, bytearray) else bytearray().join(parts)
        return np.frombuffer(joined, np.uint8)

    def read_runs(self, ref: BlobRef, runs: Sequence[Run]) -> Array:
        """`read_records` of one array."""
        return self.read_records([(ref, runs)])

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
        """Delete other and partial blobs; returns how many.  No blob may be in sealing."""
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

    def _fetch(self, spans: Mapping[str, Sequence[Run]]) -> Iterator[list[memoryview]]:
        """For each blob, the bytes begin..end of its file for each span, unverified."""
        for uri, of_blob in spans.items():
            begin, end = min(of_blob)[0], max([end for _, end in of_blob])
            size = sum([end - begin for begin, end in of_blob])
            file = self._open(uri, end)
            try:
                if end - begin - size <= CHUNK_BYTES:  # side by side, as arrays are sealed
                    data = memoryview(_read(file, uri, begin, end))
                    found = [data[low - begin : high - begin] for low, high in of_blob]
                else:
                    found = [memoryview(_read(file, uri, low, high)) for low, high in of_blob]
            finally:
                os.close(file)
            self.bytes_read += size
            yield found

    def _open(self, uri: str, need: int) -> int:
        """Descriptor of the blob's file, which has at least `need` bytes."""
        try:
            file = os.open(f"{self.root}/{self._name(uri)}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise BlobError(f"{uri} is not in {self.root}") from error
        size = os.fstat(file).st_size
        if size < need:
            os.close(file)
            raise BlobError(f"{uri} holds {size} bytes, {need} needed", uri)
        return file

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


def check_table(table: Bytes, ref: BlobRef) -> None:
    """Raises BlobError when the digests of an array's chunks were altered."""
    if xxhash.xxh3_64_hexdigest(table) != ref.digest:
        raise BlobError(f"{ref.uri}: the table at {ref.offset} does not match its digest", ref.uri)


def _spans(ref: BlobRef, runs: Sequence[Run]) -> Sequence[Run]:
    """Bytes of the blob's file that hold some runs of an array, and their digests.

    Raises BlobError for runs outside the array.
    """
    size, at = ref.num_bytes, ref.offset
    for low, high in runs:
        if not 0 <= low <= high <= size:
            raise BlobError(f"{ref.uri}: bytes {low}..{high} asked for, 0..{size} exist")
    if size <= CHUNK_BYTES:  # array and table together
        return ((at, at + size + _DIGEST_BYTES if size else at),)
    chunks = (span for span, _ in _chunks(runs))
    return [_table_span(ref), *((at + low, at + min(high, size)) for low, high in chunks)]


def _cut(ref: BlobRef, runs: Sequence[Run], views: Iterator[memoryview]) -> Sequence[Bytes]:
    """The runs of an array, from the bytes of its `_spans`, which are taken from `views`.

    Raises BlobError when the bytes were altered.
    """
    size = ref.num_bytes
    if size <= CHUNK_BYTES:  # as most records of short answers are: a rank reads hundreds of them
        view = next(views)
        data, table = view[:size], view[size:]
        check_table(table, ref)
        if xxhash.xxh3_64_digest(data) != table:
            _verify(data, table, 0, ref)
        return (data,) if runs == ((0, size),) else [data[low:high] for low, high in runs]
    table = next(views)
    check_table(table, ref)
    joined = bytearray(sum(high - low for low, high in runs))
    for (begin, _), places in _chunks(runs):
        data = next(views)
        _verify(data, table, begin, ref)
        for (low, high), at in places:
            joined[at : at + high - low] = data[low - begin : high - begin]
    return (joined,)


def _chunks(runs: Sequence[Run]) -> Iterator[tuple[Run, list[tuple[Run, int]]]]:
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


def _read(file: int, uri: str, begin: int, end: int) -> bytes:
    """Bytes begin..end of a file.  Raises BlobError."""
    parts, at = [], begin
    while at < end:
        try:
            part = os.pread(file, end - at, at)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise BlobError(f"{uri} cannot be read: {error}", uri) from error
        if not part:
            raise BlobError(f"{uri} ends at byte {at}", uri)
        parts.append(part)
        at += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _verify(data: Bytes, table: Bytes, begin: int, ref: BlobRef) -> None:
    """Check whole chunks that start at byte `begin` of the array."""
    first = begin // CHUNK_BYTES
    for idx, digest in enumerate(_chunk_digests(data), first):
        if digest != table[idx * _DIGEST_BYTES : (idx + 1) * _DIGEST_BYTES]:
            raise BlobError(
                f"{ref.uri} at byte {ref.offset + idx * CHUNK_BYTES} does not match its digest",
                ref.uri,
            )


def _chunk_digests(data: Bytes) -> list[bytes]:
    if 0 < len(data) <= CHUNK_BYTES:
        return [xxhash.xxh3_64_digest(data)]
    view = memoryview(data)
    return [
        xxhash.xxh3_64_digest(view[at : at + CHUNK_BYTES])
        for at in range(0, len(view), CHUNK_BYTES)
    ]


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _table_bytes(ref: BlobRef) -> int:
    return -(-ref.num_bytes // CHUNK_BYTES) * _DIGEST_BYTES


def _table_span(ref: BlobRef) -> Run:
    """Bytes of the file."""
    begin = ref.offset + ref.num_bytes
    return begin, begin + _table_bytes(ref)


Key = tuple[tuple[BlobRef, tuple[Run, ...]], ...]
Kept = dict[Key, Array]  # by the runs of a call


class ReadAhead:
    """The records of a store, some of which were read early.  Calls come from any thread."""

    def __init__(self, store: RecordReads) -> None:
        self._store = store
        self._hits = 0  # arrays that early calls have answered, since `use`
        self._kept: Kept = {}
        self._coming: Future[Kept] | None = None
        self._thread = ThreadPoolExecutor(1, "read-ahead")

    def read_records(self, wanted: Sequence[Wanted]) -> Array:
        """As `BlobStore.read_records`.  The bytes of an early call are shared: do not change them.

        A call is answered early as a whole or not at all.
        """
        found = self._kept.get(_key(wanted)) if self._kept else None
        if found is None:
            return self._store.read_records(wanted)
        self._hits += len(wanted)
        return found

    def begin(self, read: Callable[[RecordReads], None]) -> None:
        """Call `read` in the thread and keep its bytes for the next `use`."""
        self._coming = self._thread.submit(_gather, self._store, read)

    def use(self) -> None:
        """Wait for the reads of `begin` and answer with their bytes, and no others, from now on."""
        coming, self._coming = self._coming, None
        self._hits = 0
        self._kept = {} if coming is None else coming.result()

    def drop(self) -> int:
        """Drop the bytes of `use`; returns the number of arrays that they answered."""
        self._kept = {}
        return self._hits


class _Gathering:
    """Reads of a store, kept."""

    def __init__(self, store: RecordReads) -> None:
        self.kept: Kept = {}
        self._store = store

    def read_records(self, wanted: Sequence[Wanted]) -> Array:
        read = self._store.read_records(wanted)
        self.kept[_key(wanted)] = read
        return read


def _gather(store: RecordReads, read: Callable[[RecordReads], None]) -> Kept:
    gathering = _Gathering(store)
    try:
        read(gathering)
    except (MoerlError, OSError) as error:
        log.info("records were not read ahead: %s", error)
    return gathering.kept


def _key(wanted: Sequence[Wanted]) -> Key:
    return tuple((ref, tuple(runs)) for ref, runs in wanted)
