"""Which tiles a rank holds: Megatron-core ranks, SGLang ranks, and the whole Hugging Face tensors.

Everything follows from sizes and a rank number; no process group is needed, so any process can
compute the tiles of every other one and all arrive at the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from moerl.config.mesh import check_divides, check_mesh, stage_layers
from moerl.config.schema import ParallelConfig, TransformerImpl
from moerl.core.errors import ConfigError, LayoutError
from moerl.layout.common_parts import (
    EMBED,
    FIRST,
    HEAD,
    LAST,
    LAST_VALUES,
    MTP,
    MTP_COPIES,
    MTP_PREFIX,
    SCORE_BIAS,
)
from moerl.layout.families import FAMILY_TABLES, te_rule
from moerl.layout.rules import Layer, Part, Place, Rule, Shard, expand
from moerl.layout.spec import ModelSpec, padded_vocab
from moerl.layout.tiles import Box, Local, Named, Tile, full_box

LayerSpec = Literal["local", "te"]
"""Layer spec of the live GPTModel: megatron-core's own modules, or Transformer Engine's."""


def layers_of(impl: TransformerImpl, *, gpu: bool) -> LayerSpec:
    """Layers that `trainer.transformer_impl` chooses for ranks with or without a GPU."""
    return "te" if gpu and impl != "local" else "local"


SGLANG_VOCAB_MULTIPLE = 64
SGLANG_SHARES_HEAD = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "ernie4_5_moe",
    "llama4",
    "qwen3",
    "llama",
)
"""Families whose SGLang class uses the embedding as a tied head; others allocate a second one."""


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


def coords_of(layout: ParallelConfig, rank: int) -> Coords:
    """Megatron-core's order "tp-cp-ep-dp-pp": tp fastest, pp slowest; experts have their grid.

    Source: megatron/core/parallel_state.py, initialize_model_parallel (0.19.2).
    """
    if not 0 <= rank < layout.world_size:
        raise LayoutError(f"rank {rank} is not in 0..{layout.world_size - 1}")
    pp, inner = divmod(rank, layout.stage_size)
    return Coords(
        tp=inner % layout.tp,
        cp=inner // layout.tp % layout.cp,
        dp=inner // (layout.tp * layout.cp),
        pp=pp,
        etp=inner % layout.etp,
        ep=inner // layout.etp % layout.ep,
        edp=inner // (layout.etp * layout.ep),
    )


def check_parallel(spec: ModelSpec, layout: ParallelConfig) -> None:
    """Raises ConfigError naming the axis that does not fit the others, or the model's sizes."""
    check_mesh(layout)
    sizes = {
        "num_key_value_heads": spec.kv_heads,
        "intermediate_size": spec.ffn,
        "shared experts' width": spec.shared_ffn,
        "linear_num_key_heads": spec.linear_key_heads,
        "num_experts": spec.experts,
        "moe_intermediate_size": spec.moe_ffn,
        "num_hidden_layers": spec.layers,
    }
    check_divides(layout, sizes)
    if spec.o_bias and layout.etp > 1:
        raise ConfigError(
            "trainer.parallel.etp", layout.etp, "megatron-core cuts no experts with biases; use 1"
        )


