"""Reward functions that misbehave in every way a user's can; named by dotted path in tests."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from typing import Any


class _Unpicklable(Exception):
    def __init__(self, first: str, second: object) -> None:
        super().__init__(first)
        self.second = second


def by_steps(prompt: str, answer: Any, response: str, extra: dict[str, Any]) -> dict[str, Any]:
    """Each character is a step: + earns 1, - loses 1; x is an error; ? is returned as a key."""
    steps = [(i + 1, {"+": 1, "-": -1}.get(c, 0)) for i, c in enumerate(response)]
    if response.endswith(">"):
        steps.append((99, 0))
    return {"steps": steps, "errors": response.count("x")} | ({"?": 0} if "?" in response else {})


def by_turns(prompt: str, answer: Any, response: str, extra: dict[str, Any]) -> dict[str, Any]:
    """Each turn says what it earns; after "few" only one of them is paid."""
    return {"turns": [1.0] if response == "few" else [float(text) for text in extra["turns"]]}


def by_text(prompt: str, answer: Any, response: str, extra: dict[str, Any]) -> float:
    """The response says what to do."""
    if response == "hang":
        time.sleep(3600)
    if response == "raise":
        raise _Unpicklable("broken reward", threading.Lock())
    if response == "sys_exit":
        sys.exit(3)
    if response == "crash":
        os._exit(7)
    if response == "no process":
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    if response == "pid":
        return float(os.getpid())
    if response.startswith("hang in "):
        time.sleep(3600 * (os.getpid() == int(response.removeprefix("hang in "))))
        return 1.0
    if response == "main_thread":
        return float(threading.current_thread() is threading.main_thread())
    return float(response) + float(extra.get("bonus", 0.0))


def forgetful(prompt: str, answer: object, responses: object, extra: dict) -> str | None:
    """An environment that forgot to return its answer, or returns what cannot be sent."""
    return None if prompt == "text" else (lambda: "later")  # type: ignore[return-value]
