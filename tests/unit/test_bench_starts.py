"""Each bench starts as its page prints it: from the checkout, without PYTHONPATH, in a bare shell.

A bench is a file of bench/ that runs as a program; the others are parts that benches import.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted(
    path for path in (ROOT / "bench").glob("*.py") if '"__main__"' in path.read_text()
)


def start(*words: str) -> subprocess.CompletedProcess[str]:
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=ROOT, env=bare, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_bench_prints_its_help(path: Path) -> None:
    done = start(str(path.relative_to(ROOT)), "--help")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 100


def test_a_bench_whose_imports_are_not_found_would_fail(tmp_path: Path) -> None:
    """The control: the file alone, without the line that finds tests.helpers."""
    text = (ROOT / "bench/scoring_overlap.py").read_text()
    line = next(line for line in text.splitlines() if line.startswith("sys.path.append"))
    alone = tmp_path / "scoring_overlap.py"
    alone.write_text(text.replace(line, ""))
    done = start(str(alone), "--help")
    assert "No module named 'tests'" in done.stderr


def test_the_bench_of_scoring_runs_at_its_smallest_size() -> None:
    done = start("bench/scoring_overlap.py", "--seconds", "0.2", "--steps", "6")
    assert "they wait" in done.stdout, done.stderr
    assert "barrier" in done.stdout
