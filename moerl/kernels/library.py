"""Open a built library, or say why there is none.

    >>> lib = library("cpu")
    >>> if lib is not None: lib.moerl_changed(...)

Only a library built from the current sources is opened.
"""

from __future__ import annotations

import ctypes
from functools import cache

from moerl.kernels.build import BUILT, TARGETS


@cache
def library(target: str) -> ctypes.CDLL | None:
    """The library of `cpu`, None when it was not built; cached per process.

    A library that was built and cannot be opened is an OSError: falling back to Python would hide
    a fault of this machine.
    """
    built = TARGETS[target].library()
    return ctypes.CDLL(str(built)) if built.exists() else None


def describe(target: str) -> str:
    """One line for a log: which implementation runs, and how to get the other one."""
    wanted = TARGETS[target].library()
    if wanted.exists():
        return f"{target} kernels: built ({wanted.name})"
    outdated = any(BUILT.glob(f"{target}-*.so"))
    why = "built from other sources" if outdated else "not built"
    return f"{target} kernels: Python, {why}; `python -m moerl.kernels.build` compiles them"
