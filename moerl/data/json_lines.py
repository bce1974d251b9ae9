"""Prompt files of JSON: an object per line, or one array of objects; plain or by gzip.

Only the place of each line is kept, 8 bytes; a line is read from the file when it is needed, of
a compressed file from an unnamed temporary copy.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import IO, Any

import numpy as np

from moerl.core.errors import ConfigError
from moerl.core.types import PromptOrigin
from moerl.data.plain_values import FieldError

SUFFIXES = (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".ndjson.gz")
_CHUNK = 1 << 24  # bytes
_MARK = b"\xef\xbb\xbf"  # byte order mark of UTF-8
_BETWEEN = tuple(" \t\r\n,")  # entries of an array


class JsonLines:
    """The lines of one file that are not empty, or the entries of its array."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that cannot be read or cut into lines."""
        self._path = str(path)
        try:
            self._file = _opened(path)
            begin = len(_MARK) if self._file.read(len(_MARK)) == _MARK else 0
            self._file.seek(begin)
            self._is_array = self._file.read(4096).lstrip()[:1] == b"["
            self._file.seek(begin)
            self._empty: list[int] = []  # places before which an empty line was left out
            found = self._entries(begin) if self._is_array else self._lines(begin)
            self._begins = np.fromiter(found, np.int64)
            self._end = self._file.tell()
        except (OSError, EOFError, zlib.error) as error:
            raise self._refused(f"a readable file is needed ({error})") from error

    @property
    def size(self) -> int:
        return len(self._begins)

    def origin(self, place: int) -> PromptOrigin:
        if self._is_array:
            return PromptOrigin(self._path, place, "entry")
        return PromptOrigin(self._path, place + bisect_right(self._empty, place) + 1)

    def fields(self, place: int) -> Any:
        """The JSON value of a line.  Raises FieldError."""
        begin = int(self._begins[place])
        end = int(self._begins[place + 1]) if place + 1 < self.size else self._end
        data = os.pread(self._file.fileno(), end - begin, begin)
        return parsed(data, more=self._is_array)  # what follows is of the array

    def _lines(self, offset: int) -> Iterator[int]:
        """The offset of each line that is not empty.

        Lines are split at line feeds only: JSON strings may hold other line ends, such as U+2028.
        """
        place = 0
        for line in self._file:
            if line.isspace():
                self._empty.append(place)
            else:
                yield offset
                place += 1
            offset += len(line)

    def _entries(self, begin: int) -> Iterator[int]:
        """The offset of each entry of the array; the file is read once as a whole."""
        text = self._file.read().decode("latin-1")  # a character per byte; `parsed` reads UTF-8
        at = text.index("[") + 1
        for number in count():
            while text[at : at + 1] in _BETWEEN:
                at += 1
            if text[at : at + 1] in ("", "]"):
                return
            yield begin + at
            try:
                _, at = json.JSONDecoder().raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                line = text.count("\n", 0, at) + 1
                problem = f"entry {number}, line {line}, is not JSON: {error}"
                raise self._refused(problem) from error

    def _refused(self, problem: str) -> ConfigError:
        return ConfigError("task.path", self._path, problem)


def _opened(path: Path) -> IO[bytes]:
    if path.suffix != ".gz":
        return path.open("rb")
    copy = tempfile.TemporaryFile()  # noqa: SIM115 - closed with its owner
    with gzip.open(path) as packed:
        shutil.copyfileobj(packed, copy, _CHUNK)
    copy.seek(0)
    return copy


def parsed(data: bytes, *, more: bool = False) -> Any:
    """The JSON value of a line.  more: other text may follow.  Raises FieldError."""
    try:
        text = data.decode().rstrip()
        return _DECODER.raw_decode(text)[0] if more else _DECODER.decode(text)
    except FieldError:
        raise
    except UnicodeDecodeError as error:
        raise FieldError("not UTF-8", f"is not UTF-8: {error}") from error
    except RecursionError as error:
        raise FieldError("nesting", "is nested too deeply") from error
    except ValueError as error:  # also for a number of thousands of digits
        why = str(error).replace("line 1 ", "")  # of this text; the caller names the file's line
        raise FieldError("not JSON", f"is not JSON: {why}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise FieldError("a repeated key", f"has the key {twice!r} twice in one object")
    return fields


_DECODER = json.JSONDecoder(object_pairs_hook=_once)
