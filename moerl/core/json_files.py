"""JSON files from outside: read, or refused in a sentence that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moerl.core.errors import ModelError

_POINTER = b"version https://git-lfs"


def refuse_pointer(path: Path) -> None:
    """Raises ModelError for a file that names the bytes git-lfs would fetch, OSError as `open`."""
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise ModelError(
                f"{path}: it is a pointer of git-lfs, its bytes were not fetched: run git lfs pull"
            )


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object.  Raises ModelError for a missing file and for any other content."""
    try:
        refuse_pointer(path)
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path}: there is no such file") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def read_model_config(path: Path) -> dict[str, Any]:
    """The config.json of a model folder, or the file itself; raises as `read_json` does."""
    return read_json(path / "config.json" if path.is_dir() else path)
