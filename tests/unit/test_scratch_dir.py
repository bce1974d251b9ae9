"""What a server leaves behind whose start is given up, or whose host is killed."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from moerl.core.errors import EngineError
from moerl.engine.host.scratch_dir import Scratch, remove_abandoned
from moerl.engine.host.sglang_server import EngineServer
from tests.helpers.patience import patience
from tests.helpers.scripted_host import new_server

HOST = """
import sys, tempfile, time
from moerl.engine.host.scratch_dir import Scratch
tempfile.tempdir = sys.argv[1]
scratch = Scratch()
scratch.name_shared(sys.argv[2:])
print(scratch.path, flush=True)
time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where scratch folders are made."""
    made = tmp_path / "tmp"
    made.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    return made


class Silent:
    def __init__(self, healthy: bool) -> None:
        self._healthy = healthy

    async def healthy(self) -> bool:
        return self._healthy

    def authenticate(self, token: str) -> None: ...

    async def freeze_garbage(self) -> None: ...


def sleeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineServer:
    """A server that starts, and does nothing."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    server = new_server(tmp_path)
    monkeypatch.setattr(server, "_check_listener", lambda: None)  # it listens nowhere
    return server


def test_a_start_that_is_given_up_leaves_nothing(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = sleeping(tmp_path, monkeypatch)

    async def work() -> None:
        starting = asyncio.create_task(server.start(Silent(False)))  # type: ignore[arg-type]
        while not server.pid:
            await asyncio.sleep(0.01)
        assert list(folder.iterdir())
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(work())
    assert not psutil.pid_exists(server.pid)
    assert list(folder.iterdir()) == []
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError):
        asyncio.run(new_server(tmp_path).start(Silent(False)))  # type: ignore[arg-type]
    assert list(folder.iterdir()) == []


def test_a_server_that_is_up_and_says_nothing_is_given_up(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = sleeping(tmp_path, monkeypatch)
    server.config = replace(server.config, start_timeout_s=0.5)
    monkeypatch.setattr("moerl.engine.host.sglang_server._KILL_S", 1.0)
    monkeypatch.setattr(server, "_check_ranks", lambda: None)  # there are none

    class Mute(Silent):
        async def server_info(self) -> dict[str, Any]:
            await asyncio.sleep(120)
            return {}

    with pytest.raises(EngineError, match=r"no server_info in start_timeout_s = 0\.5 s"):
        asyncio.run(server.start(Mute(True)))  # type: ignore[arg-type]
    assert not psutil.pid_exists(server.pid)
    assert list(folder.iterdir()) == []


def test_a_helper_that_ends_while_it_is_looked_at_does_not_fail_the_start(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = sleeping(tmp_path, monkeypatch)

    def gone(_self: psutil.Process, *_: Any, **__: Any) -> Any:
        raise psutil.NoSuchProcess(1)

    async def work() -> None:
        async def identified(*_: Any) -> None: ...

        monkeypatch.setattr(server, "_identify", identified)
        monkeypatch.setattr(server, "_check_ranks", lambda: None)  # there are none
        monkeypatch.setattr(psutil.Process, "memory_maps", gone)
        monkeypatch.setattr(psutil.Process, "cmdline", gone)
        await server.start(Silent(True))  # type: ignore[arg-type]
        assert server.death() is None
        await server.stop()

    asyncio.run(work())
    assert list(folder.iterdir()) == []


def test_what_a_killed_host_left_goes_with_the_next_start(folder: Path, tmp_path: Path) -> None:
    shared = Path(f"/dev/shm/sglang_loads_test_{os.getpid()}")
    precious = tmp_path / "precious"
    for path in (shared, precious):
        path.write_text("x")
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, str(folder), str(shared), str(precious)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert host.stdout is not None
    left = Path(host.stdout.readline().strip())
    others = folder / "moerl-engine-of-a-node"  # not a server's
    others.mkdir()
    half = folder / "moerl-engine-half"  # its host is about to lock it
    half.mkdir()
    (half / "owner.lock").touch()
    planted = folder / "moerl-engine-planted"
    planted.mkdir()
    (planted / "owner.lock").write_text(json.dumps([str(precious)]))
    mine = Scratch()
    assert left.exists(), "its host lives"
    assert not planted.exists()
    os.kill(host.pid, signal.SIGKILL)
    host.wait(patience(20))
    remove_abandoned(folder)
    assert not left.exists()
    assert not shared.exists()
    assert precious.exists(), "only shared memory of SGLang is removed by name"
    assert sorted(folder.iterdir()) == sorted([others, half, mine.path])
    mine.remove()
    mine.remove()
    assert not mine.path.exists()


def test_a_folder_without_room_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()  # descriptors that other tests left to it
    opened = len(os.listdir("/proc/self/fd"))

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(EngineError, match="No space left"):
        Scratch()
    assert list(folder.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == opened
