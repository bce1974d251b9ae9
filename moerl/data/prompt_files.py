"""The prompts of a user's files: JSON or tables, one file, a folder or a pattern of parts.

Prompt files of JSON: an object per line, or one array of objects; plain or by gzip.

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
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, count
from pathlib import Path
from typing import IO, Any

import numpy as np

from moerl.config.schema import TaskConfig
from moerl.config.task_tables import SOURCES
from moerl.core.errors import ConfigError, LineError
from moerl.core.types import PromptOrigin
from moerl.data import table_files
from moerl.data.plain_values import FieldError
from moerl.data.prompt_items import Item, item_of
from moerl.data.table_files import TableRows, check_same_types, saved_files

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".ndjson.gz")
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


# `train_sft-00000-of-00002.parquet`, or a word in a name, as in data_files.py of `datasets`
_SPLIT = re.compile(
    r"(.+)-\d{5}-of-\d{5}\.|(?:.*[^a-z])?"
    r"(train|training|valid|val|validation|dev|test|testing|eval|evaluation)(?![a-z])",
    re.IGNORECASE,
)


class PromptFiles:
    """Items by their place in all files together."""

    def __init__(self, task: TaskConfig, seed: int) -> None:
        """Raises ConfigError for a file that cannot be read; a bad line is found by `item`."""
        self._columns = task.columns
        self._parts: Sequence[JsonLines | TableRows]
        if task.name == "jsonl":
            self._parts = [JsonLines(path) for path in _paths(task)]
        else:
            tables = [TableRows(path) for path in _paths(task)]
            check_same_types(tables)
            self._parts = tables
        self._ends = list(accumulate(part.size for part in self._parts))
        self.size = self._ends[-1]
        if not self.size:
            raise ConfigError("task.path", task.path, "it holds no prompt")

    def item(self, index: int) -> Item:
        """Raises LineError for a line that cannot be used."""
        part, place = self._find(index)
        origin = part.origin(place)
        try:
            return item_of(part.fields(place), self._columns, origin)
        except FieldError as error:
            raise line_error(origin, str(error), error.kind) from error

    def origin(self, index: int) -> PromptOrigin:
        part, place = self._find(index)
        return part.origin(place)

    def _find(self, index: int) -> tuple[JsonLines | TableRows, int]:
        part = bisect_right(self._ends, index)
        return self._parts[part], index - (self._ends[part - 1] if part else 0)


def line_error(origin: PromptOrigin, problem: str, kind: str) -> LineError:
    return LineError("task.path", origin.path, f"{origin.unit} {origin.line} {problem}", kind)


def _paths(task: TaskConfig) -> Sequence[Path]:
    """The files of a data set in order: of a folder, a pattern such as data/train-*, or one.

    Raises ConfigError: there is none, there are several splits, or not the one of task.split.
    """
    splits = _splits(Path(task.path), is_table=task.name == "hf_dataset")
    known = ", ".join(filter(None, splits)) or "no split in the names of its files"
    if task.split and task.split not in splits:
        raise ConfigError("task.split", task.split, f"{task.path} has {known}")
    if len(splits) > 1 and not task.split:
        problem = f"it has the splits: {known}; name one in task.split, or evaluation.split"
        raise ConfigError("task.path", task.path, problem)
    found = splits[task.split] if task.split else next(iter(splits.values()), ())
    if not found:
        raise ConfigError("task.path", task.path, f"{SOURCES[task.name].files} is needed")
    return found


def _splits(path: Path, *, is_table: bool) -> Mapping[str, Sequence[Path]]:
    """Files by split; "": nothing in their names tells one."""
    if is_table and (saved := saved_files(path)):
        return saved
    found = [path] if path.is_file() else sorted(path.parent.glob(path.name))
    if path.is_dir():
        suffixes = table_files.SUFFIXES if is_table else JSON_SUFFIXES
        below = [file for file in sorted(path.rglob("*")) if file.name.endswith(suffixes)]
        found = [file for file in below if file.parent == path] or below
    elif any(file.name.endswith(table_files.SUFFIXES) != is_table for file in found):
        return {}
    several = len({file.parent for file in found}) > 1
    parts = [match[1] or match[2] if (match := _SPLIT.match(file.name)) else "" for file in found]
    splits: dict[str, list[Path]] = {}
    for file, part in zip(found, parts, strict=True):
        name = part or (file.name.partition(".")[0] if any(parts) else "")
        splits.setdefault(f"{file.parent.name}/{name}" if several else name, []).append(file)
    return splits
