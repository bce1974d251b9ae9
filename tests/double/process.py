"""Run a module of tests in a process of its own, on the double.

    pytestmark = ...
    ITSELF = Module("on_itself.py")

    @pytest.mark.parametrize("name", ITSELF.names())
    def test_on_the_double(name): ITSELF.passed(name)

Each test of the module is a test here; the process runs once, when the first of them asks.
"""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from dataclasses import dataclass
from pathlib import Path

from tests.double.build import build
from tests.helpers.patience import patience

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TIMEOUT_S = 240


@dataclass(frozen=True)
class Module:
    """A file of tests in this folder, and others whose tests run in the same process after it."""

    file: str
    others: tuple[str, ...] = ()

    def names(self) -> list[str]:
        """Names of its tests, without importing it."""
        trees = [ast.parse((HERE / file).read_text()) for file in (self.file, *self.others)]
        functions = [n.name for tree in trees for n in tree.body if isinstance(n, ast.FunctionDef)]
        return [name for name in functions if name.startswith("test_")]

    def passed(self, name: str) -> None:
        """Assert that one of its tests passed, in the process that ran them all."""
        failures = _run(self.file, *self.others)
        assert name in failures, f"{self.file} has no result of {name}:\n{failures.get('', '')}"
        assert not failures[name], f"{self.file}::{name}\n{failures[name]}"


@functools.cache
def _run(*files: str) -> dict[str, str]:
    """Why each test failed, "" = it passed; under "" what the process printed last."""
    build()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider"]
        command += ["-p", "tests.double.plugin", f"--junitxml={report}"]
        command += [str(HERE / file) for file in files]
        done = subprocess.run(
            command, cwd=ROOT, env=_environment(), capture_output=True, text=True,
            timeout=patience(TIMEOUT_S), check=False,
        )  # fmt: skip
        output = (done.stdout + done.stderr)[-6000:]
        return {"": output} | (_results(report) if report.exists() else {})


def _environment() -> dict[str, str]:
    own = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    own |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    return os.environ | own


def _results(report: Path) -> dict[str, str]:
    found = {}
    for case in xml.parse(report).getroot().iter("testcase"):
        wrong = [part for part in case if part.tag in ("failure", "error", "skipped")]
        name = str(case.get("name")).partition("[")[0]  # its cases together
        found[name] = found.get(name, "") + "".join(part.text or "skipped" for part in wrong)
    return found
