"""Imports follow a graph without cycles, each heavy package has one home, light modules stay light.

The checker reads syntax trees, so an import inside a function or under TYPE_CHECKING counts too.
It takes a folder: the negative controls run it over synthetic trees that break one rule each.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers.architecture_page import PACKAGES, PAGE, names, rows
from tests.helpers.patience import patience

ROOT = Path(__file__).resolve().parents[2]

# The lowest packages, and what each of them may import; every other package may import all three.
BASE: dict[str, set[str]] = {"core": set(), "runtime": {"core"}, "config": {"core", "runtime"}}
# What each other package may import besides: with BASE the whole graph.
ALLOWED: dict[str, set[str]] = {
    "distributed": set(),
    "kernels": set(),
    "records": set(),
    "layout": set(),
    "algorithms": set(),
    "data": {"records", "layout"},
    "sandbox": set(),
    "scoring": {"data", "sandbox"},
    "weight_sync": {"distributed", "kernels", "layout"},
    "engine": {"distributed", "records", "layout", "weight_sync"},
    "trainer": {
        "distributed", "kernels", "records", "layout", "algorithms", "data", "weight_sync",
    },
    "episodes": {"records"},
    "controller": {"records", "algorithms", "data", "episodes"},
    "agents": {"data", "sandbox", "scoring", "episodes"},
    "observe": set(),
    "launch": {
        "distributed",
        "records", "layout", "data", "engine", "trainer", "sandbox", "scoring", "controller",
        "observe", "agents",
    },
    "audit": {
        "distributed", "records", "layout", "algorithms", "data", "trainer", "episodes",
        "observe", "launch", "weight_sync",
    },
    "planning": {"layout", "data", "weight_sync", "engine", "launch"},
    "doctor": {"distributed", "sandbox"},
    "cli": {"observe", "launch", "audit", "planning", "doctor"},
    "__main__": {"cli"},
}  # fmt: skip
# Inside a package with folders of its own, lowest layer first: a folder imports only from rows
# before its own; files that no row names lie above all rows and may import each other.
INSIDE = {
    "trainer": [{"model", "hf_io"}, {"passes"}, {"learner"}, {"checkpoints"}],
    # shared files; then what runs inside SGLang's processes, and what runs outside
    "engine": [
        {
            "protocol", "feature_table", "node_span", "record_files", "torchvision_fix",
            "weight_layout",
        },
        {"host", "plugin"},
    ],
    "launch": [{"run_context", "cluster"}, {"nodes", "task_agents"}, {"supervision"}],
}  # fmt: skip
HOMES = {
    "megatron": "trainer",
    "transformer_engine": "trainer",
    "sglang": "engine",
    "mooncake": "weight_sync",
    "ray": "launch",
}
# Packages, and files of packages: planning a publish needs no tensors.
TORCH_FREE = BASE.keys() | {"kernels", "records", "layout"}
TORCH_FREE |= {
    f"weight_sync/{name}"
    for name in ("held_shards", "deliveries", "transfer_plan", "buckets", "receiver_names")
}
TORCH_FREE |= {f"planning/{name}" for name in ("layout_check", "publish_forecast", "memory")}


def imported_names(file: Path, package: str) -> set[str]:
    """Full dotted names that a file imports; relative ones start from `package`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join(
                (parents if node.level else []) + ([node.module] if node.module else [])
            )
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def violations(tree: Path) -> list[str]:
    """One sentence per import under `tree` (the folder of the package moerl) that breaks a rule."""
    found: list[str] = []
    for file in sorted(tree.rglob("*.py")):
        where = file.relative_to(tree).with_suffix("").parts
        home = "" if where == ("__init__",) else where[0]
        if home not in BASE.keys() | ALLOWED.keys() | {""}:
            found.append(f"{file.name}: moerl.{home} has no row in the table of imports")
            continue
        if home in INSIDE and len(where) > 2 and where[1] not in set().union(*INSIDE[home]):
            found.append(f"{file.name}: moerl.{home}.{where[1]} has no row in the table of layers")
            continue
        package = ".".join(("moerl", *where[:-1]))
        for name in sorted(imported_names(file, package)):
            if problem := judge(name, home, where) or judge_inside(name, where):
                found.append(f"{'/'.join(where)}.py imports {name}: {problem}")
    return found


