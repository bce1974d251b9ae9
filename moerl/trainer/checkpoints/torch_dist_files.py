"""The tensors of a `torch_dist` checkpoint, read by box: no process group, no model.

`.metadata` is unpickled with the classes that describe tensors and no others, and of the data
files, which are regular files of the folder, only bytes of tensors are read: a folder of another
user can run no code here, and names no other file.
A box is read in bands of rows: peak memory is the result and BAND_BYTES.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import stat
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path, PosixPath
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from moerl.core.errors import ModelError
from moerl.layout import Box, at
from moerl.layout.tiles import meet
from moerl.trainer.checkpoints.find_checkpoint import METADATA_FILE

BAND_BYTES = 32 * 2**20

_MODULES = {module.__name__: module for module in (filesystem, metadata, planner)}
_OTHERS = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("pathlib", "PosixPath"): PosixPath,
}


class _Unpickler(pickle.Unpickler):
    """Unpickles descriptions of tensors only."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _OTHERS:
            return _OTHERS[module, name]
        found = getattr(_MODULES.get(module), name, None)
        if isinstance(found, type) and found.__module__ == module:
            return found
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"{module}.{name} does not describe a tensor")


class _Chunk(NamedTuple):
    """A box of a stored tensor, and where its elements are."""

    box: Box
    file: str
    start: int  # of the saved tensor in the file
    length: int


class _Data(NamedTuple):
    """Where a chunk's elements begin in the file, and its strides."""

    start: int
    strides: tuple[int, ...]


