"""Real SGLang servers, and real Megatron ranks that publish to them on demand."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import psutil
import torch

from moerl.config.load import save_config
from moerl.config.schema import (
    Config,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    ReplayConfig,
    SyncConfig,
    TrainerConfig,
)
from moerl.core.errors import ProtocolError
from moerl.core.messages import AskEngine, EngineVersion, Message
from moerl.core.rpc import Keys, RpcServer
from moerl.core.types import GenerateRequest, PolicyVersion, SamplingParams, Segment
from moerl.distributed.store_server import StoreServer
from moerl.distributed.token_store import store_variable
from moerl.engine.host.host import EngineContext, EngineHost
from moerl.records.blob_store import BlobStore
from moerl.runtime.run_dir import RunDir
from tests.helpers import engine_tiny_model as tiny
from tests.helpers.fp8_folder import quantise
from tests.helpers.live_checksums import checksums
from tests.helpers.patience import patience
from tests.helpers.publishing_ranks import Order

ROOT = Path(__file__).resolve().parents[2]
START = PolicyVersion(0, 0)
_LATE_S = 600.0  # nothing here may take longer, however slow the machine
_POLL_S = 0.05

Checksums = list[dict[str, str]]  # by rank of an engine: SGLang's own, of each tensor
T = TypeVar("T")


class World:
    """Engines, the door through which trainer ranks reach them, and the ranks."""

    def __init__(
        self,
        root: Path,
        *,
        engines: int,
        tp: int,
        transport: str = "shm",
        timeout_s: float = 120.0,
        tp_each: tuple[int, ...] = (),
        fp8: bool = False,
        args: dict[str, int] | None = None,
    ) -> None:
        """tp_each: of each engine, in place of tp; fp8: engines serve projections in fp8 blocks,
        from a checkpoint that has them; args: `engine.args`.
        """
        torch.set_num_threads(1)
        self.run_dir = RunDir(root / "run")
        self.run_dir.create()
        (self.run_dir.root / "orders").mkdir()
        self._fp8 = fp8
        model = tiny.save(root / "model", 0, moe_ffn=64)
        replay = ReplayConfig()
        if fp8:
            plain = tiny.save(root / "plain", 0, moe_ffn=256, **tiny.BLOCKS)
            model, replay = quantise(plain, root / "fp8"), ReplayConfig(routing="off")
        engine = EngineConfig(
            count=engines,
            tp=tp,
            tp_each=list(tp_each),
            platform="cpu",
            dtype="bfloat16" if fp8 else "float32",
            max_total_tokens=8192,
            args=args or {},
            start_timeout_s=_LATE_S,
        )
        config = Config(
            model=ModelConfig(path=str(model)),
            engine=engine,
            trainer=TrainerConfig(platform="cpu", parallel=ParallelConfig(tp=2, ep=2)),
            replay=replay,
            sync=SyncConfig(
                transport=transport, folder=str(root), bucket_bytes=65536, timeout_s=timeout_s
            ),
        )
        save_config(config, self.run_dir.config)
        self.loop = asyncio.new_event_loop()
        store = BlobStore(root / "blobs", "n0")
        context = EngineContext(model, tiny.SHAPE, replay, self.run_dir, "engine-token")
        self.hosts = [
            EngineHost(i, replace(engine, tp=size), context, store)
            for i, size in engine.sizes.items()
        ]
        self.known: dict[PolicyVersion, Checksums] = {}
        self.job: TrainerJob | None = None
        self.logged = 0  # characters of rank 0's log when a test began
        self._incarnation = -1
        self._asked = 0
        self.run(self._start())
        self.known[START] = self.checksums(0)

    # --- life ------------------------------------------------------------------------------------
    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Engines and trainer are answered only while something runs here."""
        return self.loop.run_until_complete(asyncio.wait_for(work, patience(_LATE_S)))

    async def _start(self) -> None:
        endpoints, keys = self.run_dir.endpoints, Keys.make()
        endpoints.make_folder()
        keys.write(endpoints.keys)
        self.server = RpcServer("tcp://127.0.0.1:*", keys, self._handle)
        self._serving = asyncio.create_task(self.server.serve())
        await asyncio.gather(*(host.start(START) for host in self.hosts))

    async def _handle(self, message: Message) -> Message:
        if not hasattr(message, "engine"):
            raise ProtocolError(f"{type(message).__name__} is not expected here")
        return await self.hosts[message.engine].session(message)

    def end(self) -> None:
        async def stop() -> None:
            self._serving.cancel()
            if self.job is not None:
                await self.job.end()
            await asyncio.gather(*(host.stop() for host in self.hosts))

        self.run(stop())
        self.server.close()
        self.loop.close()

    def restart_engine(self, engine: int) -> None:
        """It serves the model folder, as after every start."""
        self.run(self.hosts[engine].start(START))

    # --- the trainer -----------------------------------------------------------------------------
    def start_trainer(self) -> TrainerJob:
        """New ranks, as the next incarnation, in the place of the old ones."""

        async def start() -> TrainerJob:
            if self.job is not None:
                await self.job.end()
            self._incarnation += 1
            made = TrainerJob(self.run_dir, self.server.endpoint, self._incarnation)
            await made.start()
            return made

        self.job = self.run(start())
        return self.job

    def publish(self, fault: str = "", *, rank: int = 0, engine: int = 1) -> Publish:
        """The next version, with a fault on the way from a trainer rank to an engine."""
        job = self.job if self.job is not None else self.start_trainer()
        return job.publish(fault, rank, engine)

    def done(self, publish: Publish) -> dict[str, float]:
        """Wait for the end of a publish: its metrics."""
        self.until(lambda: publish.file("done").exists() or publish.job.ended)
        assert publish.file("done").exists(), publish.job.log(0)[-4000:]
        return msgspec.json.decode(publish.file("done").read_bytes(), type=dict[str, float])

    def until(self, condition: Callable[[], bool]) -> None:
        async def wait() -> None:
            while not condition():
                await asyncio.sleep(_POLL_S)

        self.run(wait())

    # --- the engines -----------------------------------------------------------------------------
    def processes(self, engine: int) -> list[psutil.Process]:
        """Of one server: its own first, its scheduler last."""
        server = self.hosts[engine]._server
        assert server is not None
        tree = server._tree()
        return sorted(tree, key=lambda p: "scheduler" in " ".join(p.cmdline()))

    def kill(self, processes: list[psutil.Process]) -> None:
        """SIGKILL, and wait until they are dead."""
        for process in processes:
            process.kill()

        def dead(process: psutil.Process) -> bool:
            try:
                return process.status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                return True

        self.until(lambda: all(map(dead, processes)))

    def checksums(self, engine: int) -> Checksums:
        return self.run(checksums(self.hosts[engine]))

    def load_folder(self, engine: int, version: PolicyVersion) -> Checksums:
        """SGLang's own loader reads the version that the trainer saved; what the engine has then.

        The engine goes on as if it had been published to: restore what it had.
        """
        client = self.hosts[engine]._alive()
        folder = self.run_dir.root / f"hf-{version}"
        if self._fp8:
            folder = quantise(folder, folder.with_name(f"fp8-{version}"))
        self.run(client._post(f"/flush_cache?timeout={patience(60.0)}", None))  # once it is idle
        self.run(client._succeed("/update_weights_from_disk", {"model_path": str(folder)}))
        return self.checksums(engine)

    def generate(self, engine: int) -> Segment:
        ids = np.arange(4, 20, dtype=np.int32)
        self._asked += 1
        request = GenerateRequest(f"r{self._asked}", 0, ids, 0, SamplingParams(8, ignore_eos=True))
        (segment,) = self.run(self.hosts[engine].generate([request]))
        assert isinstance(segment, Segment), segment
        return segment

    def holds(self, engine: int) -> EngineVersion:
        """What the host says."""
        holds = self.run(self.hosts[engine].session(AskEngine(engine)))
        assert isinstance(holds, EngineVersion)
        return holds

    def check_serves(self, engine: int, version: PolicyVersion) -> None:
        """The engine serves exactly this version: it says so, and so do its checksums.

        The checksums of a version are those that were seen first with it.
        """
        holds = self.holds(engine)
        assert (holds.version, holds.cause) == (version, "")
        assert self.generate(engine).version == version
        found = self.checksums(engine)
        assert self.known.setdefault(version, found) == found
        assert sum(found == other for other in self.known.values()) == 1

    def wait_for(self, engine: int, version: PolicyVersion) -> None:
        """Until the trainer has brought an engine to `version` by itself."""
        begin = time.monotonic()

        async def ask() -> EngineVersion:
            message = await self.hosts[engine].session(AskEngine(engine))
            assert isinstance(message, EngineVersion)
            return message

        async def wait() -> None:
            while (holds := await ask()).version != version or holds.cause:
                assert time.monotonic() - begin < patience(_LATE_S), holds
                await asyncio.sleep(_POLL_S)

        self.run(wait())


