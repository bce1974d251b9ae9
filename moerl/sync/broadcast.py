"""Publishing weights through SGLang's bucketed distributed update, one engine at a time.

The trainer's rank 0 and the tensor-parallel ranks of one engine form a process group of their own.
A publish is a session: OpenUpdate (the controller interrupts the engine and begins its update
session), one broadcast per bucket, CloseUpdate (the engine serves the version).  The sender
broadcasts only after OpenUpdate was answered, because a broadcast that nobody receives hangs.

A bucket is one flat uint8 tensor, tensors back to back in the order of `Bucket`, which is what the
engine receives with load_format=flattened_bucket (SGLang 0.5.23 `srt/weight_sync/tensor_bucket.py`
and `srt/model_executor/model_runner_components/weight_updater.py`, read, not imported).

Rejected: one group over all engines (a dead engine would take the others with it), and torchrun's
own store for the rendezvous (engines are outside the gang and must not reach it).
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from moerl.config.files import read_model_config
from moerl.config.schema import Config, SyncConfig
from moerl.errors import ConfigError, EngineError
from moerl.layout.wire import engine_wants
from moerl.protocols import (
    CloseUpdate,
    Enlisted,
    JoinSync,
    Ok,
    OpenUpdate,
    PublishResult,
    UpdateClosed,
)
from moerl.sync.background import PublishThread, sync_metrics
from moerl.sync.frozen import FrozenWeights, freeze
from moerl.sync.outlet import Control, Seat
from moerl.types import PolicyVersion

log = logging.getLogger(__name__)


def open_outlet(config: Config, seat: Seat) -> BroadcastOutlet:
    """Collective in name only: ranks other than 0 take part in the gather and nothing else."""
    model = read_model_config(Path(config.model.path))
    if engine_wants(config.engine.args.get("quantization"), model) != "none":
        why = "SGLang's update writes unquantised values into fp8 weights; use another transport"
        raise ConfigError("sync.transport", "broadcast", why)
    if seat.rank:
        return BroadcastOutlet(seat, None, None, bucket_bytes=config.sync.bucket_bytes)
    publisher = BroadcastPublisher(
        seat.connect(),
        config.sync,
        address=config.cluster.address,
        backend=seat.backend,
        drain_s=config.update_wait_s,
    )
    thread = PublishThread(
        publisher,
        tracer=seat.tracer,
        on_failure=seat.on_failure,
        engines_restart=config.supervision.max_restarts > 0,
    )
    outlet = BroadcastOutlet(seat, publisher, thread, bucket_bytes=config.sync.bucket_bytes)
    outlet.enlist([Enlisted(index, tp) for index, tp in config.engine.sizes.items()])
    return outlet


class BroadcastOutlet:
    """Implements `outlet.Outlet`; at most one publish is in flight."""

    def __init__(
        self,
        seat: Seat,
        publisher: BroadcastPublisher | None,
        thread: PublishThread | None,
        *,
        bucket_bytes: int,
    ) -> None:
        """publisher, thread: of rank 0 alone."""
        self._seat, self._publisher, self._thread = seat, publisher, thread
        self._bucket_bytes = bucket_bytes
        self._frozen: FrozenWeights | None = None

    def publish(self, version: PolicyVersion) -> dict[str, float]:
        tensors = self._seat.gather()
        if self._publisher is None or self._thread is None:
            return {}
        assert tensors is not None, "rank 0 gathers the weights"
        metrics = self.wait()
        self._frozen = freeze(tensors, version, self._frozen, bucket_bytes=self._bucket_bytes)
        self._publisher.freeze(self._frozen)
        self._thread.start(version)
        return metrics

    def wait(self) -> dict[str, float]:
        if self._thread is None:
            return {}
        waited_s, results = self._thread.wait()
        return sync_metrics(results, waited_s)

    def resume(self) -> None:
        """An engine that is behind cannot be served alone: it would need the others' group."""

    def enlist(self, engines: Sequence[Enlisted]) -> None:
        """An engine that joins gets the frozen version before the next plan."""
        if self._publisher is None or self._thread is None:
            return
        self.wait()
        new = self._publisher.enlist(engines)
        self._thread.engines = [one.engine for one in engines]
        if new and self._frozen is not None:
            self._thread.start(self._frozen.version, new)


