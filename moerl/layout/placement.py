"""Which tiles a rank holds: Megatron-core ranks, SGLang ranks, and the whole Hugging Face tensors.

Everything follows from sizes and a rank number; no process group is needed, so any process can
compute the tiles of every other one and all arrive at the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from moerl.errors import ConfigError, LayoutError
from moerl.layout.families import EMBED, FAMILY_TABLES, HEAD, TE_NAMES
from moerl.layout.rules import Place, Rule, Shard, Table, expand
from moerl.layout.spec import ModelSpec, padded_vocab
from moerl.layout.tiles import Box, Local, Named, Tile, full_box

Flavor = Literal["local", "te"]
"""Layer spec of the live GPTModel: megatron-core's own modules, or Transformer Engine's."""

SGLANG_VOCAB_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class Coords:
    """Place of a rank in the dense grid (tp, cp, dp, pp) and the expert grid (etp, ep, edp, pp)."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Sizes of the mesh axes.  Experts share the ranks of tp x cp x dp within a pipeline stage.

    Raises ConfigError when the expert axes do not divide a stage's ranks.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    vocab_divisible_by: int = 128  # Megatron's make_vocab_size_divisible_by

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp", "ep", "etp", "dp", "vocab_divisible_by"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"trainer.parallel.{name}", getattr(self, name), "must be at least 1"
                )
        if self.stage_size % (self.ep * self.etp):
            raise ConfigError(
                "trainer.parallel.ep",
                self.ep,
                f"ep * etp = {self.ep * self.etp} must divide tp * cp * dp = {self.stage_size}",
            )

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def world_size(self) -> int:
        return self.stage_size * self.pp

    def coords(self, rank: int) -> Coords:
        """Megatron-core's order "tp-cp-ep-dp-pp": tp fastest, pp slowest; experts have their grid.

        Source: megatron/core/parallel_state.py, initialize_model_parallel (0.16.1).
        """
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is not in 0..{self.world_size - 1}")
        pp, inner = divmod(rank, self.stage_size)
        return Coords(
            tp=inner % self.tp,
            cp=inner // self.tp % self.cp,
            dp=inner // (self.tp * self.cp),
            pp=pp,
            etp=inner % self.etp,
            ep=inner // self.etp % self.ep,
            edp=inner // (self.etp * self.ep),
        )


def check_parallel(spec: ModelSpec, layout: ParallelLayout) -> None:
    """Raises ConfigError naming the axis when the model's sizes do not divide by it."""
    needs = (
        ("tp", layout.tp, "num_key_value_heads", spec.kv_heads),
        ("pp", layout.pp, "num_hidden_layers", spec.layers),
        ("ep", layout.ep, "num_experts", spec.experts),
        ("etp", layout.etp, "moe_intermediate_size", spec.moe_ffn),
    )
    for axis, size, what, num in needs:
        if num % size:
            raise ConfigError(
                f"trainer.parallel.{axis}", size, f"must divide the model's {what} = {num}"
            )


def hf_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shape of every Hugging Face tensor, one expert per tensor, in the order of a checkpoint."""
    family = FAMILY_TABLES[spec.family]

    def sizes(names: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(getattr(spec, name) for name in names)

    root = {name: sizes(dims) for name, dims in family.root.items() if not _skip(name, spec)}
    shapes = {EMBED: root.pop(EMBED)}
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: sizes(dims) for name, dims in family.layer.items()}
        for expert in range(spec.experts):
            for name, dims in family.expert.items():
                shapes[prefix + name.format(e=expert)] = sizes(dims)
    return shapes | root


def hf_tiles(spec: ModelSpec) -> Named:
    """The whole Hugging Face tensors as if they were one rank's local tensors."""
    return {
        name: Local(shape, (Tile(name, full_box(shape), full_box(shape)),))
        for name, shape in hf_shapes(spec).items()
    }


