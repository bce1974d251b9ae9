"""From a name in the configuration to the function that computes it.

The table is `moerl.config.algorithms`: one line per algorithm, its settings and its needs.  An
objective may also be a user's own function, `package.module:function`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from moerl.config.algorithms import Entry, entry
from moerl.config.functions import import_object, load_below


def choose(field: str, name: str, table: Mapping[str, Entry]) -> Callable[..., Any]:
    """The function called `name`.  Raises ConfigError naming `field` and the known names."""
    found = entry(field, name, table)
    if name not in table:
        return _own(field, name, tuple(sorted(table)))
    function: Callable[..., Any] = load_below("moerl.algorithms", found.function)
    return function


@cache
def _own(field: str, path: str, named: tuple[str, ...]) -> Callable[..., Any]:
    function: Callable[..., Any] = import_object(field, path, named)
    return function
