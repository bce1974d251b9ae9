"""docs/architecture.md: its table of imports is the one that is enforced, its files exist.

What a run passes is compared in tests/e2e/test_architecture.py.
"""

from __future__ import annotations

from tests.helpers.architecture_page import (
    PACKAGES,
    PAGE,
    hops_of,
    listed_files,
    listed_hops,
    names,
    rows,
)
from tests.helpers.path_trace import Passed
from tests.unit.test_imports import ALLOWED, BASE, ROOT


def edges(page: str) -> dict[str, set[str]]:
    return {names(row[0])[0]: set(names(row[1])) for row in rows(page, PACKAGES)}


def test_the_table_of_imports_is_the_enforced_one() -> None:
    page = PAGE.read_text()
    assert edges(page) == ALLOWED
    every = page.split(f"## {PACKAGES}\n")[1].partition("Besides:")[0]
    assert set(names(every)) == BASE


def test_another_table_of_imports_is_noticed() -> None:
    """Negative control."""
    page = PAGE.read_text()
    assert (
        edges(page.replace("| `data` | `records`, `layout` |", "| `data` | `records` |")) != ALLOWED
    )
    assert edges(page.replace("| `observe` | - |\n", "")) != ALLOWED


def test_each_file_is_listed_once_and_exists() -> None:
    page = PAGE.read_text()
    for kind in ("token", "weight"):
        files = listed_files(page, kind)
        assert len(files) == len(set(files))
        assert [file for file in files if not (ROOT / "moerl" / file).is_file()] == []
    for file, name in listed_hops(page):
        assert f"class {name}" in (ROOT / "moerl" / file).read_text()


def test_hops_are_classes_in_the_order_of_time() -> None:
    seen = [
        Passed("control", "trainer/controller_client.py", "ControllerClient.expect", 1),
        Passed("token", "types.py", "check", 2),
        Passed("control", "serialization.py", "encode", 3),
        Passed("control", "weight_sync/receiver.py", "Receiver.handle", 4),
        Passed("control", "weight_sync/receiver.py", "_starts", 5),
        Passed("control", "trainer/controller_client.py", "ControllerClient.request", 6),
        Passed("control", "engine/update_hooks.py", "hand_on", 7),
    ]
    assert hops_of(seen) == [
        ("trainer/controller_client.py", "ControllerClient"),
        ("weight_sync/receiver.py", "Receiver"),
        ("engine/update_hooks.py", "hand_on"),
    ]
