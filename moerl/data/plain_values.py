"""The values that a line of data may have, checked where they are read.

Rewards, programs and environments get the values of JSON: text, true, false, null, whole numbers of
64 bits, finite numbers, lists and objects.  Cells of tables become these: dates and times ISO 8601
text, decimals text, maps objects.
"""

from __future__ import annotations

import datetime
import decimal
import math
from typing import Any

_DEPTH = 64  # lists and objects inside each other
_SMALLEST, _LARGEST = -(2**63), 2**64 - 1  # a message between processes holds no others
_TIMES = (datetime.date, datetime.time)  # a datetime is a date
MEDIA = ("images", "image", "videos", "video", "audios", "audio")


class FieldError(ValueError):
    """A value that cannot be used.  kind: as of `moerl.core.errors.LineError`."""

    def __init__(self, kind: str, problem: str) -> None:
        self.kind = kind
        super().__init__(problem)


def plain_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a line or row with plain values.  Raises FieldError, which names the field."""
    for name in MEDIA:
        if fields.get(name) and not (name in MEDIA[1::2] and isinstance(fields[name], str)):
            raise media(name)
    return {_text(key, "a name of a field"): _plain(value, key, 0) for key, value in fields.items()}


def media(where: str) -> FieldError:
    """Refusal of a value that a text model cannot read."""
    kind = "images or audio"
    return FieldError(kind, f"has {where!r}: images, video and audio are not supported")


def _plain(value: Any, field: str, depth: int) -> Any:
    if isinstance(value, str):
        return _text(value, repr(field))
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not _SMALLEST <= value <= _LARGEST:
            raise FieldError(
                "a number", f"has in {field!r} a whole number beyond 64 bits; use text"
            )
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise FieldError("a number", f"has {value} in {field!r}; use null or text")
        return value
    if depth == _DEPTH:
        raise FieldError("nesting", f"has {field!r} nested deeper than {_DEPTH} levels")
    if isinstance(value, list):
        return [_plain(item, field, depth + 1) for item in value]
    if isinstance(value, dict):
        if isinstance(value.get("bytes"), bytes):  # how `datasets` stores an image or a sound
            raise media(field)
        return {
            _text(key, repr(field)): _plain(item, f"{field}.{key}", depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, _TIMES):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | datetime.timedelta):
        return str(value)
    raise FieldError("a type", f"has {type(value).__name__} in {field!r}; use text or numbers")


def _text(value: str, where: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            code = f"\\u{ord(value[error.start]):04x}"
            problem = f"has half a character ({code}, a lone surrogate) in {where}"
            raise FieldError("half a character", problem) from error
    return value
