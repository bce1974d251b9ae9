"""Publishing weights without a gather: each trainer rank sends its shard to the ranks that need it.

`open_publisher` is called on all ranks.  `publish` snapshots this rank's shard and returns; sender
threads, one per engine and rank, send it while the next step trains.  Rank 0 drives one session per
engine (`session`); the other ranks only serve its requests (`sender.SenderThread`).

The weight snapshot is overwritten only when no session is sending: all ranks meet at a barrier
after rank 0 has settled its sessions.  A sender that still writes for an aborted session writes
into a staging buffer that its engine has dropped, or whose engine has left the run.

Engines join and leave during the run (`set_engines`).  A new engine gets the current snapshot at
once, without waiting for the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch import Tensor

from moerl.config.clusters import sleeping_engines, takes_turns
from moerl.config.schema import Config, ParallelConfig
from moerl.core.errors import EngineError
from moerl.core.json_files import read_model_config
from moerl.core.messages import (
    AbortUpdate,
    Message,
    PrepareUpdate,
    PublishFailure,
    PublishResult,
    SessionMessage,
    SyncTarget,
)
from moerl.core.rpc import Keys
from moerl.core.types import PolicyVersion
from moerl.distributed.object_collectives import all_gather_values
from moerl.layout import LayerSpec, ModelSpec, model_spec
from moerl.runtime.trace import Tracer
from moerl.weight_sync.adapters.factor_plan import FactorPlan
from moerl.weight_sync.adapters.merged_totals import MergedTotals
from moerl.weight_sync.buckets import WirePolicy
from moerl.weight_sync.held_shards import EngineLayout
from moerl.weight_sync.packed_buckets import BucketPacker
from moerl.weight_sync.sender import SenderGroup, SenderThread, WeightSender
from moerl.weight_sync.session import Control, EngineSession, Result, SessionSpec
from moerl.weight_sync.snapshot import LiveWeights, WeightSnapshot
from moerl.weight_sync.transfer_plan import PLAN_ID, TRAINER, Hop, TransferPlan, relay_schedule
from moerl.weight_sync.transports.factory import make
from moerl.weight_sync.wire_formats import engine_wants


@dataclass(frozen=True, slots=True)
class SyncContext:
    """This trainer rank, its parameters, and how it reaches the controller."""

    rank: int
    world_size: int
    control: dist.ProcessGroup  # gloo group of all ranks
    spec: ModelSpec
    layout: ParallelConfig
    layer_spec: LayerSpec
    # parameters by their name in megatron_tiles; factors, which are sent, by Hugging Face name
    live: Callable[[], Mapping[str, Tensor]]
    connect: Callable[[], Control]  # opens a connection to the controller
    keys: Keys  # of the run
    tracer: Tracer
    on_failure: Callable[[BaseException], None]  # ends the process; called on any thread


class WeightPublisher:
    """Publishes this rank's shard to the engines; all calls are collective."""

    def __init__(
        self,
        context: SyncContext,
        destinations: Destinations,
        *,
        quorum: int,
        patience: int,
    ) -> None:
        """Start without engines; `set_engines` adds them.

        patience: publishes in a row that may reach fewer than quorum engines, and attempts in a
        row that an engine may refuse.

        The first publish has no patience: its causes (layouts that differ, a missing library) are
        not repaired by a restart.
        """
        self._context, self._destinations = context, destinations
        self._snapshot = destinations.snapshot
        self._quorum, self._patience = quorum, patience
        self._lock = threading.Lock()
        self._short = patience  # publishes in a row below the quorum
        self._is_judged = True  # the publish whose first attempts all ended was compared with it
        self._has_reached = False  # a publish has reached the quorum
        self._snapshot_s = 0.0
        destinations.on_attempt = self._look

    def rehearse(self, version: PolicyVersion) -> None:
        """Before the first step: each engine compares the plan with the layout that it serves.

        Fewer engines than the quorum that accept it end the run.
        """
        with self._lock:
            for session in self._destinations.sessions.values():
                session.rehearse(version)
        self.wait()

    def publish(self, version: PolicyVersion) -> dict[str, float]:
        """Snapshot this rank's shard, start sending it; returns metrics of the previous publish."""
        metrics = self.wait()
        begin = time.perf_counter()
        self._snapshot.store(self._context.live(), version)
        self._snapshot_s = time.perf_counter() - begin
        with self._lock:
            self._is_judged = False
            for session in self._destinations.sessions.values():
                session.publish(version)
        return metrics

    def before_update(self) -> None:
        """Call before the parameters change: that waits for their snapshot, no thread does."""
        self._snapshot.before_write()

    def wait(self) -> dict[str, float]:
        """Wait until all ranks have stopped sending; metrics of that publish, returned once."""
        begin = time.perf_counter()
        results = [session.settle() for session in self._destinations.sessions.values()]
        dist.barrier(self._context.control)
        waited_s = time.perf_counter() - begin
        taken = [result for result in results if result is not None]
        return publish_metrics(taken, waited_s, self._snapshot_s)

    def resume(self) -> None:
        """After `wait`, with the weight snapshot unchanged: serve engines that are behind."""
        for session in self._destinations.sessions.values():
            session.resume()

    def set_engines(self, engines: Sequence[SyncTarget]) -> None:
        """Publish to exactly these engines from here on; new engines get the weight snapshot."""
        for engine in self._destinations.engines - {one.engine for one in engines}:
            self._destinations.close(engine)
        new = [one for one in engines if one.engine not in self._destinations.engines]
        if not new:
            return
        version = self._snapshot.version
        for session in self._destinations.open(new):
            session.start()
            if version is not None:
                session.publish(version)

    def _look(self) -> None:
        """After each attempt, on a session's thread: end a run whose engines take no version.

        Not in `wait`: with the largest lag reached no batch comes, and no other publish.
        """
        with self._lock:
            sessions = list(self._destinations.sessions.values())
            self._count_refusals(sessions)
            if not self._is_judged and all(session.is_tried for session in sessions):
                self._is_judged = True
                self._count_short(sessions)

    def _count_refusals(self, sessions: Sequence[EngineSession]) -> None:
        limit = self._patience if self._has_reached else 0
        refusing = [session for session in sessions if session.refusals > limit]
        if refusing and len(sessions) - len(refusing) < self._quorum:
            self._end(sessions, [session.failure for session in refusing if session.failure])

    def _count_short(self, sessions: Sequence[EngineSession]) -> None:
        failures = [session.first_failure for session in sessions if session.first_failure]
        if not failures or len(sessions) - len(failures) >= self._quorum:
            self._short, self._has_reached = 0, True
            return
        self._short += 1
        if self._short > self._patience:
            self._end(sessions, failures)

    def _end(self, sessions: Sequence[EngineSession], failures: Sequence[PublishFailure]) -> None:
        first = failures[0]
        self._context.on_failure(
            EngineError(
                f"{len(sessions) - len(failures)} of {len(sessions)} engines take version "
                f"{first.version}, sync.quorum = {self._quorum}: engine {first.engine}, "
                f"{first.phase}: {first.cause}"
            )
        )


