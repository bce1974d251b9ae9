"""The pages in patches/ name every change of SGLang, torch and Megatron, and nothing else.

Both directions are compared: pages with tables, tables with what they replace in the installed
packages, and the syntax trees of moerl with the functions that may assign to foreign symbols.
"""

from __future__ import annotations

import ast
import json
import multiprocessing
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from moerl.engine import torchvision_fix
from moerl.engine.plugin import hooks
from moerl.engine.plugin.hooks import Hook
from moerl.trainer.model.cpu_patches import PATCHES
from moerl_cpu_sglang import registry
from tests.helpers.patience import patience

ROOT = Path(__file__).resolve().parents[2]
FOREIGN = {"torch", "torchvision", "megatron", "transformer_engine", "sglang", "transformers"}
GONE = "torch.nn.NoSuchModule"
PAGES = {
    "sglang": "patches/sglang",
    "megatron": "patches/megatron",
    "cpu_sglang": "tests/cpu_sglang",
}
FIELDS = ["symbol", "ours", "version", "why", "test", "goes away"]


@dataclass(frozen=True)
class Entry:
    """One block of a page: a heading and `- field: text` lines."""

    section: str
    title: str
    fields: Mapping[str, str]

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple(re.findall(r"`([^`]+)`", self.fields["symbol"]))


@dataclass(frozen=True)
class Row:
    """One registered change; `says` are fields of its entry, or how they begin."""

    symbols: tuple[str, ...]
    ours: str
    says: Mapping[str, str]


def entries_of(page: str) -> list[Entry]:
    found = []
    for section in page.split("\n## ")[1:]:
        name, *blocks = section.split("\n### ")
        for block in blocks:
            title, _, body = block.partition("\n")
            lines = body.replace("\n  ", " ").strip().splitlines()
            pairs = [line.removeprefix("- ").partition(": ") for line in lines]
            fields = {key: value for key, _, value in pairs}
            found.append(Entry(name.splitlines()[0], title, fields))
    return found


def sglang_rows() -> list[Row]:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    platform = scripts["sglang.srt.platforms"]["moerl_cpu"].replace(":", ".")
    assert (
        scripts["sglang.srt.plugins"]["moerl_hooks"]
        == "moerl.engine.plugin.entry_points:register_hooks"
    )
    operators = tuple(f"torchvision::{name}" for name in torchvision_fix.OPERATORS)
    cpu = {"when": "without CUDA"}
    return [
        Row(("sglang.srt.platforms",), platform, cpu | {"kind": "entry point"}),
        Row(operators, "moerl.engine.torchvision_fix.arm", cpu | {"kind": "declaration"}),
        *(row_of(hook, hook.when) for hook in hooks.HOOKS),
    ]


def cpu_sglang_rows() -> list[Row]:
    """Of the plug-in with which tests serve more models on a plain CPU."""
    return [
        *(row_of(hook, "without CUDA, called for weights in fp8") for hook in registry.FP8_HOOKS),
        *(row_of(hook, "without CUDA, with data-parallel") for hook in registry.DP_HOOKS),
        *(
            row_of(hook, f"without CUDA, for {', '.join(f'`{name}`' for name in row.model_types)}")
            for row in registry.FAMILY_HOOKS
            for hook in row.hooks
        ),
    ]


def row_of(hook: Hook, when: str) -> Row:
    ours = f"{hook.ours.__module__}.{hook.ours.__qualname__}"
    return Row((hook.symbol,), ours, {"kind": hook.kind, "when": when, "version": hook.version})


def megatron_rows() -> list[Row]:
    return [
        Row(p.symbols, f"{p.replace.__module__}.{p.replace.__qualname__}", {"why": p.why})
        for p in PATCHES
    ]


