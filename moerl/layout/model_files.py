"""Tensors of a model folder by the headers of its files, compared with the shapes of its family.

A header is a few kilobytes per file and no weight is read, so a start checks every folder that it
will load before it starts a process.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from moerl.core.errors import LayoutError, ModelError
from moerl.core.json_files import read_json, refuse_pointer
from moerl.layout.families import model_spec
from moerl.layout.shards import hf_shapes, is_repeated, stacked_aliases, transposed_stacks
from moerl.layout.tiles import Box

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
READABLE = ("F32", "BF16", "F16")
MXFP4_GROUP = 32  # numbers that share a scale, two in a byte
_MOST_HEADER = 100_000_000  # bytes; more is refused by safetensors too
_BITS = {
    "F64": 64,
    "F32": 32,
    "I32": 32,
    "BF16": 16,
    "F16": 16,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "U8": 8,
}


class Stored(NamedTuple):
    """A tensor of a file.  dtype: as the file spells it; begin, end: bytes of the file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Form(NamedTuple):
    """A tensor after dequantisation.  dtype: of the file; empty for a quantised tensor."""

    kind: Literal["plain", "fp8", "mxfp4"]
    shape: tuple[int, ...]
    dtype: str


class Position(NamedTuple):
    """Position of a Hugging Face tensor in the files; `inside`: its box in a stack."""

    tensor: str
    inside: Box | None


