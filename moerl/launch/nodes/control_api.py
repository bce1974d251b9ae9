"""Control API of a running run: request and answer files below the run directory.

`moerl engines` writes a question and waits for its answer; the supervisor polls twice a second.  It
works from any node that mounts the run directory; the folder's mode (0700) is the permission check.
"""

from __future__ import annotations

import fcntl
import json
import logging
import secrets
import shutil
import time
from collections.abc import Iterator
from typing import Any

from moerl.core.atomic import atomic_write
from moerl.core.errors import MoerlError
from moerl.runtime.run_dir import RunDir

log = logging.getLogger(__name__)

_POLL_S = 0.1


class ControlApi:
    """The supervisor's side of the control API."""

    def __init__(self, run: RunDir) -> None:
        """Deletes unanswered requests of an earlier start."""
        self._folder = run.control_api
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700)

    def poll(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(name, question) of each pending request, oldest first; {} for an unreadable one."""
        for path in sorted(self._folder.glob("*.question")):  # names begin with the time
            try:
                question = json.loads(path.read_text(encoding="utf-8"))
            except FileNotFoundError:  # its client timed out
                question = None
            except ValueError:
                question = {}
            path.unlink(missing_ok=True)
            if question is not None:
                yield path.stem, question if isinstance(question, dict) else {}

    def answer(self, name: str, answer: dict[str, Any]) -> None:
        try:
            atomic_write(self._folder / f"{name}.answer", json.dumps(answer))
        except OSError as error:  # who asked sees a timeout; the run must not end
            log.error("request %s is not answered: %s", name, error)


def request(run: RunDir, timeout_s: float, **question: Any) -> Any:
    """Send a question to a running run and return its answer.

    Raises MoerlError when the run is not running, does not answer in time, or refuses.
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
    found = json.loads(answer.read_text(encoding="utf-8"))
    answer.unlink()
    if "refused" in found:
        raise MoerlError(found["refused"])
    return found["answer"]


def is_running(run: RunDir) -> bool:
    """True if a process holds the run's lock and polls its control API."""
    if not run.control_api.is_dir():
        return False
    with (run.root / ".lock").open("a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
