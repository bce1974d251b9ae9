"""A Megatron-core GPT/MoE model from a Hugging Face config, for every family of `moerl.layout`.

`check_family` refuses models that the installed megatron-core cannot express.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from moerl.algorithms.head_logprob import Head
from moerl.config.lora_settings import LoraConfig
from moerl.config.optimizer_settings import ddp_args
from moerl.config.schema import ParallelConfig, TrainerConfig
from moerl.core.errors import ConfigError
from moerl.data.shared_prefix import check_shared
from moerl.layout import Named, megatron_tiles, padded_vocab
from moerl.layout.spec import ModelSpec
from moerl.trainer.model.family_modules import adapt
from moerl.trainer.model.grouped_experts import group_experts, why_one_by_one
from moerl.trainer.model.lora import PREFIX, Adapters, Changes, attach_adapters
from moerl.trainer.model.parallel import Parallel
from moerl.trainer.model.platform import Platform
from moerl.trainer.model.replay import RouteReplay, attach
from moerl.trainer.model.served_adapters import ServedAdapters
from moerl.trainer.model.shared_attention import SharedAttention
from moerl.trainer.model.sparse_attention import IndexerReplay, attach_indexers, sparse_attention
from moerl.trainer.model.transformer import set_yarn, transformer_config
from moerl.trainer.model.value_head import ValueHead

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A run of consecutive layers on one rank; several per pipeline stage when interleaved."""

    index: int  # 0-based on this rank
    gpt: GPTModel  # bare: parameter names of the layout tables
    module: torch.nn.Module  # the called module: gpt, or gpt in Float16Module
    has_loss: bool  # it ends in the output layer
    lora: Adapters | None = None  # None: all weights are trained


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """One rank's model, its configuration and its layout."""

    spec: ModelSpec  # of the live model: without prediction layers
    config: TransformerConfig
    chunks: tuple[Chunk, ...]
    tiles: Named  # layout of this rank's parameters
    replay: RouteReplay | None  # None: routers are always live
    indexers: IndexerReplay | None  # None: attention is dense, or its indexers are always live
    vocab_start: int  # first vocabulary entry of this rank's head
    half: bool
    fp32_head: bool = False

    @property
    def gpt(self) -> GPTModel:
        """The bare model of a rank that holds one chunk."""
        assert len(self.chunks) == 1, f"this rank holds {len(self.chunks)} model chunks"
        return self.chunks[0].gpt

    @property
    def module(self) -> torch.nn.Module:
        """The module to call, on a rank that holds one chunk."""
        assert len(self.chunks) == 1, f"this rank holds {len(self.chunks)} model chunks"
        return self.chunks[0].module

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor the layout describes, by its name in `tiles`."""
        named: dict[str, torch.Tensor] = {}
        for chunk in self.chunks:
            prefix = f"chunk{chunk.index}." if len(self.chunks) > 1 else ""
            named |= {prefix + name: t for name, t in live_tensors(chunk.gpt).items()}
        return named

    @property
    def adapters(self) -> tuple[Adapters, ...]:
        """Of each chunk; () where all weights are trained."""
        return tuple(chunk.lora for chunk in self.chunks if chunk.lora is not None)

    def head(self, group: dist.ProcessGroup) -> Head:
        """The head of a rank of the last stage.  group: tensor-parallel ranks."""
        chunk = self.chunks[-1]
        gpt, tied = chunk.gpt, chunk.gpt.share_embeddings_and_output_weights
        return Head(
            gpt.shared_embedding_or_output_weight() if tied else gpt.output_layer.weight,
            self.spec.vocab_size,
            self.vocab_start,
            group,
            adapter=None if chunk.lora is None else chunk.lora.head,
            fp32=self.fp32_head,
        )

    def keep_base(self) -> None:
        """Keep the loaded weights as the base of adapters."""
        for adapters in self.adapters:
            adapters.keep_base()

    def set_factors(self, values: Mapping[str, torch.Tensor]) -> None:
        """Take whole factors by Hugging Face name; call `keep_base` first."""
        for adapters in self.adapters:
            adapters.set_factors(values)

    def parts_of(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's parts of whole factors, by Hugging Face name."""
        every = (adapters.parts_of(values) for adapters in self.adapters)
        return {name: part for parts in every for name, part in parts.items()}

    def factors(self) -> dict[str, torch.Tensor]:
        """This rank's part of each factor, by Hugging Face name."""
        return {name: t for adapters in self.adapters for name, t in adapters.factors().items()}

    def merge(self) -> Changes:
        """Bring adapted weights up to date with their factors."""
        every = [adapters.merge() for adapters in self.adapters]
        return Changes(sum(one.weights for one in every), sum(one.changed for one in every))

    def unmerge(self) -> None:
        """Set adapted weights to the base, until `merge`."""
        for adapters in self.adapters:
            adapters.unmerge()

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Within it the weights are as in a model folder: adapters are a part of them."""
        with ExitStack() as stack:
            for adapters in self.adapters:
                stack.enter_context(adapters.merged())
            yield

    @property
    def call_args(self) -> dict[str, Any]:
        """Keep the output in bf16; the head casts the rows that it needs."""
        return {"fp32_output": False} if self.half else {}


def build(
    spec: ModelSpec,
    trainer: TrainerConfig,
    parallel: Parallel,
    *,
    with_replay: bool,
    lora: LoraConfig | None = None,
    fp32_head: bool = False,
) -> Model:
    """Build this rank's part, with weights not yet loaded.  Raises ConfigError, LayoutError.

    lora: `Model.keep_base` is to be called when they are.  fp32_head: `model.fp32_lm_head`.
    """
    layers = parallel.platform.layers
    check_family(spec, trainer.parallel, trainer.packing, on_cpu=layers == "local")
    if trainer.share_prompts:
        check_shared(spec)
    if layers == "local" and parallel.platform.grouped and spec.experts:
        why = why_one_by_one(spec, trainer, parallel.platform, lora)
        log.info("local experts: %s", f"one by one: {why}" if why else "grouped products")
    spec = replace(spec, mtp_layers=0)  # prediction layers are not trained: a save copies them
    config = transformer_config(spec, trainer, parallel.platform, with_replay=with_replay)
    chunks = tuple(
        _chunk(index, spec, config, parallel, trainer, lora)
        for index in range(trainer.parallel.vpp)
    )
    replay = None
    if with_replay and spec.moe_layers:
        replay = attach(
            *(chunk.gpt for chunk in chunks),
            num_experts=spec.experts,
            top_k=spec.experts_per_token,
        )
    indexers = None
    if with_replay and spec.index_topk:
        indexers = attach_indexers(*(chunk.gpt for chunk in chunks))
    return Model(
        spec=spec,
        config=config,
        chunks=chunks,
        tiles=megatron_tiles(spec, trainer.parallel, parallel.rank, layers),
        replay=replay,
        indexers=indexers,
        vocab_start=_vocab_rows(spec, parallel.sizes) // parallel.tp_size * parallel.tp_rank,
        half=trainer.dtype == "bf16",
        fp32_head=fp32_head,
    )


def _chunk(
    index: int,
    spec: ModelSpec,
    config: TransformerConfig,
    parallel: Parallel,
    trainer: TrainerConfig,
    lora: LoraConfig | None,
) -> Chunk:
    last = parallel.sizes.vpp - 1
    has_loss = parallel.is_last_stage and index == last
    gpt = gpt_model(
        spec,
        config,
        use_te=parallel.platform.layers == "te",
        grouped=not why_one_by_one(spec, trainer, parallel.platform, lora),
        shares=trainer.share_prompts,
        sizes=parallel.sizes,
        pre_process=parallel.is_first_stage and index == 0,
        post_process=has_loss,
        vp_stage=index if last else None,
    )
    if has_loss and spec.values:
        gpt.output_layer = ValueHead(
            spec.hidden, bias=spec.value_bias, sequence_parallel=parallel.tp_size > 1
        )
    gpt.to(parallel.device)
    adapters = None
    if lora and lora.rank:
        made = ServedAdapters(lora) if lora.serves_adapters else Adapters(lora)
        adapters = attach_adapters(gpt, index, spec, made, lora, parallel)
    module = Float16Module(config, gpt) if trainer.dtype == "bf16" else gpt
    for router in gpt.modules():
        if hasattr(router, "_maintain_float32_expert_bias"):  # Float16Module casts buffers, too
            router._maintain_float32_expert_bias()
    return Chunk(index, gpt, module, has_loss, adapters)


def gpt_model(
    spec: ModelSpec,
    config: TransformerConfig,
    *,
    use_te: bool,
    sizes: ParallelConfig,
    grouped: bool = False,
    shares: bool = False,
    **stage: Any,
) -> GPTModel:
    """GPTModel of a spec.  stage: GPTModel's own pre_process, post_process, vp_stage."""
    chunk = {key: value for key, value in stage.items() if key == "vp_stage"}
    layers = decoder_spec(spec, config, use_te=use_te, **chunk)
    for layer in layers.layer_specs if grouped else ():
        group_experts(layer)
    if shares:
        for layer in layers.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = SharedAttention
    if spec.yarn and not spec.kv_lora:
        set_yarn(config, spec)
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=_vocab_rows(spec, sizes),
        max_sequence_length=spec.max_positions,
        share_embeddings_and_output_weights=spec.tied,
        position_embedding_type="yarn" if spec.yarn and not spec.kv_lora else "rope",
        rotary_percent=spec.rotary_percent,
        rotary_base=spec.rope_theta,
        parallel_output=True,
        **stage,
    )


