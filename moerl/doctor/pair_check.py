"""One node holds something, other nodes try it: the frame of the checks of locks and of ports.

The holder prints one line when it holds, and lets go when its input says so, or after a while.
"""

from __future__ import annotations

import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

_HOLD_S = 20.0
_GRACE_S = 5.0
_END = "end\n"


def answers(
    holder: list[str], others: Sequence[Callable[[str], list[str]]], wait_s: float
) -> list[str]:
    """What each of the others says while the holder holds; an error as its last line.

    holder: command of the node that holds; others: commands of nodes that try, from its line.
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
        if child.poll() is not None or not (line := child.stdout.readline().strip()):
            return [f"nothing was held within {wait_s:g} s"] * len(others)
        with ThreadPoolExecutor(max_workers=64) as pool:
            commands = [other(line) for other in others]
            return list(pool.map(lambda one: _answer(one, deadline - time.monotonic()), commands))
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


def hold(line: str) -> None:
    """Say that something is held; returns when it may be let go."""
    deadline = time.monotonic() + _HOLD_S
    print(line, flush=True)
    select.select([sys.stdin], [], [], _HOLD_S)
    if sys.stdin.readline() != _END:  # kubectl passes no input: its end is not the end
        time.sleep(max(0.0, deadline - time.monotonic()))
