"""Which functions of moerl a token, a weight and a control message pass, in every process of a run.

`install` writes this file as `sitecustomize.py` into a folder that the caller puts on PYTHONPATH.
Python then imports it at the start of each process, and it adds two calls to every function of
moerl while that is compiled: one that looks at the arguments, one that looks at what is returned.
`passed` reads what was seen.

A function passes
    token    when an argument or its result is a record of `TOKENS`, or a tensor or an array while a
             function that was called with one is on the stack (a microbatch, then its tensors);
    weight   when it is a plan or a place of weights (`WEIGHTS`), or a tensor, while a function of
             moerl/weight_sync is on the stack: loading a checkpoint is another path;
    control  when an argument is a message of a publish session, or it decodes one.
Containers are searched two levels deep.  A function is looked at until it was seen, at most
`_LOOKS` times.  sys.setprofile was rejected: it also costs for each call inside torch and SGLang.
"""

from __future__ import annotations

import ast
import builtins
import json
import marshal
import os
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

TOKENS = {
    "moerl.core.types": {
        "BatchPlan", "Episode", "EpisodeGroup", "GenerateRequest", "Prompt", "RefScores", "Rollout",
        "Score", "Segment", "Turn",
    },
    "moerl.core.messages": {"Plan"},
    "moerl.engine.host.reply_parser": {"Reply"},
    "moerl.engine.record_files": {"RecordReference", "StoredArray"},
    "sglang.srt.managers.io_struct": {"BatchTokenIDOutput"},
    "moerl.episodes.turn": {"SampledTurn", "TurnInFlight"},
    "moerl.episodes.open_episode": {"EpisodeSpec", "OpenEpisode", "TurnCall", "TurnRequest"},
    "moerl.episodes.finished_episode": {"FinishedEpisode", "RecordedTurn"},
    "moerl.data.packing": {"Microbatch"},
    "moerl.scoring.worker": {"WorkerAnswer", "WorkerRequest"},
}  # fmt: skip
WEIGHTS = {
    "moerl.layout.tiles": {"Local", "Op", "Tile"},
    "moerl.layout.rules": {"Block", "Layer", "Part", "Place", "Rule", "Shard"},
    "moerl.weight_sync.buckets": {"Bucket", "Piece", "Region"},
    "moerl.weight_sync.deliveries": {"Delivery", "Holding", "Tables"},
    "moerl.weight_sync.publisher": {"SyncContext"},
    "moerl.core.messages": {"Destination", "SendResult"},
    "moerl.weight_sync.packed_buckets": {"MappedBucket", "PackedBucket", "PieceViews"},
    "moerl.weight_sync.snapshot": {"LiveWeights", "WeightSnapshot"},
    "moerl.weight_sync.transfer_plan": {"ReceiverPlan", "SenderPlan", "TransferPlan"},
}
CONTROL = {
    "moerl.core.messages": {
        *("PrepareUpdate", "WriteUpdate", "VerifyUpdate", "CommitUpdate", "RelayUpdate"),
    },
}
TENSORS = {"torch": {"Tensor"}, "torch.nn.parameter": {"Parameter"}, "numpy": {"ndarray"}}
KINDS = {"token": TOKENS, "weight": WEIGHTS, "control": CONTROL}

_FOLDER = "MOERL_PATH_TRACE"
_DECODES = "core/serialization.py"
_LOOKS = 3000
_DEPTH = 2
_ITEMS = 4  # looked at in a container


@dataclass(frozen=True, slots=True)
class Passed:
    """A function of moerl had something of a kind, at `time_ns` for the first time."""

    kind: str
    file: str  # below moerl/
    function: str  # with its class
    time_ns: int


# --- for the test ---------------------------------------------------------------------------------
def install(folder: Path) -> dict[str, str]:
    """Environment of a run that is to be traced into `folder`."""
    (folder / "code").mkdir(parents=True)
    shutil.copy(__file__, folder / "sitecustomize.py")
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), _FOLDER: str(folder)}


