"""Rules: how a fused local tensor is composed of Hugging Face tensors, and which part a rank keeps.

A rule names a fusion (the GLOBAL local tensor as blocks of HF rows, in order) and a cut (which part
of those blocks rank r of n keeps).  It states no size: sizes come from the family's table of HF
shapes, so each is written down once.  Adding a model family means adding tables, not code.

    copy          one HF tensor                            whole    replicated
    concat        HF tensors end to end (gate, up)         flat     the fused rows as one axis
    concat_heads  the same, cut at heads only (q, k, v)    each     every block separately
    qkv_grouped   per kv group its q heads, k, v           columns  a column range of every block
    qkv_grouped_gate, delta_heads, delta_conv: see there   head_groups  heads of every section
    deinterleave  rows 0, 2, 4, .. then 1, 3, 5, ..        first    whole on rank 0, zeros elsewhere
                                                           each_rotary  heads of q and k reordered

Rejected: a parameter's own `partition_dim` (Transformer Engine sets 0 on grouped expert weights).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moerl.core.errors import LayoutError
from moerl.layout.spec import ModelSpec
from moerl.layout.tiles import Box, Local, Named, Tile


class Shard(NamedTuple):
    """Rank `rank` of `size` along one mesh axis."""

    rank: int
    size: int

    def part(self, num: int, what: str) -> range:
        """This rank's equal share of `num` things.  Raises LayoutError when they do not divide."""
        if num % self.size:
            raise LayoutError(f"{what}: {num} does not divide into {self.size} equal parts")
        step = num // self.size
        return range(self.rank * step, (self.rank + 1) * step)


class Block(NamedTuple):
    """Rows (and columns) of one HF tensor inside a fused tensor; `hf` empty means padding rows."""

    hf: str
    rows: range
    cols: range | None  # None for a 1-D tensor
    heads: int = 0  # > 0: may only be cut into this many equal pieces
    inner: tuple[range, ...] = ()  # further dims, which are never cut


Fusion = Callable[[ModelSpec, Sequence[Block]], list[Block]]
Cut = Callable[[Sequence[Block], Shard], list[Block]]


# --- fusions -------------------------------------------------------------------------------------
def copy(spec: ModelSpec, parts: Sequence[Block]) -> list[Block]:
    (part,) = parts
    return [part]


def concat(spec: ModelSpec, parts: Sequence[Block]) -> list[Block]:
    return list(parts)