def judge(name: str, home: str, where: tuple[str, ...]) -> str:
    """What is wrong with file `where` of package `home` importing `name`; empty: nothing.

    home: empty for the package moerl itself, which imports nothing of its own.
    """
    top, _, rest = name.partition(".")
    if top in HOMES and home != HOMES[top]:
        return f"{top} belongs to moerl.{HOMES[top]} only"
    if top == "torch" and {home, "/".join(where[:2])} & TORCH_FREE:
        return f"moerl.{home} is torch-free"
    target = rest.split(".")[0]
    if top != "moerl" or target == home or target not in BASE.keys() | ALLOWED.keys():
        return ""  # `from moerl import __version__` has a target that is no package
    allowed = BASE[home] if home in BASE else ALLOWED.get(home, set()) | BASE.keys()
    allowed = allowed if home else set()
    return "" if target in allowed else f"moerl.{home} may not import moerl.{target}"


def judge_inside(name: str, where: tuple[str, ...]) -> str:
    """What is wrong with file `where` importing `name` of its own package; empty: nothing."""
    home, *inner = where
    names = name.split(".")
    if home not in INSIDE or names[:2] != ["moerl", home] or len(names) < 3:
        return ""
    top = len(INSIDE[home])
    row_of = {child: row for row, folders in enumerate(INSIDE[home]) for child in folders}
    own = -1 if inner == ["__init__"] else row_of.get(inner[0], top)
    other = row_of.get(names[2], top)
    if other > own:
        return "that layer is above"
    if other == own < top and names[2] != inner[0]:
        return "siblings do not import each other"
    return ""


def test_imports_follow_the_table() -> None:
    assert violations(ROOT / "moerl") == []


def test_the_table_has_no_cycle() -> None:
    whole = BASE | {name: others | BASE.keys() for name, others in ALLOWED.items()}
    list(TopologicalSorter(whole).static_order())
    for back in ({"weight_sync": {"trainer"}}, {"core": {"config"}}):  # negative controls
        with pytest.raises(CycleError):
            list(TopologicalSorter(whole | back).static_order())


def test_the_table_names_no_edge_that_is_not_used() -> None:
    allowed = BASE | ALLOWED
    used = {name: set[str]() for name in allowed}
    for file in (ROOT / "moerl").rglob("*.py"):
        home, *_ = file.relative_to(ROOT / "moerl").with_suffix("").parts
        if home in used:
            used[home] |= {name.split(".")[1] for name in imported_names(file, f"moerl.{home}")
                           if name.startswith("moerl.")}  # fmt: skip
    unused = {(home, other) for home in allowed for other in allowed[home] - used[home]}
    assert unused == set()


