"""Digest of a model's weights that is equal under every layout of its ranks.

A sum over all elements of the Hugging Face tensors, each mixed with its tensor and place, so parts
of ranks add up in any cut.  Boxes that several ranks hold count once.  For one place the mixing is
a bijection of the bits: one changed element always changes the sum.

Digest of a trainer's weights, equal for two trainers of one layout with equal weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from moerl.core.serialization import encode_value
from moerl.distributed.object_collectives import all_gather_values
from moerl.layout import Box, Named, at

_BAND = 1 << 15  # elements that are mixed at a time: in a core's cache
_MIX = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # odd: SplitMix64's numbers
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def content_digest(
    tensors: Mapping[str, Tensor],
    tiles: Named,
    shapes: Mapping[str, tuple[int, ...]],
    group: dist.ProcessGroup,
) -> str:
    """16 hex digits, equal on all ranks; collective.

    tensors: of this rank by local name, laid out as `tiles`.  shapes: of the whole Hugging Face
    tensors.  group: of gloo.
    """
    own = box_sums(tensors, tiles, shapes)
    return joined(all_gather_values(own, dict[str, int], group))


def joined(ranks: Iterable[Mapping[str, int]]) -> str:
    """The digest, from `box_sums` of all ranks."""
    every = {box: number for own in ranks for box, number in own.items()}
    return f"{sum(every.values()) % 2**64:016x}"


def box_sums(
    tensors: Mapping[str, Tensor], tiles: Named, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, int]:
    """Name and box of each part of a Hugging Face tensor on a rank -> its sum."""
    found = {}
    for name, local in tiles.items():
        for tile in local.tiles:
            part = tensors[name][at(tile.box)].reshape([len(span) for span in tile.hf_box])
            found[f"{tile.hf} {tile.hf_box}"] = _sum(part, tile.hf, tile.hf_box, shapes[tile.hf])
    return found


def _sum(part: Tensor, name: str, box: Box, shape: tuple[int, ...]) -> int:
    """Of one box, modulo 2^64, in bands of rows."""
    rows, *others = box
    start = torch.tensor(xxhash.xxh3_64_intdigest(name.encode()) >> 1, device=part.device)
    step, total = max(1, _BAND // max(1, math.prod(map(len, others)))), 0
    for first in range(0, len(rows), step):
        band = rows[first : first + step]
        place = start
        for axis, span in enumerate((band, *others)):
            numbers = torch.arange(span.start, span.stop, span.step, device=part.device)
            place = place[..., None] + numbers * math.prod(shape[axis + 1 :])
        bits = part[first : first + step].contiguous().view(_BITS[part.element_size()])
        x = bits.to(torch.int64) + place * _MIX[0]
        for factor in _MIX[1:]:
            x = (x ^ ((x >> 32) & 0xFFFFFFFF)) * factor
        total += int((x ^ ((x >> 32) & 0xFFFFFFFF)).sum())
    return total % 2**64


def weights_digest(tensors: Mapping[str, Tensor], control: dist.ProcessGroup) -> str:
    """xxh3-128 over the ranks' digests of their tensors, by name; 32 hex digits.  Collective."""
    own = xxhash.xxh3_128()
    for name in sorted(tensors):
        own.update(name.encode())
        own.update(_bytes(tensors[name]))
    ranks = all_gather_values(own.hexdigest(), str, control)
    return xxhash.xxh3_128_hexdigest(encode_value(ranks))


def _bytes(tensor: Tensor) -> bytes:
    whole = tensor.detach().contiguous().reshape(-1)
    return whole.view(torch.uint8).cpu().numpy().tobytes()
