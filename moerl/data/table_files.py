"""Hugging Face `datasets` on disk: a folder of `save_to_disk`, parquet and arrow files.

pyarrow reads them in place: nothing is downloaded, copied into a cache or executed, which
`datasets.load_dataset` could do.  The layout of a saved folder (state.json lists its files, each an
Arrow stream) follows `datasets` 5; a test compares the rows with its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moerl.config.schema import TaskConfig
from moerl.core.errors import ConfigError
from moerl.core.types import Origin
from moerl.data.tasks import Item, item_of


class TableRows:
    """The rows of a data set: a prompt or messages, an answer, further columns for the reward."""

    def __init__(self, task: TaskConfig, seed: int) -> None:
        self._path, self._columns = task.path, task.columns
        self._table = _read(task.path)
        self.size = int(self._table.num_rows)
        if not self.size:
            raise ConfigError("task.path", task.path, "the data set has no row")

    def item(self, index: int) -> Item:
        (row,) = self._table.slice(index, 1).to_pylist()
        return item_of(Origin(self._path, index, "row"), row, self._columns)


def _read(path: str) -> Any:
    """All rows as a pyarrow table, mapped where the format allows it.  Raises ConfigError."""
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError(
            "task.name",
            "hf_dataset",
            "the package pyarrow is not installed; in a checkout, pip install '.[tables]'",
        ) from error
    files = _files(path)
    try:
        return pyarrow.concat_tables([_read_file(file) for file in files])
    except (OSError, pyarrow.ArrowException) as error:
        why = " ".join(str(error).split())[:200]
        raise ConfigError("task.path", path, f"use readable files of one schema: {why}") from error


def _read_file(file: Path) -> Any:
    from pyarrow import ArrowInvalid, ipc, memory_map, parquet

    if file.suffix == ".parquet":
        return parquet.read_table(file)
    source = memory_map(str(file))
    try:
        return ipc.open_stream(source).read_all()
    except (OSError, ArrowInvalid):  # the other of the two Arrow formats
        return ipc.open_file(source).read_all()


def _files(path: str) -> Sequence[Path]:
    """The files of a data set in order: of a folder, a pattern such as data/train-*, or one."""
    folder = Path(path)
    if (folder / "dataset_dict.json").is_file():
        splits = _json(folder / "dataset_dict.json", path).get("splits", [])
        raise ConfigError("task.path", path, f"add one of its splits: {', '.join(splits)}")
    if (folder / "state.json").is_file():
        listed = _json(folder / "state.json", path).get("_data_files", [])
        found = [folder / str(entry["filename"]) for entry in listed]
    elif folder.is_dir():
        found = sorted(file for file in folder.iterdir() if file.suffix in _SUFFIXES)
    else:
        found = [folder] if folder.is_file() else sorted(folder.parent.glob(folder.name))
    if not found or any(file.suffix not in _SUFFIXES for file in found):
        raise ConfigError(
            "task.path",
            path,
            "a folder of datasets.save_to_disk, or *.parquet and *.arrow files, is needed",
        )
    return found


_SUFFIXES = (".parquet", ".arrow")


def _json(file: Path, path: str) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("task.path", path, f"{file.name} is not readable: {error}") from error
    return found if isinstance(found, dict) else {}
