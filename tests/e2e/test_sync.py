"""Real Megatron ranks (TP 2 x EP 2) publish to real SGLang servers.

The oracle is SGLang itself: its own per-tensor checksums after a publish must equal those after its
own loader has read the same version from a Hugging Face folder.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest
import torch

from moerl.blob.store import BlobStore
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
from moerl.engine.host import EngineHost
from moerl.errors import EngineError, ProtocolError
from moerl.protocols import AskEngine, EngineHolds, Message
from moerl.rollout.server import TrainerServer
from moerl.rundir import RunDir
from moerl.types import GenerateRequest, PolicyVersion, SamplingParams, Segment
from tests.e2e import tiny_model as tiny

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")


class World:
    """Engines, and the door through which trainer ranks reach them."""

    def __init__(
        self,
        root: Path,
        *,
        engines: int,
        tp: int,
        transport: str = "shm",
        timeout_s: float = 120.0,
    ) -> None:
        torch.set_num_threads(1)
        self.run_dir = RunDir(root / "run")
        self.run_dir.create()
        model = tiny.save(root / "model", 0, moe_ffn=64)
        engine = EngineConfig(count=engines, tp=tp, platform="cpu", max_total_tokens=8192)
        config = Config(
            model=ModelConfig(path=str(model)),
            engine=engine,
            trainer=TrainerConfig(platform="cpu", parallel=ParallelConfig(tp=2, ep=2)),
            sync=SyncConfig(
                transport=transport, folder=str(root), bucket_bytes=65536, timeout_s=timeout_s
            ),
        )
        save_config(config, self.run_dir.config)
        self.loop = asyncio.new_event_loop()
        store = BlobStore(root / "blobs", "n0")
        self.hosts = [
            EngineHost(
                i, engine, model, tiny.FACTS, ReplayConfig(), store, self.run_dir, "engine-token"
            )
            for i in range(engines)
        ]
        self._asked = 0
        self.run(self._start())

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 300.0) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, timeout_s))

    async def _start(self) -> None:
        self.server = TrainerServer("127.0.0.1", "token", self._handle)
        self._serving = asyncio.create_task(self.server.serve())
        await asyncio.gather(*(host.start(PolicyVersion(0, 0)) for host in self.hosts))

    async def _handle(self, message: Message) -> Message:
        if not hasattr(message, "engine"):
            raise ProtocolError(f"{type(message).__name__} is not expected here")
        return await self.hosts[message.engine].session(message)

    def end(self) -> None:
        async def stop() -> None:
            self._serving.cancel()
            await asyncio.gather(*(host.stop() for host in self.hosts))

        self.run(stop())
        self.server.close()
        self.loop.close()

    def gang(self, incarnation: int, steps: int, kill_at: int = 0) -> tuple[int, str]:
        """Run the trainer ranks to their end; (status, output)."""

        async def work() -> tuple[int, str]:
            orders = [str(self.run_dir.root), self.server.endpoint]
            orders += [str(incarnation), str(steps), str(kill_at)]
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
                "--standalone", "-m", "tests.e2e.sync_gang", *orders,
                cwd=ROOT,
                env=os.environ
                | {"GLOO_SOCKET_IFNAME": "lo", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(ROOT)},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            output, _ = await process.communicate()
            return process.returncode or 0, output.decode(errors="replace")

        return self.run(work())

    def processes(self, engine: int) -> list[psutil.Process]:
        """Of one server: its own first, its scheduler last."""
        server = self.hosts[engine]._server
        assert server is not None
        tree = server._tree()
        return sorted(tree, key=lambda p: "scheduler" in " ".join(p.cmdline()))

    def checksums(self, engine: int) -> list[dict[str, str]]:
        """By rank: SGLang's own checksum of each tensor."""
        reply = self.run(self.hosts[engine].checksum())
        return [rank["checksums"] for rank in reply["ranks"]]

    def load_folder(self, engine: int, version: PolicyVersion) -> None:
        """SGLang's own loader reads the version that the trainer saved."""
        client = self.hosts[engine]._alive()
        folder = str(self.run_dir.root / f"hf-{version}")
        self.run(client._succeed("/update_weights_from_disk", {"model_path": folder}))

    def generate(self, engine: int) -> Segment:
        ids = np.arange(4, 20, dtype=np.int32)
        self._asked += 1
        request = GenerateRequest(f"r{self._asked}", 0, ids, 0, SamplingParams(8, ignore_eos=True))
        (segment,) = self.run(self.hosts[engine].generate([request]))
        assert isinstance(segment, Segment), segment
        return segment

    def holds(self, engine: int) -> PolicyVersion:
        """What the host and its receivers say."""
        holds = self.run(self.hosts[engine].session(AskEngine(engine)))
        assert isinstance(holds, EngineHolds)
        assert not holds.cause
        return holds.version


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    made: list[World] = []
    yield made
    for world in made:
        world.end()