def chunk_layers(num_layers: int, layout: ParallelConfig, stage: int, chunk: int) -> range:
    """Global numbers of the layers in one model chunk of a pipeline stage.

    Source: megatron/core/transformer/transformer_layer.py, get_transformer_layer_offset (0.19.2).
    """
    per_chunk = [num // layout.vpp for num in stage_layers(num_layers, layout)]
    start = chunk * sum(per_chunk) + sum(per_chunk[:stage])
    return range(start, start + per_chunk[stage])


def hf_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shape of every Hugging Face tensor, one expert per tensor, in the order of a checkpoint."""
    return dict(_hf_shapes(spec))


@lru_cache(maxsize=8)
def _hf_shapes(spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
    def sizes(names: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(getattr(spec, name) for name in names)

    shapes = {spec.root + name: sizes(dims) for name, dims in FIRST.hf.items()}
    for layer in range(spec.layers + spec.mtp_layers):
        prefix = spec.layer_prefix(layer)
        for part in _parts(spec, layer):
            per_expert = {name: dims for name, dims in part.hf.items() if "{e}" in name}
            shapes |= {prefix + n: sizes(d) for n, d in part.hf.items() if n not in per_expert}
            for expert in range(spec.experts if per_expert else 0):
                for name, dims in per_expert.items():
                    shapes[prefix + name.format(e=expert)] = sizes(dims)
    return shapes | {
        spec.root + name: sizes(dims)
        for name, dims in (LAST_VALUES if spec.values else LAST).hf.items()
        if not ((spec.tied and name == HEAD) or (name == SCORE_BIAS and not spec.value_bias))
    }


def mtp_copies(spec: ModelSpec) -> dict[str, str]:
    """Tensors that a checkpoint repeats in its prediction layers: copy -> original.

    They are not separate tensors here: a reader ignores them, a writer writes them again.
    """
    return {
        f"model.layers.{layer}.{name}": original
        for layer in range(spec.layers, spec.layers + spec.mtp_layers)
        for name, original in MTP_COPIES.items()
    }


def is_repeated(spec: ModelSpec, name: str) -> bool:
    """Whether a file may hold this tensor in addition to `hf_shapes`, without being model state.

    It is the head of a tied model, a copy in a prediction layer, an old rotary table, or a part of
    the model around a language model.
    """
    if not name.startswith(spec.root):
        return True
    tied_head = spec.tied and name == spec.root + HEAD
    return tied_head or name in mtp_copies(spec) or name.endswith("rotary_emb.inv_freq")


def hf_tiles(spec: ModelSpec) -> Named:
    """The whole Hugging Face tensors as if they were one rank's local tensors."""
    return {
        name: Local(shape, (Tile(name, full_box(shape), full_box(shape)),))
        for name, shape in hf_shapes(spec).items()
    }


def stacked_aliases(
    spec: ModelSpec, file_shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[str, Box]]:
    """Per-expert names that a file keeps stacked: name -> (tensor in the file, its box there).

    transformers 5 may write `mlp.experts.gate_up_proj` [E, 2F, h] (gate rows first) and
    `mlp.experts.down_proj` [E, h, F].  The file decides, never the model class.
    The box of a tensor in `transposed_stacks` is in the file's own order, [expert, cols, rows].
    Raises LayoutError when a stacked tensor has another shape.
    """
    aliases: dict[str, tuple[str, Box]] = {}
    for name, (want, places) in stacked_forms(spec).items():
        if name not in file_shapes:
            continue
        if tuple(file_shapes[name]) != want:
            raise LayoutError(
                f"{name} has shape {tuple(file_shapes[name])}, the config says {want}"
            )
        aliases |= {part: (name, box) for part, box in places.items()}
    return aliases


def stacked_forms(spec: ModelSpec) -> dict[str, tuple[tuple[int, ...], dict[str, Box]]]:
    """Experts as one tensor per layer: name -> (shape in the file, box of each expert's tensor).

    The boxes of one name cover it exactly, so a writer of stacked files needs only them.
    """
    shapes = _hf_shapes(spec)
    swap = transposed_stacks(spec)
    forms: dict[str, tuple[tuple[int, ...], dict[str, Box]]] = {}
    for layer in range(spec.layers + spec.mtp_layers):
        prefix = spec.layer_prefix(layer)
        for part in _parts(spec, layer):
            for stacked, names in part.stacked.items():
                rows = [shapes[prefix + name.format(e=0)][0] for name in names]
                cols = shapes[prefix + names[0].format(e=0)][1:]
                boxes: dict[str, Box] = {}
                for expert in range(spec.experts):
                    start = 0
                    for name, num in zip(names, rows, strict=True):
                        box = (range(start, start + num), *full_box(cols))
                        box = box[::-1] if swap else box
                        boxes[prefix + name.format(e=expert)] = (range(expert, expert + 1), *box)
                        start += num
                inner = (sum(rows), *cols)
                shape = (spec.experts, *(inner[::-1] if swap else inner))
                forms[prefix + stacked] = (shape, boxes)
    return forms


def transposed_stacks(spec: ModelSpec) -> bool:
    """Whether plain files keep stacked experts as [E, cols, rows] (gpt-oss in BF16).

    MXFP4 files of the same family keep [E, rows, cols]: the kind of checkpoint decides, because the
    released down_proj is square and its shape says nothing.
    """
    return FAMILY_TABLES[spec.family].expert_files == "transposed"


def megatron_tiles(
    spec: ModelSpec,
    layout: ParallelConfig,
    rank: int,
    layer_spec: LayerSpec = "local",
) -> Named:
    """Tensors of one trainer rank, named as `GPTModel.named_parameters()` names them there.

    Layers and experts are counted from 0 on each rank; with vpp > 1 the names of model chunk c
    start with `chunk{c}.`.  Buffers that are weights (expert bias) are included.
    Raises ConfigError when sizes do not divide.
    """
    named: Named = {}
    for prefix, place in megatron_places(spec, layout, rank, layer_spec):
        tensors = expand(spec, _hf_shapes(spec), place)
        named |= {prefix + name: local for name, local in tensors.items()}
    return named


def megatron_places(
    spec: ModelSpec,
    layout: ParallelConfig,
    rank: int,
    layer_spec: LayerSpec = "local",
) -> Iterator[tuple[str, Place]]:
    """(prefix of local names, place) of each model chunk of a trainer rank; see megatron_tiles."""
    check_parallel(spec, layout)
    if layer_spec not in ("local", "te"):
        raise LayoutError(f"layer_spec = {layer_spec!r} is unknown; use local or te")
    where = coords_of(layout, rank)
    for chunk in range(layout.vpp):
        place = Place(
            *_megatron_chunk(spec, layout, where.pp, chunk),
            tp=Shard(where.tp, layout.tp),
            etp=Shard(where.etp, layout.etp),
            ep=Shard(where.ep, layout.ep),
            vocab_rows=padded_vocab(spec, layout.tp, layout.vocab_divisible_by),
        )
        yield (
            f"chunk{chunk}." if layout.vpp > 1 else "",
            _te_place(place) if layer_spec == "te" else place,
        )


def _megatron_chunk(
    spec: ModelSpec, layout: ParallelConfig, stage: int, chunk: int
) -> tuple[tuple[Rule, ...], tuple[Layer, ...], tuple[Rule, ...]]:
    """Rules before, in and after the layers of one model chunk."""
    is_first = stage == 0 and chunk == 0
    is_last = stage == layout.pp - 1 and chunk == layout.vpp - 1
    numbers = chunk_layers(spec.layers, layout, stage, chunk)
    layers = [
        Layer(number, f"decoder.layers.{index}.", _megatron_rules(spec, number))
        for index, number in enumerate(numbers)
    ]
    if is_last:
        layers += _megatron_mtp(spec)
    # prediction layers embed the next token, so their stage has the embedding as well
    embeds = is_first or (is_last and spec.mtp_layers)
    last = _untie(LAST.megatron, spec, shared=is_first) if is_last else ()
    if is_last and spec.values:
        last = tuple(
            rule for rule in LAST_VALUES.megatron if spec.value_bias or rule.hf != (SCORE_BIAS,)
        )
    first = _rooted(FIRST.megatron, spec) if embeds else ()
    return first, tuple(layers), _rooted(last, spec)


def _megatron_mtp(spec: ModelSpec) -> Iterator[Layer]:
    for i in range(spec.mtp_layers):
        prefix, number = MTP_PREFIX.format(i=i), spec.layers + i
        yield Layer(number, prefix, MTP.megatron)
        yield Layer(number, prefix + "mtp_model_layer.", _megatron_rules(spec, number))


def _megatron_rules(spec: ModelSpec, number: int) -> tuple[Rule, ...]:
    """Rules of the ordinary layer, also as the body of a prediction layer."""
    return tuple(rule for part in _parts(spec, number, with_mtp=False) for rule in part.megatron)


def _te_place(place: Place) -> Place:
    layers = tuple(
        Layer(layer.number, layer.prefix, tuple(map(te_rule, layer.rules)))
        for layer in place.layers
    )
    return Place(place.first, layers, place.last, place.tp, place.etp, place.ep, place.vocab_rows)


def sglang_tiles(spec: ModelSpec, tp: int, rank: int, ep: int = 1, dp: int = 1) -> Named:
    """Tensors of one engine rank: attention and embedding cut over tp / dp, dense layers, shared
    experts and the head over tp, experts over ep and then tp / ep.

    dp: ranks of data-parallel attention.  Covers the canonical layout of unquantised weights; a
    runner that repacks experts after loading must restore it first.  Prediction layers belong to
    another model there and are left out.
    Source: sglang 0.5.23, srt/layers/vocab_parallel_embedding.py, srt/models,
    srt/runtime_context.py (the inner ranks of tp cut attention, the outer ranks hold experts).
    """
    named: Named = {}
    for place in sglang_places(spec, tp, rank, ep, dp):
        named |= expand(spec, _hf_shapes(spec), place)
    return named


def sglang_places(
    spec: ModelSpec, tp: int, rank: int, ep: int = 1, dp: int = 1
) -> tuple[Place, Place, Place]:
    """Attention with the embedding, the layers' rest, the head, of a rank; see sglang_tiles."""
    if not 0 <= rank < tp:
        raise LayoutError(f"rank {rank} is not in 0..{tp - 1}")
    if tp % ep or tp % dp:
        raise LayoutError(f"engine ep = {ep} and dp = {dp} must divide tp = {tp}")
    moe_tp, attention_tp = tp // ep, tp // dp
    attention = Place(
        first=_rooted(FIRST.sglang, spec, names=True),
        layers=_sglang_layers(spec, attention=True),
        last=(),
        tp=Shard(rank % attention_tp, attention_tp),
        etp=Shard(0, 1),
        ep=Shard(0, 1),
        vocab_rows=_sglang_vocab(spec, attention_tp),
    )
    feed_forward = Place(
        first=(),
        layers=_sglang_layers(spec, attention=False),
        last=(),
        tp=Shard(rank, tp),
        etp=Shard(rank % moe_tp, moe_tp),
        ep=Shard(rank // moe_tp, ep),
        vocab_rows=_sglang_vocab(spec, tp),
    )
    head = replace(
        feed_forward,
        layers=(),
        last=_rooted(
            _untie(LAST.sglang, spec, shared=spec.family in SGLANG_SHARES_HEAD), spec, names=True
        ),
        tp=Shard(rank, tp),
    )
    return attention, feed_forward, head


def _sglang_layers(spec: ModelSpec, *, attention: bool) -> tuple[Layer, ...]:
    """Every layer with the rules of its attention and norms, or of its feed-forward part."""
    family = FAMILY_TABLES[spec.family]
    every = (*family.every, *family.linear)
    layers = []
    for number in range(spec.layers):
        parts = [part for part in _parts(spec, number) if (part in every) == attention]
        rules = tuple(rule for part in parts for rule in part.sglang)
        layers.append(Layer(number, spec.layer_prefix(number), rules))
    return tuple(layers)


def _sglang_vocab(spec: ModelSpec, ranks: int) -> int:
    """Vocabulary rows: padded to 64, or to 64 * ranks where that does not divide."""
    padded = -(-spec.vocab_size // SGLANG_VOCAB_MULTIPLE) * SGLANG_VOCAB_MULTIPLE
    multiple = SGLANG_VOCAB_MULTIPLE * ranks
    return padded if padded % ranks == 0 else -(-spec.vocab_size // multiple) * multiple


def _parts(spec: ModelSpec, layer: int, with_mtp: bool = True) -> Iterator[Part]:
    """Parts of layer number `layer`; prediction layers end with an ordinary MoE layer."""
    family = FAMILY_TABLES[spec.family]
    if layer >= spec.layers and with_mtp:
        yield MTP
    routes = layer in spec.moe_layers or layer >= spec.layers
    first = family.linear if layer in spec.linear_layers else family.every
    for part in (*first, *(family.moe if routes else family.dense)):
        if not part.when or getattr(spec, part.when):
            yield part


def _untie(rules: tuple[Rule, ...], spec: ModelSpec, *, shared: bool) -> tuple[Rule, ...]:
    """Tied embeddings: the head is the embedding's tensor (shared), or a second copy of it."""
    if not spec.tied:
        return rules
    rest = tuple(rule for rule in rules if rule.hf != (HEAD,))
    copies = tuple(replace(rule, hf=(EMBED,)) for rule in rules if rule.hf == (HEAD,))
    return rest if shared else rest + copies


def _rooted(rules: tuple[Rule, ...], spec: ModelSpec, *, names: bool = False) -> tuple[Rule, ...]:
    """Rules outside the layers with the root of a file's names, and of local names."""
    if not spec.root:
        return rules
    return tuple(
        replace(
            rule,
            hf=tuple(spec.root + hf for hf in rule.hf),
            local=(spec.root if names else "") + rule.local,
        )
        for rule in rules
    )
