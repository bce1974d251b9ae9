"""Memory model: trainer ranks by pipeline stage, engine ranks, and host memory of nodes.

Legend (of one rank; bytes unless stated otherwise)
    P, X   parameters outside and inside of routed experts     t  tokens of a microbatch / cp
    B      biases of the routers, fp32, that are not trained
    h, V   hidden size, vocabulary                              s  t / tp (sequence parallel)
    K, E   experts per token, experts                           F  intermediate size of an expert

    weights      b (P + X) + 4 B    b = 2 for bf16, 4 for fp32; without prediction layers, which
    are not trained
    gradients    4 (P + X)          Megatron's buffers, summed in fp32; reduced in place, so buckets
    of the reduction cost nothing
    optimizer    m (P / shard + X / expert shard)    m = 12 in bf16 (fp32 copy, two moments), 8 in
    fp32, less in other dtypes or on the host (`optimizer_bytes`); shard = dp cp and its expert
    counterpart with the distributed optimizer, or 1
    activations  with full recompute, the input of each layer for each microbatch in flight (pp -
    stage of them, 1F1B), and the activations inside one layer; without it inside every layer
    and, where local layers on a GPU multiply experts in groups, the widest weights of a layer's
    experts stacked, and their gradients
    head         on the last stage (3 b + 4) t h, hidden states of tokens, as if all were sampled,
    and their gradient; b h V / tp, a placeholder for the gradient of a trained head; three blocks
    of logits; an fp32 head of bf16 weights (2 b + 8) t h, and two blocks of the weight in fp32
    replay       routes of the stage's layers, int64 in the router: 8 s K per layer
    others       further models on the same ranks: reference b (P + X); critic as the policy
    adapters     with LoRA gradients and optimizer are of the factors alone, which are weights too;
    W0 of adapted weights is in host memory, on engines in the place of staging, and reaches the
    trainer's device through two buckets of the largest weight; with lora.base = device W0 stays
    on the device, and with lora.delivery = adapter the weights are W0
    buckets      a publish: two on the trainer's device, two on the engine's
    runtime      a constant for CUDA, NCCL and allocator waste; not measured here

Host memory: the trainer's weight snapshot, as many bytes as its weights, its offloaded optimizer,
and its copy for a checkpoint: its weights on the first data-parallel rank, and fp32
weights and moments of the shard, 12 (P / shard + X / expert shard), unless they are offloaded; the
engine's staging, as many bytes as its rank's weights.

Experts are assumed to be equally popular: s K rows arrive at each rank.  The most popular rank of a
batch may need several times as much; the rest of the GPU is for it.  `tests/unit/test_memory.py`
has published figures and the model's errors, docs/clusters.md explains them.

Source of the byte model: Megatron's own report (6 + 12 / shard bytes per parameter).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from moerl.config import Config
from moerl.config.lora_settings import LoraConfig
from moerl.config.optimizer_settings import optimizer_args
from moerl.config.schema import ParallelConfig, TeacherConfig, TrainerConfig
from moerl.layout.adapters import projections
from moerl.layout.shards import LayerSpec, chunk_layers, hf_shapes, layers_of, megatron_tiles
from moerl.layout.spec import ModelSpec, padded_vocab
from moerl.planning.layout_check import ITEMSIZE, stage_bytes
from moerl.weight_sync.held_shards import EngineLayout

Recompute = Literal["none", "selective", "full"]

RUNTIME = 3_000_000_000
"""CUDA context, NCCL buffers, allocator waste; what people report for 8-GPU nodes, 2 to 4 GB."""


LOGITS_OF_A_BLOCK = 1 << 24
"""Logits in fp32 that exist at a time (`moerl/algorithms/head_logprob.py`)."""
ENTRIES_OF_A_BLOCK, COPIED_BY_A_BLOCK = 1 << 15, 1 << 25
"""Entries of the vocabulary that rows with sampling masks share; numbers of the weight that they
copy.  Both are upper limits.
"""

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True)
class OptimizerBytes:
    """Per parameter of a rank's shard."""

    device: int = 12  # bf16: fp32 copy and two moments
    host: int = 0
    saved: int = 12  # host memory of a checkpoint's copy in fp32; what is on the host is not copied


