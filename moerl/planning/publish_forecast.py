"""Forecast of a publish from shapes alone: bytes, seconds, buffers, and whether the ranks fit.

It needs a recipe and the model's config.json, neither torch nor a GPU.

    S  bytes that an engine rank receives        B  bytes/s of a rank's network card

    T = max(largest S, largest sent) / B, then one S / B per relay round

Bytes are exact.  T is a bound at line rate; published implementations reach EFFICIENCY of it.  A
broadcast, for comparison, brings the whole model to every engine rank, or once to every node.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from moerl.config import Config
from moerl.config.checks import missing_folder
from moerl.config.clusters import is_local, placement, trainer_share
from moerl.config.load import CONFIG_ROOT
from moerl.config.lora_settings import LoraConfig
from moerl.config.mesh import check_mesh
from moerl.config.schema import ParallelConfig
from moerl.config.transport_rules import (
    TransportChoice,
    default_transport,
    mooncake_protocol,
    why_not,
)
from moerl.core.errors import ConfigError, MoerlError
from moerl.core.json_files import read_model_config
from moerl.layout import ModelSpec, model_spec
from moerl.layout.shards import hf_shapes
from moerl.planning.layout_check import ITEMSIZE, Spread, trainer_bytes
from moerl.planning.memory import EngineMemory, engine_memory, trainer_memory, training_of
from moerl.planning.printout import GB, axes, gb, grid
from moerl.weight_sync.adapters.factor_tables import FactorTables
from moerl.weight_sync.buckets import WirePolicy, wire_bytes
from moerl.weight_sync.held_shards import EngineLayout
from moerl.weight_sync.transfer_plan import (
    PLAN_ID,
    TRAINER,
    Hop,
    TransferPlan,
    num_rounds,
    relay_schedule,
)
from moerl.weight_sync.wire_formats import engine_wants

Layouts = tuple[ModelSpec, ParallelConfig, EngineLayout, WirePolicy]
BUS_GB_S = 50.0  # from pinned memory; an H100's 53 (docs/results/gpu)
MEMORY_GB_S = 2500.0  # of a GPU, read and written; an H100's 2829

EFFICIENCY = 0.094
"""Share of line rate of a point-to-point publish: geometric mean of the seconds of miles 31f1ca96
(docs/advanced/p2p-weight-transfer.md) for Kimi K2, Qwen3-235B-A22B and Qwen3-30B-A3B."""

_SHOWN_HOPS = 8  # per relay round; --json has all


# --- layouts -------------------------------------------------------------------------------------
def recipe_shapes(config: Config) -> dict[str, Any]:
    """The model's config.json.  Raises ConfigError for a recipe without a readable folder."""
    name = config.model.path
    if not name:
        raise ConfigError(
            "model.path",
            name,
            "moerl plan needs a folder with a config.json; a run of a tiny model keeps one in "
            "runs/NAME/model",
        )
    return shapes_of(name)


def shapes_of(name: str) -> dict[str, Any]:
    """config.json of a model folder, also of a folder under configs/.  Raises ConfigError."""
    path = next((p for p in (Path(name), CONFIG_ROOT / name) if p.exists()), None)
    if path is None:
        raise ConfigError("model.path", name, missing_folder(name))
    return read_model_config(path)


def planned_layouts(config: Config, shapes: Mapping[str, Any] | None = None) -> list[Layouts]:
    """Model, layouts of both sides, and wire policy of a recipe, per size of engines.

    shapes: the model's config.json, else it is read.  Raises ConfigError or ModelError for a recipe
    without a readable model folder.
    """
    trainer, engine = config.trainer.parallel, config.engine
    check_mesh(trainer)
    shapes = shapes or recipe_shapes(config)
    quantization = engine.args.get("quantization")
    if quantization not in (None, "none", "fp8"):
        raise ConfigError("engine.args.quantization", quantization, "use none or fp8")
    policy = WirePolicy(engine.dtype, engine_wants(quantization, shapes), config.sync.bucket_bytes)
    return [
        (
            model_spec(shapes),
            trainer,
            EngineLayout(tp, engine.ep, engine.attention_dp, count),
            policy,
        )
        for tp, count in sorted(Counter(engine.sizes.values()).items())
    ]


