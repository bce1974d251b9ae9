"""Sealed immutable bytes by URI: routes and masks never travel through the controller.

One blob holds the arrays of one (rollout, segment).  It is written to a temporary name and renamed,
so a blob that exists is whole; every array carries an xxh3-64 digest that the reader verifies.
Blobs live in a node-local directory (shared memory or NVMe) and are read by mapping the file.

Rejected: Ray object references (they die with the process that made them and move whole objects).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from moerl.errors import BlobError
from moerl.types import Array, BlobRef

_ALIGN = 64  # so that a mapped array is aligned for any dtype
_DTYPES = ("uint8", "uint16", "int32", "int64", "float32")


class BlobStore:
    """The blobs of one node, below one directory."""

    def __init__(self, root: Path, node: str) -> None:
        self.root, self.node = root, node
        root.mkdir(parents=True, exist_ok=True)

    def seal(self, name: str, arrays: Sequence[Array]) -> tuple[BlobRef, ...]:
        """Write arrays as one blob and return a reference to each.

        Raises BlobError when the name is taken, is not a plain file name, or the disk is full.
        """
        target = self.root / name
        if name != target.name or name.startswith("."):
            raise BlobError(f"blob name {name!r} is not a plain file name")
        if target.exists():
            raise BlobError(f"blob {name} is sealed already")
        refs, offset = [], 0
        temporary = self.root / f".{name}.{os.getpid()}"
        try:
            with temporary.open("wb") as file:
                for array in arrays:
                    data = np.ascontiguousarray(array)
                    if data.dtype.name not in _DTYPES:
                        raise BlobError(f"blob {name}: dtype {data.dtype} is not one of {_DTYPES}")
                    file.seek(offset)
                    file.write(data.data)
                    refs.append(
                        BlobRef(
                            uri=f"blob://{self.node}/{name}",
                            offset=offset,
                            dtype=data.dtype.name,
                            shape=tuple(data.shape),
                            digest=_digest(data),
                        )
                    )
                    offset += -(-data.nbytes // _ALIGN) * _ALIGN
            temporary.rename(target)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise BlobError(f"blob {name} could not be written to {self.root}: {error}") from error
        return tuple(refs)

    def load(self, ref: BlobRef) -> Array:
        """The whole array behind a reference, mapped read-only, digest verified."""
        data = self.view(ref)
        if _digest(data) != ref.digest:
            raise BlobError(f"{ref.uri} at byte {ref.offset} does not match its digest")
        return data

    def view(self, ref: BlobRef) -> Array:
        """Map without verifying: for a reader that takes a slice (its own layers) of an array."""
        path = self._path(ref.uri)
        try:
            size = path.stat().st_size
        except FileNotFoundError as error:
            raise BlobError(f"{ref.uri} is not in {self.root}") from error
        if size < ref.offset + ref.num_bytes:
            raise BlobError(f"{ref.uri} holds {size} bytes, {ref.offset + ref.num_bytes} needed")
        if ref.num_bytes == 0:
            return np.empty(ref.shape, ref.dtype)
        return np.memmap(path, dtype=ref.dtype, mode="r", offset=ref.offset, shape=ref.shape)

    def delete(self, uri: str) -> None:
        """Remove a blob; a blob that is gone already is no error (deletion is idempotent)."""
        self._path(uri).unlink(missing_ok=True)

    def _path(self, uri: str) -> Path:
        scheme, _, rest = uri.partition("://")
        node, _, name = rest.partition("/")
        if scheme != "blob" or not name or "/" in name:
            raise BlobError(f"{uri!r} is not blob://NODE/NAME")
        if node != self.node:
            raise BlobError(f"{uri} lives on node {node}, this process reads node {self.node} only")
        return self.root / name


def _digest(data: Array) -> str:
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(data).data)
