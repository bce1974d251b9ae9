"""Low-rank factors of a rank's tensors, as tiles; they follow from the tiles of the weights.

A tile of a weight says that `hf[rows, cols]` is at `local[box]`.  The factors of that tensor,
`NAME.lora_A` [rank, in] and `NAME.lora_B` [out, rank], are then held as A[:, cols] and B[rows, :]:
whatever a fused, interleaved or cut tensor holds, no family needs a table for its adapters.
Each Hugging Face tensor has factors of its own, also inside a fused tensor (q, k, v; gate, up).
With shared factors the experts of a layer have one A on their side of the hidden state (gate, up)
and one B there (down), in the name of the layer: `...mlp.experts.up_proj.lora_A`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from moerl.config.schema import ParallelConfig
from moerl.core.errors import LayoutError
from moerl.layout.shards import hf_shapes, megatron_tiles
from moerl.layout.spec import ModelSpec
from moerl.layout.tiles import Box, Local, Named, Tile, full_box

RankOf = Callable[[str], int]
"""Rank of the factors of a Hugging Face module; 0 = it has none."""

_EXPERT = re.compile(r"(.*\.experts)\.\d+(\.(?:(gate_proj|up_proj|w1|w3)|down_proj|w2))")


@dataclass(frozen=True, slots=True)
class Projection:
    """The factors of one Hugging Face weight, as far as a rank holds that weight."""

    module: str  # Hugging Face name without .weight
    rank: int
    shape: tuple[int, int]  # of the Hugging Face weight: out, in
    rows: range  # of it: of B too
    cols: range  # of it: of A too
    places: tuple[tuple[range, range], ...]  # (its rows, where they are in the local tensor)
    names: tuple[str, str]  # of A and B

    @property
    def factors(self) -> Named:
        """Hugging Face name of each factor -> its part on this rank."""
        ranks = range(self.rank)
        boxes = ((ranks, self.cols), (self.rows, ranks))
        return {name: _held(name, box) for name, box in zip(self.names, boxes, strict=True)}


def module_of(weight: str) -> str:
    """Name of the module of a Hugging Face weight; some experts are parameters of their own."""
    return weight.removesuffix(".weight")


def factor_names(module: str, *, shared: bool) -> tuple[str, str]:
    """Names of A and B.  shared: `lora.experts`; other modules have their own factors."""
    a = b = module
    if shared and (expert := _EXPERT.fullmatch(module)):
        layer = expert[1] + expert[2]
        a, b = (layer, module) if expert[3] else (module, layer)
    return f"{a}.lora_A", f"{b}.lora_B"


def projections(
    local: Local,
    rank_of: RankOf,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    shared: bool = False,
) -> tuple[Projection, ...]:
    """Factors of the targets inside one local tensor, in its order."""
    tiles: dict[str, list[Tile]] = {}
    for tile in local.tiles:
        if len(shapes[tile.hf]) == 2 and rank_of(module_of(tile.hf)):
            tiles.setdefault(tile.hf, []).append(tile)
    return tuple(
        _projection(
            name,
            parts,
            rank_of(module_of(name)),
            shapes[name],
            factor_names(module_of(name), shared=shared),
        )
        for name, parts in tiles.items()
    )


def adapter_shapes(
    shapes: Mapping[str, tuple[int, ...]], rank_of: RankOf, *, shared: bool = False
) -> dict[str, tuple[int, int]]:
    """Shape of every factor by its Hugging Face name; shapes: of a model's weights.

    Raises LayoutError where experts that share a factor have several ranks.
    """
    found: dict[str, tuple[int, int]] = {}
    for weight, shape in shapes.items():
        module = module_of(weight)
        if len(shape) == 2 and (rank := rank_of(module)):
            pair = ((rank, shape[1]), (shape[0], rank))
            for name, own in zip(factor_names(module, shared=shared), pair, strict=True):
                if found.setdefault(name, own) != own:
                    raise LayoutError(
                        f"{name} is shared by experts of several ranks; lora.ranks must give each "
                        "expert of a layer the same, or lora.experts be per_expert"
                    )
    return found


def adapter_tiles(
    spec: ModelSpec,
    layout: ParallelConfig,
    rank: int,
    rank_of: RankOf,
    *,
    shared: bool = False,
) -> Named:
    """The factors that a trainer rank holds, by their Hugging Face names."""
    shapes = hf_shapes(spec)
    named: Named = {}
    for local in megatron_tiles(spec, layout, rank).values():
        for part in projections(local, rank_of, shapes, shared=shared):
            named |= part.factors
    return named


def engine_factors(
    named: Named,
    rank_of: RankOf,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    shared: bool = False,
) -> Named:
    """The factors from which an engine rank with these tiles computes its weights."""
    boxes: dict[str, list[Box]] = {}
    for tile in (tile for local in named.values() for tile in local.tiles):
        if len(shapes[tile.hf]) == 2 and rank_of(module_of(tile.hf)):
            boxes.setdefault(tile.hf, []).append(tile.hf_box)
    factors: Named = {}
    for name, held in boxes.items():
        rows, cols = (hull(part) for part in zip(*held, strict=True))
        module, ranks = module_of(name), range(rank_of(module_of(name)))
        a, b = factor_names(module, shared=shared)
        factors[a], factors[b] = _held(a, (ranks, cols)), _held(b, (rows, ranks))
    return factors


def whole_factors(spec: ModelSpec, rank_of: RankOf, *, shared: bool = False) -> Named:
    """All factors of a model as if they were one rank's tensors."""
    return {
        name: Local(shape, (Tile(name, full_box(shape), full_box(shape)),))
        for name, shape in adapter_shapes(hf_shapes(spec), rank_of, shared=shared).items()
    }


def _projection(
    name: str, tiles: list[Tile], rank: int, shape: tuple[int, ...], names: tuple[str, str]
) -> Projection:
    rows, cols = _joined(name, (tile.hf_box[0] for tile in tiles)), tiles[0].hf_box[1]
    if any(tile.hf_box[1] != cols for tile in tiles):
        raise LayoutError(f"{name}: its rows on this rank have different columns")
    places = tuple((tile.hf_box[0], tile.box[0]) for tile in tiles)
    return Projection(module_of(name), rank, (shape[0], shape[1]), rows, cols, places, names)


def _joined(name: str, parts: Iterable[range]) -> range:
    """The range that the parts fill."""
    every = sorted(parts, key=lambda part: part.start)
    ends_meet = all(a.stop == b.start for a, b in pairwise(every))
    if ends_meet and all(part.step == 1 for part in every):
        return hull(every)
    rows = sorted(row for part in every for row in part)  # interleaved ones
    if rows != list(range(rows[0], rows[0] + len(rows))):
        raise LayoutError(f"{name}: its rows on this rank are not one range")
    return range(rows[0], rows[-1] + 1)


def hull(parts: Iterable[range]) -> range:
    """The smallest range that holds all of them, which may be interleaved."""
    ends = [(part[0], part[-1]) for part in parts]
    return range(min(first for first, _ in ends), max(last for _, last in ends) + 1)


def _held(name: str, box: Box) -> Local:
    shape = tuple(map(len, box))
    return Local(shape, (Tile(name, box, tuple(map(range, shape))),))
