"""Control API of a running run: request and answer files below the run directory.

`moerl engines` writes a question and waits for its answer; the supervisor polls twice a second.  It
works from any node that mounts the run directory; the folder's mode (0700) is the permission check.
"""

from __future__ import annotations

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
from moerl.runtime.run_lock import holder_of

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
        except OSError as error:  # the caller sees a timeout; the run must not end
            log.error("request %s is not answered: %s", name, error)


def request(run: RunDir, timeout_s: float, **question: Any) -> Any:
    """Send a question to a running run and return its answer.

    Raises MoerlError when the run is not running, does not answer in time, or refuses.
    """
    _refuse_silent(run)
    name = f"{time.time():.6f}-{secrets.token_hex(4)}"
    asked, answer = (run.control_api / f"{name}.{kind}" for kind in ("question", "answer"))
    atomic_write(asked, json.dumps(question))
    deadline = time.monotonic() + timeout_s
    try:
        while not answer.exists():
            _refuse_silent(run)
            if time.monotonic() > deadline:
                raise MoerlError(
                    f"{run.root} is {holder_of(run.root)} and did not answer within {timeout_s:g} s"
                )
            time.sleep(_POLL_S)
    finally:
        asked.unlink(missing_ok=True)
    found = json.loads(answer.read_text(encoding="utf-8"))
    answer.unlink()
    if "refused" in found:
        raise MoerlError(found["refused"])
    return found["answer"]


def _refuse_silent(run: RunDir) -> None:
    """Raises MoerlError where no process polls the control API, with the state of the run."""
    holder = holder_of(run.root)
    if holder is None or holder.is_ending or holder.state != "training":
        state = f": it is {holder}" if holder else ""
        raise MoerlError(f"{run.root} is not being trained now{state}")


def is_running(run: RunDir) -> bool:
    """True if a process holds the run."""
    return holder_of(run.root) is not None