GOOD = {
    "__init__.py": "",
    "core/types.py": "import numpy\nfrom moerl.core.errors import MoerlError",
    "core/errors.py": "import moerl",
    "runtime/run_dir.py": "from moerl.core.atomic import atomic_write",
    "config/schema.py": "from moerl.core.errors import ConfigError\n"
    "from moerl.runtime import resources",
    "records/routing.py": "from . import other\nfrom ..core.types import Rollout",
    "records/other.py": "from moerl.config.schema import Config",
    "data/packing.py": "import torch\nfrom moerl.records.routing import decode",
    "weight_sync/sender.py": "import torch\nfrom moerl.weight_sync.buckets import Bucket",
    "weight_sync/buckets.py": "from moerl.layout.tiles import Tile",
    "trainer/model/gpt.py": "from . import parallel\nfrom moerl.trainer.model import replay",
    "trainer/learner/step.py": "import megatron.core\nfrom moerl.runtime import trace\n"
    "from moerl.trainer.passes import forward\nfrom moerl.trainer.model.gpt import build",
    "trainer/main.py": "import moerl\nfrom . import train_loop\n"
    "from moerl.trainer.learner import step",
    "trainer/train_loop.py": "from moerl.weight_sync.publisher import WeightPublisher",
    "engine/protocol.py": "from moerl.core.json_files import read_json",
    "engine/host/host.py": "from . import health\nfrom moerl.engine import protocol",
    "engine/plugin/update_hooks.py": "from moerl.weight_sync.receiver import Receiver\n"
    "from moerl.engine.protocol import MODES\nfrom moerl.engine.plugin import in_flight",
    "launch/supervision/actors.py": "import ray\nfrom moerl.trainer.learner.step import run",
    "planning/dry_run.py": "from moerl.launch.run_context import RunContext",
    "cli.py": "from moerl import __version__\nfrom moerl.launch.supervision.actors import start",
}
BAD = [
    ("core/types.py", "from moerl.records import routing", "core may not import moerl.records"),
    ("core/messages.py", "from moerl.config import schema", "core may not import moerl.config"),
    ("core/rpc.py", "from moerl.runtime import trace", "core may not import moerl.runtime"),
    ("runtime/trace.py", "from moerl.config import load", "runtime may not import moerl.config"),
    ("config/load.py", "from moerl.records import routing", "config may not import moerl.records"),
    ("records/routing.py", "from ..data import packing", "records may not import moerl.data"),
    ("records/routing.py", "from moerl import trainer", "may not import moerl.trainer"),
    (
        "records/routing.py",
        "def f():\n    import moerl.launch.nodes.control_api",
        "may not import moerl.launch",
    ),
    ("__init__.py", "from moerl.core.types import Rollout", "may not import moerl.core"),
    ("launch/supervision/actors.py", "from moerl.cli import main", "may not import moerl.cli"),
    (
        "trainer/learner/step.py",
        "from moerl.engine.host.host import EngineHost",
        "may not import moerl.engine",
    ),
    ("records/routing.py", "import moerl.layout.tiles", "may not import moerl.layout"),
    (
        "weight_sync/publisher.py",
        "from moerl.trainer.train_loop import TrainLoop",
        "may not import moerl.trainer",
    ),
    (
        "weight_sync/receiver.py",
        "from moerl.engine.host.host import EngineHost",
        "may not import moerl.engine",
    ),
    (
        "controller/engine_pool.py",
        "from moerl.weight_sync.session import SessionSpec",
        "may not import moerl.weight_sync",
    ),
    (
        "launch/run_context.py",
        "from moerl.weight_sync.publisher import WeightPublisher",
        "may not import moerl.weight_sync",
    ),
    (
        "launch/train.py",
        "from moerl.planning.dry_run import describe",
        "may not import moerl.planning",
    ),
    ("controller/loop.py", "if True:\n    from megatron.core import x", "moerl.trainer only"),
    ("controller/loop.py", "import sglang.srt.utils as u", "moerl.engine only"),
    ("trainer/learner/step.py", "import ray", "moerl.launch only"),
    (
        "engine/host/host.py",
        "from mooncake.engine import TransferEngine",
        "moerl.weight_sync only",
    ),
    ("layout/tiles.py", "import torch.nn", "torch-free"),
    ("weight_sync/buckets.py", "import torch", "torch-free"),
    ("config/schema.py", "from torch import Tensor", "torch-free"),
    ("helpers/misc.py", "", "no row"),
    ("trainer/passes/forward.py", "from ..learner import step", "above"),
    ("trainer/passes/forward.py", "from moerl.trainer.train_loop import TrainLoop", "above"),
    ("trainer/passes/forward.py", "from moerl.trainer import train_loop", "above"),
    ("trainer/model/gpt.py", "from moerl.trainer.hf_io import hf_folder", "siblings"),
    ("trainer/__init__.py", "import moerl.trainer.model.gpt", "above"),
    ("trainer/misc/x.py", "", "no row"),
    ("engine/host/host.py", "from moerl.engine.plugin import in_flight", "siblings"),
    ("engine/host/host.py", "def f():\n    from ..plugin.grammars import SAMPLED", "siblings"),
    ("engine/plugin/hooks.py", "from moerl.engine.host.server_args import arguments", "siblings"),
    ("engine/protocol.py", "from moerl.engine.plugin import in_flight", "above"),
    ("engine/record_files.py", "from moerl.engine.host import health", "above"),
    ("engine/both/x.py", "", "no row"),
    ("launch/run_context.py", "from moerl.launch.nodes import lease", "above"),
    (
        "launch/nodes/engine_node.py",
        "from moerl.launch.supervision import actors",
        "above",
    ),
]


