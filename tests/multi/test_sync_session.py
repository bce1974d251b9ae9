"""Publish sessions under faults: they end in bounded time, and an engine serves one whole version.

Engine ranks and trainer ranks are processes of their own; `Engine.served` compares every element of
what is served with the version it claims.  tests/e2e/test_sync.py does the same with SGLang.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from moerl.core.errors import EngineError, ProtocolError
from moerl.core.messages import (
    AskEngine,
    CommitUpdate,
    EngineVersion,
    PrepareUpdate,
    PublishFailure,
    PublishResult,
    UpdatePrepared,
    UpdateVerified,
    VerifyUpdate,
    WriteUpdate,
)
from moerl.core.rpc import Keys
from moerl.core.types import PolicyVersion
from moerl.weight_sync.transfer_plan import PLAN_ID
from tests.helpers.patience import Patience, patience
from tests.helpers.sync_peers import (
    CONTEXT,
    POLICY,
    TRAINER,
    Engine,
    FaultyReceiver,
    Halt,
    Trainer,
    transfer,
)
from tests.helpers.transport_cases import skip_if_missing, transports

pytestmark = pytest.mark.timeout(300)

V0, V1, V2 = PolicyVersion(0, 0), PolicyVersion(0, 1), PolicyVersion(0, 2)
FULL = pytest.mark.full
LATE_S = 60.0  # nothing here may take longer, however slow the machine


class Made(list):
    """Engines and trainers to end when the test is over, and what moves their weights."""

    def __init__(self, transport: str, folder: Path) -> None:
        super().__init__()
        self.mover = {"transport": transport, "folder": str(folder)}


@pytest.fixture(params=transports(default=["shm"]))
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Made]:
    folder = tmp_path / "shared"
    folder.mkdir()
    skip_if_missing(request.param)
    things = Made(request.param, folder)
    yield things
    for thing in reversed(things):
        thing.end()


def engines(made: Made, tmp_path: Path, count: int, **orders: int) -> list[Engine]:
    tp = orders.pop("tp", 1)
    found = [Engine(tmp_path / f"e{i}", tp) for i in range(count)]
    for engine in found:
        engine.start(**orders)
    made += found
    return found


def trainer(made: Made, *args: object, **kwargs: object) -> Trainer:
    made.append(Trainer(*args, **(made.mover | kwargs)))  # type: ignore[arg-type]
    return made[-1]


def wait_until(condition: Callable[[], bool]) -> None:
    limit = Patience(LATE_S)
    while not condition():
        assert not limit.over(), "it did not happen"
        time.sleep(0.05)


@pytest.mark.parametrize("made", transports(default=["shm", "gloo"]), indirect=True)
def test_every_rank_of_two_engines_takes_each_version(made: Made, tmp_path: Path) -> None:
    both = engines(made, tmp_path, 2, tp=2)
    job = trainer(made, both)
    for version in (V1, V2):
        results = job.publish(version)
        assert all(isinstance(result, PublishResult) for result in results), results
        assert [engine.served() for engine in both] == [version, version]
        assert all(result.resent == 0 for result in results)


def test_deltas_bring_the_same_bytes(made: Made, tmp_path: Path) -> None:
    """In full the first time and where everything changed, else what changed."""
    both = engines(made, tmp_path, 2, tp=2)
    job = trainer(made, both, delta=True)
    sent = {}
    for step in (50, 100, 101, 102):
        version = PolicyVersion(0, step)
        results = job.publish(version)
        assert all(isinstance(result, PublishResult) for result in results), results
        assert [engine.served() for engine in both] == [version, version]
        assert all(result.resent == 0 for result in results)
        sent[step] = results[0].num_bytes
    assert sent[50] >= sent[100] > sent[50] / 2
    assert max(sent[101], sent[102]) < sent[50] / 4


def test_a_flipped_bit_under_a_delta_is_sent_again_in_full(made: Made, tmp_path: Path) -> None:
    (engine,) = engines(made, tmp_path, 1, flips=1)
    job = trainer(made, [engine], delta=True)
    resent = []
    for step in (100, 101, 102):
        (result,) = job.publish(PolicyVersion(0, step))
        assert isinstance(result, PublishResult), result
        assert engine.served() == PolicyVersion(0, step)
        resent.append(result.resent)
    assert resent == [0, 1, 0]


def test_another_plan_and_a_wrong_key_are_refused(made: Made, tmp_path: Path) -> None:
    (engine,) = engines(made, tmp_path, 1)
    job = trainer(made, [engine], plan="0123456789abcdef")
    (result,) = job.publish(V1)
    assert isinstance(result, PublishFailure)
    assert result.phase == "prepare"
    assert "transfer plan is 0123456789abcdef" in result.cause
    with pytest.raises(ProtocolError, match="did not answer"):
        engine.ask(AskEngine(0), 1.0, keys=Keys(engine.keys.server, Keys.make().client))
    assert engine.served() == V0


def test_a_flipped_bit_is_sent_again_once(made: Made, tmp_path: Path) -> None:
    (engine,) = engines(made, tmp_path, 1, flips=1)
    (result,) = trainer(made, [engine]).publish(V1)
    assert isinstance(result, PublishResult), result
    assert result.resent == 1
    assert engine.served() == V1


def test_bits_that_keep_flipping_leave_the_old_version(made: Made, tmp_path: Path) -> None:
    (engine,) = engines(made, tmp_path, 1, flips=2)
    job = trainer(made, [engine])
    (result,) = job.publish(V1)
    assert isinstance(result, PublishFailure)
    assert (result.phase, "damaged twice" in result.cause) == ("verify", True), result
    # the fault is over: the engine is looked after without another publish
    wait_until(lambda: engine.served() == V1)


@FULL  # a minute; test_chaos.py kills trainers in every test run
def test_a_killed_sender_leaves_the_old_version_and_a_new_trainer_goes_on(
    made: Made, tmp_path: Path
) -> None:
    both = engines(made, tmp_path, 2)
    halt = Halt(1, 3, CONTEXT.Event(), CONTEXT.Event())
    job = trainer(made, both, halt=halt, timeouts=(60.0, 8.0))
    job.start(V1)
    assert halt.reached.wait(LATE_S)
    job.processes[0].kill()
    results = [session.settle() for session in job.sessions]
    assert isinstance(results[1], PublishFailure)
    assert results[1].phase == "transfer"
    assert both[0].served() in (V0, V1)
    assert both[1].served() == V0
    job.end()
    again = PolicyVersion(1, 0)
    results = trainer(made, both).publish(again)
    assert all(isinstance(result, PublishResult) for result in results), results
    assert [engine.served() for engine in both] == [again, again]


def test_a_killed_receiver_fails_alone(made: Made, tmp_path: Path) -> None:
    both = engines(made, tmp_path, 2, tp=2)
    halt = Halt(1, 3, CONTEXT.Event(), CONTEXT.Event())
    job = trainer(made, both, halt=halt)
    job.start(V1)
    assert halt.reached.wait(LATE_S)
    both[1].end()
    halt.go_on.set()
    results = [session.settle() for session in job.sessions]
    assert isinstance(results[0], PublishResult), results
    assert isinstance(results[1], PublishFailure), results
    cause = results[1].cause
    assert "(peer)" in cause or "(refused)" in cause or "did not answer" in cause, results
    assert both[0].served() == V1
    # it comes back with the weights of the model folder, and is brought to the current version
    both[1].start(V0)
    for session in job.sessions:
        session.resume()
    wait_until(lambda: both[1].served() == V1)


def test_a_stalled_engine_is_left_behind_and_caught_up(made: Made, tmp_path: Path) -> None:
    both = engines(made, tmp_path, 2)
    job = trainer(made, both, timeouts=(60.0, 5.0))
    os.kill(both[1].processes[0].pid, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        results = job.publish(V1)
        assert time.monotonic() - begin < patience(LATE_S)
        assert isinstance(results[0], PublishResult), results
        assert isinstance(results[1], PublishFailure), results
        assert both[0].served() == V1
    finally:
        os.kill(both[1].processes[0].pid, signal.SIGCONT)
    wait_until(lambda: both[1].served() == V1)


def test_a_late_joiner_is_served_without_the_others(made: Made, tmp_path: Path) -> None:
    first = Engine(tmp_path / "e0").start()
    late = Engine(tmp_path / "e1")
    made += [first, late]
    job = trainer(made, [first, late])
    results = job.publish(V1)
    assert isinstance(results[0], PublishResult), results
    assert isinstance(results[1], PublishFailure), results
    assert "no receiver" in results[1].cause
    late.start()
    wait_until(lambda: late.served() == V1)
    assert first.served() == V1


def prepare_of(version: PolicyVersion, *, writes_live: bool = False) -> PrepareUpdate:
    return PrepareUpdate(
        engine=0,
        version=version,
        plan_engine=PLAN_ID,
        plan=transfer(1).id,
        layout="",
        transport="shm",
        trainer=asdict(TRAINER),
        policy=asdict(POLICY),
        layer_spec="local",
        timeout_s=LATE_S,
        writes_live=writes_live,
    )


def test_a_version_that_is_not_verified_is_not_committed() -> None:
    """Neither before VERIFY nor after one that found damage, whatever the session would do."""
    rank = FaultyReceiver(0, 1, V0, flips=0)
    try:
        rank.handle(prepare_of(V1))
        for _ in range(2):
            with pytest.raises(EngineError, match=r"has not verified 0\.1"):
                rank.handle(CommitUpdate(0, V1, LATE_S))
            verified = rank.handle(VerifyUpdate(0, V1, (b"",), LATE_S))
            assert isinstance(verified, UpdateVerified)
            assert verified.failed[0], "no digest, no match"
        assert rank.handle(AskEngine(0)) == EngineVersion(V0, "")
    finally:
        rank.receiver.close()


# --- into live weights ----------------------------------------------------------------------------
def test_live_weights_take_each_version_and_no_version_twice_the_memory(
    made: Made, tmp_path: Path
) -> None:
    both = engines(made, tmp_path, 2, tp=2)
    job = trainer(made, both, live=True)
    for version in (V1, V2, PolicyVersion(1, 0)):
        results = job.publish(version)
        assert all(isinstance(result, PublishResult) for result in results), results
        assert [engine.served() for engine in both] == [version] * 2
        assert {result.num_bytes for result in results} == {
            sum(transfer(2).receiver(rank).num_bytes for rank in range(2))
        }


@pytest.mark.parametrize("flips", [1, 2])
def test_an_element_of_a_live_weight_that_changes_is_noticed(
    made: Made, tmp_path: Path, flips: int
) -> None:
    """Between WRITE and VERIFY.  Once: all is written again; twice: the weights are served by no
    commit, and the next session writes them."""
    (engine,) = engines(made, tmp_path, 1, flips=flips)
    job = trainer(made, [engine], live=True)
    job.start(V1)
    (result,) = [session.settle() for session in job.sessions]
    if flips == 1:
        assert isinstance(result, PublishResult), result
        assert result.resent == 1
    else:
        assert isinstance(result, PublishFailure)
        assert (result.phase, "damaged twice" in result.cause) == ("verify", True), result
        (state,) = engine.ask(AskEngine(0), LATE_S)
        assert isinstance(state, EngineVersion)
        assert (state.version, state.cause[:7]) == (V0, "not 0.0"), "control: they are mixed"
        job.sessions[0].resume()
    wait_until(lambda: engine.ask(AskEngine(0), LATE_S) == [EngineVersion(V1, "")])


def test_a_trainer_that_dies_between_two_rounds_leaves_weights_for_the_next_to_write(
    made: Made, tmp_path: Path
) -> None:
    (engine,) = engines(made, tmp_path, 1)
    halt = Halt(0, 12, CONTEXT.Event(), CONTEXT.Event())
    job = trainer(made, [engine], halt=halt, timeouts=(4.0,), live=True)
    job.start(V1)
    assert halt.reached.wait(LATE_S)
    job.processes[0].kill()
    (result,) = [session.settle() for session in job.sessions]
    assert isinstance(result, PublishFailure)
    assert result.phase == "transfer"
    (state,) = engine.ask(AskEngine(0), LATE_S)
    assert isinstance(state, EngineVersion)
    assert (state.version, state.cause[:7]) == (V0, "not 0.0"), "a round was written"
    job.end()
    again = PolicyVersion(1, 0)
    (result,) = trainer(made, [engine], live=True).publish(again)
    assert isinstance(result, PublishResult), result
    assert engine.served() == again


def test_rounds_and_their_staging() -> None:
    """Two buckets of each region at a time; a session that wrote nothing verifies nothing."""
    rank = FaultyReceiver(0, 1, V0, flips=0)
    prepare = prepare_of(V1, writes_live=True)
    try:
        prepared = rank.handle(prepare)
        assert isinstance(prepared, UpdatePrepared)
        plan = transfer(1).receiver(0)
        most = max(len(region.buckets) for region in plan.regions)
        assert prepared.rounds == -(-most // 2) > 3
        session = rank.receiver._session
        assert session is not None
        staged = session.staging.buffer.numel()
        assert staged <= 2 * len(plan.regions) * 2 * POLICY.bucket_bytes < plan.staging_bytes
        with pytest.raises(EngineError, match=r"nothing of 0\.1 was written"):
            rank.handle(VerifyUpdate(0, V1, (b"",), LATE_S))
        assert rank.handle(AskEngine(0)) == EngineVersion(V0, "")
        rank.handle(WriteUpdate(0, V1, 0, LATE_S))
        with pytest.raises(EngineError, match=r"has not verified 0\.1"):
            rank.handle(CommitUpdate(0, V1, LATE_S))
        rank.handle(prepare_of(V2))
        with pytest.raises(EngineError, match="does not write live weights"):
            rank.handle(WriteUpdate(0, V2, 0, LATE_S))
    finally:
        rank.receiver.close()


def test_an_older_trainer_is_refused(made: Made, tmp_path: Path) -> None:
    (engine,) = engines(made, tmp_path, 1)
    (result,) = trainer(made, [engine]).publish(PolicyVersion(1, 3))
    assert isinstance(result, PublishResult), result
    (result,) = trainer(made, [engine]).publish(PolicyVersion(0, 9))
    assert isinstance(result, PublishFailure)
    assert "older than 1.3" in result.cause
    assert engine.served() == PolicyVersion(1, 3)


def test_engines_send_a_version_on(made: Made, tmp_path: Path) -> None:
    """The trainer serves one engine of three; the others copy, and are served when it is gone."""
    three = engines(made, tmp_path, 3, tp=2)
    job = trainer(made, three, direct=1, timeouts=(8.0, 60.0, 60.0))
    results = job.publish(V1)
    assert [result.source for result in results] == [-1, 0, 0], results
    assert [engine.served() for engine in three] == [V1] * 3
    three[0].end()
    results = job.publish(V2)
    assert isinstance(results[0], PublishFailure), results
    assert [result.source for result in results[1:]] == [-1, -1], results
    assert [engine.served() for engine in three[1:]] == [V2] * 2
