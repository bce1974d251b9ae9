"""Make a CUDA build of torchvision importable with a CPU build of torch.

SGLang imports torchvision unconditionally, and transformers does for most of its configurations.
Without CUDA its compiled operators do not load, and its meta registrations then fail because two
operator schemas are missing.  Declaring both schemas just before the first import is enough:
nothing that handles text calls them.

tools/setup.sh writes moerl-torchvision.pth into the environment, so that `arm` runs at the start of
each of its programs, and plain transformers opens a folder `hf/`.  It costs the import of this
module.  `moerl.engine.plugin.server_process` calls it for environments without that file.
Rejected: `arm` in each process of ours that imports transformers (plain transformers fails on).
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

OPERATORS = ("nms", "qnms")  # of torchvision
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def arm() -> None:
    """Install the import hook once.  It does nothing when CUDA is available."""
    if not any(isinstance(finder, _DeclareOperators) for finder in sys.meta_path):
        sys.meta_path.insert(0, _DeclareOperators())


class _DeclareOperators:
    """A finder that finds no module: it only acts before the first import of torchvision."""

    library: Any = None  # keeps the declarations alive

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torchvision" and self.library is None:
            self.library = _declare()
        return None


def _declare() -> Any:
    import torch

    if torch.cuda.is_available():
        return "not needed"
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in OPERATORS:
        library.define(operator + SCHEMA)
    return library
