"""Holds SGLang's scheduler up right after it has answered a request, while a file exists.

Python imports a module of this name at its start when its folder is on PYTHONPATH.
`MOERL_TEST_LATE` names the file; each time the scheduler was held up, it gets one line.
"""

from __future__ import annotations

import os
import sys
import time
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

HOOKED = "sglang.srt.managers.scheduler"
HELD_S = 0.5  # longer than an answer and the next request take


class Finder(MetaPathFinder):
    """Finds the module as usual, and changes it once it is loaded."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != HOOKED:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            hook(module, Path(os.environ["MOERL_TEST_LATE"]))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def hook(module: ModuleType, switch: Path) -> None:
    process = module.Scheduler.process_batch_result

    def late(self, batch, *rest, **fields):  # type: ignore[no-untyped-def]
        process(self, batch, *rest, **fields)
        if switch.exists() and any(req.finished() for req in batch.reqs):
            with switch.open("a") as lines:
                lines.write("held\n")
            time.sleep(HELD_S)

    module.Scheduler.process_batch_result = late


if os.environ.get("MOERL_TEST_LATE"):
    sys.meta_path.insert(0, Finder())
