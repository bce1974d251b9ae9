"""The transports of a publish, compared for the cluster at hand.

`sync.transport: auto` depends on shapes in one place: on one node with GPUs, `cuda_ipc` keeps a
second copy of an engine rank's weights on its GPU.  It is the choice where that fits next to the
weights, the KV cache, what CUDA takes, and a context of each trainer rank.  These are estimates.

Rates are of one engine rank.  Those of `shm`, `gloo` and `disk` were measured without a GPU
(docs/weight-sync.md); those of cards are the published share of line rate (`sync_cost`).  Between
GPUs of one node there is no figure yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moerl.config import Config
from moerl.config.clusters import is_local, placement
from moerl.config.schema import TransportName
from moerl.config.transport_rules import (
    NAMES,
    TransportChoice,
    default_transport,
    mooncake_protocol,
    why_not,
    with_transport,
)
from moerl.core.errors import MoerlError
from moerl.planning.memory import engine_memory
from moerl.planning.sync_cost import PUBLISHED_EFFICIENCY, Links
from moerl.planning.sync_forecast import planned_layouts
from moerl.weight_sync.transfer_plan import TransferPlan

_RATES = {"shm": 5.3e9, "gloo": 1.8e9, "disk": 1.2e9}  # bytes/s, medians without a GPU
_MOONCAKE_TCP = 1.6e9
_GB = 1e9


@dataclass(frozen=True, slots=True)
class TransportRow:
    """One transport on this cluster."""

    name: TransportName
    refused: str  # why it cannot work, or does not fit; empty when it can
    staging_gpu: int  # bytes per engine rank
    staging_host: int
    seconds: float | None  # to fill one engine rank; None = no figure


def auto_transport(config: Config, shapes: Mapping[str, Any]) -> TransportChoice:
    """What `sync.transport: auto` means for a model of these shapes."""
    if not is_local(config.cluster) or why_not(config, "cuda_ipc"):
        return default_transport(config)
    fits, shown = _fits_gpu(config, shapes)
    if fits:
        return TransportChoice("cuda_ipc", f"staging on the GPU fits: {shown}")
    return TransportChoice("shm", f"staging of cuda_ipc on the GPU does not fit: {shown}")


def with_auto_transport(config: Config, choice: TransportChoice) -> Config:
    """The configuration with `auto` replaced."""
    return with_transport(config, choice) if config.sync.transport == "auto" else config


def _fits_gpu(config: Config, shapes: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether SGLang's share of an engine's GPU holds a second copy of its weights.

    The rest of the GPU is for activations, CUDA graphs and the contexts of trainer ranks.
    """
    try:
        placed = placement(config)
        room = placed.engines[0].node.group.device_gb * _GB * config.engine.mem_fraction_static
        need = max(_device_need(config, shapes))
    except MoerlError as error:  # the checks of a start say it too
        return False, str(error)
    if not room:
        return False, "cluster.nodes.*.device_gb is not given"
    if not config.engine.max_total_tokens:
        return False, "with engine.max_total_tokens=0 the KV cache takes what the weights leave"
    return need <= room, f"{need / _GB:.3g} of {room / _GB:.3g} GB (engine.mem_fraction_static)"


def _device_need(config: Config, shapes: Mapping[str, Any]) -> list[int]:
    """Bytes of an engine's GPU with cuda_ipc, per size of engines: weights twice, KV cache."""
    needs = []
    for spec, trainer, engines, policy in planned_layouts(config, shapes):
        received = max(TransferPlan(spec, trainer, engines, 0, policy).totals().received_bytes)
        tokens, dtype = config.engine.max_total_tokens, config.engine.dtype
        memory = engine_memory(spec, engines, received, tokens, dtype, stages_on_device=True)
        needs.append(memory.total + memory.update)
    return needs


def compare(
    config: Config, shapes: Mapping[str, Any], received: float, links: Links
) -> list[TransportRow]:
    """Every transport.  received: bytes of the largest engine rank; links: the network's cards."""
    rows = []
    for name in NAMES:
        refused = why_not(config, name)
        if name == "cuda_ipc" and not refused:
            fits, shown = _fits_gpu(config, shapes)
            refused = "" if fits else f"does not fit an engine's GPU: {shown}"
        gpu = received if name == "cuda_ipc" else 0
        host = 0 if name in ("cuda_ipc", "disk") else received
        seconds = _seconds(config, name, received, links)
        rows.append(TransportRow(name, refused, round(gpu), round(host), seconds))
    return rows


def _seconds(config: Config, name: str, received: float, links: Links) -> float | None:
    by_card = links.bytes_per_s * PUBLISHED_EFFICIENCY["plan"]
    rate = _RATES.get(name)
    if name == "mooncake":
        rate = by_card if mooncake_protocol(config) == "rdma" else _MOONCAKE_TCP
    elif name == "nccl" and not is_local(config.cluster):
        rate = by_card
    return None if rate is None else received / rate


def describe_transports(config: Config, rows: list[TransportRow], choice: TransportChoice) -> str:
    """A table, and what `auto` means."""
    lines = [f"{'transport, per engine rank':<28}{'GPU, GB':>10}{'host, GB':>10}{'seconds':>10}  "]
    for row in rows:
        seconds = "-" if row.seconds is None else f"{row.seconds:.3g}"
        cells = [f"{row.staging_gpu / _GB:.3g}", f"{row.staging_host / _GB:.3g}", seconds]
        shown = "".join(f"{cell:>10}" for cell in (["-"] * 3 if row.refused else cells))
        lines.append(f"{row.name:<28}{shown}  {row.refused}".rstrip())
    return "\n".join([*lines, transport_line(config, choice)])


def transport_line(config: Config, choice: TransportChoice) -> str:
    """The transport of this run, and what `auto` would be."""
    name = config.sync.transport
    over = f" by {mooncake_protocol(config)}" if name == "mooncake" else ""
    if over.endswith("tcp"):
        over += " (no RDMA: cluster.nodes.*.rdma names no cards, or sync.mooncake_protocol=tcp)"
    if name in ("auto", choice.name):
        return f"sync.transport: {choice.name}{over}, since {choice.reason}"
    return f"sync.transport: {name}{over}; auto is {choice.name}, since {choice.reason}"
