"""Records of ended requests, from SGLang's schedulers to the host of the engine: one file each.

SGLang sends routes, positions and masks as base64 of int32 and as lists of JSON, through three
processes.  Here a thread of the scheduler writes them into a file of the server's private folder,
each array in its narrowest integer type, and the reply carries a reference of a few bytes.  The
host reads the file in a thread and removes it.  The file's name is a digest of the request's id, so
a reference names no path, and the host finds files of requests that it no longer waits for.

A file that is missing, short, altered or of another owner is a RecordError of its rollout.

Rejected: shared memory (64 MB in many containers), one file for all requests of a step (it would
live until the last of them is read), a socket (one side would hold all that is not yet read).
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from moerl.core.errors import RecordError
from moerl.core.types import Array
from moerl.runtime.private_dir import private_opener

FIELD = "moerl_records"  # of a reply's finish_reason: the reference
FOLDER = "records"  # in the server's private folder
INLINE_BYTES = 4096  # a smaller record is in its reference: a file would cost more
LIMIT_BYTES = 16 << 30  # of files that the host has not read
_INTEGERS = ("uint8", "uint16", "uint32", "int64")
_ITEM_BYTES = {name: np.dtype(name).itemsize for name in (*_INTEGERS, "int32", "float32")}


class StoredArray(msgspec.Struct, frozen=True):
    """One array.  lowest: was subtracted from all values before they were stored."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    lowest: int = 0


class RecordReference(msgspec.Struct, frozen=True):
    """The record of a reply.  refused: the cause, where no record was written."""

    digest: str = ""
    parts: tuple[StoredArray, ...] = ()
    inline: bytes | None = None  # None: it is in the file
    refused: str = ""


_REFERENCES = msgspec.json.Decoder(RecordReference)


class RecordWriter:
    """Writes into the folder of one server.  Used by one scheduler process."""

    def __init__(
        self, folder: Path, limit_bytes: int = LIMIT_BYTES, inline_bytes: int = INLINE_BYTES
    ) -> None:
        self._folder, self._limit, self._inline = folder, limit_bytes, inline_bytes
        self._written = 0  # since the last look at files that the host has not read

    def write(self, request_id: str, arrays: Mapping[str, Array]) -> str:
        """Store the record of an ended request.  Returns the reference for its reply.

        A record that finds no room is refused in the reference, and in no exception: the request
        ends alone, and its server continues.
        """
        stored = [_narrowed(name, array) for name, array in arrays.items()]
        parts = tuple(part for part, _ in stored)
        data = [array.reshape(-1).view(np.uint8).data for _, array in stored]
        digest = xxhash.xxh3_128()
        for one in data:
            digest.update(one)
        reference = RecordReference(digest.hexdigest(), parts)
        size = sum(array.nbytes for _, array in stored)
        if size <= self._inline:
            reference = msgspec.structs.replace(reference, inline=b"".join(data))
        else:
            try:
                self._store(self._folder / name_of(request_id), data, size)
            except OSError as error:
                refused = f"{size} bytes were not written to {self._folder}: {error}"
                reference = RecordReference(refused=refused)
        return msgspec.json.encode(reference).decode()

    def _store(self, path: Path, data: Sequence[memoryview], size: int) -> None:
        self._make_room(size)
        try:
            with open(path, "xb", buffering=0, opener=private_opener) as file:
                for one in data:
                    _write_all(file.fileno(), one)
        except OSError:
            _remove(path)
            raise

    def _make_room(self, size: int) -> None:
        """Raises OSError when the host has too much to read."""
        if self._written + size > self._limit:
            self._written = _bytes_in(self._folder)
        if self._written + size > self._limit:
            raise OSError(f"the host has not read {self._written} of {self._limit} bytes allowed")
        self._written += size


