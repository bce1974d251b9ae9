"""A file is the old one or the new one, whatever happens on the way."""

from __future__ import annotations

import multiprocessing
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moerl.core.atomic import atomic_file, atomic_write
from tests.helpers.patience import patience


def _die_before_the_rename(path: Path) -> None:
    with atomic_file(path) as file:
        file.write(b"new")
        file.flush()
        os._exit(9)


def test_content_is_replaced_and_nothing_else_is_in_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    atomic_write(path, "old\n")
    atomic_write(path, b"\xff", sync=True)
    assert path.read_bytes() == b"\xff"
    atomic_write(path, "\u00e9")
    assert path.read_bytes() == "\u00e9".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_a_crash_before_the_rename_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    writer = multiprocessing.get_context("fork").Process(
        target=_die_before_the_rename, args=(path,)
    )
    writer.start()
    writer.join(patience(30))
    assert writer.exitcode == 9
    assert path.read_text() == "old"
    assert all(found.name.startswith(".") for found in tmp_path.iterdir() if found != path)
    atomic_write(path, "new")  # what the dead writer left is not in the way
    assert path.read_text() == "new"


@pytest.mark.parametrize("step", ["fsync", "replace", "body"])
def test_an_error_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "a.json"
    path.write_text("old")
    if step != "body":
        monkeypatch.setattr(os, step, full)

    def write() -> None:
        with atomic_file(path, sync=True) as file:
            file.write(b"new")
            if step == "body":
                full()

    with pytest.raises(OSError, match="No space left"):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("sync", [False, True])
def test_the_bytes_are_on_the_disk_before_the_name_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    path, synced, fsync = tmp_path / "a", [], os.fsync

    def watch(handle: int) -> None:
        found = os.fstat(handle)
        what = "folder" if stat.S_ISDIR(found.st_mode) else found.st_size
        synced.append((what, path.exists()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", watch)
    atomic_write(path, b"1234", sync=sync)
    assert synced == ([(4, False), ("folder", True)] if sync else [])


def test_writers_at_the_same_time_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "a"
    contents = [bytes([number]) * 200_000 for number in range(8)]
    atomic_write(path, contents[0])

    def write(content: bytes) -> None:
        for _ in range(10):
            atomic_write(path, content)
            assert path.read_bytes() in contents

    with ThreadPoolExecutor(len(contents)) as pool:
        list(pool.map(write, contents))
    assert list(tmp_path.iterdir()) == [path]


def test_permissions_are_those_asked_for_from_the_first_byte(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("old")
    path.chmod(0o644)
    with atomic_file(path, mode=0o600) as file:
        (fresh,) = (found for found in tmp_path.iterdir() if found != path)
        assert stat.S_IMODE(fresh.stat().st_mode) == 0o600
        file.write(b"secret")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_umask_holds(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        atomic_write(tmp_path / "a", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640
