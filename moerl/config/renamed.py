"""Settings that were renamed or removed: refused with a sentence that names the new key.

A key is a dotted field, a whole section, or one value of a choice (`field=value`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moerl.core.errors import ConfigError

RENAMED: dict[str, str] = {
    "frozen.ranks=own": "ref_models.placement=separate",
    "frozen.ranks=trainer": "ref_models.placement=trainer",
    "frozen.ranks": "ref_models.placement",
    "frozen": "ref_models",
    "cluster.ports.frozen": "cluster.ports.ref_models",
}
"""Old key -> new key.  A section stands for all fields in it, a value for a value."""

REMOVED: dict[str, str] = {
    "replay.rows=latest": "rows of the last prefill fit only the newest segment of a resumed "
    "rollout (docs/decisions.md, 10); remove it: the rows of each token's own pass are replayed",
    "replay.rows": "there is no choice; remove it: the rows of each token's own pass are replayed",
    "sync.every": "there is no choice; remove it: every trained batch is published",
    "sync.transport=broadcast": "publish sessions replaced it; use auto, shm, cuda_ipc, gloo, "
    "nccl, mooncake or disk",
    "supervision.stop_timeout_s": "it had no effect; remove it",
}
"""Old key -> why it was removed and what to do."""


def refuse_old_keys(layer: Mapping[str, Any]) -> None:
    """Raises ConfigError for the first old key, with its new key; it names the others too."""
    found = [(key, value, why) for key, value in _leaves(layer) if (why := _why(key, value))]
    if not found:
        return
    key, value, why = found[0]
    others = "; ".join(f"{other}: {reason}" for other, _, reason in found[1:])
    raise ConfigError(key, value, f"{why} (old keys, too: {others})" if others else why)


def _why(field: str, value: Any) -> str:
    """The sentence about an old key; empty for a current key."""
    if field.endswith(".roles") and "frozen" in (value if isinstance(value, list) else [value]):
        return "the role frozen is called ref_models now"
    for key in (f"{field}={value}", *_sections(field)):
        if key in REMOVED:
            return REMOVED[key]
        if key in RENAMED:
            return f"it is called {RENAMED[key] + field[len(key) :]} now"
    return ""


def _sections(field: str) -> Iterator[str]:
    """The field itself, then the sections that contain it: a.b.c, a.b, a."""
    while field:
        yield field
        field = field.rpartition(".")[0]


def _leaves(node: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
