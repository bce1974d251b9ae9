"""Hugging Face `datasets` on disk: a folder of `save_to_disk`, parquet, Arrow and csv files.

pyarrow reads them: nothing is downloaded or executed, which `datasets.load_dataset` could do.
Memory does not grow with a file: Arrow is mapped, and the others are first written as Arrow into an
unnamed temporary file.  The layout of a saved folder (state.json lists its files, each an Arrow
stream) follows `datasets` 5; a test compares the rows with its own.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moerl.core.errors import ConfigError
from moerl.core.types import PromptOrigin
from moerl.data.plain_values import FieldError

SUFFIXES = (".parquet", ".arrow", ".csv", ".csv.gz")
_BLOCK = 1 << 24  # bytes of a csv file that are read together


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
        names: list[str] = self.table.column_names
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError("task.path", self._path, f"it has the column {twice[0]!r} twice")
        self.size = int(self.table.num_rows)

    def origin(self, place: int) -> PromptOrigin:
        return PromptOrigin(self._path, place, "row")

    def fields(self, place: int) -> dict[str, Any]:
        """The cells of a row, without keys of objects that only other rows have: nulls of a table.

        Raises FieldError.
        """
        try:
            (row,) = self.table.slice(place, 1).to_pylist(maps_as_pydicts="strict")
        except (ValueError, KeyError) as error:  # nanoseconds, a repeated key, bytes as text
            raise FieldError("a type", f"cannot be read: {error}") from error
        return {name: _without_nulls(cell) for name, cell in row.items()}


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


def saved_files(folder: Path) -> Mapping[str, Sequence[Path]]:
    """The files of each split of `save_to_disk`, in order; none for a path of something else.

    Raises ConfigError.
    """
    splits = [folder / name for name in _listed(folder / "dataset_dict.json", "splits")]
    saved = splits or [folder] * (folder / "state.json").is_file()
    return {
        part.name: [
            part / entry["filename"] for entry in _listed(part / "state.json", "_data_files")
        ]
        for part in saved
    }


def _table(file: Path) -> Any:
    """Cells of csv are text: an answer 007 or 1e3 stays as it is written."""
    from pyarrow import ArrowInvalid, csv, ipc, memory_map, parquet, string

    if file.suffix != ".arrow":
        if file.suffix == ".parquet":
            parts = parquet.ParquetFile(file)
            schema, batches = parts.schema_arrow, parts.iter_batches(batch_size=1024)
        else:
            batches = csv.open_csv(
                str(file),
                csv.ReadOptions(block_size=_BLOCK, use_threads=False),  # so errors name the row
                csv.ParseOptions(newlines_in_values=True),
                csv.ConvertOptions(default_column_type=string()),
            )
            schema = batches.schema
        with tempfile.NamedTemporaryFile(suffix=".arrow") as copy:
            with ipc.new_file(copy.name, schema) as writer:
                for batch in batches:
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


def _listed(file: Path, key: str) -> list[Any]:
    """A list in a file of JSON, empty without the file."""
    try:
        return list(json.loads(file.read_bytes())[key]) if file.is_file() else []
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError("task.path", str(file), f"it is not readable: {error}") from error
