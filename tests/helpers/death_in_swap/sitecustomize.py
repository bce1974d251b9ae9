"""Ends rank 1 in the middle of loading a version of the policy.

Python imports a module of this name at its start when its folder is on PYTHONPATH.
`MOERL_TEST_DIES_AT` names the version's folder.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

HOOKED = "moerl.trainer.hf_io.hf_folder"
LOADED = 5  # tensors, of more


def hook(module: ModuleType) -> None:
    fill, seen = module.fill, list[str]()

    def dying(tensor: Any, local: Any, source: Any) -> None:
        fill(tensor, local, source)
        if source.path.name == os.environ["MOERL_TEST_DIES_AT"]:
            seen.append(source.path.name)
            if len(seen) == LOADED:
                os._exit(9)

    if os.environ.get("RANK") == "1":
        module.fill = dying


if os.environ.get("MOERL_TEST_DIES_AT"):
    from tests.helpers.after_import import after_import

    after_import(HOOKED, hook)
