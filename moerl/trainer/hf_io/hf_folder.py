"""Hugging Face folders: checked when opened, read by box, into this rank's live parameters.

HfFolder   one expert per tensor, also if the files stack them; FP8 and MXFP4 are dequantised
load_hf    folder -> this rank's parameters, reading only the bytes the rank holds

Names and cuts come from the tiles of `moerl.layout`.
Rejected: building a transformers model to read (the whole model in memory on every rank).

Quantised tensors of released checkpoints, dequantised box by box while they are read.

    FP8 block   NAME [.., R, C] fp8 and NAME_scale_inv [.., ceil(R/128), ceil(C/128)]
                value = fp8 * scale of its block                              (DeepSeek-V3)
    MXFP4       NAME_blocks [.., R, C/32, 16] and NAME_scales [.., R, C/32], both bytes
                two values per byte, low half first; value = e2m1 * 2^(scale - 127)   (gpt-oss)

Both give float32; the caller rounds once, to the dtype it keeps.  A bare cast of either gives
plausible noise, so a quantised tensor without its scales is refused by name.
Sources: the OCP Microscaling specification for MXFP4 (e2m1 elements, e8m0 scales, blocks of 32);
weight_dequant in DeepSeek-V3's inference code for the block scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from moerl.core.errors import ModelError
from moerl.layout import (
    Box,
    Local,
    ModelSpec,
    Named,
    Tile,
    at,
    check_covers,
    num_elements,
)
from moerl.layout.model_files import MXFP4_GROUP, Form, ModelFiles
from moerl.trainer.hf_io.safetensors_files import DTYPES, MappedFiles

Read = Callable[[Box], Tensor]

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_TABLE = torch.tensor([*_E2M1, *(-x for x in _E2M1)])


@dataclass(frozen=True, slots=True)
class Fp8Block:
    """Reads boxes of one FP8 tensor; `block` is its (rows, columns) per scale."""

    weight: Read
    scale: Read
    block: tuple[int, int]

    def __call__(self, box: Box) -> Tensor:
        if box[-2].step > 1:
            return self(_dense(box))[..., :: box[-2].step, :]
        value = self.weight(box).float()
        *lead, rows, cols = box
        scale_box = (*lead, _blocks(rows, self.block[0]), _blocks(cols, self.block[1]))
        scale = self.scale(scale_box).float()
        for dim, kept, size in ((-2, rows, self.block[0]), (-1, cols, self.block[1])):
            spread = scale.repeat_interleave(size, dim)
            scale = spread.narrow(dim, kept.start % size, len(kept))
        return value * scale


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Reads boxes of one MXFP4 tensor of shape [.., R, C]."""

    blocks: Read
    scales: Read

    def __call__(self, box: Box) -> Tensor:
        *lead, cols = box
        groups = _blocks(cols, MXFP4_GROUP)
        packed = self.blocks((*lead, groups, range(MXFP4_GROUP // 2)))
        halves = torch.stack((packed & 15, packed >> 4), dim=-1)
        value = _E2M1_TABLE[halves.flatten(-2).int()]  # [.., groups, 32]
        exponent = self.scales((*lead, groups)).int() - 127
        value = torch.ldexp(value, exponent.unsqueeze(-1)).flatten(-2)
        return value.narrow(-1, cols.start % MXFP4_GROUP, len(cols))


def _dense(box: Box) -> Box:
    """The box without the step of its rows."""
    return (*box[:-2], range(box[-2].start, box[-2].stop), box[-1])


def _blocks(elements: range, size: int) -> range:
    """The blocks that a range of elements touches."""
    return range(elements.start // size, -(-elements.stop // size))


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


class HfFolder:
    """A model folder: config.json and one or several safetensors files.

    FP8-block and MXFP4 tensors are dequantised while they are read.  The whole folder is checked on
    opening and raises ModelError as `ModelFiles` does; numbers are checked when they are read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        held = ModelFiles(self.path)
        self.config, self.spec, self._shapes = held.config, held.spec, held.shapes
        self._places, self._swap = held.places, held.is_swapped
        self._held, self._files = held, MappedFiles(self.path)
        self._stored = {name: self._opened(name, form) for name, form in held.forms.items()}

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
        Raises ModelError for a box outside, and a number that is not finite.
        """
        shape = self.shape(name)
        box = box if box is not None else tuple(range(n) for n in shape)
        if len(box) != len(shape) or any(r and r[-1] >= n for r, n in zip(box, shape, strict=True)):
            raise ModelError(f"{self.path}: {name} has shape {shape}, no box {box}")
        value = self._read(name, box)
        if not value.isfinite().all():
            kind = "NaN" if value.isnan().any() else "an infinite number"
            file = self._held.file_of(name)
            raise ModelError(f"{file}: {name} holds {kind}; copy or convert the model again")
        return value

    def _read(self, name: str, box: Box) -> Tensor:
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

    def _opened(self, name: str, form: Form) -> _Stored:
        if form.kind == "plain":
            return _Stored(form.shape, DTYPES[form.dtype], self._reader(name))
        dtype = config_dtype(self.config)
        if form.kind == "fp8":
            scales = self._reader(f"{name}_scale_inv")
            return _Stored(
                form.shape, dtype, Fp8Block(self._reader(name), scales, self._held.fp8_block)
            )
        read = Mxfp4(self._reader(f"{name}_blocks"), self._reader(f"{name}_scales"))
        return _Stored(form.shape, dtype, partial(_swapped, read) if self._swap else read)

    def _reader(self, name: str) -> Callable[[Box], Tensor]:
        return partial(self._files.read, self._held.tensors[name].file, name)


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
