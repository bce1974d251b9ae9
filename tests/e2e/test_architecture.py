"""docs/architecture.md lists the files that a token and a weight pass, and the hops of control.

Small real runs are traced in all their processes (`tests/helpers/path_trace.py`) and compared.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.architecture_page import PAGE, agent_differences, differences, without_agents
from tests.helpers.path_trace import Passed
from tests.helpers.short_run import ShortRun, make

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def seen(short_run: ShortRun) -> list[Passed]:
    return short_run.passed


def test_the_page_lists_what_a_run_passes(seen: list[Passed]) -> None:
    assert differences(PAGE.read_text(), seen) == []


def test_a_line_too_few_is_noticed(seen: list[Passed]) -> None:
    """Negative control: for each line of the tables."""
    page = without_agents(PAGE.read_text())
    lines = re.findall(r"(?m)^\| `(?:moerl/|[A-Z]).*\n", page)
    assert len(lines) > 50
    for line in lines:
        assert len(differences(page.replace(line, ""), seen)) == page.count(line), line


@pytest.mark.parametrize("after", ["moerl/data/tasks.py", "moerl/weight_sync/session.py"])
def test_a_line_too_many_is_noticed(seen: list[Passed], after: str) -> None:
    """Negative control: a file that exists and that this run does not pass."""
    row = "| `moerl/algorithms/preference.py` | preference learning |\n"
    page = re.sub(rf"(?m)^(\| `{after}`.*\n)", rf"\1{row}", PAGE.read_text())
    (problem,) = differences(page, seen)
    assert problem.endswith("passes algorithms/preference.py: in the page")


@pytest.mark.full
def test_the_page_lists_what_an_agents_token_passes(tmp_path: Path) -> None:
    passed = make(tmp_path, "digits-by-agent").passed
    assert agent_differences(PAGE.read_text(), passed) == []
    assert agent_differences(PAGE.read_text(), []), "control"


def test_hops_in_another_order_are_noticed(seen: list[Passed]) -> None:
    """Negative control."""
    page = PAGE.read_text()
    first, second = re.findall(r"(?m)^\| `(?:RpcClient|RpcServer)`.*\n", page)
    (problem,) = differences(page.replace(first + second, second + first), seen)
    assert problem.startswith("the hops of control are")
