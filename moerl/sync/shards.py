"""Publishing without a gather: every trainer rank sends what it holds to the ranks that need it.

`open_outlet` is called on all ranks.  `publish` freezes this rank's shard and returns; couriers
send it, one thread per engine and rank, while the next step trains.  Rank 0 drives one session per
engine (`session`); the other ranks only answer (`line`).

The frozen shard is overwritten only when no session is sending: all ranks meet at a barrier after
rank 0 has settled its sessions.  A courier that is still writing for a session given up writes into
a staging buffer that its engine has dropped, or whose engine has left the run and serves nobody.

Engines join and leave while the run goes on (`enlist`): one that joins is served the frozen
version at once, beside the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from moerl.config.json_files import read_model_config
from moerl.config.schema import Config, ParallelConfig
from moerl.errors import EngineError
from moerl.layout import Flavor, ModelSpec
from moerl.layout.plan import EngineLayout
from moerl.layout.relay import TRAINER, Hop, relay_schedule
from moerl.layout.transfer import TransferPlan
from moerl.layout.wire import WirePolicy, engine_wants
from moerl.messages import Enlisted, PublishFailure, PublishResult
from moerl.sync.courier import Courier, FrozenShard
from moerl.sync.line import CourierThread, Line, Offer
from moerl.sync.session import Control, EngineSession, Result, Terms
from moerl.trace import Tracer
from moerl.transport.registry import make
from moerl.types import PolicyVersion


@dataclass(frozen=True, slots=True)
class Seat:
    """This rank's place among the trainer ranks, and what it trains."""

    rank: int
    world_size: int
    control: dist.ProcessGroup  # gloo, all ranks
    spec: ModelSpec
    layout: ParallelConfig
    flavor: Flavor
    live: Callable[[], Mapping[str, Tensor]]  # parameters by the names of megatron_tiles
    connect: Callable[[], Control]  # a new line to the controller
    token: str  # the run's
    tracer: Tracer
    on_failure: Callable[[BaseException], None]  # ends the process; called on any thread


class ShardOutlet:
    """This rank's way to the engines; all calls are collective over the trainer ranks."""

    def __init__(
        self,
        seat: Seat,
        ways: Ways,
        *,
        quorum: int,
        patience: int,
    ) -> None:
        """patience: publishes in a row that may reach fewer than quorum engines.

        The first must not: what fails it (layouts that differ, a missing library) no restart
        repairs.
        """
        self._seat, self._ways, self._offer = seat, ways, ways.offer
        self._quorum, self._patience = quorum, patience
        self._short = patience  # publishes in a row below the quorum
        self._freeze_s = 0.0

    def publish(self, version: PolicyVersion) -> dict[str, float]:
        """Freeze this rank's shard, start sending it; metrics of the publish before."""
        metrics = self.wait()
        begin = time.perf_counter()
        with self._offer.changed:
            self._offer.shard.freeze(self._seat.live(), version)
            self._offer.changed.notify_all()
        self._freeze_s = time.perf_counter() - begin
        for session in self._ways.sessions.values():
            session.publish(version)
        return metrics

    def wait(self) -> dict[str, float]:
        """Wait until nothing is being sent, on all ranks; metrics of that publish, once."""
        begin = time.perf_counter()
        results = [session.settle() for session in self._ways.sessions.values()]
        dist.barrier(self._seat.control)
        waited_s = time.perf_counter() - begin
        taken = [result for result in results if result is not None]
        self._check(taken)
        return shard_metrics(taken, waited_s, self._freeze_s)

    def resume(self) -> None:
        """After `wait`, with the frozen weights unchanged: serve engines that are behind."""
        for session in self._ways.sessions.values():
            session.resume()

    def enlist(self, engines: Sequence[Enlisted]) -> None:
        """Publish to exactly these engines from here on; new ones get the frozen weights."""
        for engine in self._ways.engines - {one.engine for one in engines}:
            self._ways.close(engine)
        new = [one for one in engines if one.engine not in self._ways.engines]
        if not new:
            return
        version = self._offer.shard.version
        for session in self._ways.open(new):
            session.start()
            if version is not None:
                session.publish(version)

    def _check(self, results: Sequence[Result]) -> None:
        failures = [result for result in results if isinstance(result, PublishFailure)]
        if not failures or len(results) - len(failures) >= self._quorum:
            self._short = 0
            return
        self._short += 1
        if self._short > self._patience:
            first = failures[0]
            self._seat.on_failure(
                EngineError(
                    f"version {first.version} reached {len(results) - len(failures)} engines, "
                    f"sync.quorum = {self._quorum}: engine {first.engine}, {first.phase}: "
                    f"{first.cause}"
                )
            )


def open_outlet(config: Config, seat: Seat) -> ShardOutlet:
    """Collective: plans, threads and lines of this rank, to the configured engines."""
    outlet = ShardOutlet(
        seat,
        Ways(config, seat),
        quorum=config.sync.quorum,
        patience=config.supervision.max_restarts,
    )
    outlet.enlist([Enlisted(index, tp) for index, tp in config.engine.sizes.items()])
    return outlet


