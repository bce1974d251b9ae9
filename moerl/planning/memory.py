"""Memory model: trainer ranks by pipeline stage, engine ranks, and host memory of nodes.

Legend (of one rank; bytes unless stated otherwise)
    P, X   parameters outside and inside of routed experts     t  tokens of a microbatch / cp
    h, V   hidden size, vocabulary                              s  t / tp (sequence parallel)
    K, E   experts per token, experts                           F  intermediate size of an expert

    weights      b (P + X)          b = 2 for bf16, 4 for fp32
    gradients    4 (P + X)          Megatron's buffers, summed in fp32
    optimizer    m (P / shard + X / expert shard)    m = 12 in bf16 (fp32 copy, two moments), 8 in
    fp32; shard = dp cp and its expert counterpart with the distributed optimizer, or 1
    activations  with full recompute, the input of each layer for each microbatch in flight (pp -
    stage of them, 1F1B), and the activations inside one layer; without it inside every layer
    logits       10 t V / tp on the last stage: bf16, fp32 and their gradient
    replay       routes of the stage's layers, int64 in the router: 8 s K per layer
    others       further models on the same ranks: reference b (P + X); critic as the policy
    runtime      a constant for CUDA, NCCL and allocator waste; not measured here

Experts are assumed to be equally popular: s K rows arrive at each rank.  The most popular rank of a
batch may need several times as much; the rest of the GPU is for it.  `tests/unit/test_memory.py`
has published figures and the model's errors, docs/clusters.md explains them.

Source of the byte model: Megatron's own report (6 + 12 / shard bytes per parameter).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from moerl.config.schema import ParallelConfig
from moerl.layout.shards import chunk_layers
from moerl.layout.spec import ModelSpec, padded_vocab
from moerl.planning.layout_check import ITEMSIZE, stage_bytes
from moerl.weight_sync.held_shards import EngineLayout

Recompute = Literal["none", "selective", "full"]

RUNTIME = 3_000_000_000
"""CUDA context, NCCL buffers, allocator waste; what people report for 8-GPU nodes, 2 to 4 GB."""


@dataclass(frozen=True, slots=True)
class Training:
    """Settings that decide the memory of a trainer rank."""

    dtype: str = "bf16"  # bf16 | fp32
    tokens: int = 8192  # per microbatch, before cp
    recompute: Recompute = "none"
    distributed_optimizer: bool = True
    gpu: bool = True


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Memory of one rank of one pipeline stage, bytes."""

    stage: int
    parameters: int  # a count
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    replay: int
    others: int  # reference, teacher and critic on the same ranks
    runtime: int
    host: int  # node memory: weight snapshot of a publish

    @property
    def total(self) -> int:
        parts = (self.static, self.activations, self.logits, self.replay, self.others)
        return sum(parts) + self.runtime

    @property
    def static(self) -> int:
        """Memory that does not depend on the batch."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Memory of one rank of an engine, bytes."""

    weights: int
    kv: int
    kv_token: int  # per token
    host: int  # node memory: staging segment

    @property
    def total(self) -> int:
        return self.weights + self.kv


