"""Tiles: where a rank stores the elements of a Hugging Face tensor, and joins of two layouts.

Hugging Face names and coordinates are common to all layouts: a tile says that `hf[tile.hf_box]` is
stored at `local[tile.box]`.  Tiles describe both trainer ranks and engine ranks, so

    load   local[tile.box] = hf[tile.hf_box]         save   hf[tile.hf_box] = local[tile.box]
    sync   join(trainer tiles, engine tiles)         reshard   join(tiles A, tiles B)

This file is pure Python without tensors: a plan is made or refused before any byte moves.
Rejected: mapping objects that also communicate; joins by name, where a typo copies nothing.
The overlap of boxes is an idea of Awex, awex/transfer/transfer_plan.py, and of Megatron-core's
core/resharding/planner.py.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moerl.core.errors import LayoutError

Box = tuple[range, ...]
"""One range per dim.  A step above 1 means that other rows lie between these (gate, up)."""


class Tile(NamedTuple):
    """Part of a local tensor: hf[hf_box] is stored at local[box].

    Both boxes have the same extents, aligned from the right.  A local tensor that stacks experts
    has one more leading dim, whose extent in the tile is 1.
    """

    hf: str
    hf_box: Box
    box: Box


@dataclass(frozen=True, slots=True)
class Local:
    """One live tensor of a rank: the shape that the rules give it, and its tiles.

    Example: with tp 2 and 130 vocabulary rows padded to 256, rank 1 holds rows 128..255 of the
    padded embedding: shape (128, h), one tile of 2 rows, pad_rows 126.
    """

    shape: tuple[int, ...]
    tiles: tuple[Tile, ...]
    pad_rows: int = 0  # trailing rows of dim 0 that no Hugging Face tensor has; they are 0
    dtype: str = ""  # dtype of this tensor; "" = the model's dtype


Named = dict[str, Local]
"""All live tensors of one rank, by local parameter name."""


class Op(NamedTuple):
    """Copy src_box of tensor src_name on rank src to dst_box of dst_name on rank dst."""

    src: int
    src_name: str
    src_box: Box
    dst: int
    dst_name: str
    dst_box: Box


def num_elements(box: Box) -> int:
    return math.prod(map(len, box))


def at(box: Box) -> tuple[slice, ...]:
    """The box as an index into a numpy array, torch tensor or safetensors slice."""
    return tuple(slice(r.start, r.stop, r.step) for r in box)


def full_box(shape: Sequence[int]) -> Box:
    return tuple(range(n) for n in shape)


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Cut elements start..stop-1 in row-major order into boxes, in the same order.

    A shape of d dims gives at most 2 d - 1 boxes: in each dim a part of the first row, whole rows
    and a part of the last row.
    """
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    if start % row:
        yield from _in_row(shape, first - 1, start % row, row)
    if first < last:
        yield (range(first, last), *full_box(shape[1:]))
    yield from _in_row(shape, last, 0, stop % row)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    for box in flat_boxes(shape[1:], start, stop):
        yield (range(row, row + 1), *box)


def check_covers(named: Named, live: Mapping[str, Sequence[int]]) -> None:
    """Check that tiles write each element of every live tensor once, and no pad row.

    live: shape of each live parameter by name.  Raises LayoutError that names the tensor if a
    parameter has no rule, a rule has no parameter, shapes differ, or tiles overlap or leave a gap.
    """
    for name in live:
        if name not in named:
            raise LayoutError(f"{name}: no layout rule covers this live parameter")
    for name, local in named.items():
        if name not in live:
            raise LayoutError(f"{name}: the layout has this tensor, the live module does not")
        if tuple(live[name]) != local.shape:
            raise LayoutError(
                f"{name}: live shape {tuple(live[name])}, the layout says {local.shape}"
            )
        _check_exact(name, local)


def join(
    sources: Mapping[int, Named], sinks: Mapping[int, Named], *, same_ranks: bool = False
) -> list[Op]:
    """Copies that write every sink element exactly once.

    If several ranks hold a box, the rank that has sent the fewest elements so far sends it.  With
    `same_ranks`, rank r is the same process on both sides, and it copies its own elements itself.
    Raises LayoutError for a sink element that no source holds, or that two different boxes hold.
    """
    index = _index(sources)
    sent: dict[int, int] = defaultdict(int)
    ops: list[Op] = []
    for dst, named in sinks.items():
        for dst_name, local in named.items():
            for tile in local.tiles:
                parts: list[Box] = []
                for hf_box, ref_counts in index.get(tile.hf, {}).items():
                    part = meet(hf_box, tile.hf_box)
                    if part is None:
                        continue
                    parts.append(part)
                    src = dst if same_ranks and dst in ref_counts else _least(ref_counts, sent)
                    src_name, held = ref_counts[src]
                    if not (same_ranks and src == dst):
                        sent[src] += num_elements(part)
                    source = (src, src_name, local_box(held, part))
                    ops.append(Op(*source, dst, dst_name, local_box(tile, part)))
                _check_parts(dst_name, tile, parts)
    return ops


