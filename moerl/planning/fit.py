"""What would fit: a layout of a recipe's model on the GPUs of a cluster, by the estimates.

Engines are as small as a replica may be and get half of the GPUs, or more or less where the rest
does not hold the trainer.  The first layout whose estimates fit is named; it is a proposal to start
from and not the fastest one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moerl.config import Config
from moerl.config.checks import check_model_sizes
from moerl.config.clusters import is_local
from moerl.config.mesh import check_mesh
from moerl.config.schema import NodeGroup, ParallelConfig
from moerl.core.errors import MoerlError
from moerl.engine.host.server_args import check_planned_layout
from moerl.layout import model_spec
from moerl.layout.spec import ModelSpec
from moerl.planning.layout_check import engine_bytes
from moerl.planning.memory import (
    Recompute,
    Training,
    engine_memory,
    optimizer_bytes,
    trainer_memory,
)
from moerl.weight_sync.buckets import engine_wants
from moerl.weight_sync.held_shards import EngineLayout

_SIZES = (1, 2, 4, 8, 16)
_NODES = (1, 2, 4, 8, 16, 32, 64)
_AXES = ("tp", "pp", "cp", "dp", "ep", "etp", "vpp", "first_stage_layers", "last_stage_layers")
_TOKENS = 32_768  # least tokens of an engine's cache
_STATIC = 0.9  # most of a GPU for weights and cache


@dataclass(frozen=True, slots=True)
class EngineFit:
    """An engine that fits on `tp` GPUs."""

    tp: int
    ep: int
    tokens: int


def training_of(config: Config, *, gpu: bool) -> Training:
    """What the memory model reads of the trainer's settings."""
    recompute: Recompute = config.trainer.megatron.get("recompute_granularity") or "none"
    return Training(
        dtype=config.trainer.dtype,
        tokens=config.trainer.max_tokens_per_microbatch,
        recompute=recompute,
        distributed_optimizer=config.trainer.optimizer.distributed,
        optimizer=optimizer_bytes(config.trainer),
        bucket=config.sync.bucket_bytes,
        gpu=gpu,
        lora=config.lora,
        fp32_head=config.model.fp32_lm_head,
    )


