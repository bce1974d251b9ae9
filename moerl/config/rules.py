"""Rules across settings: rows (field, allowed values) behind their conditions, in generators.

    if rollout.cancel_lag > rollout.max_lag:
        yield "rollout.cancel_lag", f"use at most max_lag = {rollout.max_lag}"

`refuse` raises a ConfigError for the first row.  It reads the value that the sentence shows from
the settings; a row (field, value, allowed) shows another value.  tests/data/refusals.txt has
settings for each row, and the sentence that a user reads.

Rejected: a table of (field, function, text).  It is twice as long, repeats a condition that guards
several rows, and its sentences with numbers need a second language.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from moerl.core.errors import ConfigError

Rows: TypeAlias = Iterator[tuple[str, str] | tuple[str, object, str]]
Reasons: TypeAlias = Iterator[str]  # of rows about one field


def refuse(settings: object, rows: Iterable[tuple[str, str] | tuple[str, object, str]]) -> None:
    """Raises ConfigError for the first row.  settings: a section, or a mapping of sections."""
    for field, *value, allowed in rows:
        raise ConfigError(field, value[0] if value else _setting(settings, field), str(allowed))


def _setting(section: Any, field: str) -> object:
    """The value of a dotted name."""
    for name in field.split("."):
        if isinstance(section, list):
            section = section[int(name)]
        else:
            section = section[name] if isinstance(section, Mapping) else getattr(section, name)
    return section
