"""An experiment: fp32 master weights become bf16 weights with a dither instead of to the nearest.

At a learning rate of 1e-6 an update is below half a step of bf16 for most weights, so a policy in
bf16 stands still until its masters have moved far enough.  With a dither by Hugging Face coordinate
(`moerl.weight_sync.dither`) the weights move on average as the masters do.  Forward passes, publish
and checkpoint all read the weights that this cast writes, so nothing else knows of it; a resume
under another layout computes the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from moerl.layout import Local, Named, Tile
from moerl.weight_sync.dither import HfPart, round_past, thresholds

_BLOCK = 1 << 22  # elements whose thresholds are computed at a time


def dither_casts(tensors: Mapping[str, Tensor], tiles: Named, optimizer: Any) -> None:
    """Change how Megatron's optimizer writes bf16 weights.  tensors: the weights, by tile name."""
    places = {tensor: tiles[name] for name, tensor in tensors.items()}
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not inner.is_stub_optimizer:
            plain = inner._copy_main_params_to_model_params
            inner._copy_main_params_to_model_params = partial(_cast, inner, plain, places)


@torch.no_grad()
def _cast(inner: Any, plain: Callable[[], None], places: Mapping[Tensor, Local]) -> None:
    plain()  # parameters in fp32
    for weight, target, master, start in _shards(inner):
        round_flat(target, master.view(-1), start, places[weight])


def _shards(inner: Any) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
    """(weight, flat run of it, its master, first element) of the weights that this rank updates."""
    if not hasattr(inner, "shard_fp32_from_float16_groups"):
        for weights, masters in zip(
            inner.float16_groups, inner.fp32_from_float16_groups, strict=True
        ):
            for weight, master in zip(weights, masters, strict=True):
                yield weight, weight.data.view(-1), master.data, 0
        return
    for weights, masters in zip(
        inner.model_float16_groups, inner.shard_fp32_from_float16_groups, strict=True
    ):
        for weight, master in zip(weights, masters, strict=True):
            held = inner._get_model_param_range_map(weight)
            place, _, bucket = inner.model_param_gbuf_map[weight]
            world = held["gbuf_world_in_bucket"]
            data = inner.buffers[place].buckets[bucket].param_data.view(-1)
            yield weight, data[world.start : world.end], master.data, held["param"].start


def round_flat(target: Tensor, master: Tensor, start: int, local: Local) -> None:
    """Write a run of a local tensor's elements, of which `start` is the first.  Both are flat."""
    cols, end = local.shape[-1], start + len(master)
    every = range(start // cols, -(-end // cols))
    block = max(1, _BLOCK // cols)
    for first in range(every.start, every.stop, block):
        rows = range(first, min(first + block, every.stop))
        begin, stop = max(start, rows.start * cols), min(end, rows.stop * cols)
        limits = _limits(local, rows, master.device).view(-1)
        own = limits[begin - rows.start * cols : stop - rows.start * cols]
        part = slice(begin - start, stop - start)
        target[part] = round_past(master[part], own)


def _limits(local: Local, rows: range, device: torch.device) -> Tensor:
    """Thresholds of rows of a local tensor as a matrix; 0 where it is padding."""
    limits = torch.zeros(len(rows), local.shape[-1], dtype=torch.int32, device=device)
    for tile in local.tiles:
        for part, held, cols in _matrices(tile, local.shape):
            first, last = (
                min(len(held), max(0, -(-(edge - held.start) // held.step)))
                for edge in (rows.start, rows.stop)
            )
            if first < last:
                own = held[first:last]
                place = slice(own.start - rows.start, own.stop - rows.start, own.step)
                within = HfPart(part.name, part.rows[first:last], part.cols)
                limits[place, cols.start : cols.stop : cols.step] = thresholds(within, device)
    return limits


def _matrices(tile: Tile, shape: tuple[int, ...]) -> Iterator[tuple[HfPart, range, range]]:
    """(part of a Hugging Face matrix, its rows, its columns) in the local tensor as one matrix."""
    if len(shape) == 1:
        yield HfPart(tile.hf, range(1), tile.hf_box[0]), range(1), tile.box[0]
        return
    leads = zip(product(*tile.box[:-2]), product(*tile.hf_box[:-2]), strict=True)
    for at_local, at_hf in leads:
        first = 0
        for index, size in zip(at_local, shape[:-2], strict=True):
            first = first * size + index
        rows, before = tile.box[-2], first * shape[-2]
        moved = range(rows.start + before, rows.stop + before, rows.step)
        name = f"{tile.hf} {at_hf}" if at_hf else tile.hf
        yield HfPart(name, *tile.hf_box[-2:]), moved, tile.box[-1]
