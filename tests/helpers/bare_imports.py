"""Hide packages that a machine with torch and the packed wheels does not have."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from tools.gpu_pack import PACKED

_OWN = {"moerl", "tests", "tools", "bench"}


class _Hiding(PathFinder):
    """Finds what Python finds, but for some packages, which are then absent."""

    names: frozenset[str] = frozenset()

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in cls.names:
            return None
        return super().find_spec(fullname, path, target)


def hide_other_packages() -> None:
    """What is loaded already stays: the double and pytest came first."""
    loaded = {name.partition(".")[0] for name in sys.modules}
    _Hiding.names = frozenset(_modules() - loaded - _OWN)
    sys.meta_path[:] = [_Hiding if one is PathFinder else one for one in sys.meta_path]


def _modules() -> set[str]:
    """Top-level modules of installed packages that are neither packed nor needed by torch."""
    kept = {_plain(name) for name in (*PACKED, "triton")}  # torch with CUDA brings triton
    kept |= _with_requirements("torch")
    owners = importlib.metadata.packages_distributions()
    return {
        module
        for module, packages in owners.items()
        if not kept & {_plain(package) for package in packages}
    }


def _with_requirements(name: str) -> set[str]:
    """A package and all that it requires; packed packages bring only what is packed."""
    found, ahead = set(), [_plain(name)]
    while ahead:
        one = ahead.pop()
        if one in found:
            continue
        found.add(one)
        try:
            lines = importlib.metadata.requires(one) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        wanted = [line for line in lines if "extra ==" not in line]
        ahead += [_plain(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in wanted]
    return found


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
