"""Both ends of a publish session in bare processes: engine ranks without SGLang, trainer ranks
without Megatron.

Weights are a function of tensor name and version, so every process knows what any version looks
like, and an engine rank can say whether what it serves is one whole version.  Faults are part of a
process's orders: the byte to flip, the moment to stop at.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from moerl.config.lora_settings import LoraConfig
from moerl.config.schema import ParallelConfig
from moerl.core.errors import EngineError, LayoutError, TrainerError
from moerl.core.messages import (
    AskEngine,
    CommitUpdate,
    EngineVersion,
    Message,
    Ok,
    PrepareUpdate,
    RelayUpdate,
    UpdateDone,
    UpdatePrepared,
    UpdateVerified,
    VerifyUpdate,
)
from moerl.core.rpc import Keys, RpcClient
from moerl.core.types import PolicyVersion
from moerl.layout import ModelSpec, Named, at, hf_shapes, megatron_tiles, model_spec, sglang_tiles
from moerl.layout.adapters import adapter_shapes, adapter_tiles, module_of
from moerl.weight_sync.adapters.factor_plan import FactorPlan
from moerl.weight_sync.adapters.low_rank import merge_into
from moerl.weight_sync.adapters.merged_totals import MergedTotals
from moerl.weight_sync.buckets import WirePolicy
from moerl.weight_sync.held_shards import EngineLayout
from moerl.weight_sync.packed_buckets import BucketPacker
from moerl.weight_sync.receiver import Receiver, ReceiverContext, ReceiverSocket
from moerl.weight_sync.receiver_names import keys_path, socket_path
from moerl.weight_sync.sender import SenderGroup, SenderThread, WeightSender
from moerl.weight_sync.session import EngineSession, SessionSpec
from moerl.weight_sync.snapshot import LiveWeights, WeightSnapshot
from moerl.weight_sync.transfer_plan import PLAN_ID, TransferPlan, relay_schedule
from moerl.weight_sync.transfer_plan import TRAINER as TRAINER_ID
from moerl.weight_sync.transports.factory import make
from tests.helpers.patience import Patience, patience

FAMILIES = Path(__file__).resolve().parents[1] / "data" / "layout_families.json"
TRAINER = ParallelConfig(tp=2, ep=2)
START = PolicyVersion(0, 0)
POLICY = WirePolicy(dtype="float32", bucket_bytes=4096)
# Forked from a process that has imported everything: a start takes a tenth of a second.
CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.helpers.sync_peers"])

Reply = TypeVar("Reply")


def spec() -> ModelSpec:
    return model_spec(json.loads(FAMILIES.read_text())["qwen3_moe"])


def transfer(tp: int, lora: LoraConfig | None = None) -> TransferPlan | FactorPlan:
    plan = TransferPlan(spec(), TRAINER, EngineLayout(tp=tp), PLAN_ID, POLICY)
    return plan if lora is None else FactorPlan(plan, lora)


def hf_tensor(name: str, shape: tuple[int, ...], version: PolicyVersion) -> Tensor:
    """Versions differ everywhere, but those of a hundred, which differ in one word of 97."""
    hundred = version if version.step < 100 else PolicyVersion(version.incarnation, 100)
    seed = torch.Generator().manual_seed(zlib.crc32(f"{name} {hundred}".encode()))
    tensor = torch.randn(shape, generator=seed)
    if version.step > 100:
        tensor.view(-1)[version.step % 100 :: 97] += version.step
    return tensor


def hf_merged(
    name: str, shape: tuple[int, ...], version: PolicyVersion, lora: LoraConfig
) -> Tensor:
    """Weights of the start, and the adapters of a version; the start has none."""
    base, module = hf_tensor(name, shape, START), module_of(name)
    rank = lora.rank_of(module) if len(shape) == 2 and version != START else 0
    if not rank:
        return base
    a = hf_tensor(f"{module}.lora_A", (rank, shape[1]), version)
    b = hf_tensor(f"{module}.lora_B", (shape[0], rank), version)
    merged = torch.empty_like(base)
    merge_into(merged, base, a, b, lora.scale)
    return merged


def local_factors(rank: int, version: PolicyVersion, lora: LoraConfig | None) -> dict[str, Tensor]:
    """What a trainer rank sends of a version with adapters."""
    if lora is None:
        return {}
    shapes = adapter_shapes(hf_shapes(spec()), lora.rank_of)
    return {
        name: hf_tensor(name, shapes[name], version)[at(local.tiles[0].hf_box)]
        for name, local in adapter_tiles(spec(), TRAINER, rank, lora.rank_of).items()
    }


def local_tensors(
    named: Named,
    version: PolicyVersion,
    lora: LoraConfig | None = None,
) -> dict[str, Tensor]:
    """What a rank with these tiles holds of a version; padding is 0."""
    shapes, tensors = hf_shapes(spec()), {}
    for name, local in named.items():
        tensors[name] = torch.zeros(local.shape)
        for tile in local.tiles:
            shape = shapes[tile.hf]
            if lora is None:
                whole = hf_tensor(tile.hf, shape, version)
            else:
                whole = hf_merged(tile.hf, shape, version, lora)
            tensors[name][at(tile.box)] = whole[at(tile.hf_box)]
    return tensors


# --- an engine rank -------------------------------------------------------------------------------
class PlainModel:
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def tensors(self) -> Mapping[str, Tensor]:
        return self._tensors

    def run_hook(self, name: str) -> None:
        raise AssertionError(f"no hook is due for this family: {name}")

    def slots(self, module: str) -> tuple[Tensor, Tensor]:
        raise LayoutError(f"{module}: no slots")

    def serve_adapter(
        self, version: str, tensors: dict[str, Tensor], config: dict[str, Any]
    ) -> int:
        raise AssertionError(f"no adapter is due: {version}")


class FaultyReceiver:
    """A receiver that commits on demand, says what it serves, and flips bytes when told to."""

    def __init__(self, rank: int, tp: int, held: PolicyVersion, flips: int) -> None:
        self._named = sglang_tiles(spec(), tp, rank)
        self._model = PlainModel(local_tensors(self._named, held))
        self._flips = flips
        self._lora: LoraConfig | None = None
        self.receiver = Receiver(
            ReceiverContext(spec(), EngineLayout(tp=tp), rank, "layout"),
            self._model,
            lambda name, folder: make(name, address="127.0.0.1", folder=folder),
            held,
        )

    def handle(self, message: Message) -> Message:
        match message:
            case PrepareUpdate():
                prepared = self.receiver.handle(message)
                self._lora = LoraConfig(**message.lora) if message.lora else None
                return prepared
            case VerifyUpdate() if self._flips:
                session = self.receiver._session
                assert session is not None
                takes_deltas = session.message.delta
                if session.message.writes_live:
                    self._flips -= 1
                    *_, last = self._model.tensors().values()
                    last.view(-1)[0] += 1e-3  # the last rows are padding, which no piece has
                elif not takes_deltas or any(map(any, message.deltas)):
                    self._flips -= 1
                    session.staging.fetch(time.monotonic() + 60)  # disk: the bytes are here now
                    place = 0 if takes_deltas else session.plan.staging_bytes // 2
                    session.staging.buffer[place] ^= 1
            case CommitUpdate():
                if cause := self.receiver.claim(str(message.version)):
                    raise EngineError(cause)
                begin = time.perf_counter()
                self.receiver.commit()
                return UpdateDone(0.0, 0, commit_s=time.perf_counter() - begin)
            case AskEngine():
                return EngineVersion(self.receiver.held, self._difference())
        return self.receiver.handle(message)

    def _difference(self) -> str:
        """Why what is served is not the whole version that is claimed; empty when it is."""
        want = local_tensors(self._named, self.receiver.held, self._lora)
        wrong = [
            name for name, t in self._model.tensors().items() if not torch.equal(t, want[name])
        ]
        return f"not {self.receiver.held}: {wrong}" if wrong else ""


def run_engine_rank(folder: Path, rank: int, tp: int, held: PolicyVersion, flips: int) -> None:
    torch.set_num_threads(1)
    receiver, keys = FaultyReceiver(rank, tp, held, flips), Keys.read(keys_path(folder))
    ReceiverSocket(receiver.handle, socket_path(folder, rank), keys).run()


@dataclass
class Engine:
    """The host's part: asks the receivers of all ranks and merges their answers."""

    folder: Path
    tp: int = 1
    processes: list = field(default_factory=list)
    keys: Keys = field(default_factory=Keys.make)

    def start(self, held: PolicyVersion = PolicyVersion(0, 0), flips: int = 0) -> Engine:
        self.folder.mkdir(exist_ok=True)
        self.keys.write(keys_path(self.folder))
        for rank in range(self.tp):
            socket_path(self.folder, rank).unlink(missing_ok=True)
            orders = (self.folder, rank, self.tp, held, flips)
            self.processes.append(CONTEXT.Process(target=run_engine_rank, args=orders, daemon=True))
            self.processes[-1].start()
        limit = Patience(60)
        while not all(socket_path(self.folder, rank).exists() for rank in range(self.tp)):
            assert not limit.over(), "an engine rank did not open its door"
            time.sleep(0.02)
        return self

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes.clear()

    def ask(self, message: Message, timeout_s: float, keys: Keys | None = None) -> list[Message]:
        replies = []
        for rank in range(self.tp):
            path = socket_path(self.folder, rank)
            if not path.exists():
                raise TrainerError(f"rank {rank} has no receiver")
            client = RpcClient(f"ipc://{path}", keys or self.keys, peer=f"rank {rank}")
            try:
                replies.append(client.request(message, timeout_s))
            finally:
                client.close()
        return replies

    def served(self) -> PolicyVersion:
        """The one whole version that all ranks serve."""
        replies = self.ask(AskEngine(0), 10.0)
        assert all(isinstance(reply, EngineVersion) and not reply.cause for reply in replies), (
            replies
        )
        versions = {reply.version for reply in replies}  # type: ignore[union-attr]
        assert len(versions) == 1, replies
        return versions.pop()