class TrainerJob:
    """The trainer's processes of one incarnation."""

    def __init__(self, run_dir: RunDir, controller: str, incarnation: int) -> None:
        self.run_dir, self.incarnation = run_dir, incarnation
        self._controller = controller
        self._orders = 0
        self.ranks: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        self._store = StoreServer("127.0.0.1")
        places = os.environ | store_variable(self._store.server_address, 0)
        places |= {
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCHDYNAMO_DISABLE": "1",
            "PYTHONPATH": str(ROOT),
            "WORLD_SIZE": "2",
        }
        orders = [str(self.run_dir.root), self._controller, str(self.incarnation)]
        for rank in range(2):
            with self._log(rank).open("wb") as log:
                self.ranks.append(
                    await asyncio.create_subprocess_exec(
                        sys.executable, "-m", "tests.helpers.publishing_ranks", *orders,
                        cwd=ROOT,
                        env=places | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdout=log,
                        stderr=asyncio.subprocess.STDOUT,
                    )
                )  # fmt: skip

    @property
    def ended(self) -> bool:
        """Whether a rank has ended, of itself or killed."""
        return any(rank.returncode is not None for rank in self.ranks)

    async def end(self) -> None:
        for rank in self.ranks:
            if rank.returncode is None:
                rank.kill()
            await rank.wait()
        self._store.close()

    def publish(self, fault: str, rank: int, engine: int) -> Publish:
        number, self._orders = self._orders, self._orders + 1
        order = Order(self._orders, fault, rank, engine)
        path = self.run_dir.root / "orders" / f"{self.incarnation}.{number}"
        written = path.with_suffix(f".{number}.writing")
        written.write_bytes(msgspec.json.encode(order))
        written.rename(path.with_suffix(f".{number}.json"))
        return Publish(self, path, PolicyVersion(self.incarnation, order.step))

    def log(self, rank: int) -> str:
        return self._log(rank).read_text(errors="replace")

    def _log(self, rank: int) -> Path:
        return self.run_dir.root / f"trainer-{self.incarnation}-{rank}.log"


class Publish:
    """One order on its way."""

    def __init__(self, job: TrainerJob, path: Path, version: PolicyVersion) -> None:
        self.job, self.version = job, version
        self._path = path

    def file(self, kind: str) -> Path:
        """done: it is over; halted: a rank waits in the middle; go: what that waits for."""
        return self._path.with_name(f"{self._path.name}.{kind}")