def _index(sources: Mapping[int, Named]) -> dict[str, dict[Box, dict[int, tuple[str, Tile]]]]:
    """HF name -> box -> rank -> (local name, tile).  Replicas have equal boxes: one entry."""
    index: dict[str, dict[Box, dict[int, tuple[str, Tile]]]] = defaultdict(dict)
    for rank, named in sources.items():
        for name, local in named.items():
            for tile in local.tiles:
                ref_counts = index[tile.hf].setdefault(tile.hf_box, {})
                ref_counts.setdefault(rank, (name, tile))
    return index


def _least(ref_counts: Iterable[int], sent: Mapping[int, int]) -> int:
    return min(ref_counts, key=lambda rank: (sent.get(rank, 0), rank))


def meet(a: Box, b: Box) -> Box | None:
    """Intersection of two boxes of one HF tensor, or None.  Raises LayoutError as below."""
    if a == b:
        return a
    if len(a) != len(b):
        raise LayoutError(f"boxes {a} and {b} of one tensor differ in their number of dims")
    part = tuple(_meet_ranges(x, y) for x, y in zip(a, b, strict=True))
    return part if all(part) else None


def _meet_ranges(a: range, b: range) -> range:
    """The common elements, in order.  Raises LayoutError if neither step divides the other."""
    step = max(a.step, b.step)
    if step == 1:
        return range(max(a.start, b.start), min(a.stop, b.stop))
    if step % a.step or step % b.step:
        raise LayoutError(f"rows {a} and {b} are interleaved and do not nest")
    coarse, fine = (a, b) if a.step == step else (b, a)
    if (coarse.start - fine.start) % fine.step:
        return range(0)
    start = max(coarse.start, fine.start)
    start += (coarse.start - start) % step
    return range(start, min(coarse.stop, fine.stop), step)


def local_box(tile: Tile, part: Box) -> Box:
    """Local coordinates of `part`, a piece of tile.hf_box."""
    lead = len(tile.box) - len(part)
    return (*tile.box[:lead], *map(_move, tile.hf_box, tile.box[lead:], part))


def hf_box(tile: Tile, part: Box) -> Box:
    """Hugging Face coordinates of `part`, a piece of tile.box: the inverse of `local_box`."""
    lead = len(tile.box) - len(tile.hf_box)
    return tuple(
        hf[cut.start - local.start : cut.stop - local.start]
        for hf, local, cut in zip(tile.hf_box, tile.box[lead:], part[lead:], strict=True)
    )


def _move(hf: range, local: range, cut: range) -> range:
    first = local.start + (cut.start - hf.start) // hf.step
    step = cut.step // hf.step
    return range(first, first + (len(cut) - 1) * step + 1, step)


def _check_parts(dst_name: str, tile: Tile, parts: Sequence[Box]) -> None:
    clash = overlap(parts)
    if clash:
        raise LayoutError(
            f"{dst_name}: sources hold {tile.hf} in boxes that overlap without being equal, "
            f"{clash[0]} and {clash[1]}"
        )
    covered, needed = sum(map(num_elements, parts)), num_elements(tile.hf_box)
    if covered != needed:
        raise LayoutError(
            f"{dst_name}: sources hold {covered} of {needed} elements of {tile.hf} {tile.hf_box}"
        )


def _check_exact(name: str, local: Local) -> None:
    boxes = [tile.box for tile in local.tiles]
    clash = overlap(boxes)
    if clash:
        raise LayoutError(f"{name}: two tiles write the same elements, {clash[0]} and {clash[1]}")
    stops = (local.shape[0] - local.pad_rows, *local.shape[1:])
    for tile in local.tiles:
        lead = len(tile.box) - len(tile.hf_box)
        fits = all(r.stop <= stop for r, stop in zip(tile.box, stops, strict=True))
        if not fits or [len(r) for r in tile.hf_box] != [len(r) for r in tile.box[lead:]]:
            raise LayoutError(f"{name}: tile {tile} does not fit shape {local.shape}")
    covered, needed = sum(map(num_elements, boxes)), math.prod(stops)
    if covered != needed:
        raise LayoutError(f"{name}: tiles cover {covered} of {needed} elements")


def overlap(boxes: Iterable[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, or None; found by a sweep along dim 0."""
    active: list[Box] = []
    for box in sorted(boxes, key=lambda b: b[0].start):
        active = [other for other in active if other[0].stop > box[0].start]
        for other in active:
            if all(map(_meet_ranges, box, other)):
                return other, box
        active.append(box)
    return None
