"""Publish sessions that send factors: each engine rank merges, and says so by a digest.

The processes of test_sync_session.py; `Engine.served` compares every weight with W0 and the factors
of the version that is claimed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moerl.config.lora_settings import LoraConfig
from moerl.core.messages import PublishFailure, PublishResult
from moerl.core.types import PolicyVersion
from moerl.layout.tiles import full_box, num_elements
from tests.helpers.sync_peers import CONTEXT, Engine, Halt, Trainer, transfer

pytestmark = pytest.mark.timeout(300)

V0, V1, V2 = PolicyVersion(0, 0), PolicyVersion(0, 1), PolicyVersion(0, 2)
LORA = LoraConfig(rank=2, alpha=1, ranks={"*.experts.*": 1})
LATE_S = 60.0


@pytest.fixture
def made() -> Iterator[list]:
    things: list = []
    yield things
    for thing in reversed(things):
        thing.end()


def engine(made: list, folder: Path, tp: int = 1, **orders: int) -> Engine:
    made.append(Engine(folder, tp).start(**orders))
    return made[-1]


def trainer(made: list, engines: list[Engine], **settings: object) -> Trainer:
    made.append(Trainer(engines, **{"lora": LORA, **settings}))  # type: ignore[arg-type]
    return made[-1]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LATE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def test_engines_merge_each_version_from_factors_alone(made: list, tmp_path: Path) -> None:
    """Two ranks each; the first of two engines starts again in between, with W0."""
    both = [engine(made, tmp_path / f"e{i}", 2) for i in range(2)]
    job, plan = trainer(made, both), transfer(2, LORA)
    wanted = [plan.factors(rank).values() for rank in range(2)]
    elements = sum(num_elements(full_box(t.shape)) for held in wanted for t in held)
    for version in (V1, V2):
        results = job.publish(version)
        assert all(isinstance(result, PublishResult) for result in results), results
        assert [one.served() for one in both] == [version, version]
        assert [result.num_bytes for result in results] == [4 * elements] * 2, "factors alone"
    both[0].end()
    both[0].start()
    assert both[0].served() == V0
    wait_until(lambda: both[0].served() == V2)


def test_factors_of_an_older_version_are_noticed_before_a_weight_changes(
    made: list, tmp_path: Path
) -> None:
    """The bytes arrive as they were sent; what they give is not what the trainer has."""
    one = engine(made, tmp_path / "e0")
    job = trainer(made, [one], stale=True)
    (result,) = job.publish(V1)
    assert isinstance(result, PublishResult), result
    (result,) = job.publish(V2)
    assert isinstance(result, PublishFailure), result
    assert (result.phase, "was sent" in result.cause) == ("verify", True), result
    assert one.served() == V1


def test_a_flipped_bit_of_a_factor_is_sent_again(made: list, tmp_path: Path) -> None:
    one = engine(made, tmp_path / "e0", flips=1)
    (result,) = trainer(made, [one]).publish(V1)
    assert isinstance(result, PublishResult), result
    assert result.resent == 1
    assert one.served() == V1


@pytest.mark.full
def test_a_killed_trainer_leaves_a_whole_adapter_and_the_next_one_goes_on(
    made: list, tmp_path: Path
) -> None:
    """The engine keeps its W0 over both."""
    one = engine(made, tmp_path / "e0")
    halt = Halt(0, 9, CONTEXT.Event(), CONTEXT.Event())
    job = trainer(made, [one], halt=halt, timeouts=(8.0,))
    (result,) = job.publish(V1)
    if isinstance(result, PublishResult) and not halt.reached.is_set():
        job.start(V2)
        assert halt.reached.wait(LATE_S)
    job.processes[0].kill()
    job.sessions[0].settle()
    assert one.served() in (V0, V1)
    job.end()
    again = PolicyVersion(1, 0)
    (result,) = trainer(made, [one]).publish(again)
    assert isinstance(result, PublishResult), result
    assert one.served() == again


@pytest.mark.full
def test_other_adapters_need_an_engine_that_starts_again(made: list, tmp_path: Path) -> None:
    one = engine(made, tmp_path / "e0")
    (result,) = trainer(made, [one]).publish(V1)
    assert isinstance(result, PublishResult), result
    made.append(Trainer([one], lora=LoraConfig(rank=3)))
    (result,) = made[-1].publish(V2)
    assert isinstance(result, PublishFailure), result
    assert "need a new start" in result.cause
    assert one.served() == V1