def write_tree(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")


def test_checker_accepts_a_good_tree(tmp_path: Path) -> None:
    write_tree(tmp_path, GOOD)
    assert violations(tmp_path) == []


@pytest.mark.parametrize(("file", "text", "expected"), BAD)
def test_checker_reports_a_bad_import(tmp_path: Path, file: str, text: str, expected: str) -> None:
    write_tree(tmp_path, GOOD | {file: text})
    (problem,) = violations(tmp_path)
    assert expected in problem


# --- the page and the tests -----------------------------------------------------------------------
def edges(page: str) -> dict[str, set[str]]:
    return {names(row[0])[0]: set(names(row[1])) for row in rows(page, PACKAGES)}


def test_the_table_of_imports_is_the_enforced_one() -> None:
    page = PAGE.read_text()
    assert edges(page) == ALLOWED
    lowest = page.split(f"## {PACKAGES}\n")[1].partition("Besides")[0]
    assert names(lowest) == [*BASE]


def test_another_table_of_imports_is_noticed() -> None:
    """Negative control."""
    page = PAGE.read_text()
    assert (
        edges(page.replace("| `data` | `records`, `layout` |", "| `data` | `records` |")) != ALLOWED
    )
    assert edges(re.sub(r"(?m)^\| `observe` \|.*\n", "", page)) != ALLOWED


# Absolute, relative, and by name alone from the same folder.
TESTS = re.compile(r"(?:(?:tests)?\.(?:\w*\.)*)?test_\w+")


def imported_tests(file: Path) -> list[str]:
    """Imports of test modules, each as `file:line name`."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = [f"{module}.{alias.name}" for alias in node.names]
        found += [f"{file.name}:{node.lineno} {name}" for name in names if TESTS.match(name)]
    return found


def test_tests_import_no_tests() -> None:
    """What several of them share is in tests/helpers."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert len(files) > 300
    assert [name for file in files for name in imported_tests(file)] == []


@pytest.mark.parametrize(
    "line",
    [
        "from tests.unit.test_a import StubEngine",
        "from tests.unit import test_a",
        "import tests.unit.test_a as a",
        "from .test_a import StubEngine",
        "from test_a import StubEngine",
        "def late():\n    from tests.e2e.test_a import check",
    ],
)
def test_an_imported_test_is_found(tmp_path: Path, line: str) -> None:
    """Negative control."""
    file = tmp_path / "test_b.py"
    file.write_text(f"import tests.helpers.a\n{line}\n")
    assert len(imported_tests(file)) == 1


# --- what importing really loads ------------------------------------------------------------------
HEAVY = {"torch", "ray", "sglang", "transformers", "megatron", "mooncake", "matplotlib"}


def loaded_by(statement: str) -> set[str]:
    """The heavy packages in memory after a new interpreter ran `statement`."""
    code = f"import json, sys\n{statement}\nprint(json.dumps([*sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert done.returncode == 0, done.stderr
    return HEAVY & {name.split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


def test_configuration_and_command_line_load_nothing_heavy() -> None:
    assert loaded_by("import moerl.config") == set()
    assert loaded_by("import moerl.cli") == set()


def test_torch_free_layers_load_nothing_heavy() -> None:
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for name in sorted(TORCH_FREE)
        for file in [ROOT / "moerl" / f"{name}.py", *(ROOT / "moerl" / name).rglob("*.py")]
        if file.exists()
    ]
    assert len(modules) > len(TORCH_FREE)
    assert loaded_by("import " + ", ".join(modules)) == set()


def test_actors_without_a_model_load_neither_torch_nor_transformers() -> None:
    """Each would cost its process seconds at every start, and hundreds of MiB."""
    assert loaded_by("import moerl.launch.supervision.actors, moerl.engine.host.host") == {"ray"}


def test_loaded_packages_are_seen() -> None:
    """Negative control."""
    assert loaded_by("import matplotlib") == {"matplotlib"}


# --- tracked files name no outside machine -------------------------------------------------------
# Brackets keep the patterns from matching themselves.
OUTSIDE = re.compile(
    r"(?<![\w.$}~*-])/(?:[h]ome|[U]sers|[r]oot|[w]ork)/\w"  # somebody's folders
    r"|https?://[^\s/]*(?:[p]ypi|[p]ythonhosted|[r]egistry|[m]irror)"
    r"|--(?:[e]xtra-)?[i]ndex-url[ =]\S|--[f]ind-links[ =]\S"
)


def outside_names(text: str) -> list[str]:
    return [match.group() for match in OUTSIDE.finditer(text)]


def test_tracked_files_name_no_outside_path_or_package_index() -> None:
    listing = subprocess.run(
        ["git", "ls-files", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=patience(60),
    )
    found = {}
    for name in filter(None, listing.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and (names := outside_names(path.read_bytes().decode(errors="ignore"))):
            found[name] = names
    assert found == {}


def test_outside_names_are_found() -> None:
    """Negative control; the names are put together here so that this file has none itself."""
    for parts in (
        ("see /", "home/ada/model"),
        ("'/", "work/x'"),
        ("http", "s://files.", "pythonhosted.example/x"),
        ("pip install --index", "-url https://example.org"),
    ):
        assert outside_names("".join(parts))
    assert outside_names("https://example.org/home/page /dev/shm $PWD/work/x a/root/b") == []