def read_header(path: Path) -> dict[str, Stored]:
    """Tensors of a safetensors file, by name.

    Raises ModelError for a missing file, a pointer of git-lfs, a file that is cut, or another
    format.
    """
    try:
        size = path.stat().st_size
        refuse_pointer(path)
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(_MOST_HEADER, size - 8):
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        found = {
            name: _stored(path.name, fields, 8 + length)
            for name, fields in header.items()
            if name != "__metadata__"
        }
    except OSError as error:
        raise ModelError(f"{path}: missing or unreadable: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(f"{path}: cut or not safetensors: {error}") from error
    _check_end(path, found, size)
    return found


def _stored(file: str, fields: Mapping[str, Any], start: int) -> Stored:
    begin, end = fields["data_offsets"]
    shape, dtype = tuple(map(int, fields["shape"])), str(fields["dtype"])
    if (bits := _BITS.get(dtype)) and (end - begin) * 8 != math.prod(shape) * bits:
        raise ValueError(f"{end - begin} bytes for {dtype} {shape}")
    return Stored(file, dtype, shape, start + begin, start + end)


def _check_end(path: Path, found: Mapping[str, Stored], size: int) -> None:
    needed = max((one.end for one in found.values()), default=0)
    if size < needed:
        name = min((one.end, name) for name, one in found.items() if one.end > size)[1]
        raise ModelError(
            f"{path}: it has {size:,} bytes of {needed:,} and ends in tensor {name}; copy it again"
        )
    if size > needed > 0:
        raise ModelError(f"{path}: it has {size:,} bytes, its header describes {needed:,}")


class ModelFiles:
    """A model folder: config.json and the headers of one or several safetensors files.

    Names and shapes are as in `hf_shapes`, one expert per tensor, also when the files keep the
    experts stacked.  Raises ModelError for a missing folder or config, an unknown family, and a
    tensor that is missing, unknown, cut, of another shape or quantised without scales.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            raise ModelError(f"{path}: no such model folder")
        self.config: dict[str, Any] = read_json(path / "config.json")
        try:
            self.spec = model_spec(self.config)
            self.tensors = _tensors(path)
            self.is_swapped = transposed_stacks(self.spec)
            self.forms = dict(self._forms())
            found = {name: form.shape for name, form in self.forms.items()}
            aliases = stacked_aliases(self.spec, found)
        except LayoutError as error:
            raise ModelError(f"{path}: {error}") from error
        self.shapes = hf_shapes(self.spec)
        self.places = {name: Position(name, None) for name in found}
        self.places |= {name: Position(*place) for name, place in aliases.items()}
        self._check(found, {tensor for tensor, _ in aliases.values()})

    def file_of(self, name: str) -> Path:
        """The file with a Hugging Face tensor."""
        tensor = self.places[name].tensor
        return self.path / (self.tensors.get(tensor) or self.tensors[f"{tensor}_blocks"]).file

    def _forms(self) -> Iterator[tuple[str, Form]]:
        for name in self.tensors:
            scaled, packed = name.removesuffix("_scale_inv"), name.removesuffix("_blocks")
            if scaled != name and scaled in self.tensors:
                continue
            if (
                name.endswith("_scales")
                and name.removesuffix("_scales") + "_blocks" in self.tensors
            ):
                continue
            if f"{name}_scale_inv" in self.tensors:
                yield name, self._fp8(name)
            elif packed != name and f"{packed}_scales" in self.tensors:
                yield packed, self._mxfp4(packed)
            else:
                yield name, self._plain(name)

    def _plain(self, name: str) -> Form:
        _, dtype, shape, *_ = self.tensors[name]
        if dtype not in READABLE:
            raise ModelError(
                f"{self.path}: {name} is stored as {dtype}; readable: "
                f"{', '.join(READABLE)}, and FP8 or MXFP4 with its scales"
            )
        return Form("plain", shape, dtype)

    @property
    def fp8_block(self) -> tuple[int, int]:
        quantised = self.config.get("quantization_config") or {}
        rows, cols = quantised.get("weight_block_size") or (128, 128)
        return rows, cols

    def _fp8(self, name: str) -> Form:
        scale_name, (rows, cols) = f"{name}_scale_inv", self.fp8_block
        shape, found = self.tensors[name].shape, self.tensors[scale_name].shape
        want = (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // cols))
        if found != want:
            raise ModelError(
                f"{self.path}: {scale_name} has shape {found}, blocks of {rows} x {cols} on "
                f"{name} {shape} need {want}"
            )
        return Form("fp8", shape, "")

    def _mxfp4(self, name: str) -> Form:
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        found = self.tensors[scales].shape
        if self.tensors[blocks].shape != (*found, MXFP4_GROUP // 2):
            raise ModelError(
                f"{self.path}: {blocks} must have the shape of {scales} {found} and 16 bytes each"
            )
        *lead, rows, groups = found
        shape = (rows, groups * MXFP4_GROUP)
        # packed files keep [E, rows, cols] where plain files are transposed
        return Form("mxfp4", (*lead, *(shape[::-1] if self.is_swapped else shape)), "")

    def _check(self, shapes: Mapping[str, tuple[int, ...]], stacked: set[str]) -> None:
        for name, shape in self.shapes.items():
            if name not in self.places:
                raise ModelError(f"{self.path}: tensor {name} is missing")
            if self.places[name].inside is None and shapes[name] != shape:
                raise ModelError(
                    f"{self.file_of(name)}: {name} has shape {shapes[name]}, the config says "
                    f"{shape}"
                )
        for name in shapes.keys() - self.shapes.keys() - stacked:
            if not is_repeated(self.spec, name):
                raise ModelError(f"{self.path}: {name} is not a tensor of {self.spec.family}")


def _tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of the folder's files, by name."""
    if not (folder / INDEX_FILE).exists():
        if not (folder / SINGLE_FILE).exists():
            raise ModelError(f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}")
        return read_header(folder / SINGLE_FILE)
    files = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(files, dict):
        raise ModelError(f"{folder / INDEX_FILE}: has no weight_map")
    headers = _headers(folder, files.values())
    for name, file in files.items():
        if name not in headers[file]:
            raise ModelError(f"{folder / file}: has no tensor {name}, {INDEX_FILE} says it has")
    return {name: headers[file][name] for name, file in files.items()}


def _headers(folder: Path, files: Iterable[str]) -> dict[str, dict[str, Stored]]:
    return {file: read_header(folder / file) for file in dict.fromkeys(files)}