def stacked_aliases(
    spec: ModelSpec, file_shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[str, Box]]:
    """Per-expert names that a file keeps stacked: name -> (tensor in the file, its 3-D box).

    transformers 5 may write `mlp.experts.gate_up_proj` [E, 2F, h] (gate rows first) and
    `mlp.experts.down_proj` [E, h, F].  The file decides, never the model class.
    Raises LayoutError when a stacked tensor has another shape.
    """
    shapes = hf_shapes(spec)
    aliases: dict[str, tuple[str, Box]] = {}
    for layer in spec.moe_layers:
        prefix = f"model.layers.{layer}."
        for stacked, parts in FAMILY_TABLES[spec.family].stacked.items():
            name = prefix + stacked
            if name not in file_shapes:
                continue
            rows = [shapes[prefix + part.format(e=0)][0] for part in parts]
            cols = shapes[prefix + parts[0].format(e=0)][1]
            want = (spec.experts, sum(rows), cols)
            if tuple(file_shapes[name]) != want:
                raise LayoutError(
                    f"{name} has shape {tuple(file_shapes[name])}, the config says {want}"
                )
            for expert in range(spec.experts):
                first = 0
                for part, num in zip(parts, rows, strict=True):
                    box = (range(expert, expert + 1), range(first, first + num), range(cols))
                    aliases[prefix + part.format(e=expert)] = (name, box)
                    first += num
    return aliases


def megatron_tiles(
    spec: ModelSpec, layout: ParallelLayout, rank: int, flavor: Flavor = "local"
) -> Named:
    """Tensors of one trainer rank, named as `GPTModel.named_parameters()` names them there.

    Layers and experts are counted from 0 on each rank.
    Raises ConfigError when sizes do not divide.
    """
    check_parallel(spec, layout)
    where = layout.coords(rank)
    first, last = where.pp == 0, where.pp == layout.pp - 1
    table = _untie(FAMILY_TABLES[spec.family].megatron, spec, shared=first and last)
    if flavor == "te":
        table = replace(table, layer=tuple(_te_name(rule) for rule in table.layer))
    elif flavor != "local":
        raise LayoutError(f"flavor = {flavor!r} is unknown; use local or te")
    place = Place(
        layers=Shard(where.pp, layout.pp).part(spec.layers, "layers"),
        first=first,
        last=last,
        tp=Shard(where.tp, layout.tp),
        etp=Shard(where.etp, layout.etp),
        ep=Shard(where.ep, layout.ep),
        vocab_rows=padded_vocab(spec, layout.tp, layout.vocab_divisible_by),
    )
    return expand(table, spec, hf_shapes(spec), place)


def sglang_tiles(spec: ModelSpec, tp: int, rank: int) -> Named:
    """Tensors of one engine rank (attention and experts both cut over tp, no expert parallelism).

    Covers the canonical layout of unquantised weights; a runner that repacks experts after loading
    must restore it first.  The vocabulary is padded to 64, or 64 * tp where that does not divide.
    Source: sglang 0.5.23, srt/layers/vocab_parallel_embedding.py, srt/models/qwen3_moe.py.
    """
    if not 0 <= rank < tp:
        raise LayoutError(f"rank {rank} is not in 0..{tp - 1}")
    padded = -(-spec.vocab_size // SGLANG_VOCAB_MULTIPLE) * SGLANG_VOCAB_MULTIPLE
    if padded % tp:
        multiple = SGLANG_VOCAB_MULTIPLE * tp
        padded = -(-spec.vocab_size // multiple) * multiple
    shard = Shard(rank, tp)
    place = Place(
        layers=range(spec.layers),
        first=True,
        last=True,
        tp=shard,
        etp=shard,
        ep=Shard(0, 1),
        vocab_rows=padded,
    )
    table = _untie(FAMILY_TABLES[spec.family].sglang, spec, shared=False)
    return expand(table, spec, hf_shapes(spec), place)


def _skip(name: str, spec: ModelSpec) -> bool:
    return spec.tied and name == HEAD


def _untie(table: Table, spec: ModelSpec, *, shared: bool) -> Table:
    """Tied embeddings: the head is the embedding's tensor (shared), or a second copy of it."""
    if not spec.tied:
        return table
    rest = tuple(rule for rule in table.last if rule.hf != (HEAD,))
    copies = tuple(replace(rule, hf=(EMBED,)) for rule in table.last if rule.hf == (HEAD,))
    return replace(table, last=rest if shared else rest + copies)


def _te_name(rule: Rule) -> Rule:
    return replace(rule, local=TE_NAMES.get(rule.local, rule.local))
