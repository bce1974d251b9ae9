"""A mapping of settings -> the dataclasses of the schema, or one sentence about the first fault.

msgspec checks each value against the type of its field.  Its messages name neither the value nor
everything that is allowed, so the sentences are made here, from the same types.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from moerl.config.bounds import LARGEST, UserPath
from moerl.config.schema import Config
from moerl.config.secret_values import hide_value
from moerl.core.errors import ConfigError, nearest

T = TypeVar("T")


def validate(config: Config) -> None:
    """Raises ConfigError for the first value that its type does not allow."""
    read_section(Config, asdict(config))


def read_section(schema: Callable[..., T], settings: Mapping[str, Any], above: str = "") -> T:
    """An instance of `schema`; fields missing in `settings` keep their default.

    above: the section's own dotted name with a dot behind it; empty for the whole configuration.
    Raises ConfigError naming the field, its value and the allowed values.
    """
    values = {}
    for name, kind in _fields(schema).items():
        if name in settings:
            values[name] = _read(f"{above}{name}", kind, settings[name])
    return schema(**values)


def check_keys(schema: Callable[..., object], layer: Mapping[str, Any], above: str = "") -> None:
    """Every key is a field of `schema`, and a section holds settings.  Raises ConfigError."""
    known = _fields(schema)
    for key, value in layer.items():
        field = f"{above}{key}"
        if key not in known:
            where = above.rstrip(".") or "the configuration"
            shown = hide_value(field, value)
            near = nearest(key, known, above) or f"; {where} has {', '.join(known)}"
            raise ConfigError(field, shown, f"unknown key{near}")
        if is_dataclass(known[key]):
            _check_section(field, known[key], value)
            continue
        bare = _bare(known[key])
        if isinstance(value, list | dict) and get_origin(bare) is not type(value):
            # OmegaConf cannot merge the two
            raise ConfigError(field, hide_value(field, value), _allowed(bare))
        if entry := _entry(bare):
            for name, one in _named(value):
                _check_section(f"{field}.{name}", entry, one)


def either(allowed: tuple[str, ...]) -> str:
    """`a, b or c`."""
    return allowed[0] if len(allowed) == 1 else ", ".join(allowed[:-1]) + " or " + allowed[-1]


def _check_section(field: str, schema: Any, value: Any) -> None:
    if not isinstance(value, Mapping):
        names = ", ".join(_fields(schema))
        shown = hide_value(field, value)
        raise ConfigError(field, shown, f"it is a section of settings: {names}")
    check_keys(schema, value, f"{field}.")


@lru_cache
def _fields(schema: Callable[..., object]) -> dict[str, Any]:
    """Types of a dataclass's fields by name, in order."""
    return get_type_hints(schema, include_extras=True)


def _entry(kind: Any) -> Any:
    """The dataclass of the entries of a table or list; None for other types."""
    of = get_args(kind)[-1:] if get_origin(kind) in (dict, list) else ()
    return of[0] if of and is_dataclass(of[0]) else None


def _named(value: Any) -> list[tuple[Any, Any]]:
    """The entries of a table by key, of a list by number; none of anything else."""
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else []


def _read(field: str, kind: Any, value: Any) -> Any:
    if is_dataclass(kind):
        return read_section(kind, value, f"{field}.")  # type: ignore[arg-type]
    if (entry := _entry(kind)) and isinstance(value, get_origin(kind)):
        read = {str(k): read_section(entry, one, f"{field}.{k}.") for k, one in _named(value)}
        return list(read.values()) if isinstance(value, list) else read
    bare = _bare(kind)
    try:  # not strict: an environment variable that is interpolated is text
        meant = msgspec.convert(_as_meant(value, bare), bare, strict=False)
        meant = os.path.expanduser(meant) if kind == UserPath else meant
    except msgspec.ValidationError as error:
        raise ConfigError(field, hide_value(field, value), _allowed(bare)) from error
    try:
        return msgspec.convert(meant, kind)
    except msgspec.ValidationError as error:
        (bounds,) = kind.__metadata__
        other = f"; {bounds.description}" if bounds.description else ""
        allowed = _within(bounds) or _allowed(bare)
        raise ConfigError(field, meant, allowed + other) from error


def _bare(kind: Any) -> Any:
    """The type without its bounds."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _as_meant(value: Any, bare: Any) -> Any:
    """Restore intended text: YAML reads an account 1234 as a number, and off as false."""
    if value is False and get_origin(bare) is Literal:
        return "off"
    if isinstance(value, int | float) and bare is str:
        return str(value)
    if isinstance(value, list) and bare == list[str]:
        return [_as_meant(one, str) for one in value]
    if isinstance(value, dict) and bare == dict[str, str]:
        return {key: _as_meant(one, str) for key, one in value.items()}
    return value


def _allowed(bare: Any) -> str:
    """The values that the type allows, as the end of a sentence about a refused value."""
    if get_origin(bare) is Literal:
        return f"use {either(get_args(bare))}"
    if get_origin(bare) is list and get_origin(get_args(bare)[0]) is Literal:
        return f"use some of {', '.join(get_args(get_args(bare)[0]))}"
    if entry := _entry(bare):
        return f"{str(bare).replace(f'{entry.__module__}.', '')} is needed"
    name = bare.__name__ if get_origin(bare) is None else str(bare).replace("typing.", "")
    return f"{name} is needed"


def _within(bounds: msgspec.Meta) -> str:
    """The numbers within bounds, as text; empty for bounds of something else."""
    low = bounds.ge if bounds.gt is None else bounds.gt
    top = bounds.le if bounds.lt is None else bounds.lt
    if low is None:
        return ""
    if top in (None, LARGEST):
        least = "number of at least" if bounds.gt is None else "finite number above"
        return f"a {least} {low:g} is needed"
    begin, end = "[" if bounds.gt is None else "(", "]" if bounds.lt is None else ")"
    return f"a number in {begin}{low:g}, {top:g}{end} is needed"