class Control:
    """The controller's and host's part between a session and an engine."""

    def __init__(self, engine: Engine, engines: list[Engine]) -> None:
        self._engine, self._engines = engine, engines

    def expect(
        self, message: Message, reply_type: type[Reply], timeout_s: float | None = None
    ) -> Reply:
        to = self._engines[message.engine] if isinstance(message, RelayUpdate) else self._engine
        replies = to.ask(message, getattr(message, "timeout_s", timeout_s or 5.0))
        first = replies[0]
        if isinstance(message, PrepareUpdate) and isinstance(first, UpdatePrepared):
            merged: Message = UpdatePrepared(
                tuple(r.endpoints[0] for r in replies),  # type: ignore[union-attr]
                tuple(r.starts[0] for r in replies),  # type: ignore[union-attr]
                first.layout,
                first.held,
                max(r.rounds for r in replies),  # type: ignore[union-attr]
            )
        elif isinstance(message, VerifyUpdate):
            merged = UpdateVerified(
                tuple(r.failed[0] for r in replies),  # type: ignore[union-attr]
                "-".join(r.digest for r in replies),  # type: ignore[union-attr]
            )
        else:
            merged = first if isinstance(first, reply_type) else Ok()
        assert isinstance(merged, reply_type), merged
        return merged

    def close(self) -> None:
        pass


