"""Hugging Face `datasets` on disk: a folder of `save_to_disk`, parquet and Arrow files.

pyarrow reads them: nothing is downloaded or executed, which `datasets.load_dataset` could do.
Memory does not grow with a file: Arrow is mapped, and parquet is first written as Arrow into an
unnamed temporary file.  The layout of a saved folder (state.json lists its files, each an Arrow
stream) follows `datasets` 5; a test compares the rows with its own.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moerl.core.errors import ConfigError
from moerl.core.types import PromptOrigin
from moerl.data.plain_values import FieldError

SUFFIXES = (".parquet", ".arrow")
_BLOCK = 64  # rows that are made into Python objects together


class TableRows:
    """The rows of one file."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError: pyarrow is missing, or cannot read the file."""
        try:
            import pyarrow
        except ImportError as error:
            raise ConfigError(
                "task.name",
                "hf_dataset",
                "the package pyarrow is not installed; in a checkout, pip install '.[tables]'",
            ) from error
        self._path = str(path)
        try:
            self.table = _table(path)
        except (OSError, pyarrow.ArrowException) as error:
            why = " ".join(str(error).split())[:200]
            raise ConfigError(
                "task.path", self._path, f"a readable file is needed: {why}"
            ) from error
        self.size = int(self.table.num_rows)
        self._block: tuple[int, list[dict[str, Any]]] = -1, []

    def origin(self, place: int) -> PromptOrigin:
        return PromptOrigin(self._path, place, "row")

    def fields(self, place: int) -> dict[str, Any]:
        """The cells of a row.  Raises FieldError."""
        block, row = divmod(place, _BLOCK)
        if self._block[0] != block:
            self._block = block, self._rows(block * _BLOCK, _BLOCK)
        return self._block[1][row]

    def _rows(self, begin: int, count: int) -> list[dict[str, Any]]:
        """Keys of objects that only other rows have are null in a table, and left out here."""
        try:
            rows = self.table.slice(begin, count).to_pylist(maps_as_pydicts="strict")
        except (ValueError, KeyError) as error:  # nanoseconds, a repeated key, bytes as text
            if count > 1:
                return [row for n in range(count) for row in self._rows(begin + n, 1)]
            raise FieldError("a type", f"cannot be read: {error}") from error
        return [{name: _without_nulls(cell) for name, cell in row.items()} for row in rows]


def check_same_types(parts: Sequence[TableRows]) -> None:
    """Refuse files of one data set whose columns differ.  Raises ConfigError naming the column."""
    first = parts[0]
    want = {field.name: _kind(field.type) for field in first.table.schema}
    for part in parts[1:]:
        found = {field.name: _kind(field.type) for field in part.table.schema}
        for name in sorted(want.keys() | found.keys()):
            one, other = want.get(name, "missing"), found.get(name, "missing")
            if one != other and "null" not in (one, other):
                there = f"in {first.origin(0).path} it is {one}"
                problem = f"its column {name!r} is {other}, and {there}; use files of one schema"
                raise ConfigError("task.path", part.origin(0).path, problem)


def saved_files(folder: Path) -> Sequence[Path]:
    """The files of `save_to_disk` in order; none for another path.  Raises ConfigError."""
    if (folder / "dataset_dict.json").is_file():
        splits = _json(folder / "dataset_dict.json").get("splits", [])
        raise ConfigError("task.path", str(folder), f"add one of its splits: {', '.join(splits)}")
    if not (folder / "state.json").is_file():
        return []
    listed = _json(folder / "state.json").get("_data_files", [])
    return [folder / str(entry["filename"]) for entry in listed]


def _table(file: Path) -> Any:
    from pyarrow import ArrowInvalid, ipc, memory_map, parquet

    if file.suffix == ".parquet":
        with tempfile.NamedTemporaryFile(suffix=".arrow") as copy:
            source = parquet.ParquetFile(file)
            with ipc.new_file(copy.name, source.schema_arrow) as writer:
                for batch in source.iter_batches(batch_size=1024):
                    writer.write_batch(batch)
            return ipc.open_file(memory_map(copy.name)).read_all()
    source = memory_map(str(file))
    try:
        return ipc.open_stream(source).read_all()
    except (OSError, ArrowInvalid):  # the other of the two Arrow formats
        return ipc.open_file(source).read_all()


def _kind(type_: Any) -> str:
    """Type of a column as far as Python objects show it."""
    from pyarrow import types

    if types.is_dictionary(type_):
        type_ = type_.value_type
    if types.is_string(type_) or types.is_large_string(type_) or types.is_string_view(type_):
        return "string"
    return "integer" if types.is_integer(type_) else str(type_)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("task.path", str(file), f"it is not readable: {error}") from error
    return found if isinstance(found, dict) else {}
