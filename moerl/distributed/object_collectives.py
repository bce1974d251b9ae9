"""Collectives over values: msgpack in tensors of bytes.

torch's `*_object` collectives pickle, and unpickling runs code.  Groups are of gloo, or
of NCCL with the current CUDA device.  A value has a type that `moerl.core.serialization` knows; all
ranks of the group name the same.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moerl.core.serialization import decode_value, encode_value

_T = TypeVar("_T")


def broadcast_value(value: _T | None, type_: type[_T], group: dist.ProcessGroup) -> _T:
    """The value of the group's first rank, on all; the others' is not read."""
    is_first = dist.get_rank(group) == 0
    data = _bytes(value, group) if is_first else None
    size = torch.tensor([0 if data is None else data.numel()], device=_device(group))
    dist.broadcast(size, group=group, group_src=0)
    if data is None:
        data = torch.empty(int(size), dtype=torch.uint8, device=_device(group))
    dist.broadcast(data, group=group, group_src=0)
    return _value(data, type_)


def all_gather_values(value: _T, type_: type[_T], group: dist.ProcessGroup) -> list[_T]:
    """The values of all ranks of the group, in their order."""
    data, sizes = _padded(value, group)
    parts = [torch.empty_like(data) for _ in sizes]
    dist.all_gather(parts, data, group=group)
    return [_value(part[:size], type_) for part, size in zip(parts, sizes, strict=True)]


def gather_values(value: _T, type_: type[_T], group: dist.ProcessGroup) -> list[_T]:
    """The values of all ranks of the group on its first rank; nothing on the others."""
    data, sizes = _padded(value, group)
    parts = [torch.empty_like(data) for _ in sizes] if dist.get_rank(group) == 0 else None
    dist.gather(data, parts, group=group, group_dst=0)
    if parts is None:
        return []
    return [_value(part[:size], type_) for part, size in zip(parts, sizes, strict=True)]


def _padded(value: object, group: dist.ProcessGroup) -> tuple[Tensor, list[int]]:
    """This rank's bytes at the length of the longest, and the lengths of all ranks."""
    data = _bytes(value, group)
    mine = torch.tensor([data.numel()], device=data.device)
    sizes = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, mine, group=group)
    lengths = [int(size) for size in sizes]
    whole = torch.zeros(max(lengths), dtype=torch.uint8, device=data.device)
    whole[: data.numel()] = data
    return whole, lengths


def _bytes(value: object, group: dist.ProcessGroup) -> Tensor:
    return torch.frombuffer(bytearray(encode_value(value)), dtype=torch.uint8).to(_device(group))


def _value(data: Tensor, type_: type[_T]) -> _T:
    found: _T = decode_value(data.cpu().numpy().tobytes(), type_)
    return found


def _device(group: dist.ProcessGroup) -> torch.device:
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
