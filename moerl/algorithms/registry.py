"""Look-up of a named variant, with a refusal that lists what exists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from moerl.errors import ConfigError

T = TypeVar("T")


def choose(field: str, name: str, known: Mapping[str, T]) -> T:
    """The entry called `name`.  Raises ConfigError naming `field` and the known names."""
    if name not in known:
        raise ConfigError(field, name, f"known names are {', '.join(sorted(known))}")
    return known[name]
