"""From a name in the configuration to the function that computes it.

The table is `moerl.config.algorithms`: one line per algorithm, with what it reads and needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from moerl.config.algorithms import Entry, entry


def choose(field: str, name: str, table: Mapping[str, Entry]) -> Callable[..., Any]:
    """The function called `name`.  Raises ConfigError naming `field` and the known names."""
    return _load(entry(field, name, table).function)


@cache
def _load(path: str) -> Callable[..., Any]:
    module, _, function = path.partition(":")
    loaded: Callable[..., Any] = getattr(import_module(f"moerl.algorithms.{module}"), function)
    return loaded
