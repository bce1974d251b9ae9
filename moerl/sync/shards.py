"""Publishing without a gather: every trainer rank sends what it holds to the ranks that need it.

`open_outlet` is called on all ranks.  `publish` freezes this rank's shard and returns; couriers
send it, one thread per engine and rank, while the next step trains.  Rank 0 drives one session per
engine (`session`); the other ranks only answer (`line`).

The frozen shard is overwritten only when no session is sending: all ranks meet at a barrier after
rank 0 has settled its sessions.  A courier that is still writing for a session given up writes into
a staging buffer that its engine has dropped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from moerl.config.schema import Config
from moerl.errors import EngineError
from moerl.layout.plan import EngineLayout
from moerl.layout.relay import TRAINER, relay_schedule
from moerl.layout.transfer import TransferPlan
from moerl.layout.wire import WirePolicy
from moerl.protocols import PublishFailure, PublishResult
from moerl.sync.courier import Courier, FrozenShard
from moerl.sync.line import CourierThread, Line, Offer
from moerl.sync.outlet import Seat
from moerl.sync.session import EngineSession, Result, Terms
from moerl.transport.registry import make
from moerl.types import PolicyVersion


class ShardOutlet:
    """Every rank's way to the engines; `publish` and `wait` are collective."""

    def __init__(
        self,
        seat: Seat,
        sessions: Sequence[EngineSession],
        offer: Offer,
        *,
        quorum: int,
        patience: int,
    ) -> None:
        """sessions: of rank 0, one per engine; () elsewhere.

        patience: publishes in a row that may reach fewer than quorum engines; the first must not,
        since what fails it (layouts that differ, a missing library) no restart repairs.
        """
        self._seat, self._sessions, self._offer = seat, sessions, offer
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
        for session in self._sessions:
            session.publish(version)
        return metrics

    def wait(self) -> dict[str, float]:
        """Wait until nothing is being sent, on all ranks; metrics of that publish, once."""
        begin = time.perf_counter()
        results = [session.settle() for session in self._sessions]
        dist.barrier(self._seat.control)
        waited_s = time.perf_counter() - begin
        taken = [result for result in results if result is not None]
        self._check(taken)
        return shard_metrics(taken, waited_s, self._freeze_s)

    def resume(self) -> None:
        """After `wait`, with the frozen weights unchanged: look after the engines again."""
        for session in self._sessions:
            session.resume()

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
    """Collective: plans, threads and lines of this rank."""
    policy = WirePolicy(dtype=config.engine.dtype, bucket_bytes=config.sync.bucket_bytes)
    engine = engine_layout(config)
    address = config.cluster.address
    offer = Offer(FrozenShard(), threading.Condition())
    lines = [Line(address, seat.token, seat.world_size) for _ in _engines(config) if seat.rank == 0]
    endpoints: list[Any] = [[line.endpoint for line in lines]]
    dist.broadcast_object_list(endpoints, src=0, group=seat.control)
    count = config.engine.count
    hops = {hop.dst: hop for hop in relay_schedule(range(count), config.sync.direct or count)}
    plan_ids = []
    for index in _engines(config):
        plan = TransferPlan(
            seat.spec, seat.layout, engine, hops[index].plan_engine, policy, seat.flavor
        ).sender(seat.rank)
        plan_ids.append(plan.plan_id)
        transport = make(config.sync.transport, address=address, folder=config.sync.folder)
        courier = Courier(plan, offer.shard, transport, delta=config.sync.delta)
        CourierThread(endpoints[0][index], seat.token, seat.rank, courier, offer).start()
    sessions: list[EngineSession] = []
    for index, line in enumerate(lines):
        terms = Terms(
            engine=index,
            plan_engine=hops[index].plan_engine,
            plan=plan_ids[index],
            transport=config.sync.transport,
            trainer=seat.layout,
            policy=policy,
            flavor=seat.flavor,
            timeout_s=config.sync.timeout_s,
            drain_s=config.update_wait_s,
            folder=config.sync.folder,
            delta=config.sync.delta,
        )
        hop = hops[index]
        source = sessions[hop.src] if hop.src != TRAINER else None
        sessions.append(EngineSession(terms, line, seat.connect, seat.tracer, source))
    for session in sessions:
        session.start()
    return ShardOutlet(
        seat, sessions, offer, quorum=config.sync.quorum, patience=config.supervision.max_restarts
    )


def engine_layout(config: Config) -> EngineLayout:
    """How the engines of a run cut their weights, as planned; each engine says whether it is so."""
    args = config.engine.args
    return EngineLayout(
        tp=config.engine.tp,
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


def _engines(config: Config) -> range:
    return range(config.engine.count)
