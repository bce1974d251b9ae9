"""Leaves pages of a sleeping engine readable while the file named by `MOERL_TEST_OPEN` exists.

Python imports a module of this name at its start when its folder is on PYTHONPATH.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType


def hook(module: ModuleType) -> None:
    switch, call = Path(os.environ["MOERL_TEST_OPEN"]), module._call

    def open_call(name, *rest):  # type: ignore[no-untyped-def]
        if name != "mprotect" or not switch.exists():
            call(name, *rest)

    module._call = open_call


if os.environ.get("MOERL_TEST_OPEN"):
    from tests.helpers.after_import import after_import

    after_import("moerl.engine.plugin.host_memory", hook)