def decoder_spec(
    spec: ModelSpec, config: TransformerConfig, *, use_te: bool, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Layers of one model chunk, with the family's own modules."""
    dense = copy.copy(config)  # megatron-core's spec of the block is for dense attention
    dense.experimental_attention_variant = None
    layers = get_gpt_decoder_block_spec(
        dense, use_transformer_engine=use_te, normalization="RMSNorm", vp_stage=vp_stage
    )
    for layer in layers.layer_specs:
        if spec.index_topk:
            layer.submodules.self_attention = sparse_attention(config, on_cpu=not use_te)
        else:
            adapt(layer, spec, on_cpu=not use_te)
    return layers


def _vocab_rows(spec: ModelSpec, sizes: ParallelConfig) -> int:
    return padded_vocab(spec, sizes.tp, sizes.vocab_divisible_by)


def live_tensors(gpt: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that the layout describes: all weights, and the buffers that are weights."""
    bias = {name: t for name, t in gpt.named_buffers() if name.endswith(".expert_bias")}
    weights = {name: t for name, t in gpt.named_parameters() if not name.startswith(PREFIX)}
    return weights | bias


def check_family(
    spec: ModelSpec, sizes: ParallelConfig, packing: bool = False, *, on_cpu: bool = False
) -> None:
    """Refuse models for which megatron-core 0.19.2 lacks a part.  Raises ConfigError naming it.

    Conversion does not need megatron-core: the layout tables cover all of these models.
    """
    group_top = spec.experts_per_token // spec.group_topk
    lacks = (
        (
            spec.qk_norm_all_heads and sizes.tp > 1,
            "a query/key norm over all heads cannot be cut; use trainer.parallel.tp = 1",
        ),
        (
            spec.score == "sigmoid" and not spec.norm_topk_prob and spec.experts_per_token > 1,
            "megatron-core always divides sigmoid gate weights by their sum",
        ),
        (
            spec.groups > 1 and group_top != {"max": 1, "top2": 2}[spec.group_score],
            f"megatron-core rates a group of experts by its best {group_top} "
            "(top-k / top groups), this model by "
            + {"max": "1", "top2": "2"}.get(spec.group_score, "all"),
        ),
    )
    for holds, reason in lacks:
        if holds:
            raise ConfigError("model.path", spec.family, reason)
    if spec.linear_layers and (sizes.cp > 1 or (packing and sizes.tp > 1 and on_cpu)):
        cut = ("trainer.parallel.cp", sizes.cp) if sizes.cp > 1 else ("trainer.packing", packing)
        raise ConfigError(
            *cut,
            f"the gated delta net of {spec.family} was not compared with context parallelism, and "
            "local layers take packed rows with tp 1 only; use cp 1, and packing false with tp",
        )
    if spec.sinks and (sizes.cp > 1 or (packing and on_cpu)):
        cut = ("trainer.parallel.cp", sizes.cp) if sizes.cp > 1 else ("trainer.packing", packing)
        raise ConfigError(
            *cut,
            f"no attention has the sinks of {spec.family} with context parallelism, nor "
            "megatron-core's own, of local layers, with packing; use cp 1, and there packing false",
        )


def wrap(model: Model, trainer: TrainerConfig, platform: Platform) -> list[DistributedDataParallel]:
    """Gradient buffers per chunk and their reduction over data-parallel ranks, as fp32 sums.

    Raises ConfigError for a field of `trainer.ddp` that megatron-core does not have.
    """
    args = ddp_args(trainer, cuda=platform.name == "cuda")
    try:
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=trainer.optimizer.distributed,
            **args,
        )
    except TypeError as error:
        raise ConfigError("trainer.ddp", args, f"megatron-core says: {error}") from error
    return [
        DistributedDataParallel(
            model.config, replace(config), chunk.module, disable_bucketing=chunk.index > 0
        )
        for chunk in model.chunks
    ]
