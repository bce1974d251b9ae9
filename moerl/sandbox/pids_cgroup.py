"""A cgroup that bounds the number of processes: the only bound that holds for root."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class PidsCgroup:
    """The folder of a cgroup with the pids controller."""

    folder: Path

    def end(self) -> None:
        """Kill all processes in it, also processes that its reaper has lost, and remove it."""
        deadline = time.monotonic() + 5.0
        while self.folder.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                (self.folder / "pids.max").write_text(
                    "0", encoding="utf-8"
                )  # nothing can be started any more
                for pid in (self.folder / "cgroup.procs").read_text(encoding="utf-8").split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                self.folder.rmdir()
            time.sleep(0.001)


def cgroup_parent() -> Path | None:
    """The folder in which this process can make pids cgroups, or None."""
    for folder in _own_folders():
        try:
            make_cgroup(folder, 1).end()
        except OSError:
            continue
        return folder
    return None


def make_cgroup(parent: Path, processes: int) -> PidsCgroup:
    """Raises OSError where none can be made, or none with the pids controller."""
    folder = parent / f"moerl-{os.getpid()}-{secrets.token_hex(4)}"
    folder.mkdir()
    try:
        (folder / "pids.max").write_text(str(processes), encoding="utf-8")
    except OSError:
        folder.rmdir()
        raise
    return PidsCgroup(folder)


def _own_folders() -> list[Path]:
    """Folders of this process's cgroups with the pids controller: version 1 and version 2."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if "pids" in controllers.split(","):
                found.append(_ROOT / "pids" / path.lstrip("/"))
            elif not controllers:
                found.append(_ROOT / path.lstrip("/"))
    return found
