"""Real Megatron ranks (TP 2 x EP 2) publish to real SGLang servers, with and without faults.

The oracle is SGLang itself: its own per-tensor checksums after a publish must equal those after its
own loader has read the same version from a Hugging Face folder.  Under a fault the publish ends in
bounded time (`World.run`), every engine is on exactly one version, the reason is in the log, and an
engine that was left behind is brought up by the trainer without another publish.
tests/multi/test_sync_session.py has the same faults in bare processes, over every transport.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moerl.core.errors import EngineError
from moerl.core.types import PolicyVersion
from tests.helpers.sync_world import Publish, World
from tests.helpers.transport_cases import skip_if_missing, transports

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(1500)]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(transport: str, *, fp8: bool = False) -> World:
        worlds.append(World(tmp_path, engines=1, tp=2, transport=transport, fp8=fp8))
        return worlds[-1]

    yield make
    for world in worlds:
        world.end()


@pytest.mark.parametrize("transport", transports(default=["shm"]))
def test_a_tp2_engine_holds_what_sglang_would_have_loaded(
    made: Callable[..., World], transport: str
) -> None:
    skip_if_missing(transport)
    world = made(transport)
    start = world.checksums(0)
    assert len(start) == 2
    world.done(world.publish())
    last = world.publish()
    assert world.done(last)["async/sync_engines_behind"] == 0
    world.check_serves(0, last.version)
    served = world.checksums(0)
    assert all(a[name] != b[name] for a, b in zip(start, served, strict=True) for name in a)
    assert world.load_folder(0, PolicyVersion(0, 1)) != served, "versions have other checksums"
    assert world.load_folder(0, last.version) == served
    spans = "".join(path.read_text() for path in world.run_dir.trace.glob("trainer-0.jsonl"))
    for phase in ("publish", "publish prepare", "publish transfer", "publish verify"):
        assert f'"{phase}"' in spans
    if transport == "shm":
        _meets_damage(world, last.version)


def test_an_engine_of_fp8_blocks_holds_what_sglang_would_have_loaded(
    made: Callable[..., World],
) -> None:
    """Senders quantise; SGLang loads the same version quantised as whole tensors.

    Its checksums are of the weights multiplied out; the bytes themselves are compared in
    tests/multi/test_layout_sglang.py.
    """
    world = made("shm", fp8=True)
    server = world.hosts[0]._server
    assert server is not None
    assert server.layout is not None
    assert server.layout.quantization == "fp8_block"
    start = world.checksums(0)
    world.done(world.publish())
    last = world.publish()
    metrics = world.done(last)
    assert metrics["async/sync_engines_behind"] == 0
    world.check_serves(0, last.version)
    served = world.checksums(0)
    assert all(a[name] != b[name] for a, b in zip(start, served, strict=True) for name in a)
    assert world.load_folder(0, PolicyVersion(0, 1)) != served, "versions have other checksums"
    assert world.load_folder(0, last.version) == served


def _meets_damage(world: World, before: PolicyVersion) -> None:
    """Another plan is refused, a bucket damaged once is sent again."""
    refused = world.publish("plan", engine=0)
    assert world.done(refused)["async/sync_engines_behind"] == 1
    assert "transfer plan is 0123456789abcdef" in refused.job.log(0)
    assert re.search(rf"serves {before}\b", refused.job.log(0))
    damaged = world.publish("flip", engine=0)
    metrics = world.done(damaged)
    assert metrics["async/sync_engines_behind"] == 0
    assert metrics["async/sync_resent_buckets"] >= 1
    assert "buckets arrived damaged" in damaged.job.log(0)
    world.check_serves(0, damaged.version)


# --- two engines, one of which meets every fault --------------------------------------------------
@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("two"), engines=2, tp=1, timeout_s=25.0)
    yield world
    world.end()


@pytest.fixture
def two(shared: World) -> World:
    """Both engines serve one version, and a trainer is there: whatever the test before left."""
    if shared.job is None or shared.job.ended:
        shared.start_trainer()
    for engine in range(2):
        if shared.hosts[engine]._health.ended.is_set():
            shared.restart_engine(engine)
    publish = shared.publish()
    shared.done(publish)
    for engine in range(2):
        shared.wait_for(engine, publish.version)
        shared.check_serves(engine, publish.version)
    shared.logged = len(publish.job.log(0))
    return shared


def _ends(world: World, publish: Publish, phase: str, cause: str) -> dict[str, float]:
    """Engine 0 took the version, engine 1 did not, and the log says why."""
    metrics = world.done(publish)
    assert metrics["async/sync_engines_behind"] == 1
    _says(world, publish, rf"{phase} failed: .*(?:{cause})")
    world.check_serves(0, publish.version)
    return metrics


def _says(world: World, publish: Publish, cause: str) -> None:
    """Since the test began; the trainer looks after engines between publishes, too."""
    log = publish.job.log(0)[world.logged :]
    assert re.search(rf"engine 1 stays behind \S+: {cause}", log), log[-4000:]


def _comes_up(world: World, publish: Publish) -> None:
    """The trainer brings engine 1 to the version by itself; SGLang's loader agrees."""
    world.wait_for(1, publish.version)
    for engine in range(2):
        world.check_serves(engine, publish.version)
    assert world.load_folder(1, publish.version) == world.known[publish.version]


