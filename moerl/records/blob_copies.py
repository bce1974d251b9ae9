"""Copies of blobs in the run directory, one sealed file per group; they survive the loss of a node.

A file holds named parts: `digest of the index | length of the index | index | part | part ...`, the
index (name, bytes, digest) of each part.  So a reader that knows a blob's URI finds it by reading
indexes only, a slice of a blob is a range of the file, and a part can be checked alone.

A file is written under a temporary name, flushed to the disk and renamed, so an existing file is
complete.  It is deleted with its group; a blob of two groups is in both files, so no reference
count is needed.

Rejected: a file per blob (dozens of flushes per group), one digest per file (no cheap slices).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from moerl.core.atomic import atomic_file
from moerl.core.errors import BlobError

log = logging.getLogger(__name__)

SUFFIX = ".group"
_DIGEST_CHARS, _LENGTH_BYTES = 16, 8

Stamp = tuple[int, int, int]  # inode, time of change and size of a file


@dataclass(frozen=True, slots=True)
class CopiedBlob:
    """Some bytes of a sealed file."""

    path: Path
    offset: int
    num_bytes: int
    digest: str

    def read(self) -> bytes:
        """All bytes.  Raises OSError; BlobError when they differ from the sealed bytes."""
        data = self.read_spans([(0, self.num_bytes)])
        if xxhash.xxh3_64_hexdigest(data) != self.digest:
            raise BlobError(f"{self.path} at byte {self.offset} does not match its digest")
        return data

    def read_spans(self, spans: Iterable[tuple[int, int]]) -> bytes:
        """The bytes begin..end of each span, joined, unchecked.  Raises OSError, BlobError."""
        with self.path.open("rb", buffering=0) as file:
            return b"".join(self._span(file.fileno(), *span) for span in spans)

    def _span(self, fd: int, begin: int, end: int) -> bytes:
        parts, at = [], begin
        while at < end <= self.num_bytes:
            part = os.pread(fd, end - at, self.offset + at)
            if not part:
                break
            parts.append(part)
            at += len(part)
        if at != end:
            raise BlobError(f"{self.path} ends before byte {end} of a copy")
        return b"".join(parts)


def seal(path: Path, named_parts: Sequence[tuple[str, bytes]], *, sync: bool = True) -> None:
    """Write named parts as one file; replaces a file of that name.  Raises OSError.

    sync: the file is on the disk on return.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    index = msgspec.msgpack.encode(
        [(n, len(b), xxhash.xxh3_64_hexdigest(b)) for n, b in named_parts]
    )
    with atomic_file(path, sync=sync, mode=0o600) as file:
        file.write(xxhash.xxh3_64_hexdigest(index).encode())
        file.write(len(index).to_bytes(_LENGTH_BYTES, "little"))
        file.write(index)
        for _, data in named_parts:
            file.write(data)


def copied_blobs_of(path: Path) -> dict[str, CopiedBlob] | None:
    """Blobs by name; None for a missing or damaged file.  Raises OSError."""
    try:
        with path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            digest = file.read(_DIGEST_CHARS)
            size = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            begin = _DIGEST_CHARS + _LENGTH_BYTES
            index = file.read(size) if size <= total - begin else b""
    except FileNotFoundError:
        return None
    if not index or xxhash.xxh3_64_hexdigest(index).encode() != digest:
        log.error("the index of %s does not match its digest", path)
        return None
    found, at = {}, begin + size
    for name, num_bytes, part in msgspec.msgpack.decode(index, type=list[tuple[str, int, str]]):
        found[name] = CopiedBlob(path, at, num_bytes, part)
        at += num_bytes
    if at != total:
        log.error("%s holds %d bytes, %d were written", path, total, at)
        return None
    return found


class Copies:
    """Finds copies of blobs by URI; read-only, usable from any thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[Path, tuple[Stamp, dict[str, CopiedBlob]]] = {}
        self._parts: dict[str, CopiedBlob] = {}  # blobs of all files, by URI
        self._lock = threading.Lock()

    def which(self, uris: Collection[str]) -> set[str]:
        """The URIs that have a copy now."""
        return set(self._find(uris))

    def read(self, uri: str, spans: Sequence[tuple[int, int]] | None) -> bytes | None:
        """Spans of a copy, unchecked, or all of it, checked; None when no copy is readable.

        Raises BlobError when the bytes differ from the sealed bytes.
        """
        part = self._find([uri]).get(uri)
        try:
            if part is not None:
                return part.read() if spans is None else part.read_spans(spans)
        except OSError as error:
            log.warning("the copy of %s could not be read: %s", uri, error)
        return None

    def _find(self, uris: Collection[str]) -> dict[str, CopiedBlob]:
        with self._lock:
            try:
                found = self._known(uris)
                if len(found) < len(set(uris)):
                    self._look()
                    found = self._known(uris)
            except OSError as error:
                log.warning("%s could not be read: %s", self.folder, error)
                return {}
        return found

    def _known(self, uris: Iterable[str]) -> dict[str, CopiedBlob]:
        found = {uri: self._parts[uri] for uri in uris if uri in self._parts}
        paths = {part.path for part in found.values()}
        there = {path for path in paths if _stamp_of(path) == self._files[path][0]}
        return {uri: part for uri, part in found.items() if part.path in there}

    def _look(self) -> None:
        """Read the indexes of files that are new; forget files that are gone."""
        files = {}
        for path in self.folder.glob(f"*{SUFFIX}"):
            stamp = _stamp_of(path)
            before = self._files.get(path)
            if before is not None and before[0] == stamp:
                files[path] = before
            elif stamp is not None:
                files[path] = (stamp, copied_blobs_of(path) or {})
        self._files = files
        self._parts = {
            name: part for _, parts in files.values() for name, part in parts.items() if name
        }


def _stamp_of(path: Path) -> Stamp | None:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