# --- trainer ranks --------------------------------------------------------------------------------
@dataclass(frozen=True)
class Halt:
    """Where trainer rank 0 stops for a while: before its n-th flush towards one engine."""

    engine: int
    flush: int
    reached: Event
    go_on: Event


def run_trainer_rank(
    rank: int,
    wires: tuple[Keys, Connection],
    tp: int,
    transport: str,
    folder: str,
    versions: object,
    halt: Halt | None,
    delta: bool,
    num_engines: int,
    lora: LoraConfig | None = None,
    stale: bool = False,
    live: bool = False,
) -> None:
    """Sender threads towards all engines; stores each version that comes over the queue.

    wires: keys of the run, and where the threads' endpoints are sent.  stale: the factors stay
    those of version 0.1, whatever is published.
    """
    torch.set_num_threads(1)
    named = megatron_tiles(spec(), TRAINER, rank)
    own = local_tensors(named, START)  # the live weights
    offer = LiveWeights() if live else WeightSnapshot()
    keys, lines = wires
    threads = []
    plan, merged = transfer(tp, lora), None
    if isinstance(plan, FactorPlan):
        merged = MergedTotals(plan.weights.sender(rank), offer).total
    packer = BucketPacker(plan.sender(rank), offer, merged)
    for engine in range(num_engines):
        # a copy of its own for each engine: one of them may be made to halt
        mover = copy(make(transport, address="127.0.0.1", folder=folder))
        if halt is not None and rank == 0 and engine == halt.engine:
            _halting(mover, halt)
        sender = WeightSender(packer, mover, delta=delta)
        threads.append(SenderThread("127.0.0.1", keys, sender))
        threads[-1].start()
    lines.send([thread.endpoint for thread in threads])
    while True:
        version = versions.get()  # type: ignore[attr-defined]
        factors = local_factors(rank, PolicyVersion(0, 1) if stale else version, lora)
        weights = local_tensors(named, version, lora)
        if live:
            offer.before_write()
            for name, tensor in own.items():
                tensor.copy_(weights[name])
            weights = own
        offer.store(weights | factors, version)