def optimizer_bytes(trainer: TrainerConfig) -> OptimizerBytes:
    """Bytes that `trainer.optimizer_args` leave on the device.

    Offloaded are fp32 copy, two moments and a pinned copy of the fp32 gradient.  The
    precision-aware optimizer keeps the 16 bits of the fp32 copy that the bf16 weight lacks, unless
    an option differs; a checkpoint unscales its moments into its copy.
    """
    args = optimizer_args(trainer)
    if args.get("optimizer_cpu_offload"):
        return OptimizerBytes(0, 16, saved=0)
    if not args.get("use_precision_aware_optimizer"):
        if trainer.dtype == "bf16":
            return OptimizerBytes()
        return OptimizerBytes(8, saved=12 if trainer.optimizer.distributed else 8)
    copy = _BYTES[args.get("main_params_dtype", "fp32")]
    if copy == 4 and args.get("store_param_remainders", True):
        copy = 2
    moments = [_BYTES[args.get(name, "fp32")] for name in ("exp_avg_dtype", "exp_avg_sq_dtype")]
    return OptimizerBytes(copy + sum(moments))


@dataclass(frozen=True, slots=True)
class Training:
    """Settings that decide the memory of a trainer rank."""

    dtype: str = "bf16"  # bf16 | fp32
    tokens: int = 8192  # per microbatch, before cp
    recompute: Recompute = "none"
    distributed_optimizer: bool = True
    optimizer: OptimizerBytes = OptimizerBytes()
    bucket: int = 0  # bytes of a publish's bucket, sync.bucket_bytes
    gpu: bool = True
    layers: LayerSpec = "te"
    lora: LoraConfig = field(default_factory=LoraConfig)
    fp32_head: bool = False  # model.fp32_lm_head

    @property
    def width(self) -> int:
        """Bytes of a weight and of an activation."""
        return 2 if self.dtype == "bf16" else 4


def training_of(config: Config, *, gpu: bool) -> Training:
    """The trainer's settings as the memory model reads them."""
    recompute: Recompute = config.trainer.megatron.get("recompute_granularity") or "none"
    return Training(
        dtype=config.trainer.dtype,
        tokens=config.trainer.max_tokens_per_microbatch,
        recompute=recompute,
        distributed_optimizer=config.trainer.optimizer.distributed,
        optimizer=optimizer_bytes(config.trainer),
        bucket=config.sync.bucket_bytes,
        gpu=gpu,
        layers=layers_of(config.trainer.transformer_impl, gpu=gpu),
        lora=config.lora,
        fp32_head=config.model.fp32_lm_head,
    )


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Memory of one rank of one pipeline stage, bytes."""

    stage: int
    parameters: int  # a count, with factors
    weights: int
    gradients: int
    optimizer: int
    activations: int
    head: int
    replay: int = 0
    others: int = 0  # reference, teacher and critic on the same ranks
    buckets: int = 0  # of a publish
    runtime: int = 0
    snapshot: int = 0  # host memory: weights of a publish
    offloaded: int = 0  # host memory: optimizer
    checkpoint: int = 0  # host memory: copy of the state that is written
    base: int = 0  # host memory: W0 of adapted weights
    teachers: int = 0  # host memory: copy of a version that becomes a teacher, and means
    parked: int = 0  # host memory: optimizer and weights that leave the device in turns
    device_base: int = 0  # W0 of adapted weights on the device, or the two buckets that bring it

    @property
    def total(self) -> int:
        """On the device."""
        parts = (self.static, self.activations, self.head, self.replay, self.others)
        return sum(parts) + self.device_base + self.buckets + self.runtime

    @property
    def host(self) -> int:
        kept = (self.snapshot, self.offloaded, self.checkpoint, self.base, self.teachers)
        return sum(kept) + self.parked

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
    update: int  # a publish: two buckets, or a staged version
    host: int  # host memory: staging

    @property
    def total(self) -> int:
        """Bytes that SGLang's share of the GPU holds; `update` is outside of it."""
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
    spec = replace(spec, mtp_layers=0)  # as the trainer builds it
    dense, expert = stage_bytes(spec, layout, training.layers)
    itemsize = ITEMSIZE.get(spec.dtype, 2)
    ranks = [
        _stage(
            spec,
            layout,
            training,
            p,
            (max(dense[p]) - _router_biases(spec, layout, p)) // itemsize,
            max(expert[p]) // itemsize,
        )
        for p in range(layout.pp)
    ]
    beside = [ref_model_memory(other, layout, training) for other in ref_models]
    return tuple(
        replace(
            rank,
            others=sum(other[p].weights for other in beside) + (rank.static if critic else 0),
            offloaded=rank.offloaded * (2 if critic else 1),
            checkpoint=rank.checkpoint * (2 if critic else 1),
        )
        for p, rank in enumerate(ranks)
    )


