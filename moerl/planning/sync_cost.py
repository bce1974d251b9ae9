"""What a publish will cost: bytes per rank, traffic against a broadcast, seconds, buffers.

Legend
    M  bytes of the model on the wire            X  of its routed experts, in the trainer's dtype
    W  trainer ranks      N engines of R ranks   S  bytes that an engine rank receives
    B  bytes/s of a rank's network card          g  ranks of an engine on one node

    planned      every rank receives S; T = max(largest S, largest sent) / B, then one S / B per
                 relay round
    broadcast    gather the experts over EP on the trainer, then every rank receives M: flat, T =
                 M / B; hierarchical, one copy per node over all its cards and NVLink inside,
                 T = M / (g B)

These T are bounds at line rate.  Published systems reach the shares of it in PUBLISHED_EFFICIENCY;
bench/plan_anchors.py holds their seconds with their sources, fits the shares and prints the error
of predicting each from the others.  Bytes are exact for the plan and lower bounds for the
broadcast: the gather of the trainer's tensor-parallel dense weights is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moerl.config.schema import ParallelConfig
from moerl.core.errors import ConfigError
from moerl.layout.shards import hf_shapes
from moerl.layout.spec import ModelSpec
from moerl.planning.layout_check import ITEMSIZE as MODEL_ITEMSIZE
from moerl.planning.layout_check import Spread, trainer_bytes
from moerl.weight_sync.buckets import WirePolicy, wire_bytes
from moerl.weight_sync.held_shards import EngineLayout
from moerl.weight_sync.transfer_plan import PLAN_ID, Hop, TransferPlan, num_rounds, relay_schedule

PUBLISHED_EFFICIENCY = {"plan": 0.094, "broadcast": 0.40, "hierarchical": 0.17}
"""Share of line rate; geometric means, as bench/plan_anchors.py prints them."""


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
        return self.nic_gb_s * 1e9


@dataclass(frozen=True, slots=True)
class Forecast:
    """One publish to all engines.  Bytes unless named otherwise; seconds at line rate."""

    model_bytes: int  # M
    expert_share: float  # of M
    trainer_ranks: int
    engines: int
    ranks_per_engine: int
    received: Spread  # S, per engine rank: bound on engine ingress
    engine_bytes: int  # all ranks of one engine
    planned_bytes: int  # all engines
    sent: Spread  # per trainer rank, to the engines it serves directly: bound on egress
    sent_without_relay: Spread
    parts: Spread  # boxes sent per trainer rank to one engine
    gather_bytes: int  # over EP on the trainer, before a broadcast
    broadcast_bytes: int  # received by all engine ranks
    broadcast_nic_bytes: int  # received by all nodes, where cards share one copy
    nodes_per_engine: int
    planned_s: float
    broadcast_s: float
    hierarchical_s: float
    hops: tuple[Hop, ...]
    trainer_buffer: int  # per rank: weight snapshot and two buckets
    engine_buffer: int  # per rank: staging segment

    @property
    def rank_ratio(self) -> float:
        """Bytes into engine ranks: broadcast / plan."""
        return self.broadcast_bytes / self.planned_bytes

    @property
    def nic_ratio(self) -> float:
        """Bytes through network cards: hierarchical broadcast / plan."""
        return self.broadcast_nic_bytes / self.planned_bytes


def forecast(
    spec: ModelSpec,
    trainer: ParallelConfig,
    engines: EngineLayout,
    policy: WirePolicy,
    links: Links,
    *,
    direct: int = 0,
) -> Forecast:
    """Cost of one publish.  direct: engines that the trainer serves itself; 0 = the fastest number.

    Raises ConfigError or LayoutError when sizes do not divide.
    """
    if not 0 <= direct <= engines.num:
        raise ConfigError("--direct", direct, f"must be 0 to {engines.num}, the number of engines")
    totals = TransferPlan(spec, trainer, engines, PLAN_ID, policy).totals()
    received = Spread.of(totals.received_bytes)
    # by the number of engines, then by trainer rank: all engines get the same buckets
    sums = [[n * sent for sent in totals.sent_bytes] for n in range(1, engines.num + 1)]
    pace = _Pace(received.high, [max(row) for row in sums], links.bytes_per_s)
    served = direct or pace.fastest()
    model, experts = model_bytes(spec, policy)
    engine_bytes = sum(totals.received_bytes)
    nodes = -(-engines.tp // links.ranks_per_node)
    held = trainer_bytes(spec, trainer)
    return Forecast(
        model_bytes=model,
        expert_share=experts / model,
        trainer_ranks=trainer.world_size,
        engines=engines.num,
        ranks_per_engine=engines.tp,
        received=received,
        engine_bytes=engine_bytes,
        planned_bytes=engine_bytes * engines.num,
        sent=Spread.of(sums[served - 1]),
        sent_without_relay=Spread.of(sums[-1]),
        parts=Spread.of(totals.sent_parts),
        gather_bytes=_gather_bytes(spec, trainer),
        broadcast_bytes=engines.world_size * model,
        broadcast_nic_bytes=engines.num * nodes * model,
        nodes_per_engine=nodes,
        planned_s=pace.seconds(served),
        broadcast_s=model / links.bytes_per_s,
        hierarchical_s=model / links.bytes_per_s / min(links.ranks_per_node, engines.tp),
        hops=relay_schedule(range(engines.num), served),
        trainer_buffer=round(held.high) + 2 * policy.bucket_bytes,
        engine_buffer=round(received.high),
    )


@dataclass(frozen=True, slots=True)
class _Pace:
    """Seconds of a publish by the number of engines that the trainer serves directly."""

    received: float  # bytes, the largest S
    sent: list[int]  # bytes, the largest of a trainer rank; entry n - 1 serves n engines
    bytes_per_s: float

    def seconds(self, served: int) -> float:
        first = max(self.received, self.sent[served - 1]) / self.bytes_per_s
        rounds = num_rounds(relay_schedule(range(len(self.sent)), served))
        return first + rounds * self.received / self.bytes_per_s

    def fastest(self) -> int:
        """The smallest of the fastest numbers."""
        return min(range(1, len(self.sent) + 1), key=lambda n: (self.seconds(n), n))


def model_bytes(spec: ModelSpec, policy: WirePolicy) -> tuple[int, int]:
    """(all, routed experts): bytes on the wire of the engines' tensors, each once."""
    every = experts = 0
    for name, shape in hf_shapes(spec).items():
        _, is_layer, rest = name.partition("model.layers.")
        if is_layer and int(rest.split(".")[0]) >= spec.layers:
            continue  # prediction layers stay on the trainer
        size = wire_bytes(name, shape, policy)
        every += size
        experts += size if ".experts." in name else 0
    return every, experts


def _gather_bytes(spec: ModelSpec, trainer: ParallelConfig) -> int:
    """Bytes received by all trainer ranks when each stage gathers its experts on every rank."""
    plain = WirePolicy("float32")
    experts = model_bytes(spec, plain)[1] // 4 * MODEL_ITEMSIZE.get(spec.dtype, 2)
    return trainer.world_size * experts * (trainer.ep - 1) // (trainer.pp * trainer.ep)