# --- bytes and seconds ---------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Links:
    """The network of a publish."""

    nic_gb_s: float = 50.0  # per card and direction; 400 Gb/s
    ranks_per_node: int = 8

    def __post_init__(self) -> None:
        if not (math.isfinite(self.nic_gb_s) and self.nic_gb_s > 0):
            raise ConfigError("--nic-gb-s", self.nic_gb_s, "must be a finite number above 0")
        if self.ranks_per_node < 1:
            raise ConfigError("--ranks-per-node", self.ranks_per_node, "must be at least 1")

    @property
    def bytes_per_s(self) -> float:
        return self.nic_gb_s * GB


@dataclass(frozen=True, slots=True)
class Forecast:
    """One publish of whole weights to all engines of one size, in bytes unless stated otherwise."""

    model_bytes: int  # on the wire, each tensor once
    received: Spread  # S, per engine rank
    engine_bytes: int  # into all ranks of an engine
    planned_bytes: int  # into all engines
    sent: Spread  # per trainer rank, to the engines that it serves directly
    boxes: Spread  # a count: boxes that a trainer rank sends to one engine
    rank_ratio: float  # bytes of a broadcast into every rank / planned_bytes
    card_ratio: float  # bytes of a broadcast into every node / planned_bytes
    seconds: float  # at line rate
    hops: tuple[Hop, ...]
    trainer_buffer: int  # per rank: weight snapshot and two buckets
    engine_buffer: int  # per rank: staging