def with_teachers(
    ranks: Sequence[TrainerMemory], training: Training, followers: Sequence[TeacherConfig]
) -> tuple[TrainerMemory, ...]:
    """With the copy of trained weights that is written for teachers, and their means in fp32."""
    each = training.width + 4 * sum(1 for teacher in followers if teacher.ema) if followers else 0
    return tuple(replace(rank, teachers=each * (rank.gradients // 4)) for rank in ranks)


def ref_model_memory(
    spec: ModelSpec, layout: ParallelConfig, training: Training
) -> tuple[TrainerMemory, ...]:
    """The same for a model that only scores: weights, activations inside one layer, head.

    Without gradients no activations are kept between layers; routers are live, nothing is adapted.
    """
    alone = trainer_memory(spec, layout, replace(training, recompute="full", lora=LoraConfig()))
    return tuple(
        TrainerMemory(
            stage=rank.stage,
            parameters=rank.parameters,
            weights=rank.weights,
            gradients=0,
            optimizer=0,
            activations=max(_insides(spec, layout, training, rank.stage), default=0)
            + _stacked(spec, layout, training) // 2,
            head=rank.head,
            runtime=rank.runtime,
        )
        for rank in alone
    )


def _layers(spec: ModelSpec, layout: ParallelConfig, stage: int) -> list[int]:
    """Numbers of the layers of a stage."""
    chunks = (chunk_layers(spec.layers, layout, stage, chunk) for chunk in range(layout.vpp))
    return [number for chunk in chunks for number in chunk]


def _insides(spec: ModelSpec, layout: ParallelConfig, training: Training, stage: int) -> list[int]:
    """Activations inside each layer of a stage."""
    tokens = -(-training.tokens // layout.cp)
    return [
        layer_activations(spec, layout, tokens, training.width, number)
        for number in _layers(spec, layout, stage)
    ]


def _stage(
    spec: ModelSpec, layout: ParallelConfig, training: Training, stage: int, dense: int, expert: int
) -> TrainerMemory:
    width, held = training.width, training.optimizer
    sharded = training.distributed_optimizer
    shard = layout.dp * layout.cp if sharded else 1
    expert_shard = layout.stage_size // (layout.ep * layout.etp) if sharded else 1
    tokens = -(-training.tokens // layout.cp)
    last = stage == layout.pp - 1
    vocab = padded_vocab(spec, layout.tp, layout.vocab_divisible_by) // layout.tp
    weights = width * (dense + expert) + _router_biases(spec, layout, stage)
    trained, adapted, saved, extra = (dense, expert), _Adapted(), weights, 0
    if training.lora.rank:
        adapted = _factors(spec, layout, training.lora, stage)
        trained = (adapted.outside, adapted.inside)
        extra = sum(trained)
        saved = width * extra
        weights += saved
    if training.lora.serves_adapters:  # the weights are W0
        adapted = adapted._replace(weights=0, largest=0)
    whole, base = width * adapted.weights, training.lora.base
    # parameters that this rank's optimizer updates
    own = trained[0] // shard + trained[1] // expert_shard
    return TrainerMemory(
        stage=stage,
        parameters=dense + expert + extra,
        weights=weights,
        gradients=4 * sum(trained),
        optimizer=held.device * own,
        activations=_activations(spec, layout, training, stage) + _stacked(spec, layout, training),
        head=_head(spec, training, tokens, vocab) if last else 0,
        replay=_num_routers(spec, layout, stage)
        * (8 * (tokens // layout.tp) * spec.experts_per_token),
        buckets=2 * training.bucket if training.gpu else 0,
        runtime=RUNTIME if training.gpu else 0,
        snapshot=weights,
        offloaded=held.host * own,
        checkpoint=saved + held.saved * own,
        base=0 if training.gpu and base == "device" else whole,
        device_base=training.gpu * (whole if base == "device" else 2 * width * adapted.largest),
    )


def _head(spec: ModelSpec, training: Training, tokens: int, vocab: int) -> int:
    """Bytes without weights and buffers.  vocab: entries of this rank."""
    width = training.width
    passing = 0 if training.lora.rank else width * vocab * spec.hidden
    logits = 3 * 4 * min(LOGITS_OF_A_BLOCK, tokens * vocab)
    if not (training.fp32_head and width == 2):
        return (3 * width + 4) * tokens * spec.hidden + passing + logits
    shared = min(ENTRIES_OF_A_BLOCK, COPIED_BY_A_BLOCK // spec.hidden)
    entries = max(LOGITS_OF_A_BLOCK // spec.hidden, shared)
    cast = 2 * 4 * min(entries, vocab) * spec.hidden
    return (2 * width + 8) * tokens * spec.hidden + passing + logits + cast


class _Adapted(NamedTuple):
    """Elements on a stage's first rank."""

    outside: int = 0  # factors outside of experts
    inside: int = 0
    weights: int = 0  # that have factors
    largest: int = 0  # of these; summed over model chunks, each of which has its own buckets


def _factors(spec: ModelSpec, layout: ParallelConfig, lora: LoraConfig, stage: int) -> _Adapted:
    inside: dict[str, int] = {}
    outside: dict[str, int] = {}
    shapes, adapted = hf_shapes(spec), 0
    largest: dict[str, int] = defaultdict(int)  # by chunk
    for path, local in megatron_tiles(spec, layout, stage * layout.stage_size).items():
        parts = projections(local, lora.rank_of, shapes, shared=lora.shares)
        for part in parts:
            for name, factor in part.factors.items():
                # what experts share has the data-parallel ranks of other weights
                own = ".experts." in part.module and name.startswith(part.module)
                (inside if own else outside)[name] = math.prod(factor.shape)
        if parts:
            size = math.prod(local.shape)  # a fused tensor's other rows, too
            chunk = path.partition(".")[0] if layout.vpp > 1 else ""
            adapted, largest[chunk] = adapted + size, max(largest[chunk], size)
    factors = sum(outside.values()), sum(inside.values())
    return _Adapted(*factors, adapted, sum(largest.values()))


def _stacked(spec: ModelSpec, layout: ParallelConfig, training: Training) -> int:
    """Bytes of a layer's widest expert weights, stacked for a grouped product, and gradients."""
    if training.layers == "te" or not (training.gpu and training.width == 2):
        return 0
    return (
        2
        * training.width
        * 2
        * spec.moe_ffn
        * spec.hidden
        * spec.experts
        // (layout.ep * layout.etp)
    )


def _num_routers(spec: ModelSpec, layout: ParallelConfig, stage: int) -> int:
    return len(set(_layers(spec, layout, stage)) & set(spec.moe_layers))


def _router_biases(spec: ModelSpec, layout: ParallelConfig, stage: int) -> int:
    """Bytes: buffers in fp32, without gradients and optimizer state."""
    return 4 * spec.experts * _num_routers(spec, layout, stage) if spec.expert_bias else 0


def _activations(spec: ModelSpec, layout: ParallelConfig, training: Training, stage: int) -> int:
    tokens = -(-training.tokens // layout.cp)
    inside = _insides(spec, layout, training, stage)
    # 1F1B: the first stage holds most; the interleaved schedule a little more per chunk
    in_flight = layout.pp - stage
    if layout.vpp > 1:
        in_flight = round(in_flight * (1 + (layout.pp - 1) / (layout.pp * layout.vpp))) or 1
    if training.recompute != "full":
        return in_flight * sum(inside)
    kept = training.width * spec.hidden * (tokens // layout.tp)
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
    spec: ModelSpec,
    engine: EngineLayout,
    received: float,
    tokens: int,
    dtype: str,
    *,
    bucket: int = 0,
    stages_on_device: bool = False,
) -> EngineMemory:
    """Memory of an engine rank.  received: bytes of its weights; tokens: size of its KV cache.

    bucket: bytes of a publish's bucket.  stages_on_device: the transport holds a whole version on
    the device instead of the host.
    """
    width = ITEMSIZE.get(dtype, 2)
    attention_ranks = engine.tp // engine.dp
    if spec.kv_lora:
        rows = spec.kv_lora + spec.qk_rope  # the latent, replicated on each rank
    else:
        rows = 2 * spec.head_dim * max(1, spec.kv_heads // attention_ranks)
    token, weights = width * rows * spec.layers, round(received)
    return EngineMemory(
        weights=weights,
        kv=token * tokens,
        kv_token=token,
        update=weights if stages_on_device else 2 * bucket,
        host=0 if stages_on_device else weights,
    )