class RecordReader:
    """The host's end: reads each file once, and removes each that nothing waits for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._expected: set[str] = set()  # names of files

    def expect(self, request_ids: Iterable[str]) -> None:
        """Requests are sent."""
        self._expected |= {name_of(one) for one in request_ids}

    def leave(self, request_ids: Iterable[str]) -> None:
        """Requests ended, and their files were read or never will be."""
        self._expected -= {name_of(one) for one in request_ids}

    def take(self, request_id: str, stored: object) -> dict[str, Array]:
        """The arrays of a request, by name; their file is removed.  May run in a thread.

        stored: the reference in its reply, or None.  Raises RecordError `record_file`.
        """
        if stored is None:
            return {}
        path, has_file = f"{self._folder}/{name_of(request_id)}", True
        try:
            if not isinstance(stored, str):
                raise ValueError(f"its reference is {stored!r:.80}")
            reference = _REFERENCES.decode(stored)
            if reference.refused:
                raise ValueError(reference.refused)
            has_file = reference.inline is None
            return _read(path, reference)
        except (OSError, ValueError, msgspec.DecodeError) as error:
            raise RecordError("record_file", f"{request_id}: {error}") from error
        finally:
            if has_file:
                _remove(path)

    def sweep(self) -> int:
        """Remove files of aborted or cancelled calls; returns how many.  May run in a thread."""
        # In this order: a file is written only after its request was expected.
        try:
            found = os.listdir(self._folder)
        except FileNotFoundError:  # its server was stopped
            return 0
        left = set(found) - set(self._expected)
        for name in left:
            _remove(self._folder / name)
        return len(left)


def name_of(request_id: str) -> str:
    """Name of the file of one request."""
    return xxhash.xxh3_128_hexdigest(request_id.encode())


def _narrowed(name: str, array: Array) -> tuple[StoredArray, Array]:
    """The array in the narrowest unsigned type that holds its values; floats as they are."""
    if array.dtype.kind == "f" or not array.size:
        return StoredArray(name, array.dtype.name, array.shape), np.ascontiguousarray(array)
    low, high = int(array.min()), int(array.max())
    lowest = min(low, 0)
    dtype = next(d for d in _INTEGERS if high - lowest <= np.iinfo(d).max)
    data = (array if not lowest else array.astype(np.int64) - lowest).astype(dtype)
    return StoredArray(name, dtype, array.shape, lowest), np.ascontiguousarray(data)


def _read(path: str, reference: RecordReference) -> dict[str, Array]:
    """Raises OSError, and ValueError for bytes that are not those referred to."""
    sizes = [_num_bytes(part) for part in reference.parts]
    inline = reference.inline
    data = memoryview(_file_bytes(path, sum(sizes)) if inline is None else inline)
    if len(data) != sum(sizes) or xxhash.xxh3_128_hexdigest(data) != reference.digest:
        raise ValueError("the bytes of the record are not those that were written")
    arrays, at = {}, 0
    for part, size in zip(reference.parts, sizes, strict=True):
        stored = np.frombuffer(data[at : at + size], part.dtype).reshape(part.shape)
        wide = np.int32 if stored.itemsize <= 2 else np.int64
        arrays[part.name] = stored.astype(wide) + part.lowest if part.lowest else stored
        at += size
    return arrays


def _file_bytes(path: str, size: int) -> bytes:
    with open(path, "rb", buffering=0, opener=private_opener) as file:
        found = os.fstat(file.fileno())
        private = found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        if not private or not stat.S_ISREG(found.st_mode):
            raise ValueError(f"the file is not ours alone (uid {found.st_uid})")
        if found.st_size != size:
            raise ValueError(f"the file has {found.st_size} bytes, want {size}")
        return file.readall()


def _num_bytes(part: StoredArray) -> int:
    if part.dtype not in _ITEM_BYTES or min(part.shape, default=0) < 0:
        raise ValueError(f"a part of dtype {part.dtype!r} and shape {part.shape}")
    return math.prod(part.shape) * _ITEM_BYTES[part.dtype]


def _remove(path: Path | str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _write_all(handle: int, data: memoryview) -> None:
    while data:
        data = data[os.write(handle, data) :]


def _bytes_in(folder: Path) -> int:
    total = 0
    for entry in os.scandir(folder):
        try:
            total += entry.stat(follow_symlinks=False).st_size
        except FileNotFoundError:  # it was read
            continue
    return total
