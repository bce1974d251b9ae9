"""Hugging Face folders: checked when opened, read by box, into this rank's live parameters.

HfFolder   one expert per tensor, also if the files stack them; FP8 and MXFP4 are dequantised
load_hf    folder -> this rank's parameters, reading only the bytes the rank holds

Names and cuts come from the tiles of `moerl.layout`.
Rejected: building a transformers model to read (the whole model in memory on every rank).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from moerl.core.errors import LayoutError, ModelError
from moerl.core.json_files import read_json
from moerl.layout import (
    Box,
    Local,
    ModelSpec,
    Named,
    Tile,
    at,
    check_covers,
    hf_shapes,
    is_repeated,
    model_spec,
    num_elements,
    stacked_aliases,
    transposed_stacks,
)
from moerl.trainer.hf_io.dequantize import MXFP4_GROUP, Fp8Block, Mxfp4
from moerl.trainer.hf_io.mapped_files import DTYPES, MappedFiles

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"

READABLE = ("F32", "BF16", "F16")
FILL_BYTES = 64 * 2**20  # a tile is copied in bands of rows no larger than this


class TensorSource(Protocol):
    """A source of Hugging Face tensors: their folder, or a Megatron checkpoint."""

    @property
    def spec(self) -> ModelSpec: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str, box: Box | None = None) -> Tensor: ...


class _Stored(NamedTuple):
    """A tensor of the files, after dequantisation."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Box], Tensor]


class _Place(NamedTuple):
    """Position of a Hugging Face tensor in the files; `inside`: its box in a stack."""

    tensor: str
    inside: Box | None


