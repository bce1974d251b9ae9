"""The prompts of a user's files: JSON or tables, one file, a folder or a pattern of parts."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from moerl.config.schema import TaskConfig
from moerl.config.task_tables import SOURCES
from moerl.core.errors import ConfigError, LineError
from moerl.core.types import PromptOrigin
from moerl.data import json_lines, table_files
from moerl.data.json_lines import JsonLines
from moerl.data.plain_values import FieldError
from moerl.data.prompt_items import Item, item_of
from moerl.data.table_files import TableRows, check_same_types, saved_files

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
        suffixes = table_files.SUFFIXES if is_table else json_lines.SUFFIXES
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
