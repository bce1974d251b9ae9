"""Tensors to a file one after the other: a safetensors file whose header is known beforehand."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moerl.trainer.hf_io.mapped_files import DTYPES

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