@pytest.mark.parametrize(
    "transport",
    ["shm", *(pytest.param(name, marks=pytest.mark.full) for name in ("gloo", "disk"))],
)
def test_a_tp2_engine_holds_what_sglang_would_have_loaded(
    worlds: list[World], tmp_path: Path, transport: str
) -> None:
    world = World(tmp_path, engines=1, tp=2, transport=transport)
    worlds.append(world)
    start = world.checksums(0)
    assert len(start) == 2
    status, output = world.gang(0, 2)
    assert status == 0, output[-4000:]
    last = PolicyVersion(0, 2)
    assert world.holds(0) == last, output[-4000:]
    assert world.generate(0).version == last
    served = world.checksums(0)
    assert all(a[name] != b[name] for a, b in zip(start, served, strict=True) for name in a)
    world.load_folder(0, PolicyVersion(0, 1))
    assert world.checksums(0) != served, "another version must have other checksums"
    world.load_folder(0, last)
    assert world.checksums(0) == served
    spans = "".join(path.read_text() for path in world.run_dir.trace.glob("trainer-0.jsonl"))
    for phase in ("publish", "publish prepare", "publish transfer", "publish verify"):
        assert f'"{phase}"' in spans
    assert re.search(r"'async/sync_engines_behind': 0\.0", output)


@pytest.mark.full
def test_a_trainer_killed_mid_publish_leaves_both_engines_on_a_whole_version(
    worlds: list[World], tmp_path: Path
) -> None:
    world = World(tmp_path, engines=2, tp=1)
    worlds.append(world)
    start = [world.checksums(i) for i in range(2)]
    assert start[0] == start[1]
    status, _ = world.gang(0, 1, kill_at=5)
    assert status != 0
    for engine in range(2):
        version = world.holds(engine)
        assert world.generate(engine).version == version
        if version == PolicyVersion(0, 0):
            assert world.checksums(engine) == start[engine]
    status, output = world.gang(1, 1)
    assert status == 0, output[-4000:]
    new = PolicyVersion(1, 1)
    served = [world.checksums(i) for i in range(2)]
    assert [world.holds(i) for i in range(2)] == [new, new]
    assert served[0] == served[1] != start[0]
    world.load_folder(1, new)
    assert world.checksums(1) == served[0]


@pytest.mark.full
def test_a_stalled_and_a_killed_engine_are_left_behind_and_refreshed(
    worlds: list[World], tmp_path: Path
) -> None:
    world = World(tmp_path, engines=2, tp=1, timeout_s=30.0)
    worlds.append(world)
    stalled = world.processes(1)
    for process in stalled:
        process.suspend()
    try:
        status, output = world.gang(0, 1)
    finally:
        for process in stalled:
            process.resume()
    assert status == 0, output[-4000:]
    assert "'async/sync_engines_behind': 1.0" in output
    assert world.holds(0) == PolicyVersion(0, 1)
    with pytest.raises(EngineError, match="did not answer PrepareUpdate"):
        world.generate(1)
    status, output = world.gang(1, 1)
    assert status == 0, output[-4000:]
    assert [world.holds(i) for i in range(2)] == [PolicyVersion(1, 1)] * 2
    assert world.generate(1).version == PolicyVersion(1, 1)
    assert world.checksums(0) == world.checksums(1)

    world.processes(1)[-1].kill()
    status, output = world.gang(2, 1)
    assert status == 0, output[-4000:]
    assert "'async/sync_engines_behind': 1.0" in output
    assert world.holds(0) == PolicyVersion(2, 1)
    world.run(world.hosts[1].start(PolicyVersion(0, 0)))
    status, output = world.gang(3, 1)
    assert status == 0, output[-4000:]
    assert [world.holds(i) for i in range(2)] == [PolicyVersion(3, 1)] * 2
    assert world.checksums(0) == world.checksums(1)