def test_another_plan_is_refused(two: World) -> None:
    publish = two.publish("plan")
    _ends(two, publish, "prepare", "transfer plan is 0123456789abcdef")
    _comes_up(two, publish)


def test_bits_that_keep_flipping_leave_the_old_version(two: World) -> None:
    publish = two.publish("flips")
    _ends(two, publish, "verify", "damaged twice")
    _comes_up(two, publish)


def test_a_stalled_engine_is_left_behind(two: World) -> None:
    publish = two.publish("halt")
    two.until(publish.file("halted").exists)
    stalled = two.processes(1)
    for process in stalled:
        process.suspend()
    publish.file("go").touch()
    try:
        _ends(two, publish, "verify", "did not answer VerifyUpdate")
        with pytest.raises(EngineError, match="did not answer VerifyUpdate"):
            two.generate(1)
    finally:
        for process in stalled:
            process.resume()
    _comes_up(two, publish)


@pytest.mark.parametrize("whole", [True, False], ids=["server", "receiver"])
def test_an_engine_killed_in_a_transfer_fails_alone_and_is_refreshed(
    two: World, whole: bool
) -> None:
    """The receiver is a thread of the scheduler: that process, or the whole server."""
    publish = two.publish("halt")
    two.until(publish.file("halted").exists)
    killed = two.processes(1)
    two.kill(killed if whole else killed[-1:])
    publish.file("go").touch()
    _ends(two, publish, "transfer", "is gone")
    with pytest.raises(EngineError, match="is not usable"):
        two.generate(1)
    two.restart_engine(1)
    _comes_up(two, publish)


def test_a_late_joiner_is_served_alone(two: World) -> None:
    two.run(two.hosts[1].stop())
    publish = two.publish()
    _ends(two, publish, "prepare", "it was stopped")
    updates = _updates(two)
    two.restart_engine(1)
    _comes_up(two, publish)
    assert _updates(two) == updates, "engine 0 was updated again"


@pytest.mark.parametrize("whole", [True, False], ids=["trainer", "sender"])
def test_a_trainer_killed_in_a_publish_leaves_whole_versions(two: World, whole: bool) -> None:
    """All of its ranks at once, or one that only sends; the next incarnation goes on."""
    before = two.holds(1).version
    publish = two.publish("halt", rank=1)
    two.until(publish.file("halted").exists)
    two.wait_for(0, publish.version)  # else its commit may be on the way when the trainer dies
    job = publish.job
    for rank in job.ranks if whole else job.ranks[1:]:
        rank.kill()
    two.until(lambda: all(rank.returncode is not None for rank in job.ranks))
    assert not publish.file("done").exists()
    if not whole:
        _says(two, publish, r"transfer failed: .*ranks \[1\] did not send in time")
    two.check_serves(0, publish.version)
    two.check_serves(1, before)
    two.start_trainer()
    again = two.publish()
    assert two.done(again)["async/sync_engines_behind"] == 0
    assert again.version.incarnation == publish.version.incarnation + 1
    _comes_up(two, again)


def _updates(world: World) -> int:
    """Commits that engine 0 has seen."""
    spans = "".join(path.read_text() for path in world.run_dir.trace.glob("engine0*.jsonl"))
    return spans.count('"update"')
