"""docs/architecture.md: its files exist, and its tracer sees what a module passes.

Its table of imports is compared in test_imports.py, what a run passes in
tests/e2e/test_architecture.py.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import numpy as np

from moerl.core.messages import CommitUpdate, Ok
from moerl.core.types import PolicyVersion, Prompt
from moerl.layout.tiles import Tile
from tests.helpers.architecture_page import (
    PAGE,
    agent_differences,
    agent_files,
    hops_of,
    listed_files,
    listed_hops,
)
from tests.helpers.path_trace import Passed, kinds_in, with_calls

ROOT = PAGE.parents[1]
T = TypeVar("T")


def test_each_file_is_listed_once_and_exists() -> None:
    page = PAGE.read_text()
    for kind in ("token", "weight"):
        files = listed_files(page, kind)
        assert len(files) == len(set(files))
        assert [file for file in files if not (ROOT / "moerl" / file).is_file()] == []
    for file, name in listed_hops(page):
        assert f"class {name}" in (ROOT / "moerl" / file).read_text()


def test_each_file_of_an_agent_is_compared() -> None:
    page = PAGE.read_text()
    own, without = agent_files(page)
    text = {*listed_files(page, "token")}
    assert [file for file in own if not (ROOT / "moerl" / file).is_file()] == []
    assert own
    assert without
    assert (own & text, without - text) == (set(), set())
    seen = [Passed("token", file, "f", 1) for file in own | (text - without)]
    assert agent_differences(page, seen) == []
    for place, one in enumerate(seen):
        (problem,) = agent_differences(page, seen[:place] + seen[place + 1 :])
        assert problem == f"no agent's token passes {one.file}: in the page"
    for file in {*without, "algorithms/preference.py"}:
        (problem,) = agent_differences(page, [*seen, Passed("token", file, "f", 1)])
        assert problem == f"an agent's token passes {file}: not in the page"


def test_hops_are_classes_in_the_order_of_time() -> None:
    seen = [
        Passed("control", "core/rpc.py", "RpcClient.expect", 1),
        Passed("token", "types.py", "check", 2),
        Passed("control", "core/serialization.py", "encode", 3),
        Passed("control", "weight_sync/receiver.py", "Receiver.handle", 4),
        Passed("control", "weight_sync/receiver.py", "_starts", 5),
        Passed("control", "core/rpc.py", "RpcClient.request", 6),
        Passed("control", "engine/plugin/update_hooks.py", "hand_on", 7),
    ]
    assert hops_of(seen) == [
        ("core/rpc.py", "RpcClient"),
        ("weight_sync/receiver.py", "Receiver"),
        ("engine/plugin/update_hooks.py", "hand_on"),
    ]


# --- the tracer -----------------------------------------------------------------------------------
MODULE = '''
"""A module."""
from __future__ import annotations

class Queue:
    """A class."""
    def put(self, item, *rest, limit=3, **others):
        """Text."""
        self.items = [item, *rest]
        return len(self.items)

    async def take(self):
        return self.items.pop()

def pairs(n):
    yield from ((i, i) for i in range(n))
    yield n

double = lambda n: 2 * n
'''


def test_a_traced_module_works_as_before_and_is_seen() -> None:
    calls: list[tuple[str, object]] = []

    def takes(_file: str, function: str, values: object) -> None:
        calls.append((function, values))

    def gives(_file: str, function: str, value: T) -> T:
        calls.append((function, value))
        return value

    made: dict[str, Any] = {"__moerl_takes__": takes, "__moerl_gives__": gives}
    exec(compile(with_calls(MODULE, "q.py"), "q.py", "exec", dont_inherit=True), made)
    queue = made["Queue"]()
    assert (queue.put(1, 2, others=5), queue.put.__doc__) == (2, "Text.")
    assert asyncio.run(queue.take()) == 2
    assert ([*made["pairs"](1)], made["double"](3)) == ([(0, 0), 1], 6)
    assert calls == [
        ("Queue.put", (1, 3, (2,), {"others": 5})),
        ("Queue.put", 2),
        ("Queue.take", ()),
        ("Queue.take", 2),
        ("pairs", (1,)),
        ("pairs", 1),
        ("<lambda>", 6),
    ]


def test_records_are_found_in_containers_and_nothing_else_is() -> None:
    prompt = Prompt(0, (1, 2), "", None, {})
    assert kinds_in([{"a": [prompt]}]) == {"token"}
    assert kinds_in([Tile("w", (), ())]) == {"weight"}
    assert kinds_in([CommitUpdate(0, PolicyVersion(0, 1), 1.0)]) == {"control"}
    assert kinds_in([np.zeros(2)]) == {"tensor"}
    assert kinds_in(["w", 1, None, PolicyVersion(0, 0), Ok(), [[[[prompt]]]]]) == set()
