"""Safetensors files of one folder, mapped for reading and unmapped after a budget of bytes.

A mapped page counts as resident memory until it is unmapped, so a process that reads a large model
once would seem to hold all of it.  Here the mappings are dropped, and made again on demand,
whenever `budget_bytes` have been touched.
Rejected: pread (one system call per row of a column cut), madvise (safetensors owns the mapping).

Tensors to a file one after the other: a safetensors file whose header is known beforehand.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moerl.core.errors import ModelError
from moerl.layout import Box
from moerl.layout.model_files import read_header

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
}


class MappedFiles:
    """The safetensors files below one folder, by file name."""

    def __init__(self, folder: Path, budget_bytes: int = 64 * 2**20) -> None:
        self._folder, self._budget, self._touched = folder, budget_bytes, 0
        self._open: dict[str, Any] = {}

    def read(self, file: str, tensor: str, box: Box) -> Tensor:
        """A box of a tensor in the file's dtype, valid as long as it is referenced.

        Raises ModelError for a missing, truncated or foreign file and for an unknown tensor.
        """
        part = self._slice(file, tensor)
        *rows, last = part.get_shape() or (1,)
        # a column cut touches whole rows: pages are larger than most of them
        self._touched += math.prod(map(len, box[: len(rows)])) * last * 4
        value: Tensor = part[tuple(slice(r.start, r.stop) for r in box)]
        if self._touched > self._budget:
            self._open.clear()
            self._touched = 0
        if any(r.step > 1 for r in box):  # safetensors slices have no step
            value = value[tuple(slice(None, None, r.step) for r in box)]
        return value

    def _slice(self, file: str, tensor: str) -> Any:
        try:
            return self._handle(file).get_slice(tensor)
        except SafetensorError as error:
            raise ModelError(f"{self._folder / file}: has no tensor {tensor}") from error
        except ModelError as error:
            raise ModelError(f"tensor {tensor} cannot be read: {error}") from error

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self._folder / file, framework="pt")
            except (OSError, SafetensorError) as error:
                read_header(self._folder / file)  # raises with the fault's place, where it is known
                raise ModelError(f"{self._folder / file}: cannot be read: {error}") from error
        return self._open[file]


_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Planned(NamedTuple):
    """A tensor of a file, made when it is written and dropped afterwards."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def made(self) -> Tensor:
        """The tensor, contiguous; it must be the announced one."""
        tensor = self.make().contiguous()
        assert tuple(tensor.shape) == self.shape, f"{self.name}: {tuple(tensor.shape)}"
        assert tensor.dtype == self.dtype, f"{self.name}: {tensor.dtype}"
        return tensor


def safetensors_header(tensors: Iterable[Planned]) -> bytes:
    """Length and JSON header of a safetensors file, padded so that the data is aligned."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    first = 0
    for planned in tensors:
        entries[planned.name] = {
            "dtype": _NAMES[planned.dtype],
            "shape": list(planned.shape),
            "data_offsets": [first, first + planned.nbytes],
        }
        first += planned.nbytes
    body = json.dumps(entries, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    return struct.pack("<Q", len(body)) + body


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor in row-major order."""
    data: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data
