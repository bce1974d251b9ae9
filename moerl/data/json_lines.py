"""Prompt files of JSON: an object per line, or one array of objects; plain or by gzip.

Only the place of each line is kept, 8 bytes; a line is read from the file when it is needed, of
a compressed file from an unnamed temporary copy.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from moerl.core.errors import ConfigError
from moerl.core.types import Array, PromptOrigin
from moerl.data.plain_values import FieldError

SUFFIXES = (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".ndjson.gz")
_CHUNK = 1 << 24  # bytes
_MARK = b"\xef\xbb\xbf"  # byte order mark of UTF-8
_BETWEEN = re.compile(r"[\s,]*")  # entries of an array


class JsonLines:
    """The lines of one file that are not empty, or the entries of its array."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that cannot be read or cut into lines."""
        self._path = str(path)
        try:
            self._file = _opened(path)
            self._end = os.fstat(self._file).st_size
            begin = len(_MARK) if os.pread(self._file, len(_MARK), 0) == _MARK else 0
            self._is_array = os.pread(self._file, 4096, begin).lstrip()[:1] == b"["
            self._empty = np.zeros(0, np.int64)  # places before which an empty line was left out
            self._begins = self._entries(begin) if self._is_array else self._lines(begin)
        except (OSError, EOFError, zlib.error) as error:
            raise self._refused(f"a readable file is needed ({error})") from error

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    @property
    def size(self) -> int:
        return len(self._begins)

    def origin(self, place: int) -> PromptOrigin:
        if self._is_array:
            return PromptOrigin(self._path, place, "entry")
        return PromptOrigin(self._path, place + int(self._empty.searchsorted(place, "right")) + 1)

    def fields(self, place: int) -> Any:
        """The JSON value of a line.  Raises FieldError."""
        begin = int(self._begins[place])
        end = int(self._begins[place + 1]) if place + 1 < self.size else self._end
        data = os.pread(self._file, end - begin, begin)
        return parsed(data, more=self._is_array)  # what follows is of the array

    def _lines(self, begin: int) -> Array:
        """Offsets at which lines begin that are not empty.

        Lines are split at line feeds only: JSON strings may hold other line ends, such as U+2028.
        """
        parts = [np.array([begin], np.int64)]
        for offset in range(begin, self._end, _CHUNK):
            chunk = np.frombuffer(os.pread(self._file, _CHUNK, offset), np.uint8)
            parts.append(np.flatnonzero(chunk == ord("\n")) + (offset + 1))
        begins = np.concatenate(parts)
        begins = begins[begins < self._end]
        sizes = np.diff(begins, append=self._end)
        short = np.flatnonzero(sizes <= 2)
        empty = [n for n in short if not os.pread(self._file, sizes[n], int(begins[n])).strip()]
        self._empty = np.array(empty, np.int64) - np.arange(len(empty))
        return np.delete(begins, np.array(empty, np.int64))

    def _entries(self, begin: int) -> Array:
        """Offsets at which the entries of the array begin; the file is read once as a whole."""
        try:
            with open(self._file, "rb", closefd=False) as file:
                file.seek(begin)
                text = _text(file.read())
        except FieldError as error:
            raise self._refused(f"it {error}") from error
        at, offset, begins = text.index("[") + 1, begin, []
        known = 0  # characters before `offset`
        while (at := _after(_BETWEEN, text, at)) < len(text) and text[at] != "]":
            offset += len(text[known:at].encode())
            known = at
            begins.append(offset)
            try:
                _, at = json.JSONDecoder().raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                line = text.count("\n", 0, at) + 1
                problem = f"entry {len(begins) - 1}, line {line}, is not JSON: {error}"
                raise self._refused(problem) from error
        return np.array(begins, np.int64)

    def _refused(self, problem: str) -> ConfigError:
        return ConfigError("task.path", self._path, problem)


def _opened(path: Path) -> int:
    if path.suffix != ".gz":
        return os.open(path, os.O_RDONLY)
    with gzip.open(path) as packed, tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(packed, copy, _CHUNK)
        copy.flush()
        return os.dup(copy.fileno())


def parsed(data: bytes, *, more: bool = False) -> Any:
    """The JSON value of a line.  more: other text may follow.  Raises FieldError."""
    text = _text(data).rstrip()
    try:
        return _DECODER.raw_decode(text)[0] if more else _DECODER.decode(text)
    except FieldError:
        raise
    except RecursionError as error:
        raise FieldError("nesting", "is nested too deeply") from error
    except ValueError as error:  # also for a number of thousands of digits
        why = str(error).replace("line 1 ", "")  # of this text; the caller names the file's line
        raise FieldError("not JSON", f"is not JSON: {why}") from error


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise FieldError("not UTF-8", f"is not UTF-8: {error}") from error


def _after(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise FieldError("a repeated key", f"has the key {twice!r} twice in one object")
    return fields


_DECODER = json.JSONDecoder(object_pairs_hook=_once)