def concat_heads(spec: ModelSpec, parts: Sequence[Block]) -> list[Block]:
    return [part._replace(heads=len(part.rows) // spec.head_dim) for part in parts]


def qkv_grouped(spec: ModelSpec, parts: Sequence[Block]) -> list[Block]:
    """Megatron's order: for each kv group g its query heads, then k_g, then v_g."""
    groups = [Shard(g, spec.kv_heads) for g in range(spec.kv_heads)]
    return [
        part._replace(rows=group.part(len(part.rows), part.hf))
        for group in groups
        for part in parts
    ]


def qkv_grouped_gate(spec: ModelSpec, parts: Sequence[Block]) -> list[Block]:
    """`qkv_grouped` where q holds, per head, a query and then a gate: queries, gates, k_g, v_g."""
    size, ordered = spec.head_dim, []
    for block in qkv_grouped(spec, parts):
        if block.hf != parts[0].hf:
            ordered.append(block)
            continue
        for first in (0, size):
            starts = range(first, len(block.rows), 2 * size)
            ordered += [block._replace(rows=block.rows[i : i + size]) for i in starts]
    return ordered


def delta_heads(spec: ModelSpec, parts: Sequence[Block]) -> list[Block]:
    """A gated delta net: q, k, v and gate of all key heads, then step sizes, then decays.

    The files hold them per key head, in two tensors: (q, k, v, gate) and (step size, decay).
    """
    heads = spec.linear_key_heads
    values = spec.delta_values // heads
    steps = spec.linear_value_heads // heads
    wide, narrow = parts
    sections = (
        (wide, (spec.linear_key_dim, spec.linear_key_dim, values, values)),
        (narrow, (steps, steps)),
    )
    blocks = []
    for part, sizes in sections:
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        for first, size in zip(starts, sizes, strict=True):
            for head in range(heads):
                at = head * sum(sizes) + first
                blocks.append(part._replace(rows=part.rows[at : at + size], heads=heads))
    return blocks


def delta_conv(spec: ModelSpec, parts: Sequence[Block]) -> list[Block]:
    """The convolution of a gated delta net: q, k and v of all heads in one tensor."""
    (part,) = parts
    heads, keys = spec.linear_key_heads, spec.delta_keys
    cuts = (range(keys), range(keys, 2 * keys), range(2 * keys, len(part.rows)))
    return [part._replace(rows=part.rows[r.start : r.stop], heads=heads) for r in cuts]


def deinterleave(spec: ModelSpec, parts: Sequence[Block]) -> list[Block]:
    """One tensor whose even rows are the gate and whose odd rows are the up projection."""
    (part,) = parts
    return [part._replace(rows=part.rows[0::2]), part._replace(rows=part.rows[1::2])]


# --- cuts ----------------------------------------------------------------------------------------
def whole(blocks: Sequence[Block], shard: Shard) -> list[Block]:
    return list(blocks)


def flat(blocks: Sequence[Block], shard: Shard) -> list[Block]:
    keep = shard.part(sum(len(block.rows) for block in blocks), blocks[0].hf)
    kept, first = [], 0
    for block in blocks:
        start, stop = max(keep.start - first, 0), min(keep.stop - first, len(block.rows))
        if start < stop:
            kept.append(block._replace(rows=block.rows[start:stop]))
        first += len(block.rows)
    return kept


def each(blocks: Sequence[Block], shard: Shard) -> list[Block]:
    """Every block cut separately; ranks beyond the number of heads share a head (replicated kv)."""
    kept = []
    for block in blocks:
        share = shard
        if 0 < block.heads < shard.size:
            Shard(0, block.heads).part(shard.size, f"{block.hf}, ranks per head")
            share = Shard(shard.rank * block.heads // shard.size, block.heads)
        if block.heads:
            share.part(block.heads, f"{block.hf}, heads")
        rows = share.part(len(block.rows), block.hf)
        kept.append(block._replace(rows=block.rows[rows.start : rows.stop]))
    return kept


def each_rotary(blocks: Sequence[Block], shard: Shard) -> list[Block]:
    """q, k, v as `each` cuts them; of q and k, per head, its even rows and then its odd rows.

    An engine that rotates the two halves of a head stores weights of neighbours' pairs like this.
    """
    kept = []
    for place, (block, part) in enumerate(zip(blocks, each(blocks, shard), strict=True)):
        size = len(block.rows) // block.heads
        if place == len(blocks) - 1:
            kept.append(part)
            continue
        for first in range(0, len(part.rows), size):
            head = part.rows[first : first + size]
            kept += [part._replace(rows=head[0::2]), part._replace(rows=head[1::2])]
    return kept


def head_groups(blocks: Sequence[Block], shard: Shard) -> list[Block]:
    """Sections of one block per head (`delta_heads`): a rank's heads of every section."""
    heads = blocks[0].heads
    mine = shard.part(heads, f"{blocks[0].hf}, key heads")
    return [block for place, block in enumerate(blocks) if place % heads in mine]


def columns(blocks: Sequence[Block], shard: Shard) -> list[Block]:
    kept = []
    for block in blocks:
        assert block.cols is not None, f"{block.hf} has no columns to cut"
        kept.append(block._replace(cols=shard.part(len(block.cols), block.hf)))
    return kept


def first(blocks: Sequence[Block], shard: Shard) -> list[Block]:
    """For a bias added after a row-parallel product: a second copy would be added twice."""
    return list(blocks) if shard.rank == 0 else [block._replace(hf="") for block in blocks]


# --- tables --------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Rule:
    """One local tensor, or one per expert when its HF names hold {e}.

    Inside a layer, names are relative to the layer.  {e} is the global expert in `hf` and the slot
    on the rank in `local`; a local name without it stacks the rank's experts along dim 0.
    """

    local: str
    hf: tuple[str, ...]
    fuse: Fusion = copy
    cut: Cut = whole
    pad_vocab: bool = False  # rows are padded to the framework's vocabulary size
    dtype: str = ""  # fixed dtype, independent of the model's
    te: str = ""  # name in a Transformer Engine module, where it differs


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors that belong together in a layer: HF shapes, and the rules of both frameworks."""

    hf: Mapping[str, tuple[str, ...]]  # name -> sizes, attributes of ModelSpec
    megatron: tuple[Rule, ...]
    sglang: tuple[Rule, ...]
    when: str = ""  # attribute of ModelSpec that says whether the model has them; "" = always
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Other file form: [E, ...] tensor -> the per-expert tensors its rows hold, in order."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer to expand: its number in HF names, its prefix on the rank, its rules."""

    number: int
    prefix: str
    rules: tuple[Rule, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Position of one rank: its layers, and its shard along each axis that cuts weights."""

    first: tuple[Rule, ...]  # before the layers; () where the rank has no embedding
    layers: tuple[Layer, ...]
    last: tuple[Rule, ...]
    tp: Shard
    etp: Shard  # tensor parallelism inside an expert
    ep: Shard
    vocab_rows: int  # vocabulary with the framework's padding


def expand(spec: ModelSpec, hf_shapes: Mapping[str, tuple[int, ...]], place: Place) -> Named:
    """All tensors of one rank by local name, in the tables' order.

    Raises LayoutError when a rule names an HF tensor that the family's table does not have.
    """
    named: Named = {}

    def blocks(rule: Rule, prefix: str, expert: int = 0) -> list[Block]:
        names = [prefix + name.format(e=expert) for name in rule.hf]
        fused = rule.fuse(spec, [_block(name, hf_shapes, rule) for name in names])
        if rule.pad_vocab:
            pad = place.vocab_rows - spec.vocab_size
            fused.append(Block("", range(pad), fused[0].cols))
        return fused

    def add(rule: Rule, local_prefix: str = "", hf_prefix: str = "") -> None:
        kept = rule.cut(blocks(rule, hf_prefix), place.tp)
        named[local_prefix + rule.local] = _local(kept, dtype=rule.dtype)

    def add_experts(rule: Rule, local_prefix: str, hf_prefix: str) -> None:
        mine = place.ep.part(spec.experts, "experts")
        kept = [rule.cut(blocks(rule, hf_prefix, expert), place.etp) for expert in mine]
        if "{e}" not in rule.local:
            named[local_prefix + rule.local] = _stacked(kept, rule.dtype)
            return
        for slot, part in enumerate(kept):
            named[local_prefix + rule.local.format(e=slot)] = _local(part, dtype=rule.dtype)

    for rule in place.first:
        add(rule)
    for layer in place.layers:
        hf_prefix = spec.layer_prefix(layer.number)
        for rule in layer.rules:
            if "{e}" in rule.hf[0]:
                add_experts(rule, layer.prefix, hf_prefix)
            else:
                add(rule, layer.prefix, hf_prefix)
    for rule in place.last:
        add(rule)
    return named


def _block(name: str, hf_shapes: Mapping[str, tuple[int, ...]], rule: Rule) -> Block:
    if name not in hf_shapes:
        raise LayoutError(f"{rule.local}: its rule names {name}, which the family does not have")
    rows, *cols = (range(size) for size in hf_shapes[name])
    return Block(name, rows, cols[0] if cols else None, inner=tuple(cols[1:]))


def _local(blocks: Sequence[Block], lead: Box = (), dtype: str = "") -> Local:
    """Blocks stored end to end.  Padding, if any, comes last."""
    tiles, start, pad = [], 0, 0
    for block in blocks:
        stop = start + len(block.rows)
        if block.hf:
            assert not pad, f"{block.hf} follows padding rows"
            cols: Box = () if block.cols is None else (block.cols, *block.inner)
            local_cols = tuple(range(len(c)) for c in cols)
            box = (*lead, range(start, stop), *local_cols)
            tiles.append(Tile(block.hf, (block.rows, *cols), box))
        else:
            pad += len(block.rows)
        start = stop
    inner = () if blocks[0].cols is None else (blocks[0].cols, *blocks[0].inner)
    return Local((start, *map(len, inner)), tuple(tiles), pad, dtype)


def _stacked(experts: Iterable[Sequence[Block]], dtype: str) -> Local:
    """One tensor [experts on this rank, rows, cols]; without any tile, all of it is padding."""
    slots = [_local(part, (range(slot, slot + 1),)) for slot, part in enumerate(experts)]
    tiles = tuple(tile for slot in slots for tile in slot.tiles)
    return Local((len(slots), *slots[0].shape), tiles, 0 if tiles else len(slots), dtype)