def open_publisher(config: Config, context: SyncContext) -> WeightPublisher:
    """Collective: make plans, threads and channels of this rank for the configured engines."""
    publisher = WeightPublisher(
        context,
        Destinations(config, context),
        quorum=config.sync.quorum,
        patience=config.supervision.max_restarts,
    )
    publisher.set_engines([SyncTarget(index, tp) for index, tp in config.engine.sizes.items()])
    return publisher


class Destinations:
    """This rank's senders and, on rank 0, the sessions that direct them: one per engine."""

    def __init__(self, config: Config, context: SyncContext) -> None:
        self.snapshot = LiveWeights() if takes_turns(config.cluster) else WeightSnapshot()
        self.sessions: dict[int, EngineSession] = {}  # on rank 0; {} on other ranks
        self.engines: set[int] = set()
        self.on_attempt: Callable[[], None] = lambda: None  # see EngineSession
        self._config, self._context = config, context
        self._packers: WeakValueDictionary[str, BucketPacker] = WeakValueDictionary()  # by plan
        model = read_model_config(Path(config.model.path))
        wants = engine_wants(config.engine.args.get("quantization"), model)
        self._policy = WirePolicy(config.engine.dtype, wants, config.sync.bucket_bytes)
        self._lora = config.lora if config.lora.sends_factors else None
        turns = takes_turns(config.cluster)
        self._sleepers = sleeping_engines(config) if turns else frozenset[int]()

    def open(self, engines: Sequence[SyncTarget]) -> list[EngineSession]:
        """Collective: connect to new engines; their sessions are not started yet."""
        context = self._context
        hops = self._hops([one.engine for one in engines])
        mine = [self._sender(one) for one in engines]
        # by rank: endpoints of its senders
        every = all_gather_values([place for _, place in mine], list[str], context.control)
        for place, one in enumerate(engines if context.rank == 0 else ()):
            hop = hops[one.engine]
            source = self.sessions[hop.src] if hop.src != TRAINER else None
            self.sessions[one.engine] = EngineSession(
                self._spec(hop, mine[place][0]),
                SenderGroup([endpoints[place] for endpoints in every], context.keys),
                context.connect,
                context.tracer,
                source,
                lambda: self.on_attempt(),
            )
        self.engines |= {one.engine for one in engines}
        return [self.sessions[one.engine] for one in engines if context.rank == 0]

    def close(self, engine: int) -> None:
        """Remove an engine that left; its session stops its senders."""
        self.engines.remove(engine)
        if engine in self.sessions:
            self.sessions.pop(engine).remove()

    def _hops(self, engines: Sequence[int]) -> dict[int, Hop]:
        """Hops to these engines; engines that join a running trainer are served by the trainer."""
        direct = 0 if self.engines else self._config.sync.direct
        return {hop.dst: hop for hop in relay_schedule(engines, direct or len(engines))}

    def _sender(self, one: SyncTarget) -> tuple[str, str]:
        """Start this rank's sender to an engine; (id of its transfer plan, its endpoint)."""
        config, context = self._config, self._context
        plan = TransferPlan(
            context.spec,
            context.layout,
            engine_layout(config, one.tp),
            PLAN_ID,
            self._policy,
            context.layer_spec,
        )
        packer = self._packer(plan if self._lora is None else FactorPlan(plan, self._lora))
        address, folder = config.cluster.address, config.sync.folder
        transport = make(config.sync.transport, address=address, folder=folder)
        sender = WeightSender(packer, transport, delta=config.sync.delta)
        thread = SenderThread(address, context.keys, sender)
        thread.start()
        return packer.plan.plan_id, thread.endpoint

    def _packer(self, transfer_plan: TransferPlan | FactorPlan) -> BucketPacker:
        """One for all engines with this plan."""
        packer = self._packers.get(transfer_plan.id)
        if packer is None:
            rank, weights, merged = self._context.rank, self.snapshot, None
            if isinstance(transfer_plan, FactorPlan):
                merged = MergedTotals(transfer_plan.weights.sender(rank), weights).total
            beside = self._lora is not None and self._lora.serves_adapters
            packer = BucketPacker(
                transfer_plan.sender(rank), weights, merged, counts_factors=beside
            )
            self._packers[transfer_plan.id] = packer
        return packer

    def _spec(self, hop: Hop, plan_id: str) -> SessionSpec:
        config, context = self._config, self._context
        return SessionSpec(
            engine=hop.dst,
            plan_engine=PLAN_ID,
            plan=plan_id,
            transport=config.sync.transport,
            trainer=context.layout,
            policy=self._policy,
            layer_spec=context.layer_spec,
            timeout_s=config.sync.timeout_s,
            drain_s=config.update_wait_s,
            folder=config.sync.folder,
            delta=config.sync.delta,
            lora=self._lora,
            writes_live=self._lora is None and hop.dst in self._sleepers,
        )


