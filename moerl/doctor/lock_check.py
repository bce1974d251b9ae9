"""Whether a lock of one node is seen by another: `python -m moerl.doctor.lock_check JOB PATH`.

A run locks its directory, and engines lock their staging folders.  Some mounts, such as Lustre with
`localflock`, keep locks on the machine: then two nodes hold the same one.

JOB hold: locks a new file in PATH or its nearest parent, prints its name, keeps it for a while.
JOB try: prints `refused` when another process holds the lock of the file, `granted` or `missing`.
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from pathlib import Path

from moerl.doctor import pair_check

_PREFIX = ".moerl-doctor-"


def hold(folder: Path) -> None:
    there = next(path for path in (folder, *folder.resolve().parents) if path.is_dir())
    handle, name = tempfile.mkstemp(prefix=_PREFIX, dir=there)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        pair_check.hold(name)
    finally:
        Path(name).unlink(missing_ok=True)


def attempt(path: Path) -> str:
    """Take the lock that another node holds."""
    os.listdir(path.parent)  # a network file system looks again
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return "missing"
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "refused"
    finally:
        os.close(handle)
    return "granted"


def main() -> None:
    job, path = sys.argv[1], Path(sys.argv[2])
    if job == "hold":
        hold(path)
    else:
        print(attempt(path))


if __name__ == "__main__":
    main()
