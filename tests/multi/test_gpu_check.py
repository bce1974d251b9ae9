"""`tools/gpu-check --parts` on the device double: what it prints and writes; checks that fail."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.patience import patience
from tools import gpu_check
from tools.gpu_check_list import CHECKS

pytestmark = pytest.mark.full  # the double's own tests and a step on it are in the default suite

ROOT = Path(__file__).resolve().parents[2]
PARTS = [check for check in CHECKS if check.size == "parts"]
ABSENT = ("cuda-ipc",)  # the double has no memory of another process
RESULT = """<testsuites><testsuite><properties><property name="machine" value="{}"/></properties>
<testcase name="test_a[x]" time="1.5"><properties>
<property name="figure" value='["speed", 2.5, "GB/s"]'/></properties></testcase>
<testcase name="test_b" time="0.5"><failure message="AssertionError: 3 != 4&#10;more">text</failure>
</testcase><testcase name="test_c" time="0"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


Called = tuple[int | None, str]


def stand_in(command: list[str], _environment: Any, _limit_s: float) -> Called:
    """pytest's process: of test_delta one that dies, of test_commit one that hangs."""
    node = command[-1]
    if node.endswith("test_commit"):
        return None, "begun\n"
    if not node.endswith("test_delta"):
        (file,) = [word for word in command if word.startswith("--junitxml=")]
        Path(file.partition("=")[2]).write_text(RESULT)
    return 1, "collected\nCUDA error: misaligned\n"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of one run on the double, through the command that a person types."""
    file = tmp_path_factory.mktemp("check") / "report.json"
    command = [str(ROOT / "tools/gpu-check"), "--parts", "--double", "--json", str(file)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=patience(240), check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    for check in PARTS:
        assert re.search(rf"^\W*{check.name}\b", done.stdout, re.MULTILINE), check.name
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_every_parts_check_ran_on_the_double(report: dict[str, Any]) -> None:
    states = {check["name"]: check["state"] for check in report["checks"]}
    assert states == {
        check.name: "skipped" if check.name in ABSENT else "passed" for check in PARTS
    }
    assert (report["size"], report["double"], report["machine"]["device"]) == (
        "parts", True, "double",
    )  # fmt: skip
    assert report["machine"]["megatron-core"]
    assert "--parts --double" in report["command"]


def test_figures_are_numbers_with_units(report: dict[str, Any]) -> None:
    of = {check["name"]: check["figures"] for check in report["checks"]}
    for name in ("speed", "head-speed", "replay", "step", "step-replay", "commit", "delta"):
        assert of[name], name
        for figure in of[name]:
            assert figure["unit"]
            assert math.isfinite(figure["value"])
            assert figure["value"] >= 0
    memory = {figure["name"]: figure["value"] for figure in of["step-replay"]}
    assert memory["peak"] > memory["weights, gradients, optimizer"] > 0
    assert memory["tokens"] > 0
    (share,) = [f["value"] for f in of["delta"] if f["unit"] == "%"]
    assert 0 < share < 100


def test_tables_for_the_readme_have_every_figure(report: dict[str, Any]) -> None:
    text = gpu_check.markdown(report)
    assert report["command"] in text
    for check in report["checks"]:
        for figure in check["figures"]:
            assert f"| {figure['name']} | {figure['value']:.4g} | {figure['unit']} |" in text


def test_a_failed_check_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "call", stand_in)
    words = ["--only", "speed", "--only", "delta", "--only", "commit"]
    assert gpu_check.main([*words, "--json", str(tmp_path / "x.json")]) == 1
    checks = json.loads((tmp_path / "x.json").read_text())["checks"]
    assert [check["state"] for check in checks] == ["failed"] * 3
    assert [check["reason"] for check in checks] == [
        "test_b: AssertionError: 3 != 4",
        "exit status 1: CUDA error: misaligned",
        "not done after 600 s",
    ]
    assert checks[0]["figures"] == [{"name": "speed", "value": 2.5, "unit": "GB/s"}]
    assert "AssertionError: 3 != 4" in capsys.readouterr().out


def test_the_run_in_turns_has_a_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run(checks: Any, *_rest: Any, **_fields: Any) -> gpu_check.Report:
        ran.extend(check.name for check in checks)
        return gpu_check.Report("full", False, "", "")

    monkeypatch.setattr(gpu_check, "run", run)
    assert (
        gpu_check.main(["--colocated"]) == gpu_check.main(["--colocated", "--only", "speed"]) == 0
    )
    assert ran == ["colocated", "speed", "colocated"]
    with pytest.raises(SystemExit, match="no check 'colocated'"):
        gpu_check.main(["--colocated", "--parts"])


def test_names_and_tests_of_checks_exist() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        text = (ROOT / "tests/gpu" / check.file).read_text()
        for name in (*check.tests, *(check.on_double or ())):
            assert f"def {name.partition('[')[0]}(" in text, f"{check.name}: {name}"
    with pytest.raises(SystemExit, match="no check 'engine'; there are speed"):
        gpu_check.chosen(["engine"], "parts")
    assert [check.name for check in gpu_check.chosen(["delta"], "parts")] == ["delta"]


def test_a_parts_check_sees_only_what_it_brings() -> None:
    """Packages of this environment that are neither torch's nor packed are absent for it."""
    code = (
        "from importlib.util import find_spec as found\n"
        "names = 'sglang', 'ray', 'transformers', 'aiohttp', 'megatron', 'msgspec', 'sympy'\n"
        "before = [found(name) is not None for name in names]\n"
        "from tests.helpers.bare_imports import hide_other_packages\n"
        "hide_other_packages()\n"
        "print(before, [name for name in names if found(name)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{[True] * 7} ['megatron', 'msgspec', 'sympy']\n"
