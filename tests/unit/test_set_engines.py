"""A trainer rank opens ways to engines that join, and closes those of engines that leave."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moerl.config.schema import (
    Config,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SupervisionConfig,
    SyncConfig,
    TinyModel,
)
from moerl.errors import TrainerError
from moerl.layout import model_spec
from moerl.messages import Message, PrepareUpdate, SyncTarget
from moerl.planning.dry_run import _tiny_shapes
from moerl.rpc import Keys
from moerl.trace import Tracer
from moerl.types import PolicyVersion
from moerl.weight_sync.publisher import SyncContext, WeightPublisher, open_publisher

V1 = PolicyVersion(0, 1)


class Engines:
    """Refuse every session, and remember who was asked."""

    def __init__(self) -> None:
        self.asked: list[PrepareUpdate] = []

    def expect(self, message: Message, reply_type: type, timeout_s: float | None = None) -> object:
        if isinstance(message, PrepareUpdate):
            self.asked.append(message)
        raise TrainerError("it does not answer")

    def close(self) -> None: ...

    def of(self, version: PolicyVersion) -> set[int]:
        return {message.engine for message in self.asked if message.version == version}


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A trainer of this process only."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0,
                            world_size=1)  # fmt: skip
    yield
    dist.destroy_process_group()


def publisher_of(engines: Engines, tmp_path: Path) -> WeightPublisher:
    shapes = _tiny_shapes(TinyModel())
    (tmp_path / "config.json").write_text(json.dumps(shapes))
    config = Config(
        model=ModelConfig(path=str(tmp_path)),
        engine=EngineConfig(count=2),
        sync=SyncConfig(transport="shm", timeout_s=20.0),
        supervision=SupervisionConfig(max_restarts=100),
    )
    slot = SyncContext(
        rank=0,
        world_size=1,
        control=dist.group.WORLD,
        spec=model_spec(shapes),
        layout=ParallelConfig(),
        layer_spec="local",
        live=lambda: {"w": torch.zeros(1)},
        connect=lambda: engines,
        keys=Keys.make(),
        tracer=Tracer(tmp_path / "trace", "trainer-0"),
        on_failure=lambda error: None,
    )
    return open_publisher(config, slot)


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline, [thread.name for thread in threading.enumerate()]
        time.sleep(0.01)


class Threads:
    """Of this test: other tests of the process may have left some that end by themselves."""

    def __init__(self) -> None:
        self._before = set(threading.enumerate())

    def names(self, kind: str) -> list[str]:
        fresh = set(threading.enumerate()) - self._before
        return sorted(thread.name for thread in fresh if thread.name.startswith(f"{kind}-"))

    def are(self, sessions: list[str], num_senders: int) -> bool:
        return self.names("session") == sessions and len(self.names("sender")) == num_senders


def test_ways_follow_the_engines(alone: None, tmp_path: Path) -> None:
    engines, threads = Engines(), Threads()
    publisher = publisher_of(engines, tmp_path)
    assert threads.names("session") == ["session-0", "session-1"]
    publisher.set_engines([SyncTarget(1, 1), SyncTarget(7, 2)])
    until(lambda: threads.are(["session-1", "session-7"], 2))
    assert not engines.asked, "nothing is ref_models yet"
    publisher.publish(V1)
    until(lambda: engines.of(V1) == {1, 7})
    publisher.set_engines([SyncTarget(1, 1), SyncTarget(7, 2), SyncTarget(8, 1)])
    until(lambda: engines.of(V1) == {1, 7, 8})  # at once, not with the next publish
    plans = {message.engine: message.plan for message in engines.asked}
    assert len(set(plans.values())) == 3, "sizes and engines have plans of their own"
    publisher.wait()
    publisher.set_engines([])
    until(lambda: threads.are([], 0))
