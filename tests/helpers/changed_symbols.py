"""What our changes of SGLang, torch and Megatron really replace, found by comparing all symbols.

    python -m tests.helpers.changed_symbols sglang | megatron [SYMBOL ..]

Prints one line of JSON: a `Found` for the registered changes, one for a control that lies, and
which of the symbols do not exist.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from types import FunctionType, ModuleType
from typing import Any

Symbols = dict[tuple[str, str], Any]  # (module or class, attribute) -> value


@dataclass(frozen=True)
class Found:
    """missing: the symbol does not exist; untouched: it is named and not replaced."""

    missing: list[str]
    untouched: list[str]
    undeclared: list[str]  # replaced and not named


def owner_of(symbol: str) -> Any:
    return pkgutil.resolve_name(symbol.rpartition(".")[0])


def exists(symbol: str) -> bool:
    """Whether a symbol is bound, or read by the code of its module."""
    try:
        owner, name = owner_of(symbol), symbol.rpartition(".")[2]
    except (ImportError, AttributeError):
        return False
    return hasattr(owner, name) or (isinstance(owner, ModuleType) and name in _read_by(owner))


def _read_by(module: ModuleType) -> set[str]:
    tree = ast.parse(inspect.getsource(module))
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def symbols_of(packages: set[str]) -> Symbols:
    """Every attribute of the loaded modules of these packages and of their classes."""
    return {
        (name_of(owner), attribute): value
        for owner in _owners(packages)
        for attribute, value in list(vars(owner).items())
        if isinstance(value, FunctionType)
        or not (attribute.startswith("__") or isinstance(value, ModuleType))
    }


def _owners(packages: set[str]) -> Iterator[Any]:
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__name__.split(".")[0] in packages:
            yield module
            for value in list(vars(module).values()):
                if isinstance(value, type) and str(value.__module__).split(".")[0] in packages:
                    yield value


def name_of(owner: Any) -> str:
    if isinstance(owner, ModuleType):
        return owner.__name__
    return f"{owner.__module__}.{owner.__qualname__}"


def compare(
    declared: Iterable[str], replace: Callable[[], None], packages: set[str], *, propagates: bool
) -> Found:
    """propagates: where a module has imported a replaced function by name, that is replaced too."""
    declared = list(declared)
    missing = [symbol for symbol in declared if not exists(symbol)]
    named = {
        (name_of(owner_of(symbol)), symbol.rpartition(".")[2]): symbol
        for symbol in declared
        if symbol not in missing
    }
    before = symbols_of(packages)
    replace()
    after = symbols_of(packages)
    owners = {owner for owner, _ in before}
    changed = {
        key
        for key, value in after.items()
        if key[0] in owners and (key not in before or before[key] is not value)
    }
    copies = {id(before[key]) for key in named if propagates and key in before}
    undeclared = [key for key in changed - set(named) if id(before.get(key)) not in copies]
    return Found(
        missing=missing,
        untouched=sorted(symbol for key, symbol in named.items() if key not in changed),
        undeclared=sorted(".".join(key) for key in undeclared),
    )


def of_sglang() -> list[Found]:
    from moerl.engine import torchvision_fix

    torchvision_fix.arm()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from moerl.engine.plugin import entry_points
    from moerl.engine.protocol import DP_ATTENTION
    from moerl_cpu_sglang import registry

    os.environ[DP_ATTENTION] = "1"
    entry_points.register_hooks()
    of_families = (hook for row in registry.FAMILY_HOOKS for hook in row.hooks)
    entry_points.register((*registry.FP8_HOOKS, *registry.DP_HOOKS, *of_families))
    for symbol in HookRegistry._hooks:
        exists(symbol)  # imports its module
    real = compare(list(HookRegistry._hooks), HookRegistry.apply_hooks, {"sglang"}, propagates=True)
    lie = "sglang.srt.managers.scheduler.Scheduler.no_such"

    def lying() -> None:
        target = "sglang.srt.managers.scheduler.Scheduler.flush_cache"
        HookRegistry.register(target, lambda *_args: None, HookType.AFTER)
        HookRegistry.apply_hooks()

    return [real, compare([lie], lying, {"sglang"}, propagates=True)]


def of_megatron() -> list[Found]:
    import torch

    from moerl.trainer.model.cpu_patches import PATCHES

    packages = {"torch", "megatron"}
    for patch in PATCHES:
        for symbol in patch.symbols:
            exists(symbol)  # imports its module
    found = [compare(p.symbols, p.replace, packages, propagates=False) for p in PATCHES]
    real = Found(
        missing=[symbol for row in found for symbol in row.missing],
        untouched=[symbol for row in found for symbol in row.untouched],
        undeclared=[symbol for row in found for symbol in row.undeclared],
    )
    lie = ["torch.no_such", "torch.eye"]
    control = compare(lie, lambda: setattr(torch, "randperm", None), packages, propagates=False)
    return [real, control]


if __name__ == "__main__":
    results = {"sglang": of_sglang, "megatron": of_megatron}[sys.argv[1]]()
    missing = [symbol for symbol in sys.argv[2:] if not exists(symbol)]
    print(json.dumps([*(asdict(found) for found in results), missing]))
