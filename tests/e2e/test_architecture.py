"""docs/architecture.md lists the files that a token and a weight pass, and the hops of control.

One small real run is traced in all its processes (`tests/helpers/path_trace.py`) and compared.
"""

from __future__ import annotations

import re

import pytest

from tests.helpers import path_trace
from tests.helpers.architecture_page import PAGE, differences
from tests.helpers.path_trace import Passed
from tests.helpers.train_runs import start

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SHORT = [
    "run.steps=2",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.groups_per_request=4",
    "rollout.buffer_depth=0",
    "observe.engine_alone_s=0",
    "checkpoint.every=0",
    "task.pass_environment=[MOERL_PATH_TRACE]",  # workers write what they pass there,
    "task.limits.user=same",  # in a folder of the test's user
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[Passed]:
    root = tmp_path_factory.mktemp("architecture")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in path_trace.install(root / "trace").items():
            patch.setenv(name, value)
        run = start(root, "quickstart", *SHORT, name="x")
    assert run.finish() == 0, run.text()
    return path_trace.passed(root / "trace")


def test_the_page_lists_what_a_run_passes(seen: list[Passed]) -> None:
    assert differences(PAGE.read_text(), seen) == []


def test_a_line_too_few_is_noticed(seen: list[Passed]) -> None:
    """Negative control: for each line of the tables."""
    page = PAGE.read_text()
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


def test_hops_in_another_order_are_noticed(seen: list[Passed]) -> None:
    """Negative control."""
    page = PAGE.read_text()
    first, second = re.findall(r"(?m)^\| `(?:ControllerClient|TrainerServer)`.*\n", page)
    (problem,) = differences(page.replace(first + second, second + first), seen)
    assert problem.startswith("the hops of control are")
