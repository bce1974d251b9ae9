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
from moerl.config.tiny_config import tiny_config
from moerl.core.errors import LayoutError, TrainerError
from moerl.core.messages import (
    AbortUpdate,
    AskEngine,
    EngineVersion,
    Message,
    Ok,
    PrepareUpdate,
    SyncTarget,
    UpdatePrepared,
)
from moerl.core.rpc import Keys
from moerl.core.types import PolicyVersion
from moerl.layout import model_spec
from moerl.runtime.trace import Tracer
from moerl.weight_sync.publisher import SyncContext, WeightPublisher, open_publisher
from tests.helpers.patience import Patience

V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)
PADDED = "w13: the plan fills 49152 of 65536 elements"


class RefusingClient:
    """Refuse every session, and remember who was asked."""

    def __init__(self, cause: str = "it does not answer", *, well: bool = False) -> None:
        """well: they answer a question for their version; refuses: those that do not PREPARE."""
        self.asked: list[PrepareUpdate] = []
        self.aborted: list[AbortUpdate] = []
        self.refuses = {0, 1, 7, 8}
        self.cause, self.well = cause, well

    def expect(self, message: Message, reply_type: type, timeout_s: float | None = None) -> object:
        if isinstance(message, AskEngine) and self.well:
            return EngineVersion(V0, "")
        if isinstance(message, AbortUpdate):
            self.aborted.append(message)
            return Ok()
        if isinstance(message, PrepareUpdate):
            self.asked.append(message)
            if message.engine not in self.refuses:
                return UpdatePrepared((b"",), ({0: 0},), "layout", V0)
            raise LayoutError(self.cause)
        raise TrainerError(self.cause)

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


def publisher_of(
    engines: RefusingClient,
    tmp_path: Path,
    ended: Callable[[BaseException], None] = lambda error: None,
    *,
    max_restarts: int = 100,
) -> WeightPublisher:
    shapes = tiny_config(TinyModel(), vocab_size=128)
    (tmp_path / "config.json").write_text(json.dumps(shapes))
    config = Config(
        model=ModelConfig(path=str(tmp_path)),
        engine=EngineConfig(count=2),
        sync=SyncConfig(transport="shm", timeout_s=20.0),
        supervision=SupervisionConfig(max_restarts=max_restarts),
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
        on_failure=ended,
    )
    return open_publisher(config, slot)


def until(what: Callable[[], bool]) -> None:
    limit = Patience(20)
    while not what():
        assert not limit.over(), [thread.name for thread in threading.enumerate()]
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
    engines, threads = RefusingClient(), Threads()
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
    assert plans[1] == plans[8] != plans[7], "engines of one size have one plan"
    publisher.wait()
    publisher.set_engines([])
    until(lambda: threads.are([], 0))


def test_engines_that_refuse_the_plan_end_the_run_before_the_first_step(
    alone: None, tmp_path: Path
) -> None:
    engines, ends = RefusingClient(PADDED, well=True), list[BaseException]()
    publisher = publisher_of(engines, tmp_path, ends.append)
    publisher.rehearse(V0)
    assert engines.of(V0) == {0, 1}
    assert str(ends[-1]) == (
        f"0 of 2 engines take version 0.0, sync.quorum = 1: engine 0, prepare: {PADDED}"
    )
    publisher.set_engines([])


def test_a_rehearsal_that_enough_engines_pass_sends_nothing(alone: None, tmp_path: Path) -> None:
    engines, ends = RefusingClient(PADDED, well=True), list[BaseException]()
    engines.refuses = {1}
    publisher = publisher_of(engines, tmp_path, ends.append)
    publisher.rehearse(V0)
    assert not ends
    assert {message.engine for message in engines.aborted} == {0, 1}
    assert publisher.wait() == {}, "a rehearsal is no publish"
    publisher.set_engines([])


def test_engines_that_do_not_answer_are_left_to_the_supervisor(alone: None, tmp_path: Path) -> None:
    engines, ends = RefusingClient("engine 0 is being started again"), list[BaseException]()
    publisher = publisher_of(engines, tmp_path, ends.append)
    publisher.rehearse(V0)
    assert engines.of(V0) == {0, 1}
    assert not ends
    publisher.set_engines([])


def test_a_first_publish_that_no_engine_takes_ends_the_run_at_once(
    alone: None, tmp_path: Path
) -> None:
    """Without another publish: at the largest lag no batch comes, so there is none."""
    engines, ends = RefusingClient(), list[BaseException]()
    publisher = publisher_of(engines, tmp_path, ends.append)
    publisher.publish(V1)
    until(lambda: bool(ends))
    assert "0 of 2 engines take version 0.1" in str(ends[0])
    publisher.set_engines([])


def test_engines_that_come_to_refuse_end_the_run_after_some_attempts(
    alone: None, tmp_path: Path
) -> None:
    engines, ends = RefusingClient(PADDED, well=True), list[BaseException]()
    publisher = publisher_of(engines, tmp_path, ends.append, max_restarts=1)
    publisher._has_reached, publisher._short = True, 0  # as after a publish that was taken
    publisher.publish(V1)
    publisher.wait()
    assert not ends, "one refusal is tolerated"
    publisher.resume()
    until(lambda: bool(ends))
    assert PADDED in str(ends[0])
    assert len([m for m in engines.asked if m.engine == 0]) == 2
    publisher.set_engines([])
