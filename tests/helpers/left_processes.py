"""Processes that a test has started and left; a worker of xdist has servers of other tests, too."""

from __future__ import annotations

import psutil

_known: set[psutil.Process] = set()


def remember() -> None:
    """Called before each test: the processes that it finds are not its own."""
    _known.clear()
    _known.update(psutil.Process().children(recursive=True))


def left_children() -> list[psutil.Process]:
    """Descendants of this process that are there now and were not before the test."""
    return [child for child in psutil.Process().children(recursive=True) if child not in _known]
