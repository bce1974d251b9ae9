"""Whether a lock of one node is seen by another: `python -m moerl.planning.lock_check JOB PATH`.

A run locks its directory, and engines lock their staging folders.  Some mounts, such as Lustre with
`localflock`, keep locks on the machine: then two nodes hold the same one.

JOB hold: locks a new file in PATH or its nearest parent, prints its name, keeps it for a while.
JOB try: prints `refused` when another process holds the lock of the file, `granted` or `missing`.
"""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_HOLD_S = 20.0
_GRACE_S = 5.0
_END = "end\n"  # tells the holder that all others have tried
_PREFIX = ".moerl-doctor-"
MODULE = ("-m", "moerl.planning.lock_check")


def answers(
    holder: list[str], others: Sequence[Callable[[str], list[str]]], wait_s: float
) -> list[str]:
    """What each of the others says while the holder holds a lock; an error as its last line.

    holder: command of the node that holds; others: commands of nodes that try, from the file.
    """
    deadline = time.monotonic() + wait_s
    child = subprocess.Popen(
        holder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdout is not None
    try:
        select.select([child.stdout], [], [], wait_s)
        if child.poll() is not None or not (path := child.stdout.readline().strip()):
            return ["no lock could be taken"] * len(others)
        return [_answer(other(path), deadline - time.monotonic()) for other in others]
    finally:
        _end(child)


def _end(child: subprocess.Popen[str]) -> None:
    try:
        child.communicate(_END, timeout=_GRACE_S)
    except subprocess.TimeoutExpired:  # a remote that passes no input on
        child.kill()
        child.wait()


def _answer(command: list[str], wait_s: float) -> str:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=max(0.1, wait_s),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "no answer"
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[-1] if lines else "no answer"


def hold(folder: Path) -> None:
    """Lock a new file, print its path, and remove it when told to, or after a while."""
    there = next(path for path in (folder, *folder.resolve().parents) if path.is_dir())
    handle, name = tempfile.mkstemp(prefix=_PREFIX, dir=there)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        print(name, flush=True)
        _wait_for_end(time.monotonic() + _HOLD_S)
    finally:
        Path(name).unlink(missing_ok=True)


def _wait_for_end(deadline: float) -> None:
    """The end of the input is not the end: kubectl passes none."""
    select.select([sys.stdin], [], [], _HOLD_S)
    if sys.stdin.readline() != _END:
        time.sleep(max(0.0, deadline - time.monotonic()))


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
