"""Refuse an import of a module that a GPU bundle left out, by name and with the option for it.

A `.pth` file of a joined environment calls `install` when Python starts; only the standard library
is used.  The question whether a package exists (`importlib.util.find_spec`) is still answered with
no, and the refusal is a ModuleNotFoundError, so that packages with optional parts go on without.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

ABOUT = "gpu-bundle.json"


class Refusing:
    """The last finder: modules that come here were found nowhere.  left: module -> sentence."""

    def __init__(self, left: Mapping[str, str]) -> None:
        self._left = left

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            why = self._left.get(".".join(parts[:length]))
            if why and _is_import():
                raise ModuleNotFoundError(f"No module named {name!r}: {why}", name=name)
        return None


def _is_import() -> bool:
    """Whether Python imports, as opposed to a question by `importlib.util.find_spec`.

    The frames: this function, `find_spec`, importlib's search, and who asked for it.
    """
    return sys._getframe(3).f_code.co_name == "_find_and_load_unlocked"


def sentences(left_out: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Module -> why it is not here.  left_out: rows of gpu-bundle.json."""
    return {module: row["sentence"] for row in left_out for module in row["modules"]}


def install() -> None:
    """In a joined environment: set its variables, and refuse what was left out."""
    try:
        about = json.loads(Path(sys.prefix, ABOUT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    for name, value in about["environment"].items():
        os.environ.setdefault(name, value)
    sys.meta_path.append(Refusing(sentences(about["left_out"])))