def _halting(mover: object, halt: Halt) -> None:
    connect: Callable = mover.connect  # type: ignore[attr-defined]
    count = 0

    def wrapped(endpoint: bytes, deadline: float) -> object:
        link = connect(endpoint, deadline)
        flush = link.flush

        def halting_flush(until: float) -> None:
            nonlocal count
            count += 1
            if count == halt.flush:
                halt.reached.set()
                halt.go_on.wait(patience(60))
            flush(until)

        link.flush = halting_flush
        return link

    mover.connect = wrapped  # type: ignore[attr-defined]


class Trainer:
    """Ranks in processes of their own, and rank 0's sessions here."""

    def __init__(
        self,
        engines: list[Engine],
        *,
        transport: str = "shm",
        folder: str = "",
        timeouts: tuple[float, ...] = (),
        direct: int = 0,
        plan: str | None = None,
        halt: Halt | None = None,
        delta: bool = False,
        lora: LoraConfig | None = None,
        stale: bool = False,
        live: bool = False,
    ) -> None:
        """live: no copy on either side, as between engines and a trainer that take turns.

        direct: engines that are served by the trainer ranks; 0 = all.

        timeouts: `sync.timeout_s` per engine; 60 s unless a test waits for one to pass.
        """
        hops = relay_schedule(range(len(engines)), direct or len(engines))
        self.engines = engines
        keys, tp = Keys.make(), engines[0].tp
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(TRAINER.world_size)]
        self.queues = [CONTEXT.Queue() for _ in range(TRAINER.world_size)]
        self.processes = [
            CONTEXT.Process(
                target=run_trainer_rank,
                args=(
                    rank,
                    (keys, pipe[1]),
                    tp,
                    transport,
                    folder,
                    queue,
                    halt,
                    delta,
                    len(engines),
                    lora,
                    stale,
                    live,
                ),
                daemon=True,
            )
            for rank, (queue, pipe) in enumerate(zip(self.queues, pipes, strict=True))
        ]
        for process in self.processes:
            process.start()
        endpoints = [pipe[0].recv() for pipe in pipes]  # by rank and engine
        self.sessions = []
        for index, engine in enumerate(engines):
            group = SenderGroup([by_engine[index] for by_engine in endpoints], keys)
            timeout_s = timeouts[index] if timeouts else 60.0
            terms = self._terms(index, tp, transport, timeout_s, plan, delta, folder)
            terms = replace(terms, writes_live=live)
            if lora is not None:
                terms = replace(terms, plan=transfer(tp, lora).id, lora=lora)
            connect = lambda engine=engine: Control(engine, engines)  # noqa: E731
            (src,) = [hop.src for hop in hops if hop.dst == index]
            source = self.sessions[src] if src != TRAINER_ID else None
            self.sessions.append(EngineSession(terms, group, connect, None, source))
            self.sessions[-1].start()

    @staticmethod
    def _terms(
        index: int,
        tp: int,
        transport: str,
        timeout_s: float,
        plan: str | None,
        delta: bool,
        folder: str,
    ) -> SessionSpec:
        return SessionSpec(
            engine=index,
            plan_engine=PLAN_ID,
            plan=plan or transfer(tp).id,
            transport=transport,
            trainer=TRAINER,
            policy=POLICY,
            layer_spec="local",
            timeout_s=timeout_s,
            drain_s=0.0,
            delta=delta,
            folder=folder,
        )

    def start(self, version: PolicyVersion) -> None:
        for queue in self.queues:
            queue.put(version)
        for session in self.sessions:
            session.publish(version)

    def publish(self, version: PolicyVersion) -> list:
        """One result per engine."""
        self.start(version)
        results = [session.settle() for session in self.sessions]
        for session in self.sessions:
            session.resume()
        return results

    def end(self) -> None:
        for session in self.sessions:
            session._paused = True
        for process in self.processes:
            process.kill()
            process.join()