class BroadcastPublisher:
    """Implements `protocols.Publisher`; used by one thread of rank 0."""

    def __init__(
        self,
        control: Control,
        sync: SyncConfig,
        *,
        address: str,
        backend: str,
        drain_s: float = 0.0,
    ) -> None:
        """address: interface that engines can reach and nobody else; backend: gloo or nccl.

        drain_s: longest wait for requests in flight before an update may open.
        """
        self._control, self._sync = control, sync
        self._open_timeout_s = sync.timeout_s + drain_s
        self._address, self._backend = address, backend
        self._sizes: dict[int, int] = {}  # tensor-parallel ranks, by engine
        self._groups: dict[int, _EngineGroup] = {}
        self._frozen: FrozenWeights | None = None

    def freeze(self, frozen: FrozenWeights) -> None:
        """Offer one version for publishing; the caller keeps its buffers unchanged until done."""
        self._frozen = frozen

    def enlist(self, engines: Sequence[Enlisted]) -> list[int]:
        """Publish to these engines; returns those that are new."""
        new = [one.engine for one in engines if one.engine not in self._sizes]
        self._sizes = {one.engine: one.tp for one in engines}
        for engine in self._groups.keys() - self._sizes.keys():
            self._groups.pop(engine).destroy()
        return new

    def publish(self, engine: int, version: PolicyVersion) -> PublishResult:
        """Bring one engine to `version`.  Raises EngineError when a transfer fails or is late."""
        frozen = self._frozen
        if frozen is None or frozen.version != version:
            raise EngineError(f"version {version} is not frozen for publishing")
        group = self._groups.pop(engine, None) or self._join(engine)
        try:
            result = self._publish(engine, group, frozen)
        except BaseException:
            group.destroy()  # one that failed is not used again
            raise
        self._groups[engine] = group
        return result

    def _publish(self, engine: int, group: _EngineGroup, frozen: FrozenWeights) -> PublishResult:
        version = frozen.version
        opened = OpenUpdate(engine, version, group.name, frozen.buckets)
        self._control.expect(opened, Ok, self._open_timeout_s)
        begin = time.perf_counter()
        try:
            for buffer in frozen.buffers:
                dist.broadcast(buffer.to(group.device), src=0, group=group.handle)
        except RuntimeError as error:
            raise EngineError(f"sending version {version} to engine {engine}: {error}") from error
        transfer_s = time.perf_counter() - begin
        closed = self._control.expect(
            CloseUpdate(engine, version), UpdateClosed, self._sync.timeout_s
        )
        return PublishResult(
            engine=engine,
            version=version,
            num_bytes=frozen.num_bytes,
            transfer_s=transfer_s,
            pause_s=closed.pause_s,
            aborted=closed.aborted,
        )

    def _join(self, engine: int) -> _EngineGroup:
        """Open a group with one engine; the controller is told before this side waits for it."""
        timeout = timedelta(seconds=self._sync.timeout_s)
        world_size = 1 + self._sizes[engine]
        listener = socket.create_server((self._address, 0))
        port = int(listener.getsockname()[1])
        store = dist.TCPStore(
            self._address,
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        # unlike any group an engine that outlived an earlier gang still knows
        name = f"moerl-sync-{engine}-{port}"
        self._control.expect(
            JoinSync(engine, self._address, port, name, world_size, self._backend),
            Ok,
            self._sync.timeout_s,
        )
        try:
            handle = _new_group(store, name, world_size, self._backend, timeout)
        except RuntimeError as error:
            raise EngineError(f"engine {engine} did not join the sync group: {error}") from error
        device = torch.device("cuda" if self._backend == "nccl" else "cpu")
        return _EngineGroup(name, handle, device)


@dataclass(frozen=True, slots=True)
class _EngineGroup:
    name: str
    handle: dist.ProcessGroup
    device: torch.device

    def destroy(self) -> None:
        """Give its sockets and threads back: torch keeps a group until it is told."""
        try:
            dist.destroy_process_group(self.handle)
        except (RuntimeError, ValueError) as error:
            log.warning("group %s could not be ended: %s", self.name, error)


def _new_group(
    store: dist.Store, name: str, world_size: int, backend: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Rank 0 of a group whose other members are not in this gang.

    torch offers no public way to form a group across two default groups; this is the private
    helper that the engine's `init_custom_process_group` uses, with the same key prefix.
    """
    from torch.distributed import distributed_c10d as c10d

    handle: dist.ProcessGroup
    handle, _ = c10d._new_process_group_helper(
        world_size,
        0,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=c10d.GroupName(name),
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[handle] = {rank: rank for rank in range(world_size)}
    return handle