def derived_rows() -> list[Row]:
    """Classes of moerl/trainer that derive from one of megatron-core, and the replay interface."""
    replay = "megatron.core.transformer.moe.router_replay.RouterReplay"
    found = [Row((replay,), "moerl.trainer.model.replay.LayerReplay", {})]
    for path in sorted((ROOT / "moerl/trainer").rglob("*.py")):
        tree = ast.parse(path.read_text())
        names = imported(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases = [dotted(base, names) for base in node.bases]
                symbols = tuple(base for base in bases if base.startswith("megatron."))
                found += [Row(symbols, f"{module_of(path)}.{node.name}", {})] if symbols else []
    return found


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def complaints(entries: Sequence[Entry], rows: Sequence[Row], pin: str) -> list[str]:
    """What a page and the registered changes disagree in."""
    found = []
    several = [s for s, count in Counter(row.symbols for row in rows).items() if count > 1]

    def key(symbols: tuple[str, ...], ours: str) -> tuple[str, ...]:
        return (*symbols, ours) if symbols in several else symbols  # hooks of different families

    registered = {key(row.symbols, row.ours): row for row in rows}
    described = {key(e.symbols, e.fields.get("ours", "").strip("`")): e for e in entries}
    found += [f"{symbols} has no entry" for symbols in registered.keys() - described.keys()]
    found += [f"{symbols} is not registered" for symbols in described.keys() - registered.keys()]
    if len(described) < len(entries) or len(registered) < len(rows):
        found.append("a symbol stands twice")
    for symbols in described.keys() & registered.keys():
        found += _field_complaints(described[symbols], registered[symbols], pin)
    return found


def _field_complaints(entry: Entry, row: Row, pin: str) -> list[str]:
    missing = [name for name in FIELDS if not entry.fields.get(name)]
    wants = {"ours": f"`{row.ours}`", "version": pin, **row.says}
    wrong = [
        f"{entry.title}: {name} is {entry.fields.get(name)!r}, the table says {value!r}"
        for name, value in wants.items()
        if not entry.fields.get(name, "").startswith(value)
    ]
    if entry.fields.get("version") != pin:
        wrong.append(f"{entry.title}: version {entry.fields.get('version')}, pinned is {pin}")
    if not is_test(entry.fields.get("test", "").strip("`")):
        wrong.append(f"{entry.title}: there is no test {entry.fields.get('test')}")
    return [f"{entry.title}: has no {name}" for name in missing] + wrong


def is_test(name: str) -> bool:
    path, _, function = name.partition("::")
    if not path.startswith("tests/") or not (ROOT / path).is_file():
        return False
    body = ast.parse((ROOT / path).read_text()).body
    return function.startswith("test_") and function in {getattr(n, "name", "") for n in body}


def pinned(package: str) -> str:
    locks = [ROOT / "requirements" / name for name in ("cpu.lock", "cpu-nodeps.lock")]
    text = "".join(lock.read_text() for lock in locks)
    found = re.search(rf"^{package}==(\S+) ", text, re.MULTILINE)
    assert found, package
    return found.group(1)


def page(side: str) -> list[Entry]:
    return entries_of((ROOT / PAGES[side] / "README.md").read_text())


# --- pages and tables -----------------------------------------------------------------------------
def test_every_hook_of_sglang_has_an_entry() -> None:
    assert complaints(page("sglang"), sglang_rows(), pinned("sglang")) == []
    assert complaints(page("cpu_sglang"), cpu_sglang_rows(), pinned("sglang")) == []


def test_every_patch_of_megatron_has_an_entry() -> None:
    rows = [*megatron_rows(), *derived_rows()]
    assert complaints(page("megatron"), rows, pinned("megatron-core")) == []


def test_a_page_that_is_wrong_is_seen() -> None:
    """Controls: each of these breaks one thing, and the complaint names it."""
    entries, rows, pin = page("sglang"), sglang_rows(), pinned("sglang")
    first, *rest = entries
    (symbol,) = first.symbols

    def with_field(name: str, value: str) -> list[Entry]:
        return [replace(first, fields={**first.fields, name: value}), *rest]

    more = Row(("sglang.srt.new",), "moerl.engine.plugin.update_hooks.new", {})
    assert complaints(entries, [*rows, more], pin) == ["('sglang.srt.new',) has no entry"]
    fewer = [row for row in rows if row.symbols != (symbol,)]
    assert complaints(entries, fewer, pin) == [f"('{symbol}',) is not registered"]
    assert "a symbol stands twice" in complaints([*entries, first], rows, pin)
    broken = {
        "ours": "`moerl.engine.plugin.update_hooks.after_start`",
        "kind": "before",
        "when": "without CUDA",
        "version": "0.5.22",
        "why": "",
        "test": "`tests/e2e/test_engine_e2e.py::test_that_is_gone`",
        "goes away": "",
    }
    for name, value in broken.items():
        found = complaints(with_field(name, value), rows, pin)
        assert found, name
        assert all(text.startswith(first.title) and name in text for text in found), found
    assert not is_test("tests/e2e/gone.py::test_abort_and_resume")


# --- tables and installed packages ----------------------------------------------------------------
def changed(side: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    pages = ("sglang", "cpu_sglang") if side == "sglang" else (side,)
    entries = (entry for name in pages for entry in page(name))
    symbols = [s for entry in entries for s in entry.symbols if "::" not in s]
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.helpers.changed_symbols",
            side,
            *symbols,
            GONE,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience(200),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    real, control, missing = json.loads(done.stdout.splitlines()[-1])
    assert missing == [GONE]
    return real, control


def test_sglang_hooks_change_what_they_name() -> None:
    """In a process that imports SGLang: without the shim the import fails on this machine."""
    real, control = changed("sglang")
    assert real == {"missing": [], "untouched": [], "undeclared": []}
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    assert control["missing"] == [f"{scheduler}.no_such"]
    assert control["undeclared"] == [f"{scheduler}.flush_cache"]


def test_megatron_patches_change_what_they_name() -> None:
    real, control = changed("megatron")
    assert real == {"missing": [], "untouched": [], "undeclared": []}
    assert control == {
        "missing": ["torch.no_such"],
        "untouched": ["torch.eye"],
        "undeclared": ["torch.randperm"],
    }


def test_processes_are_forked_without_cuda() -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    try:
        spawn = ["spawn"]
        hooks._then_fork(lambda: multiprocessing.set_start_method(spawn.pop(), force=True))
        assert not spawn, "SGLang's own function runs first"
        assert multiprocessing.get_start_method() == "fork"
    finally:
        multiprocessing.set_start_method(before, force=True)


# --- nothing else assigns to foreign symbols ------------------------------------------------------
def imported(tree: ast.AST) -> dict[str, str]:
    """Local name -> dotted path, for imports and for names bound to an attribute of one."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Attribute):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            path = dotted(node.value, names)
            names |= {t.id: path for t in targets if path and isinstance(t, ast.Name)}
    return names


def dotted(node: ast.AST, names: Mapping[str, str]) -> str:
    """The foreign path that an expression names; empty for anything else."""
    if isinstance(node, ast.Attribute):
        base = dotted(node.value, names)
        return f"{base}.{node.attr}" if base else ""
    path = names.get(node.id, "") if isinstance(node, ast.Name) else ""
    return path if path.split(".")[0] in FOREIGN else ""


def assigned(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.expr]]:
    """(statement, owner) of each `owner.name = ..`, `del owner.name` and setattr(owner, ..)."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr"):
            yield node, node.args[0]
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store | ast.Del):
                    yield node, part.value


