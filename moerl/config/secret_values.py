"""Settings whose name says that their value is a secret: WANDB_API_KEY, a password.

People share config.yaml, report.html, the printout of `--dry-run` and manifests, so these show
`HIDDEN`.  A run keeps the values in its secrets.yaml (0600), for a resume and other nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import yaml

from moerl.config.schema import Config
from moerl.core.errors import ConfigError

HIDDEN = "(hidden)"
_NAME = re.compile(r"TOKEN(?!I[SZ])|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)  # no tokenizer
_LOGIN = re.compile(r"://[^/\s@]+:[^/\s@]+@")  # of a proxy: https://user:password@host


def hide(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, at any depth, with HIDDEN in place of every secret."""
    return {name: hide_value(name, value) for name, value in settings.items()}


def hide_value(name: str, value: Any) -> Any:
    """The value of the setting `name` as it may be shown."""
    if isinstance(value, Mapping):
        return hide(value)
    if isinstance(value, list):
        return [hide_value(name, item) for item in value]
    is_secret = isinstance(value, str) and (_NAME.search(name) or _LOGIN.search(value))
    return HIDDEN if is_secret and value else value


def secrets_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the settings that `hide` hides."""
    found = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            if below := secrets_of(value):
                found[name] = below
        elif hide_value(name, value) != value:
            found[name] = value
    return found


def hide_override(item: str) -> str:
    """`key=value` as it may be printed; other words are returned unchanged."""
    key, equals, text = item.partition("=")
    if not equals:
        return item
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    hidden = hide_value(key, value if isinstance(value, dict | list) else text)
    if hidden in (value, text):
        return item
    return f"{key}={hidden if isinstance(hidden, str) else yaml.safe_dump(hidden).strip()}"


def refuse_hidden(config: Config) -> None:
    """Raises ConfigError for a value that is not known: config.yaml without its secrets.yaml."""
    for name in _hidden_names("", asdict(config)):
        raise ConfigError(
            name, HIDDEN, "its value was in secrets.yaml of the run, which is gone; give it again"
        )


def _hidden_names(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _hidden_names(f"{name}.{key}".lstrip("."), item)
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _hidden_names(f"{name}.{place}", item)
    elif value == HIDDEN:
        yield name