def trainer_memory(
    spec: ModelSpec,
    layout: ParallelConfig,
    training: Training,
    *,
    ref_models: Sequence[ModelSpec] = (),
    critic: bool = False,
) -> tuple[TrainerMemory, ...]:
    """The largest rank of every pipeline stage.

    ref_models: reference and teacher on the same ranks; critic: True if it is too.  Raises
    ConfigError or LayoutError when sizes do not divide.
    """
    dense, expert = stage_bytes(spec, layout, "te" if training.gpu else "local")
    itemsize = ITEMSIZE.get(spec.dtype, 2)
    ranks = [
        _stage(spec, layout, training, p, max(dense[p]) // itemsize, max(expert[p]) // itemsize)
        for p in range(layout.pp)
    ]
    beside = [ref_model_memory(other, layout, training) for other in ref_models]
    return tuple(
        replace(
            rank,
            others=sum(other[p].weights for other in beside) + (rank.static if critic else 0),
        )
        for p, rank in enumerate(ranks)
    )


def ref_model_memory(
    spec: ModelSpec, layout: ParallelConfig, training: Training
) -> tuple[TrainerMemory, ...]:
    """The same for a model that only scores: weights, activations inside one layer, logits.

    Without gradients no activations are kept between layers; routers are live.
    """
    alone = trainer_memory(spec, layout, replace(training, recompute="full"))
    one = [max(_insides(spec, layout, training, rank.stage), default=0) for rank in alone]
    return tuple(
        replace(rank, gradients=0, optimizer=0, activations=inside, replay=0, host=0)
        for rank, inside in zip(alone, one, strict=True)
    )


def _insides(spec: ModelSpec, layout: ParallelConfig, training: Training, stage: int) -> list[int]:
    """Activations inside each layer of a stage."""
    width = 2 if training.dtype == "bf16" else 4
    tokens = -(-training.tokens // layout.cp)
    chunks = [chunk_layers(spec.layers, layout, stage, chunk) for chunk in range(layout.vpp)]
    return [
        layer_activations(spec, layout, tokens, width, number)
        for chunk in chunks
        for number in chunk
    ]


def _stage(
    spec: ModelSpec, layout: ParallelConfig, training: Training, stage: int, dense: int, expert: int
) -> TrainerMemory:
    half = training.dtype == "bf16"
    width, moments = (2, 12) if half else (4, 8)
    sharded = training.distributed_optimizer
    shard = layout.dp * layout.cp if sharded else 1
    expert_shard = layout.stage_size // (layout.ep * layout.etp) if sharded else 1
    chunks = [chunk_layers(spec.layers, layout, stage, chunk) for chunk in range(layout.vpp)]
    layers = [number for chunk in chunks for number in chunk]
    tokens = -(-training.tokens // layout.cp)
    last = stage == layout.pp - 1
    vocab = padded_vocab(spec, layout.tp, layout.vocab_divisible_by) // layout.tp
    in_moe = [number for number in layers if number in set(spec.moe_layers)]
    return TrainerMemory(
        stage=stage,
        parameters=dense + expert,
        weights=width * (dense + expert),
        gradients=4 * (dense + expert),
        optimizer=moments * dense // shard + moments * expert // expert_shard,
        activations=_activations(spec, layout, training, stage),
        logits=(10 if half else 12) * tokens * vocab if last else 0,
        replay=8 * (tokens // layout.tp) * spec.experts_per_token * len(in_moe),
        others=0,
        runtime=RUNTIME if training.gpu else 0,
        host=width * (dense + expert),
    )


def _activations(spec: ModelSpec, layout: ParallelConfig, training: Training, stage: int) -> int:
    width = 2 if training.dtype == "bf16" else 4
    tokens = -(-training.tokens // layout.cp)
    inside = _insides(spec, layout, training, stage)
    # 1F1B: the first stage holds most; the interleaved schedule a little more per chunk
    in_flight = layout.pp - stage
    if layout.vpp > 1:
        in_flight = round(in_flight * (1 + (layout.pp - 1) / (layout.pp * layout.vpp))) or 1
    if training.recompute != "full":
        return in_flight * sum(inside)
    kept = width * spec.hidden * (tokens // layout.tp)
    return in_flight * kept * len(inside) + max(inside, default=0)


def layer_activations(
    spec: ModelSpec, layout: ParallelConfig, tokens: int, width: int, number: int
) -> int:
    """Bytes that the backward pass of one layer needs, flash attention, no recompute.

    tokens: of a microbatch on this context rank.
    """
    own = tokens // layout.tp  # sequence parallel outside of attention and matrix products
    norms = 4 * own * spec.hidden  # two norms' inputs, and their outputs before a column cut
    return width * (
        norms + _attention(spec, layout.tp, tokens) + _feed_forward(spec, layout, tokens, number)
    )


def _attention(spec: ModelSpec, tp: int, tokens: int) -> int:
    """Elements: queries, keys, values, output, fp32 softmax sums."""
    if spec.kv_lora:
        heads = spec.heads // tp
        latent = spec.q_lora + spec.kv_lora + spec.qk_rope
        per_head = 2 * (spec.qk_nope + spec.qk_rope) + 2 * spec.v_head
        return tokens * (latent + heads * (per_head + 2))
    kv_rows = max(spec.kv_rows // tp, spec.head_dim)
    return tokens * (2 * spec.q_rows // tp + 2 * kv_rows + 2 * spec.heads // tp)


def _feed_forward(spec: ModelSpec, layout: ParallelConfig, tokens: int, number: int) -> int:
    """Elements: router, rows dispatched and permuted, both products, the combined output."""
    if number not in spec.moe_layers:
        return tokens * 3 * spec.ffn // layout.tp
    own = tokens // layout.tp
    rows = own * spec.experts_per_token * layout.etp  # gathered over expert tensor ranks
    routed = rows * (3 * spec.hidden + 3 * spec.moe_ffn // layout.etp)
    shared = tokens * 3 * spec.shared_ffn // layout.tp
    return routed + shared + 2 * own * spec.experts


def engine_memory(
    spec: ModelSpec, engine: EngineLayout, received: float, tokens: int, dtype: str
) -> EngineMemory:
    """Memory of an engine rank.  received: bytes of its weights; tokens: size of its KV cache."""
    width = ITEMSIZE.get(dtype, 2)
    attention_ranks = engine.tp // engine.dp
    if spec.kv_lora:
        rows = spec.kv_lora + spec.qk_rope  # the latent, replicated on each rank
    else:
        rows = 2 * spec.head_dim * max(1, spec.kv_heads // attention_ranks)
    token = width * rows * spec.layers
    return EngineMemory(
        weights=round(received), kv=token * tokens, kv_token=token, host=round(received)
    )
