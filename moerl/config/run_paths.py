"""Recorded paths that lie inside a run, and so follow its folder when that is copied or moved."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import normpath
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def moved(value: T, old: Path, new: Path | str) -> T:
    """The value (a text, or a list or mapping at any depth), its paths in `old` now in `new`.

    Paths are compared as texts, because the old folder may be gone, or be another run.
    """
    found: object = value
    if isinstance(value, Mapping):
        found = {name: moved(item, old, new) for name, item in value.items()}
    elif isinstance(value, list):
        found = [moved(item, old, new) for item in value]
    elif isinstance(value, str) and f"{normpath(value)}/".startswith(f"{old}/"):
        found = f"{new}{normpath(value)[len(str(old)) :]}"
    return found  # type: ignore[return-value]  # of the same form
