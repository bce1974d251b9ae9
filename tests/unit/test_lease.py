"""The sign of life of a run: who trusts it, for how long, and who is not fooled by clocks."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from moerl.core.errors import TrainerError
from moerl.launch.nodes.lease import LeaseKeeper, LeaseReader, RunEnded
from tests.helpers.scripted_actors import Clock


class World:
    """A root process and a node, each with a monotonic clock of its own."""

    def __init__(self, root: Path) -> None:
        self.path = root / "endpoints" / "lease"
        self.root_clock, self.node_clock = Clock(), Clock()
        self.node_clock.now = 5.0  # clocks of two machines have nothing in common
        self.keeper = LeaseKeeper(self.path, 60.0, self.root_clock)
        self.reader = LeaseReader(self.path, self.node_clock)

    def pass_time(self, seconds: int, *, root: bool = True, node: bool = True) -> None:
        """Second by second; root, node: whether that side runs."""
        for _ in range(seconds):
            self.root_clock.now += 1.0
            self.node_clock.now += 1.0
            if root:
                self.keeper.renew()
            if node:
                self.reader.check()


def test_a_node_stays_with_a_root_that_lives(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.pass_time(600)
    assert int(world.path.read_bytes().split()[0]) == 120, "once per 5 s"
    assert world.path.stat().st_mode & 0o777 == 0o600
    assert world.path.parent.stat().st_mode & 0o777 == 0o700


def test_a_node_leaves_a_lost_root_after_a_lease(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.pass_time(20)
    world.pass_time(55, root=False)
    with pytest.raises(
        TrainerError, match=r"no sign of .* for 61 s .supervision.lease_s = 60.*lost"
    ):
        world.pass_time(6, root=False)


def test_a_root_that_was_suspended_for_less_than_a_lease_is_not_left(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.pass_time(20)
    world.pass_time(50, root=False)
    world.pass_time(300)


def test_a_node_that_was_suspended_itself_looks_before_it_judges(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.pass_time(20)
    world.pass_time(400, node=False)
    world.pass_time(300)


def test_a_node_leaves_a_run_that_is_over_at_the_second_look(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.pass_time(20)
    world.path.unlink()
    world.reader.check()
    with pytest.raises(RunEnded, match="the run has ended"):
        world.reader.check()


def test_failures_of_the_file_server_are_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    world.pass_time(20)

    def stale(_: Path) -> bytes:
        raise OSError(errno.ESTALE, "stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", stale)
        world.pass_time(300, root=False)
    world.pass_time(50, root=False)
    with pytest.raises(TrainerError, match="lost"):
        world.pass_time(70, root=False)


def test_a_root_without_room_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("moerl.launch.nodes.lease.os.pwrite", full)
        world.pass_time(50)
    world.pass_time(300)


def test_a_file_of_an_earlier_start_is_not_trusted(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.path.parent.mkdir()
    world.path.write_text(f"{12:016d} {60:015.3f}\n")
    for _ in range(5):
        assert not world.reader._look()
    world.pass_time(1)
    assert world.reader._look(), "the next start counts from 1"