def foreign_assignments(source: str) -> dict[str, set[int]]:
    """Top-level function -> lines that assign to an attribute of a foreign module or class."""
    tree = ast.parse(source)
    names = imported(tree)
    found: dict[str, set[int]] = {}
    for top in tree.body:
        for node, owner in assigned(top):
            is_class = isinstance(owner, ast.Call) and getattr(owner.func, "id", "") == "type"
            if dotted(owner, names) or is_class:
                found.setdefault(getattr(top, "name", ""), set()).add(node.lineno)  # type: ignore[attr-defined]
    return found


def test_only_registered_functions_replace_symbols() -> None:
    found = set()
    folders = (ROOT / "moerl", ROOT / "tests/cpu_sglang")
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        source = path.read_text()
        module = module_of(path)
        assert ("HookRegistry" in source) == (module == "moerl.engine.plugin.entry_points"), module
        found |= {f"{module}.{name}" for name in foreign_assignments(source)}
    assert found == {row.ours for row in megatron_rows()}


@pytest.mark.parametrize(
    "line",
    [
        "torch.zeros = None",
        "torch.nn.Module.cuda, other = None, 1",
        "backends.LocalSpecProvider.layer_norm = None",
        "cuda: object = torch.cuda; cuda.Stream = None",
        "setattr(Scheduler, 'flush_cache', None)",
        "del mappings.gather",
        "type(router).forward = None",
    ],
)
def test_an_assignment_to_a_foreign_symbol_is_seen(line: str) -> None:
    head = (
        "import torch\n"
        "import megatron.core.tensor_parallel.mappings as mappings\n"
        "from megatron.core.models import backends\n"
        "from sglang.srt.managers.scheduler import Scheduler\n"
    )
    assert foreign_assignments(f"{head}def sly():\n    {line}\n") == {"sly": {6}}
    harmless = "router.replay = torch.zeros(1); names = {}; names['a'] = torch.float32"
    assert foreign_assignments(f"{head}def fair(router):\n    {harmless}\n") == {}