def forecast(
    spec: ModelSpec,
    trainer: ParallelConfig,
    engines: EngineLayout,
    policy: WirePolicy,
    links: Links,
    *,
    direct: int = 0,
) -> Forecast:
    """Cost of one publish.

    direct: number of engines that the trainer serves itself; 0 takes the fastest number.  Raises
    ConfigError or LayoutError when sizes do not divide.
    """
    if not 0 <= direct <= engines.num:
        raise ConfigError("--direct", direct, f"must be 0 to {engines.num}, the number of engines")
    totals = TransferPlan(spec, trainer, engines, PLAN_ID, policy).totals()
    received, sent = Spread.of(totals.received_bytes), Spread.of(totals.sent_bytes)

    def seconds(served: int) -> float:
        rounds = num_rounds(relay_schedule(range(engines.num), served))
        first = max(received.high, served * sent.high)
        return (first + rounds * received.high) / links.bytes_per_s

    served = direct or min(range(1, engines.num + 1), key=seconds)
    model, engine_bytes = _model_bytes(spec, policy), sum(totals.received_bytes)
    nodes = -(-engines.tp // links.ranks_per_node)
    return Forecast(
        model_bytes=model,
        received=received,
        engine_bytes=engine_bytes,
        planned_bytes=engine_bytes * engines.num,
        sent=Spread(served * sent.low, served * sent.mean, served * sent.high),
        boxes=Spread.of(totals.sent_parts),
        rank_ratio=engines.tp * model / engine_bytes,
        card_ratio=nodes * model / engine_bytes,
        seconds=seconds(served),
        hops=relay_schedule(range(engines.num), served),
        trainer_buffer=round(trainer_bytes(spec, trainer).high) + 2 * policy.bucket_bytes,
        engine_buffer=round(received.high),
    )


def _model_bytes(spec: ModelSpec, policy: WirePolicy) -> int:
    total = 0
    for name, shape in hf_shapes(spec).items():
        _, is_layer, rest = name.partition("model.layers.")
        if not (is_layer and int(rest.split(".")[0]) >= spec.layers):  # prediction layers stay
            total += wire_bytes(name, shape, policy)
    return total


@dataclass(frozen=True, slots=True)
class FactorForecast:
    """One publish of LoRA factors into one engine."""

    received: Spread  # bytes, per engine rank
    engine_bytes: int  # into all of its ranks
    merged: int  # weights that its largest rank computes from W0; 0 with adapter slots
    largest: int  # of these, the weights of the largest Hugging Face tensor


def factor_forecast(
    spec: ModelSpec, engine: EngineLayout, lora: LoraConfig, dtype: str
) -> FactorForecast:
    """The trainer's layout does not matter: an engine rank gets each element once."""
    tables = FactorTables(spec, ParallelConfig(), engine, lora)
    received, merged, largest = [], [], 0
    for rank in range(engine.tp):
        elements = 0
        for factor in tables.of_engine(rank):
            want = factor.target.parts.wanted[rank]
            elements += factor.target.rank * len(want.cols if factor.is_a else want.rows)
        received.append(ITEMSIZE.get(dtype, 2) * elements)
        targets = () if lora.serves_adapters else tables.targets(rank)
        wanted = (target.parts.wanted[rank] for target in targets)
        sizes = [len(want.rows) * len(want.cols) for want in wanted]
        merged.append(sum(sizes))
        largest = max([largest, *sizes])
    return FactorForecast(Spread.of(received), sum(received), max(merged), largest)


# --- memory --------------------------------------------------------------------------------------
def merging_memory(
    whole: EngineMemory, factors: FactorForecast, lora: LoraConfig, dtype: str, bucket: int
) -> EngineMemory:
    """Memory of an engine rank that merges: factors, staged factors with two buckets, and W0.

    A rank with adapter slots needs no W0.  whole: the same rank with publishes of whole weights.
    SGLang's slots and the tensor that VERIFY computes are not counted.
    """
    width, size = ITEMSIZE.get(dtype, 2), round(factors.received.high)
    base, stays = width * factors.merged, lora.base == "device"
    staged = size if whole.host == 0 else 2 * min(bucket, size)
    return replace(
        whole,
        update=size + staged + (base if stays else 2 * width * factors.largest),
        host=(size if whole.host else 0) + (0 if stays else base),
    )


def _fit_line(config: Config, layouts: Layouts, received: float) -> str:
    """Whether a rank of each side fits its GPU, by the estimates of `moerl.planning.memory`."""
    spec, trainer, engines, _ = layouts
    try:
        placed = placement(config)
    except MoerlError as error:
        return f"memory: the layout DOES NOT FIT the cluster: {error}"
    engine_gb, trainer_gb = (
        slot.node.group.device_gb for slot in (placed.engines[0], placed.trainers[0])
    )
    if not (engine_gb and trainer_gb):
        return "memory: cluster.nodes.*.device_gb is not given"
    tokens, static = config.engine.max_total_tokens, config.engine.mem_fraction_static
    engine = engine_memory(spec, engines, received, tokens, config.engine.dtype)
    rank = max(one.total for one in trainer_memory(spec, trainer, training_of(config, gpu=True)))
    trainer_gb *= trainer_share(config)
    sides = (("an engine", engine.total, static * engine_gb), ("a trainer", rank, trainer_gb))
    verdicts = (
        f"{who} rank {'fits' if need <= room * GB else 'DOES NOT FIT'}: {gb(need)} of {room:.3g} GB"
        for who, need, room in sides
    )
    return f"memory: {'; '.join(verdicts)}"


# --- transport -----------------------------------------------------------------------------------
def auto_transport(config: Config, shapes: Mapping[str, Any]) -> TransportChoice:
    """Meaning of `sync.transport: auto` for a model of these shapes.

    On one node with GPUs, `cuda_ipc` keeps a second copy of an engine rank's weights on its GPU: it
    is chosen where that copy fits.
    """
    if not is_local(config.cluster) or why_not(config, "cuda_ipc"):
        return default_transport(config)
    fits, why = _fits_gpu(config, shapes)
    if fits:
        return TransportChoice("cuda_ipc", f"staging on the GPU fits: {why}")
    return TransportChoice("shm", f"staging of cuda_ipc on the GPU does not fit: {why}")


def _fits_gpu(config: Config, shapes: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether SGLang's share of an engine's GPU holds weights twice and the KV cache.

    The rest of the GPU is for activations, CUDA graphs and the contexts of trainer ranks.
    """
    tokens, dtype = config.engine.max_total_tokens, config.engine.dtype
    needs = []
    try:
        group = placement(config).engines[0].node.group
        for spec, trainer, engines, policy in planned_layouts(config, shapes):
            received = max(TransferPlan(spec, trainer, engines, 0, policy).totals().received_bytes)
            memory = engine_memory(spec, engines, received, tokens, dtype, stages_on_device=True)
            needs.append(memory.total + memory.update)
    except MoerlError as error:  # the checks of a start raise it too
        return False, str(error)
    room, need = group.device_gb * GB * config.engine.mem_fraction_static, max(needs)
    if not room:
        return False, "cluster.nodes.*.device_gb is not given"
    if not tokens:
        return False, "with engine.max_total_tokens=0 the KV cache takes what the weights leave"
    return need <= room, f"{need / GB:.3g} of {room / GB:.3g} GB (engine.mem_fraction_static)"


def transport_line(config: Config, choice: TransportChoice) -> str:
    """The transport of this run, and the meaning of `auto`."""
    name = config.sync.transport
    over = f" by {mooncake_protocol(config)}" if name == "mooncake" else ""
    if over.endswith("tcp"):
        over += " (no RDMA: cluster.nodes.*.rdma names no cards, or sync.mooncake_protocol=tcp)"
    if name in ("auto", choice.name):
        return f"sync.transport: {choice.name}{over}, since {choice.reason}"
    return f"sync.transport: {name}{over}; auto is {choice.name}, since {choice.reason}"


# --- printing ------------------------------------------------------------------------------------
def describe(
    config: Config,
    layouts: Layouts,
    found: Forecast,
    factors: FactorForecast | None,
    links: Links,
    efficiency: float,
) -> str:
    """Printed report on the engines of one size."""
    spec, trainer, engines, policy = layouts
    wire = policy.dtype if policy.quantization == "none" else f"fp8 blocks and {policy.dtype}"
    rows = [
        ("per rank", "min", "mean", "max"),
        ("an engine rank receives, GB", *map(gb, found.received.values)),
        ("a trainer rank sends, GB", *map(gb, found.sent.values)),
        ("boxes to one engine", *(f"{value:,.0f}" for value in found.boxes.values)),
    ]
    lines = [
        f"{spec.family}, {gb(found.model_bytes)} GB on the wire ({wire})",
        f"trainer: {trainer.world_size:,} ranks, {axes(trainer)}",
        f"engines: {engines.num} x {engines.tp} ranks, ep {engines.ep}, attention over "
        f"{engines.tp // engines.dp}, dense layers over {engines.tp}",
        "",
        *grid(rows, 28, 12, 12, 12),
        "",
        f"bytes: {gb(found.engine_bytes)} GB into an engine, {gb(found.planned_bytes)} GB into "
        f"all; a broadcast would bring {found.rank_ratio:.2f} times as much into engine ranks and "
        f"{found.card_ratio:.2f} times through network cards",
        f"seconds: {found.seconds:.3g} at line rate, {links.nic_gb_s:g} GB/s a card; "
        f"{found.seconds / efficiency:.3g} at {efficiency:.1%} of it",
        f"buffers: trainer rank {gb(found.trainer_buffer)} GB (weight snapshot, two buckets), "
        f"engine rank {gb(found.engine_buffer)} GB (staging)",
        _relay_line(found.hops, engines.num),
        _fit_line(config, layouts, found.received.high),
    ]
    if factors is not None:
        lines.append(_factor_line(factors, found.engine_bytes, config.lora, policy.dtype))
    return "\n".join(lines)


def _factor_line(factors: FactorForecast, engine_bytes: int, lora: LoraConfig, dtype: str) -> str:
    then = "SGLang's adapter slots of each rank are filled, and its weights stay W0"
    if factors.merged:
        source, rate = ("the host", BUS_GB_S)
        if lora.base == "device":
            source, rate = ("its memory", MEMORY_GB_S / 2)
        seconds = ITEMSIZE.get(dtype, 2) * factors.merged / GB / rate
        then = (
            f"each rank merges up to {factors.merged:,} weights, at VERIFY and at COMMIT, in "
            f"{seconds:.2g} s each (W0 from {source} at {rate:g} GB/s)"
        )
    return (
        f"factors alone (lora.send: factors): {gb(factors.received.high)} GB into an engine "
        f"rank, {gb(factors.engine_bytes)} GB into an engine, "
        f"{factors.engine_bytes / engine_bytes:.2%} of its weights; {then}"
    )


def _relay_line(hops: tuple[Hop, ...], engines: int) -> str:
    direct = sum(hop.src == TRAINER for hop in hops)
    parts = [f"relay: the trainer serves {direct} of {engines} engines"]
    for number, of_round in groupby(hops, key=lambda hop: hop.round):
        pairs = [f"{hop.src} -> {hop.dst}" for hop in of_round]
        rest = len(pairs) - _SHOWN_HOPS
        if number:
            shown = ", ".join(pairs[:_SHOWN_HOPS]) + (f" and {rest} more" if rest > 0 else "")
            parts.append(f"round {number}: {shown}")
    return "; ".join(parts)
