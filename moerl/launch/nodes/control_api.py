"""Requests of people to a run that goes on: a folder of small files below the run directory.

`moerl engines` leaves a question and waits for its answer; the supervisor looks twice a second.
Both need the run directory only, so it works from any node that mounts it, and who may ask is who
may write there (0700).  Rejected: a socket of the supervisor (one more port and token to hand out).
"""

from __future__ import annotations

import fcntl
import json
import secrets
import shutil
import time
from collections.abc import Iterator
from typing import Any

from moerl.atomic import atomic_write
from moerl.errors import MoerlError
from moerl.run_dir import RunDir

_POLL_S = 0.1


class ControlApi:
    """The supervisor's side."""

    def __init__(self, run: RunDir) -> None:
        """Forgets what an earlier start of the run was asked."""
        self._folder = run.control_api
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700)

    def poll(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(name, question) of each request that has come, oldest first; {}: it is unreadable."""
        for path in sorted(self._folder.glob("*.question")):  # their names begin with the time
            try:
                question = json.loads(path.read_text())
            except FileNotFoundError:  # who asked waits no more
                question = None
            except ValueError:
                question = {}
            path.unlink(missing_ok=True)
            if question is not None:
                yield path.stem, question if isinstance(question, dict) else {}

    def answer(self, name: str, answer: dict[str, Any]) -> None:
        atomic_write(self._folder / f"{name}.answer", json.dumps(answer))


def request(run: RunDir, timeout_s: float, **question: Any) -> Any:
    """The answer of a run that goes on.

    Raises MoerlError: it does not, it does not answer in time, or it refuses, in a sentence.
    """
    if not is_running(run):
        raise MoerlError(f"{run.root} is not being trained now")
    name = f"{time.time():.6f}-{secrets.token_hex(4)}"
    atomic_write(run.control_api / f"{name}.question", json.dumps(question))
    answer = run.control_api / f"{name}.answer"
    deadline = time.monotonic() + timeout_s
    while not answer.exists():
        if time.monotonic() > deadline:
            (run.control_api / f"{name}.question").unlink(missing_ok=True)
            raise MoerlError(f"{run.root} did not answer within {timeout_s:g} s: is it starting?")
        time.sleep(_POLL_S)
    found = json.loads(answer.read_text())
    answer.unlink()
    if "refused" in found:
        raise MoerlError(found["refused"])
    return found["answer"]


def is_running(run: RunDir) -> bool:
    """Whether a process holds the run's lock, and has begun to look at its control API."""
    if not run.control_api.is_dir():
        return False
    with (run.root / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