class TorchDistFiles:
    """The stored tensors of a folder by name.

    Raises ModelError for a folder without readable metadata; reads raise it for a missing or
    truncated file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        described = _read_metadata(path)
        self._tensors = {
            name: stored
            for name, stored in described.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self._places = described.storage_data
        self._files: set[str] = set()  # whose names have been checked
        self._index: dict[str, _ChunkIndex] = {}
        self._data: dict[tuple[str, int], _Data] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].size)

    def dtype(self, name: str) -> torch.dtype:
        dtype = self._tensors[name].properties.dtype
        assert isinstance(dtype, torch.dtype)
        return dtype

    def read_into(self, out: Tensor, name: str, box: Box) -> None:
        """Fill `out`, which has the box's extents, cast to its dtype.

        Raises ModelError when the files lack a part of the box.
        """
        if name not in self._index:
            self._index[name] = _ChunkIndex(self._chunks(name))
        covered = 0
        for chunk in self._index[name].overlapping(box):
            part = meet(chunk.box, box)
            if part is not None:
                covered += math.prod(map(len, part))
                self._read_part(out, name, chunk, part, box)
        if covered != math.prod(map(len, box)):
            raise ModelError(f"{self.path}: the parts of {name} do not cover it")

    def _chunks(self, name: str) -> Iterator[_Chunk]:
        for chunk in self._tensors[name].chunks:
            place = self._places.get(MetadataIndex(name, chunk.offsets))
            if place is None:
                raise ModelError(f"{self.path}: {name} has a part without a place in the files")
            self._check_file(place.relative_path)
            ranges = zip(chunk.offsets, chunk.sizes, strict=True)
            box = tuple(range(first, first + size) for first, size in ranges)
            yield _Chunk(box, place.relative_path, place.offset, place.length)

    def _check_file(self, file: object) -> None:
        """Raises ModelError unless it is the plain name of a regular file of the folder."""
        if not isinstance(file, str) or file != Path(file).name or "\0" in file:
            raise ModelError(f"{self.path}: names {file!r}, which is no plain name of a file")
        if file in self._files:
            return
        with contextlib.suppress(OSError):
            if not stat.S_ISREG((self.path / file).lstat().st_mode):
                raise ModelError(f"{self.path / file}: is no regular file")
        self._files.add(file)

    def _read_part(self, out: Tensor, name: str, chunk: _Chunk, part: Box, box: Box) -> None:
        file = self.path / chunk.file
        try:
            start, strides = self._data_of(chunk)
            dtype = self.dtype(name)
            for band in _bands(part, strides, dtype.itemsize):
                value = _read_band(file, start, strides, dtype, _within(chunk.box, band))
                out[at(_within(box, band))] = value
        except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
            raise ModelError(f"{file}: tensor {name} cannot be read: {error}") from error

    def _data_of(self, chunk: _Chunk) -> _Data:
        key = (chunk.file, chunk.start)
        if key not in self._data:
            with (self.path / chunk.file).open("rb") as stream:
                view: Any = _create_file_view(stream, chunk.start, chunk.length)
                saved = torch.load(view, map_location="meta", weights_only=True)
            if tuple(saved.shape) != tuple(map(len, chunk.box)):
                raise ValueError(f"its shape is {tuple(saved.shape)}")
            storage: Any = saved.untyped_storage()  # on this device it says where its bytes are
            first = storage._checkpoint_offset + saved.storage_offset() * saved.itemsize
            self._data[key] = _Data(chunk.start + first, saved.stride())
        return self._data[key]


class _ChunkIndex:
    """Chunks by their position in the leading dims that every chunk cuts into single entries.

    A model's layers and experts can be two such dims of one tensor: thousands of chunks, of which
    a read needs few.
    """

    def __init__(self, chunks: Iterator[_Chunk]) -> None:
        every = list(chunks)
        self._lead = _single_dims([chunk.box for chunk in every])
        self._by_lead: dict[tuple[int, ...], list[_Chunk]] = defaultdict(list)
        for chunk in every:
            self._by_lead[tuple(r.start for r in chunk.box[: self._lead])].append(chunk)

    def overlapping(self, box: Box) -> Iterator[_Chunk]:
        for lead in product(*box[: self._lead]):
            yield from self._by_lead.get(lead, ())


def _single_dims(boxes: Sequence[Box]) -> int:
    """How many leading dims have one entry in every box."""
    dims = min((len(box) for box in boxes), default=0)
    return next((d for d in range(dims) if any(len(box[d]) != 1 for box in boxes)), dims)


def _read_metadata(path: Path) -> Metadata:
    try:
        with (path / METADATA_FILE).open("rb") as file:
            described = _Unpickler(file).load()
    except FileNotFoundError as error:
        raise ModelError(f"{path}: no {METADATA_FILE}, so no torch_dist checkpoint") from error
    except Exception as error:  # a damaged pickle raises nearly anything
        raise ModelError(f"{path / METADATA_FILE}: cannot be read: {error}") from error
    if not isinstance(described, Metadata):
        raise ModelError(f"{path / METADATA_FILE}: describes no tensors")
    return described


def _within(outer: Box, part: Box) -> Box:
    """`part` in coordinates that begin where `outer` does; outer may have steps."""
    return tuple(
        range(o.index(p.start), o.index(p[-1]) + 1, max(1, p.step // o.step))
        for o, p in zip(outer, part, strict=True)
    )


def _bands(part: Box, strides: Sequence[int], itemsize: int) -> Iterator[Box]:
    """Cut a part along its first long dim, so that a band spans BAND_BYTES of the file at most."""
    dim = next((d for d, r in enumerate(part) if len(r) > 1), 0)
    if not part:
        yield part
        return
    step = max(1, BAND_BYTES // max(1, strides[dim] * itemsize))
    for first in range(0, len(part[dim]), step):
        yield (*part[:dim], part[dim][first : first + step], *part[dim + 1 :])


def _read_band(
    file: Path, start: int, strides: Sequence[int], dtype: torch.dtype, band: Box
) -> Tensor:
    """A box of a chunk; the span from its first to its last element is read with one call."""
    first = sum(r.start * s for r, s in zip(band, strides, strict=True))
    last = sum(r[-1] * s for r, s in zip(band, strides, strict=True))
    data = bytearray((last - first + 1) * dtype.itemsize)
    with file.open("rb", buffering=0) as stream:
        stream.seek(start + first * dtype.itemsize)
        if stream.readinto(data) != len(data):
            raise EOFError("the file ends inside it")
    steps = [r.step * s for r, s in zip(band, strides, strict=True)]
    return torch.frombuffer(data, dtype=dtype).as_strided(tuple(map(len, band)), steps)