def passed(folder: Path) -> list[Passed]:
    """What all processes have seen, in the order of time."""
    lines = [line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    return sorted((Passed(*json.loads(line)) for line in lines), key=lambda one: one.time_ns)


# --- in a traced process --------------------------------------------------------------------------
class _Finder(PathFinder):
    @classmethod
    def find_spec(
        cls,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "moerl":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Kept in the folder of the trace alone: no changed code gets into Python's cache."""
        kept = Path(os.environ[_FOLDER], "code", fullname)
        with suppress(OSError):
            code: CodeType = marshal.loads(kept.read_bytes())
            return code
        tree = with_calls(self.get_data(self.path).decode(), _below_moerl(self.path))
        code = compile(tree, self.path, "exec", dont_inherit=True)
        with suppress(OSError):  # a process of a box may not write there
            own = kept.with_name(f"{fullname}.{os.getpid()}")
            own.write_bytes(marshal.dumps(code))
            own.replace(kept)
        return code


def with_calls(source: str, file: str) -> ast.Module:
    """The module with a call of `__moerl_takes__` or `__moerl_gives__` wherever one is due."""
    tree: ast.Module = _Calls(file).visit(ast.parse(source))
    return ast.fix_missing_locations(tree)


class _Calls(ast.NodeTransformer):
    """Adds a call to the start of each function, and one around each value that it gives."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._names: list[str] = []
        self._function: list[str] = []  # the innermost last

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._names.append(node.name)
        self.generic_visit(node)
        self._names.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._changed(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._changed(node)

    def _changed(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        self._names.append(node.name)
        self._function.append(".".join(self._names))
        self.generic_visit(node)
        given = node.args
        every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        names = [arg.arg for arg in every if arg is not None and arg.arg not in ("self", "cls")]
        seen = ast.Tuple([ast.Name(name, ast.Load()) for name in names], ast.Load())
        has_text = ast.get_docstring(node, clean=False) is not None
        node.body.insert(int(has_text), ast.Expr(self._call("__moerl_takes__", seen)))
        self._function.pop()
        self._names.pop()
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self._function.append(".".join([*self._names, "<lambda>"]))
        self.generic_visit(node)
        node.body = self._call("__moerl_gives__", node.body)
        self._function.pop()
        return node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        self.generic_visit(node)
        if node.value is not None:
            node.value = self._call("__moerl_gives__", node.value)
        return node

    def visit_Yield(self, node: ast.Yield) -> ast.AST:
        self.generic_visit(node)
        if node.value is not None:
            node.value = self._call("__moerl_gives__", node.value)
        return node

    def _call(self, name: str, value: ast.expr) -> ast.expr:
        where = [ast.Constant(self._file), ast.Constant(self._function[-1])]
        return ast.Call(ast.Name(name, ast.Load()), [*where, value], [])


class _Tracer:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._looks: dict[tuple[str, str, bool], int] = {}
        self._seen: set[tuple[str, ...]] = set()
        self._holders: set[CodeType] = set()  # functions that were called with a token record

    def takes(self, file: str, function: str, values: Sequence[object]) -> None:
        if self._is_due(file, function, True):
            found = kinds_in(values)
            self._note(file, function, found, sys._getframe(1))

    def gives(self, file: str, function: str, value: Any) -> Any:
        if self._is_due(file, function, False):
            found = kinds_in([value])
            frame = sys._getframe(1)
            if file == _DECODES and "control" in found and frame.f_back is not None:
                asker = frame.f_back.f_code  # who got the message as bytes
                self._write("control", _below_moerl(asker.co_filename), asker.co_qualname)
            self._note(file, function, found - {"control"}, frame)
        return value

    def _is_due(self, file: str, function: str, takes: bool) -> bool:
        looks = self._looks.get((file, function, takes), 0)
        self._looks[file, function, takes] = looks + 1
        return looks < _LOOKS

    def _note(self, file: str, function: str, found: set[str], frame: FrameType) -> None:
        if "token" in found:
            self._holders.add(frame.f_code)
        if found & {"tensor", "weight"}:
            syncs = _is_below(frame, self._is_weight_sync)
            found.discard("weight")
            if syncs:
                found.add("weight")
            elif "tensor" in found and _is_below(frame, self._holders.__contains__):
                found.add("token")
        for kind in found - {"tensor"}:
            self._write(kind, file, function)

    @staticmethod
    def _is_weight_sync(code: CodeType) -> bool:
        return "/moerl/weight_sync/" in code.co_filename

    def _write(self, *seen: str) -> None:
        """At once: most processes of a run are killed at its end."""
        if seen in self._seen:
            return
        self._seen.add(seen)
        with (self._folder / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps([*seen, time.time_ns()]) + "\n")


def _below_moerl(path: str) -> str:
    return path.rpartition("/moerl/")[2]


def _is_below(frame: FrameType | None, wanted: Any) -> bool:
    while frame is not None:
        if wanted(frame.f_code):
            return True
        frame = frame.f_back
    return False


def kinds_in(values: Iterable[object]) -> set[str]:
    return {kind for value in values for kind in _search([value], _DEPTH)}


def _search(values: Iterable[object], depth: int) -> Iterable[str]:
    for value, _ in zip(values, range(_ITEMS), strict=False):
        kind = type(value)
        if kind in (str, int, float, bytes, bool):
            continue
        if kind.__name__ in TENSORS.get(kind.__module__, ()):
            yield "tensor"
        for name, types in KINDS.items():
            if kind.__name__ in types.get(kind.__module__, ()):
                yield name
        if depth and isinstance(value, list | tuple | set | dict):
            yield from _search(value.values() if isinstance(value, dict) else value, depth - 1)


def _start(folder: Path) -> None:
    tracer = _Tracer(folder)
    vars(builtins)["__moerl_takes__"] = tracer.takes
    vars(builtins)["__moerl_gives__"] = tracer.gives
    sys.meta_path.insert(0, _Finder)


if __name__ == "sitecustomize":
    _start(Path(os.environ[_FOLDER]))
