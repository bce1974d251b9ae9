"""`tools/gpu-check --loop`: its order, its limits, the file after each step; all on the double."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from moerl.config import load_config, resolve
from moerl.config.checks import check
from moerl.planning.dry_run import describe
from tests.helpers.device_loop import ON_GPU, RUNS, rise
from tests.helpers.large_random_model import SMALL, large_model
from tests.helpers.patience import patience, until
from tools import gpu_check
from tools.gpu_check import main
from tools.gpu_check_list import CHECKS
from tools.gpu_loop_list import LOOP

pytestmark = [pytest.mark.e2e, pytest.mark.full]

ROOT = Path(__file__).resolve().parents[2]
FILE = (
    '<testsuites><testsuite><testcase name="test_a" time="1">{}</testcase></testsuite></testsuites>'
)
BUDGET_S = gpu_check.BUDGETS_S["loop"]
NAMES = [check.name for check in LOOP]
# What is promised first, in this order (the other steps follow).
FIRST = ("libraries", "token-eager", "records", "trainer", "quickstart", "publish-shm")


class Clock:
    """Of a machine on which a check takes as long as `takes` says of its test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, takes: Callable[[str], float]) -> None:
        self.now, self.limits, self._takes = 0.0, list[float](), takes
        monkeypatch.setattr(gpu_check.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(gpu_check, "call", self._call)

    def _call(self, command: list[str], _env: Any, limit_s: float) -> tuple[int | None, str]:
        node = command[-1].rpartition("::")[2]
        self.limits.append(limit_s)
        self.now += min(limit_s, self._takes(node))
        if self._takes(node) > limit_s:
            return None, "a line of the output\n"
        (file,) = [word for word in command if word.startswith("--junitxml=")]
        failure = '<failure message="wrong">text</failure>' if "shm" in node else ""
        Path(file.partition("=")[2]).write_text(FILE.format(failure))
        return int(bool(failure)), "passed\n"


def states(file: Path) -> dict[str, str]:
    return {check["name"]: check["state"] for check in json.loads(file.read_text())["checks"]}


# --- the list -------------------------------------------------------------------------------------
def test_the_order_is_that_of_what_is_learned_first() -> None:
    assert [name for name in NAMES if name in FIRST] == list(FIRST)
    assert NAMES.index("figure-step") > NAMES.index("kills"), "figures come last"
    assert len({*NAMES}) == len(NAMES)
    for step in LOOP:
        text = (ROOT / "tests/gpu" / step.file).read_text()
        for name in (*step.tests, *(step.on_double or ())):
            assert f"def {name.partition('[')[0]}(" in text, f"{step.name}: {name}"
        assert step.least_s <= step.limit_s <= 300
        if step.on_double == ():
            assert step.absent != CHECKS[0].absent, f"{step.name}: why is it not on the double?"


def test_what_is_promised_fits_by_its_estimates() -> None:
    """To the published weights; each step may also take its whole limit once."""
    promised = LOOP[: NAMES.index("publish-cuda-ipc") + 1]
    estimates = [check.least_s for check in promised]
    assert sum(estimates) + max(c.limit_s - c.least_s for c in promised) <= BUDGET_S


def test_a_full_check_is_no_step_of_the_loop() -> None:
    assert not {check.name for check in CHECKS} & {*NAMES}
    assert {check.size for check in LOOP} == {"loop"}
    with pytest.raises(SystemExit, match="no check 'engine'; there are libraries, token-eager"):
        main(["--loop", "--only", "engine"])


def test_the_page_has_every_step_with_its_limit() -> None:
    page = (ROOT / "docs/first-gpu-hour.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| (\d+) \|", page, re.MULTILINE)
    assert rows == [(check.name, str(check.limit_s)) for check in LOOP]


@pytest.mark.parametrize("name", RUNS)
def test_every_run_has_a_plan_for_one_card(name: str, tmp_path: Path) -> None:
    """Its settings are accepted and its memory fits 80 GB; weights go by cuda_ipc where it says."""
    recipe, _, _, settings = RUNS[name]
    model = ()
    if name == "401m":
        large_model(tmp_path / "model", SMALL)
        model = (f"model.path={tmp_path / 'model'}",)
    config = resolve(load_config(recipe, (*ON_GPU, *settings, *model)))
    check(config, starts=False)
    text = describe(config, [])
    assert "would hold" not in text
    by = config.sync.transport if name in ("shm", "cuda_ipc", "turns") else "auto is cuda_ipc"
    assert by in text


# --- time -----------------------------------------------------------------------------------------
def test_steps_end_with_the_budget_and_the_next_command_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each takes 50 s: 15 of them, then none is begun; `--from` begins with the first of these."""
    clock, file = Clock(monkeypatch, lambda _node: 50.0), tmp_path / "x.json"
    assert main(["--loop", "--json", str(file)]) == 1, "publish-shm failed"
    assert clock.now <= BUDGET_S
    found = states(file)
    assert found["publish-shm"] == "failed"
    late = [name for name, state in found.items() if state == "not begun"]
    assert late == [check.name for check in LOOP if found[check.name] == "not begun"]
    said = capsys.readouterr().out
    assert f"go on with --from {late[0]}" in said
    assert list(found) == NAMES
    assert main(["--loop", "--from", late[0], "--json", str(tmp_path / "y.json")]) == 0
    assert next(iter(states(tmp_path / "y.json"))) == late[0]
    assert main(["--loop", "--budget", "30", "--only", "quickstart", "--json", str(file)]) == 3
    assert states(file) == {"quickstart": "not begun"}


def test_a_step_that_hangs_costs_its_own_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Control: without a limit it would have taken all of the budget."""
    takes = lambda node: math.inf if "[eager]" in node else 1.0  # noqa: E731
    clock, file = Clock(monkeypatch, takes), tmp_path / "x.json"
    main(["--loop", "--json", str(file)])
    found = {check["name"]: check for check in json.loads(file.read_text())["checks"]}
    assert found["token-eager"]["reason"] == "not done after 150 s"
    assert found["token-eager"]["tail"] == "a line of the output\n"
    assert found["token-triton"]["state"] == "passed"
    assert clock.now == 150 + len(LOOP) - 1
    assert clock.limits == [check.limit_s for check in LOOP]


def test_the_file_is_there_after_each_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The machine goes in the fourth."""

    def takes(node: str) -> float:
        if node.endswith("[graphs]"):
            raise KeyboardInterrupt
        return 1.0

    Clock(monkeypatch, takes)
    with pytest.raises(KeyboardInterrupt):
        main(["--loop", "--json", str(tmp_path / "x.json")])
    assert list(states(tmp_path / "x.json")) == NAMES[:3]
    assert (tmp_path / "x.log").read_text() == 3 * "passed\n"


def test_a_part_of_the_loop_has_a_file_of_its_own() -> None:
    whole, part = list(LOOP), [LOOP[3]]
    assert gpu_check.default_file("loop", whole).name == "gpu-loop.json"
    assert gpu_check.default_file("loop", part).name == f"gpu-loop-{NAMES[3]}.json"
    assert gpu_check.default_file("parts", whole).name == "gpu-check.json"


SLEEPER = """
import subprocess, sys, time
print("begun", flush=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_after_its_limit_no_process_of_a_step_is_left() -> None:
    """An engine below pytest would keep the GPU.  Control: it lived until the limit."""
    begin = time.monotonic()
    code, output = gpu_check.call([sys.executable, "-c", SLEEPER], dict(os.environ), patience(3))
    assert code is None
    assert time.monotonic() - begin < patience(60)
    begun, pid = output.split()
    assert begun == "begun"
    until(lambda: not psutil.pid_exists(int(pid)), 10.0, "the child lives")
    assert gpu_check.call([sys.executable, "-c", "print(1)"], dict(os.environ), 60) == (0, "1\n")


def test_a_reward_that_stays_does_not_rise() -> None:
    """What step `quickstart` asks: twice the first quarter in the last."""
    flat = [{"reward/mean": value} for value in (0.02, 0.03, 0.02, 0.03) * 3]
    before, after = rise(flat)
    assert after <= 2 * before
    before, after = rise([{"reward/mean": 0.01 * step} for step in range(12)])
    assert after > 2 * before


# --- on the double --------------------------------------------------------------------------------
@pytest.mark.timeout(1800)
def test_every_step_runs_on_the_double_or_says_why_not(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    done = subprocess.run(
        [str(ROOT / "tools/gpu-check"), "--loop", "--double", "--json", str(file)],
        capture_output=True, text=True, timeout=patience(1200), check=False,
    )  # fmt: skip
    log = file.with_suffix(".log").read_text() if file.exists() else ""
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:] + log[-6000:]
    found = {check["name"]: check for check in json.loads(file.read_text())["checks"]}
    for step in LOOP:
        if step.on_double == ():
            assert found[step.name]["state"] == "skipped"
            assert found[step.name]["reason"] == f"not on the double: {step.absent}"
        else:
            assert found[step.name]["state"] == "passed", found[step.name]
            assert found[step.name]["figures"], step.name