class HfFolder:
    """A model folder: config.json and one or several safetensors files.

    Names and shapes are as in `hf_shapes`, one expert per tensor, also when the files keep the
    experts stacked.  FP8-block and MXFP4 tensors are dequantised while they are read.  The whole
    folder is checked on opening: raises ModelError for a missing folder or config, an unknown
    family, and a tensor that is missing, unknown, truncated, of another shape or quantised without
    scales.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ModelError(f"{self.path}: no such model folder")
        self.config: dict[str, Any] = read_json(self.path / "config.json")
        self._files = MappedFiles(self.path)
        try:
            self.spec = model_spec(self.config)
            self._swap = transposed_stacks(self.spec)
            self._stored = self._find_stored(self._tensor_files())
            found = {name: stored.shape for name, stored in self._stored.items()}
            aliases = stacked_aliases(self.spec, found)
        except LayoutError as error:
            raise ModelError(f"{self.path}: {error}") from error
        self._shapes = hf_shapes(self.spec)
        self._places = {name: _Place(name, None) for name in found}
        self._places |= {name: _Place(*place) for name, place in aliases.items()}
        self._check(found, {tensor for tensor, _ in aliases.values()})

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise ModelError(f"{self.path}: has no tensor {name}")
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """The file's dtype; for a quantised tensor the dtype that the config names."""
        self.shape(name)
        return self._stored[self._places[name].tensor].dtype

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """One tensor, or a box of it, on the CPU; reads no other bytes.

        In the file's dtype; float32 where the file is quantised, so that the caller rounds once.
        """
        shape = self.shape(name)
        box = box if box is not None else tuple(range(n) for n in shape)
        if len(box) != len(shape) or any(r and r[-1] >= n for r, n in zip(box, shape, strict=True)):
            raise ModelError(f"{self.path}: {name} has shape {shape}, no box {box}")
        tensor, inside = self._places[name]
        if inside is None:
            return self._stored[tensor].read(box)
        expert, *outer = inside
        box = box[::-1] if self._swap else box
        moved = (
            range(r.start + first.start, r.stop + first.start, r.step)
            for r, first in zip(box, outer, strict=True)
        )
        value = self._stored[tensor].read((expert, *moved))[0]
        return value.T if self._swap and len(box) == 2 else value

    def _tensor_files(self) -> dict[str, str]:
        if (self.path / INDEX_FILE).exists():
            index = read_json(self.path / INDEX_FILE)
            if not isinstance(index.get("weight_map"), dict):
                raise ModelError(f"{self.path / INDEX_FILE}: has no weight_map")
            return dict(index["weight_map"])
        if not (self.path / SINGLE_FILE).exists():
            raise ModelError(f"{self.path}: has neither {SINGLE_FILE} nor {INDEX_FILE}")
        return dict.fromkeys(self._files.names(SINGLE_FILE), SINGLE_FILE)

    def _find_stored(self, files: Mapping[str, str]) -> dict[str, _Stored]:
        stored: dict[str, _Stored] = {}
        for name, file in files.items():
            scaled, packed = name.removesuffix("_scale_inv"), name.removesuffix("_blocks")
            if scaled != name and scaled in files:
                continue
            if name.endswith("_scales") and name.removesuffix("_scales") + "_blocks" in files:
                continue
            if f"{name}_scale_inv" in files:
                stored[name] = self._fp8(name, files)
            elif packed != name and f"{packed}_scales" in files:
                stored[packed] = self._mxfp4(packed, files)
            else:
                stored[name] = self._plain(name, file)
        return stored

    def _plain(self, name: str, file: str) -> _Stored:
        dtype = self._files.dtype(file, name)
        if dtype not in READABLE:
            raise ModelError(
                f"{self.path}: {name} is stored as {dtype}; readable: "
                f"{', '.join(READABLE)}, and FP8 or MXFP4 with its scales"
            )
        read = partial(self._files.read, file, name)
        return _Stored(self._files.shape(file, name), DTYPES[dtype], read)

    def _fp8(self, name: str, files: Mapping[str, str]) -> _Stored:
        scale_name = f"{name}_scale_inv"
        shape = self._files.shape(files[name], name)
        quantised = self.config.get("quantization_config") or {}
        rows, cols = quantised.get("weight_block_size") or (128, 128)
        want = (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // cols))
        found = self._files.shape(files[scale_name], scale_name)
        if found != want:
            raise ModelError(
                f"{self.path}: {scale_name} has shape {found}, blocks of {rows} x {cols} on "
                f"{name} {shape} need {want}"
            )
        weight = partial(self._files.read, files[name], name)
        scale = partial(self._files.read, files[scale_name], scale_name)
        return _Stored(shape, config_dtype(self.config), Fp8Block(weight, scale, (rows, cols)))

    def _mxfp4(self, name: str, files: Mapping[str, str]) -> _Stored:
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        found = self._files.shape(files[scales], scales)
        if self._files.shape(files[blocks], blocks) != (*found, MXFP4_GROUP // 2):
            raise ModelError(
                f"{self.path}: {blocks} must have the shape of {scales} {found} and 16 bytes each"
            )
        read = Mxfp4(
            partial(self._files.read, files[blocks], blocks),
            partial(self._files.read, files[scales], scales),
        )
        shape = (*found[:-1], found[-1] * MXFP4_GROUP)
        if self._swap:  # packed files keep [E, rows, cols] where plain ones are transposed
            *lead, rows, cols = shape
            return _Stored((*lead, cols, rows), config_dtype(self.config), partial(_swapped, read))
        return _Stored(shape, config_dtype(self.config), read)

    def _check(self, shapes: Mapping[str, tuple[int, ...]], stacked: set[str]) -> None:
        for name, shape in self._shapes.items():
            if name not in self._places:
                raise ModelError(f"{self.path}: tensor {name} is missing")
            if self._places[name].inside is None and shapes[name] != shape:
                raise ModelError(
                    f"{self.path}: {name} has shape {shapes[name]}, the config says {shape}"
                )
        for name in shapes.keys() - self._shapes.keys() - stacked:
            if not is_repeated(self.spec, name):
                raise ModelError(f"{self.path}: {name} is not a tensor of {self.spec.family}")


def _swapped(read: Callable[[Box], Tensor], box: Box) -> Tensor:
    *lead, rows, cols = box
    return read((*lead, cols, rows)).mT


@torch.no_grad()
def load_hf(params: Mapping[str, Tensor], tiles: Named, folder: HfFolder) -> None:
    """Fill this rank's parameters in place, cast to their dtype; padding rows become 0.

    tiles: `megatron_tiles(folder.spec, ...)` of this rank.  Raises LayoutError when they do not
    cover `params` exactly, ModelError when the folder cannot give a tile.
    """
    check_covers(tiles, {name: tuple(param.shape) for name, param in params.items()})
    for name, local in tiles.items():
        fill(params[name], local, folder)


def fill(tensor: Tensor, local: Local, source: TensorSource) -> None:
    """Write all of one local tensor, cast to its dtype; padding rows become 0.

    Peak memory beyond the tensor: FILL_BYTES of float32 and the mapped part of the source.
    """
    for tile in local.tiles:
        for hf_box, box in _bands(tile):
            tensor[at(box)] = source.read(tile.hf, hf_box).to(tensor.device)
    if local.pad_rows:
        tensor[-local.pad_rows :] = 0


def _bands(tile: Tile) -> Iterator[tuple[Box, Box]]:
    """(hf box, local box) of consecutive bands of the tile's rows."""
    rows, *rest = tile.hf_box
    lead, local_rows = len(tile.box) - len(tile.hf_box), tile.box[-len(tile.hf_box)]
    step = max(1, FILL_BYTES * len(rows) // (4 * max(1, num_elements(tile.hf_box))))
    for first in range(0, len(rows), step):
        band = slice(first, first + step)
        yield (rows[band], *rest), (*tile.box[:lead], local_rows[band], *tile.box[lead + 1 :])


def config_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype a config names; bfloat16 where it names none that weights can have."""
    name = config.get("dtype") or config.get("torch_dtype")
    return {"float32": torch.float32, "float16": torch.float16}.get(str(name), torch.bfloat16)