class Ways:
    """This rank's couriers and, on rank 0, the sessions that direct them: one per engine."""

    def __init__(self, config: Config, seat: Seat) -> None:
        self.offer = Offer(FrozenShard(), threading.Condition())
        self.sessions: dict[int, EngineSession] = {}  # of rank 0; {} elsewhere
        self.engines: set[int] = set()
        self._config, self._seat = config, seat
        model = read_model_config(Path(config.model.path))
        wants = engine_wants(config.engine.args.get("quantization"), model)
        self._policy = WirePolicy(config.engine.dtype, wants, config.sync.bucket_bytes)

    def open(self, engines: Sequence[Enlisted]) -> list[EngineSession]:
        """Collective: ways to engines that have none; the sessions are not started yet."""
        config, seat = self._config, self._seat
        address = config.cluster.address
        lines = [Line(address, seat.token, seat.world_size) for _ in engines if seat.rank == 0]
        endpoints: list[Any] = [[line.endpoint for line in lines]]
        dist.broadcast_object_list(endpoints, src=0, group=seat.control)
        hops = self._hops([one.engine for one in engines])
        plans = [
            self._courier(one, hops[one.engine], endpoints[0][place])
            for place, one in enumerate(engines)
        ]
        for line, one, plan in zip(lines, engines, plans, strict=False):
            hop = hops[one.engine]
            source = self.sessions[hop.src] if hop.src != TRAINER else None
            session = EngineSession(self._terms(hop, plan), line, seat.connect, seat.tracer, source)
            self.sessions[one.engine] = session
        self.engines |= {one.engine for one in engines}
        return [self.sessions[one.engine] for one in engines if seat.rank == 0]

    def close(self, engine: int) -> None:
        """The engine left; its couriers hear it from its session."""
        self.engines.remove(engine)
        if engine in self.sessions:
            self.sessions.pop(engine).leave()

    def _hops(self, engines: Sequence[int]) -> dict[int, Hop]:
        """Engines that join a run that goes on are served by the trainer itself."""
        direct = 0 if self.engines else self._config.sync.direct
        return {hop.dst: hop for hop in relay_schedule(engines, direct or len(engines))}

    def _courier(self, one: Enlisted, hop: Hop, endpoint: str) -> str:
        """Start this rank's courier to an engine; the id of its transfer plan."""
        config, seat = self._config, self._seat
        layout = engine_layout(config, one.tp)
        plan = TransferPlan(
            seat.spec, seat.layout, layout, hop.plan_engine, self._policy, seat.flavor
        ).sender(seat.rank)
        address, folder = config.cluster.address, config.sync.folder
        transport = make(config.sync.transport, address=address, folder=folder)
        courier = Courier(plan, self.offer.shard, transport, delta=config.sync.delta)
        CourierThread(endpoint, seat.token, seat.rank, courier, self.offer).start()
        return plan.plan_id

    def _terms(self, hop: Hop, plan: str) -> Terms:
        config, seat = self._config, self._seat
        return Terms(
            engine=hop.dst,
            plan_engine=hop.plan_engine,
            plan=plan,
            transport=config.sync.transport,
            trainer=seat.layout,
            policy=self._policy,
            flavor=seat.flavor,
            timeout_s=config.sync.timeout_s,
            drain_s=config.update_wait_s,
            folder=config.sync.folder,
            delta=config.sync.delta,
        )


def engine_layout(config: Config, tp: int) -> EngineLayout:
    """How the engines of a run cut their weights, as planned; each engine says whether it is so."""
    args = config.engine.args
    return EngineLayout(
        tp=tp,
        ep=int(args.get("ep_size", 1)),
        dp=int(args.get("attn_dp_size", 1)),
    )


def shard_metrics(results: Sequence[Result], wait_s: float, freeze_s: float) -> dict[str, float]:
    """`async/sync_*` of one publish to all engines; empty when nothing was published."""
    if not results:
        return {}
    done = [result for result in results if isinstance(result, PublishResult)]
    metrics = {
        "async/sync_wait_s": wait_s,
        "async/sync_freeze_s": freeze_s,
        "async/sync_engines_behind": float(len(results) - len(done)),
    }
    if not done:
        return metrics
    transfer_s = sum(result.transfer_s for result in done)
    total = sum(result.num_bytes for result in done)
    return metrics | {
        "async/sync_bytes": float(total),
        "async/sync_relayed_bytes": float(sum(r.num_bytes for r in done if r.source != TRAINER)),
        "async/sync_prepare_s": sum(result.prepare_s for result in done),
        "async/sync_transfer_s": transfer_s,
        "async/sync_verify_s": sum(result.verify_s for result in done),
        "async/sync_commit_s": sum(result.commit_s for result in done),
        "async/sync_pause_s": max(result.pause_s for result in done),
        "async/sync_gib_per_s": total / max(transfer_s, 1e-9) / 2**30,
        "async/sync_resent_buckets": float(sum(result.resent for result in done)),
        "async/interrupts": float(sum(result.aborted for result in done)),
    }
