"""Adapters of an engine rank: the factors of a version, and how its engine serves them.

`EngineAdapters` merges them (lora.delivery = merged): it has W0 and computes W0 + s B A.

W0 is copied once, before the first version is committed (`base_weights`: into host memory, or with
lora.base = device next to the weights).  A version's weights are always computed from it:
subtracting the factors before from rounded weights would drift.  VERIFY digests the merged weights
one tensor at a time, and COMMIT computes them once more into the live weights, so that a rank
needs no second copy of the served weights next to W0.  A GPU computes both on itself.

`SlotAdapters` hands them to SGLang (lora.delivery = adapter): weights stay W0, every rank has
whole factors and SGLang cuts them.  VERIFY digests W0 and the factors; COMMIT reads the slot back
and compares it with the factors by the layout tables: SGLang answers success before it has looked
at a shape.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor

from moerl.config.lora_settings import LoraConfig
from moerl.core.errors import EngineError, LayoutError
from moerl.layout import ModelSpec, at, hf_shapes, sglang_tiles
from moerl.layout.adapters import engine_factors, factor_names, module_of, whole_factors
from moerl.layout.tiles import Box, Named, Tile
from moerl.weight_sync.adapters.base_weights import BaseBuckets, BaseWeights
from moerl.weight_sync.adapters.low_rank import merge_into
from moerl.weight_sync.adapters.sglang_adapter import sglang_form
from moerl.weight_sync.buckets import Piece, seeds
from moerl.weight_sync.commit_copies import device_of
from moerl.weight_sync.held_shards import EngineLayout
from moerl.weight_sync.transfer_plan import ReceiverPlan


class LiveModel(Protocol):
    """The weights that the engine serves."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Live parameters by name; their memory may move between calls."""
        ...

    def run_hook(self, name: str) -> None:
        """Run a function of the engine's loader, by `transfer_plan.post_load_hooks`."""
        ...

    def slots(self, module: str) -> tuple[Tensor, Tensor]:
        """The adapter slots of a module of the engine: A [slots, parts * rank, in] and
        B [slots, out, rank].  Raises LayoutError where it has none.
        """
        ...

    def serve_adapter(
        self, version: str, tensors: dict[str, Tensor], config: dict[str, Any]
    ) -> int:
        """Fill a slot with an adapter in SGLang's form; returns its number.  Raises EngineError."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Merge:
    """One box of a live tensor, and its parts of the factors."""

    place: tuple[slice | int, ...]  # in the live tensor; two dims are left
    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]


class EngineAdapters:
    """W0 and factors of one engine rank."""

    def __init__(
        self,
        spec: ModelSpec,
        engine: EngineLayout,
        rank: int,
        lora: LoraConfig,
        live: Mapping[str, Tensor],
    ) -> None:
        """Copy W0.  live: the weights as the engine loaded them.  Raises LayoutError."""
        self.lora = lora
        named = sglang_tiles(spec, engine.tp, rank, engine.ep, engine.dp)
        shapes = hf_shapes(spec)
        self._held = engine_factors(named, lora.rank_of, shapes, shared=lora.shares)
        merges = {name: self._targets(local.tiles) for name, local in named.items()}
        adapted = [name for name, tiles in merges.items() if tiles]
        if missing := [name for name in adapted if name not in live]:
            raise LayoutError(f"{missing[0]}: it has an adapter, the live model lacks it")
        dtypes = {live[name].dtype for name in adapted}
        if len(dtypes) != 1:
            raise LayoutError(f"adapted weights have the dtypes {sorted(map(str, dtypes))}")
        (dtype,) = dtypes
        self.factors = {
            name: torch.zeros(local.shape, dtype=dtype, device=device_of(live))
            for name, local in self._held.items()
        }
        self._merges = {name: [self._merge(tile) for tile in merges[name]] for name in adapted}
        self._base = self._kept(live)

    def commit(self, model: LiveModel, _version: str) -> None:
        """Write the merged weights, in place."""
        live = model.tensors()
        for name in self._merges:
            self._write(name, live[name])

    def total(self, whole: ReceiverPlan, live: Mapping[str, Tensor]) -> int:
        """Sum of the pieces' digests after `commit`.  whole: plan of whole weights."""

        def merged(name: str) -> Tensor:
            if name not in self._merges:
                return live[name]
            value = live[name].clone()  # its elements without factors are W0, too
            self._write(name, value)
            return value

        return _total(whole, merged)

    def _write(self, name: str, target: Tensor) -> None:
        for one, base in zip(self._merges[name], self._base[name], strict=True):
            merge_into(target[one.place], base, one.a, one.b, self.lora.scale)

    def _kept(self, live: Mapping[str, Tensor]) -> dict[str, BaseWeights]:
        """W0 of each box with factors, by tensor; all go through the same two buckets."""
        boxes = {name: [live[name][m.place] for m in self._merges[name]] for name in self._merges}
        device, buckets = device_of(live), None
        if device is not None and self.lora.base == "host":
            largest = max(box.nbytes for every in boxes.values() for box in every)
            buckets = BaseBuckets(device, largest)
        return {name: BaseWeights(every, self.lora.base, buckets) for name, every in boxes.items()}

    def _targets(self, tiles: tuple[Tile, ...]) -> list[Tile]:
        return [tile for tile in tiles if self._names(tile)[0] in self._held]

    def _names(self, tile: Tile) -> tuple[str, str]:
        return factor_names(module_of(tile.hf), shared=self.lora.shares)

    def _merge(self, tile: Tile) -> _Merge:
        rows, cols = tile.hf_box
        a, b = self._names(tile)
        lead = len(tile.box) - 2
        slot: tuple[slice | int, ...] = tuple(part.start for part in tile.box[:lead])
        first_row, first_col = _start(self._held, b, 0), _start(self._held, a, 1)
        return _Merge(
            slot + at(tile.box[lead:]),
            self.factors[a][:, _moved(cols, first_col)],
            self.factors[b][_moved(rows, first_row)],
        )


