"""The private folder of one server, and the clean-up after a host that was killed.

A server dies with its host, but its folder and SGLang's shared memory remain.  So the host holds a
lock on a file in the folder and writes the names of the server's shared memory into it.  The kernel
releases the lock when the host dies.  The next start of a server on this machine removes the
folders whose lock is free, and the shared memory that they name.

Rejected: the host's process id in the folder's name (ids are reused, also across containers).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from moerl.core.errors import EngineError
from moerl.weight_sync.receiver_names import SCRATCH

_OWNER = "owner.lock"  # a folder without it belongs to others
_SHARED = Path("/dev/shm")
# Load counters (SGLang's managers/load_snapshot.py) and semaphores of multiprocessing: processes
# that are killed leave them.
_NAMES = ("sglang_loads_", "sem.mp-")


class Scratch:
    """The folder of one server, removed with it."""

    def __init__(self) -> None:
        """Make the folder.  Raises EngineError when the disk is full."""
        remove_abandoned(Path(tempfile.gettempdir()))
        try:
            self.path = Path(tempfile.mkdtemp(prefix=SCRATCH))
        except OSError as error:
            raise EngineError(f"engine: no folder for its sockets: {error}") from error
        self._owner = -1
        try:
            self._owner = os.open(self.path / _OWNER, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._owner, fcntl.LOCK_EX)
            self.name_shared([])
        except (OSError, EngineError) as error:
            self.remove()
            raise EngineError(f"engine: no lock in {self.path}: {error}") from error

    def name_shared(self, paths: Iterable[str]) -> None:
        """Note the server's mapped files of shared memory.  Raises EngineError on a full disk."""
        mine = sorted({path for path in paths if _is_removable(path)})
        try:
            os.ftruncate(self._owner, 0)
            os.pwrite(self._owner, json.dumps(mine).encode(), 0)
        except OSError as error:
            raise EngineError(f"engine: {self.path} takes no note: {error}") from error

    def remove(self) -> None:
        """Remove the folder and the shared memory; a second call does nothing."""
        _remove(self.path, self._owner)
        if self._owner >= 0:
            os.close(self._owner)
        self._owner = -1


def remove_abandoned(parent: Path) -> None:
    """Remove folders of this user's servers whose host is dead, and their shared memory."""
    for folder in parent.glob(SCRATCH + "*"):
        try:
            with _opened(folder, os.O_DIRECTORY) as opened:
                _refuse_foreign(opened)
                with _opened(Path(_OWNER), os.O_RDWR | os.O_NONBLOCK, dir_fd=opened) as owner:
                    _refuse_foreign(owner)
                    fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.fstat(owner).st_size:  # an empty file: its host is about to lock it
                        _remove(folder, owner)
        except OSError:  # of another user, a symlink, gone, or in use
            continue


@contextlib.contextmanager
def _opened(path: Path, flags: int, *, dir_fd: int | None = None) -> Iterator[int]:
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        yield handle
    finally:
        os.close(handle)


def _refuse_foreign(handle: int) -> None:
    if os.fstat(handle).st_uid != os.geteuid():
        raise PermissionError


def _remove(folder: Path, owner: int) -> None:
    """Remove a folder.  owner: its lock file, which names the shared memory; -1 = no lock file."""
    try:
        named = json.loads(os.pread(owner, os.fstat(owner).st_size, 0))
    except (OSError, ValueError):
        named = []
    for path in filter(_is_removable, map(str, named)):
        Path(path).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _is_removable(path: str) -> bool:
    return Path(path).parent == _SHARED and Path(path).name.startswith(_NAMES)