def engine_layout(config: Config, tp: int) -> EngineLayout:
    """The engine layout that the run plans with; each engine checks that it has it."""
    return EngineLayout(tp=tp, ep=config.engine.ep, dp=config.engine.attention_dp)


def publish_metrics(
    results: Sequence[Result], wait_s: float, snapshot_s: float
) -> dict[str, float]:
    """`async/sync_*` of one publish to all engines; empty when nothing was published."""
    if not results:
        return {}
    done = [result for result in results if isinstance(result, PublishResult)]
    metrics = {
        "async/sync_wait_s": wait_s,
        "async/sync_snapshot_s": snapshot_s,
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


# --- one engine without a trainer -----------------------------------------------------------------
async def check_plan(
    config: Config, engine: int, ask: Callable[[SessionMessage], Awaitable[Message]]
) -> None:
    """Have a started engine compare the transfer plan with its live tensors; nothing is sent.

    `moerl mismatch` asks it before it samples, without a trainer; a run asks by a rehearsal.

    ask: sends one message of a session to the engine.  Raises LayoutError or ConfigError
    where no plan exists, EngineError with the engine's sentence when it refuses.
    """
    sync, trainer = config.sync, config.trainer.parallel
    start = PolicyVersion(0, 0)  # which a started engine serves
    model = read_model_config(Path(config.model.path))
    wants = engine_wants(config.engine.args.get("quantization"), model)
    policy = WirePolicy(config.engine.dtype, wants, sync.bucket_bytes)
    layout = engine_layout(config, config.engine.sizes[engine])
    plan = TransferPlan(model_spec(model), trainer, layout, PLAN_ID, policy)
    prepare = PrepareUpdate(
        engine=engine,
        version=start,
        plan_engine=PLAN_ID,
        plan=plan.sender(0).plan_id,
        layout="",
        transport=sync.transport,
        trainer=asdict(trainer),
        policy=asdict(policy),
        layer_spec=plan.layer_spec,
        timeout_s=sync.timeout_s,
        folder=sync.folder,
        delta=sync.delta,
    )
    await ask(prepare)
    await ask(AbortUpdate(engine, start, "it was a rehearsal", sync.timeout_s))
