"""Writes wait for room on a full disk, say so with path and bytes, and give up after a limit."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from moerl.core.errors import NonRetryableError
from moerl.runtime import disk_wait
from moerl.runtime.disk_wait import DiskPatience, is_full, shortage


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(disk_wait.time, "monotonic", lambda: now[0])
    return now


def test_a_wait_is_said_at_its_begin_at_times_and_at_its_end(clock: list[float]) -> None:
    said: list[str] = []
    wait = DiskPatience(100.0, said.append).begin("hf/")
    assert wait.again("no room")
    for clock[0] in range(101, 165):
        assert wait.again("no room")
    assert said == [
        f"hf/ waits for room on the disk, {left} s at most: no room" for left in (100, 70, 40)
    ]
    wait.done()
    assert said[3:] == ["hf/: written after 64 s without room"]
    clock[0] = 200.0
    assert wait.again("no room"), "another wait begins"
    clock[0] = 300.0
    assert not wait.again("no room")


def test_a_write_that_succeeds_or_may_not_wait_says_nothing(clock: list[float]) -> None:
    said: list[str] = []
    DiskPatience(100.0, said.append).begin("hf/").done()
    assert not DiskPatience(0.0, said.append).begin("hf/").again("no room")
    assert said == []


def test_nothing_is_tried_until_there_is_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    free = iter([10, 20, 99, 99, 50, 100, 7])
    said: list[str] = []
    monkeypatch.setattr(disk_wait, "free_bytes", lambda _: next(free))
    monkeypatch.setattr(disk_wait.time, "sleep", lambda _: None)
    wait = DiskPatience(100.0, said.append).begin("hf/")
    assert wait.for_room(tmp_path, 100, "no room")
    assert said == [
        f"hf/ waits for room on the disk, 100 s at most: {tmp_path} needs 100 bytes and its disk "
        "has 10 free (no room)"
    ]
    assert not DiskPatience().begin("hf/").for_room(tmp_path, 100, "no room")


def test_a_write_is_repeated_while_the_disk_is_full(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(disk_wait.time, "sleep", lambda _: None)
    errors = [OSError(errno.ENOSPC, "No space left on device")] * 2
    tries: list[int] = []

    def write() -> None:
        tries.append(1)
        if errors:
            raise errors.pop()

    DiskPatience(100.0, lambda _: None).write(tmp_path, 1, write)
    assert len(tries) == 3
    errors.append(OSError(errno.EACCES, "Permission denied"))
    with pytest.raises(NonRetryableError, match="was not written: PermissionError"):
        DiskPatience(100.0).write(tmp_path, 1, write)


def test_what_counts_as_full(tmp_path: Path) -> None:
    for cause in ("OSError: [Errno 28] No space left", "RuntimeError: [Errno 122] quota"):
        assert is_full(cause, tmp_path, 0)
    assert is_full("RuntimeError: unexpected pos 64 vs 0", tmp_path, 2**60)
    assert not is_full("PermissionError: [Errno 13]", tmp_path, 0)
    text = shortage(tmp_path / "not" / "made", 12_345)
    assert text.startswith(f"{tmp_path}/not/made needs 12,345 bytes and its disk has ")
