"""The prompts of a user's files: JSON or tables, one file, a folder or a pattern of parts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from moerl.config.schema import TaskConfig
from moerl.config.task_tables import SOURCES
from moerl.core.errors import ConfigError, LineError
from moerl.core.types import PromptOrigin
from moerl.data import json_lines, table_files
from moerl.data.json_lines import JsonLines
from moerl.data.plain_values import FieldError
from moerl.data.prompt_items import Item, item_of
from moerl.data.table_files import TableRows, check_same_types, saved_files


class _Part(Protocol):
    """One file."""

    @property
    def size(self) -> int: ...

    def origin(self, place: int) -> PromptOrigin: ...

    def fields(self, place: int) -> Any: ...


class PromptFiles:
    """Items by their place in all files together."""

    def __init__(self, task: TaskConfig, seed: int) -> None:
        """Raises ConfigError for a file that cannot be read; a bad line is found by `item`."""
        self._columns = task.columns
        self._parts: Sequence[_Part]
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

    def _find(self, index: int) -> tuple[_Part, int]:
        part = bisect_right(self._ends, index)
        return self._parts[part], index - (self._ends[part - 1] if part else 0)


def line_error(origin: PromptOrigin, problem: str, kind: str) -> LineError:
    return LineError("task.path", origin.path, f"{origin.unit} {origin.line} {problem}", kind)


def _paths(task: TaskConfig) -> Sequence[Path]:
    """The files of a data set in order: of a folder, a pattern such as data/train-*, or one."""
    path, is_table = Path(task.path), task.name == "hf_dataset"
    if is_table and (saved := saved_files(path)):
        return saved
    suffixes = table_files.SUFFIXES if is_table else json_lines.SUFFIXES
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.suffix in suffixes)
    else:
        found = [path] if path.is_file() else sorted(path.parent.glob(path.name))
    if not found or any((file.suffix in table_files.SUFFIXES) != is_table for file in found):
        raise ConfigError("task.path", task.path, f"{SOURCES[task.name].files} is needed")
    return found