class SlotAdapters:
    """Whole factors of an engine rank, for SGLang's adapter slots."""

    def __init__(
        self, spec: ModelSpec, engine: EngineLayout, rank: int, lora: LoraConfig, model: LiveModel
    ) -> None:
        """Raises LayoutError where the model has no slot for a factor."""
        live = model.tensors()
        if any(tensor.is_cuda for tensor in live.values()):
            raise LayoutError(
                "adapter slots were never filled on a GPU; use lora.delivery = merged"
            )
        self.lora, self._spec = lora, spec
        named = sglang_tiles(spec, engine.tp, rank, engine.ep, engine.dp)
        adapted = {hf for hf in hf_shapes(spec) if lora.rank_of(module_of(hf))}
        self._tiles = {
            module_of(name): local.tiles
            for name, local in named.items()
            if any(tile.hf in adapted for tile in local.tiles)
        }
        dtypes = {live[f"{module}.weight"].dtype for module in self._tiles}
        self.factors = {
            name: torch.zeros(local.shape, dtype=dtype)
            for name, local in whole_factors(spec, lora.rank_of).items()
            for dtype in dtypes
        }
        self._config = sglang_form(self.factors, spec, lora)[1]
        for module in self._tiles:
            _check_slot_shape(module, model, self._tiles[module], self._config["r"])

    def commit(self, model: LiveModel, version: str) -> None:
        """Fill a slot of its own for the version.

        Raises EngineError: the slot holds something else, and no request may use it.
        """
        tensors, config = sglang_form(self.factors, self._spec, self.lora)
        slot = model.serve_adapter(version, tensors, config)
        for module, tiles in self._tiles.items():
            a, b = (every[slot] for every in model.slots(module))
            parts = list(dict.fromkeys(tile.hf for tile in tiles))
            for tile in tiles:
                first = parts.index(tile.hf) * config["r"]
                if not self._holds(tile, a[first : first + config["r"]], b):
                    raise EngineError(f"{module}: its slot does not hold the factors of {version}")

    def total(self, whole: ReceiverPlan, live: Mapping[str, Tensor]) -> int:
        """Sum of the digests of all pieces of W0.  whole: plan of whole weights."""
        return _total(whole, live.__getitem__)

    def _holds(self, tile: Tile, a: Tensor, b: Tensor) -> bool:
        """Whether the slot of a module has this tile's part of the factors.

        a: [rank, in] of the tile's weight; b: [out, rank] of the module.  Parts without factors are
        zero.
        """
        (rows, cols), (own_rows, own_cols) = tile.hf_box, tile.box
        names = factor_names(module_of(tile.hf), shared=False)
        if names[0] not in self.factors:
            return not b[at((own_rows, range(b.shape[1])))].any()
        whole_a, whole_b = (self.factors[name] for name in names)
        rank = len(whole_a)
        held_b = b[at((own_rows, range(rank)))]
        same = torch.equal(held_b, whole_b[at((rows, range(rank)))])
        return same and torch.equal(a[:rank, at((own_cols,))[0]], whole_a[:, at((cols,))[0]])


def _check_slot_shape(module: str, model: LiveModel, tiles: tuple[Tile, ...], rank: int) -> None:
    a, b = model.slots(module)
    parts = len({tile.hf for tile in tiles})
    rows = max(tile.box[0].stop for tile in tiles)
    cols = max(tile.box[1].stop for tile in tiles)
    fits = a.shape[1] >= parts * rank and a.shape[2] == cols
    if not (fits and b.shape[1] == rows and b.shape[2] >= rank):
        raise LayoutError(
            f"{module}: its slots hold A {list(a.shape[1:])} and B {list(b.shape[1:])}, factors "
            f"need [{parts * rank}, {cols}] and [{rows}, {rank}]"
        )


def check_same(held: LoraConfig, asked: LoraConfig) -> None:
    """Raises EngineError: W0 of other targets is gone."""
    if held != asked:
        raise EngineError(f"this engine has adapters of {held}; {asked} need a new start")


def _start(held: Named, name: str, dim: int) -> int:
    (tile,) = held[name].tiles
    box: Box = tile.hf_box
    return box[dim].start


def _moved(part: range, first: int) -> slice:
    return slice(part.start - first, part.stop - first, part.step)


def _total(whole: ReceiverPlan, value_of: Callable[[str], Tensor]) -> int:
    """Sum of the digests of all pieces of a rank.  value_of: the tensor of a name, called once."""
    found: dict[str, list[tuple[Piece, int]]] = defaultdict(list)
    for region in whole.regions:
        for piece, seed in zip(region.pieces, seeds(region), strict=True):
            found[piece.dst_name].append((piece, seed))
    total = 0
    for name, pieces in found.items():
        value = value_of(name)
        total += sum(_digest(value[at(piece.dst_box)], seed) for piece, seed in pieces)
    return total % 2**64


def _digest(value: Tensor, seed: int) -> int:
    data = value.contiguous().cpu().view(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_64_intdigest(data.data, seed=seed)