def what_fits(config: Config, shapes: Mapping[str, Any]) -> str:
    """Settings under which the model fits this cluster's GPUs, or how many it takes.

    Empty on a cluster whose GPUs are not described.
    """
    group = next(iter(config.cluster.nodes.values()), NodeGroup())
    if not (group.devices and group.device_gb):
        return ""
    engine = _smallest_engine(config, shapes, group)
    if is_local(config.cluster) and engine is not None:
        for tried in (config, *_offloaded(config)):
            for used in _shares(engine.tp, group.devices):
                layout = _first_layout(tried, shapes, group, group.devices - used)
                if layout is not None:
                    return _settings(tried, engine, used // engine.tp, layout)
    return _more(config, shapes, group, engine)


def _offloaded(config: Config) -> list[Config]:
    """The same with the optimizer on the host, where that is allowed."""
    args = {"optimizer_cpu_offload": True}
    offloaded = replace(config, trainer=replace(config.trainer, optimizer_args=args))
    return [offloaded] if config.trainer.dtype == "bf16" else []


def _shares(tp: int, devices: int) -> list[int]:
    """GPUs for engines of one node: half of them first."""
    return sorted(range(tp, devices, tp), key=lambda used: abs(2 * used - devices))


def _settings(config: Config, engine: EngineFit, count: int, layout: ParallelConfig) -> str:
    own = config.trainer.parallel  # settings of the command line are merged with it
    axes = {axis: getattr(layout, axis) for axis in _AXES}
    wanted = {axis: size for axis, size in axes.items() if size != getattr(own, axis)}
    sizes = ", ".join(f"{axis}: {size}" for axis, size in wanted.items())
    offload = config.trainer.optimizer_args.get("optimizer_cpu_offload")
    args = " trainer.optimizer_args='{optimizer_cpu_offload: true}'" if offload else ""
    return (
        f"what would: engine.count={count} engine.tp={engine.tp} engine.args.ep_size={engine.ep} "
        f"engine.max_total_tokens={engine.tokens} engine.mem_fraction_static={_STATIC} "
        f"trainer.parallel='{{{sizes}}}' trainer.optimizer.distributed=true{args}"
    )


def _more(
    config: Config, shapes: Mapping[str, Any], group: NodeGroup, engine: EngineFit | None
) -> str:
    """No layout fits: how many nodes of this kind the trainer and an engine take."""
    kind = f"{group.devices} x {group.device_gb:g} GB"
    wanted = "no number of GPUs up to 16" if engine is None else f"{engine.tp} GPU(s)"
    for nodes in _NODES:
        layout = _first_layout(config, shapes, group, nodes * group.devices)
        if layout is not None:
            alone = "1 node" if nodes == 1 else f"{nodes} nodes"
            return (
                f"what would: {alone} of {kind} for the trainer alone (tp {layout.tp} pp "
                f"{layout.pp} dp {layout.dp} ep {layout.ep}) and {wanted} for each engine, with "
                "cluster=slurm"
            )
    return f"what would: more than {_NODES[-1]} nodes of {kind} for the trainer"


def _smallest_engine(
    config: Config, shapes: Mapping[str, Any], group: NodeGroup
) -> EngineFit | None:
    spec, room = model_spec(shapes), _STATIC * group.device_gb * 1e9
    for tp in _SIZES:
        ep = tp if spec.moe_layers and spec.experts % tp == 0 else 1
        sizes = replace(config.engine, tp=tp, tp_each=[], args={**_own_args(config), "ep_size": ep})
        try:
            check_model_sizes(ParallelConfig(), tp, shapes)
            check_planned_layout(sizes, shapes, cuda=True, routing=False)
            layout = EngineLayout(tp=tp, ep=ep, dp=1, num=1, dense_tp=0)
            weights = engine_bytes(spec, layout, _itemsize(config, shapes))
        except MoerlError:
            continue
        asked = config.engine.max_total_tokens  # 0: SGLang decides
        for tokens in (asked or _TOKENS, _TOKENS):
            memory = engine_memory(spec, layout, weights, tokens, config.engine.dtype)
            if memory.total <= room:
                return EngineFit(tp, ep, tokens if asked else 0)
    return None


def _own_args(config: Config) -> dict[str, Any]:
    names = ("ep_size", "attn_dp_size", "moe_dense_tp_size")
    return {name: value for name, value in config.engine.args.items() if name not in names}


def _itemsize(config: Config, shapes: Mapping[str, Any]) -> int:
    asked = config.engine.args.get("quantization")
    return 1 if engine_wants(asked, shapes) != "none" else 2


def _first_layout(
    config: Config, shapes: Mapping[str, Any], group: NodeGroup, ranks: int
) -> ParallelConfig | None:
    """A layout of `ranks` trainer ranks whose largest rank fits, with the least model cutting."""
    spec = model_spec(shapes)
    training = replace(training_of(config, gpu=True), distributed_optimizer=True)
    (whole,) = trainer_memory(spec, ParallelConfig(), training)
    for layout in _layouts(spec, ranks):
        least = (whole.weights + whole.gradients) // (layout.pp * max(layout.ep, layout.tp))
        if least > group.device_gb * 1e9:  # whatever else a rank holds
            continue
        try:
            check_mesh(layout)
            check_model_sizes(layout, 1, shapes)
            stages = trainer_memory(spec, layout, training)
        except MoerlError:
            continue
        host = min(ranks, group.devices) * max(rank.host for rank in stages)
        if host > (group.memory_gb or math.inf) * 1e9:
            continue
        if max(rank.total for rank in stages) <= group.device_gb * 1e9:
            return layout
    return None


def _layouts(spec: ModelSpec, ranks: int) -> Iterator[ParallelConfig]:
    for pp in _SIZES:
        for tp in (1, 2, 4, 8):
            if ranks % (pp * tp):
                continue
            stage = ranks // pp
            cuts = [e for e in (*_SIZES, 32, 64) if not stage % e and not spec.experts % e]
            yield ParallelConfig(
                tp=tp,
                pp=pp,
                dp=stage // tp,
                ep=max(cuts) if spec.moe_layers else 1,
                first_stage_layers=_first_stage(spec.layers, pp),
            )


def _first_stage(layers: int, pp: int) -> int:
    """Layers of a smaller first stage where pp does not divide them; 0 where it does."""
    others = -(-layers // pp)
    return 0 if layers % pp == 0 else max(layers - (pp - 1) * others, 0)
