"""Tests in forked workers: each once, with its fixtures, whatever a worker dies of."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
import os, pathlib, pytest

@pytest.fixture(scope="session")
def mine(tmp_path_factory):
    yield os.getpid()
    pathlib.Path("ended").open("a").write(f"{os.getpid()}\\n")
"""
GOOD = """
import os, pathlib, time, pytest

@pytest.mark.parametrize("n", range(3))
def test_it(mine, tmp_path, capfd, n):
    os.system("echo from a child")
    assert capfd.readouterr().out == "from a child\\n"
    assert mine == os.getpid()
    pathlib.Path("ran").open("a").write(f"{os.getpid()} {__name__}{n} {tmp_path}\\n")
    time.sleep(0.3)
"""
BAD = """
import os, signal

def test_before(mine): pass
def test_fails(): assert len("abc") == 4
def test_dies(): os.kill(os.getpid(), signal.SIGKILL)
def test_after(mine): pass
"""
LATE = """
import pytest

@pytest.fixture(scope="session")
def bad():
    yield
    raise OSError("late")

def test_it(bad): pass
"""
THREAD = """
import threading, time

threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
def test_it(): pass
"""
COUNTER = "import pathlib\npathlib.Path('collected').open('a').write('once ')\n"


def play(folder: Path, *words: str, **files: str) -> subprocess.CompletedProcess[str]:
    """Run files of tests in two workers."""
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    plugins = ["-p", "tests.helpers.fork_workers", "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir=.", "-q", *plugins,
         "--forks=2", "--junitxml=j.xml", *words, "."],
        cwd=folder, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(ROOT), "HOME": str(folder)},
    )  # fmt: skip


def test_files_are_shared_out_and_collected_once(tmp_path: Path) -> None:
    done = play(tmp_path, a=GOOD + COUNTER, b=GOOD, c=GOOD)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "9 passed" in done.stdout
    assert (tmp_path / "collected").read_text() == "once "
    ran = [line.split() for line in (tmp_path / "ran").read_text().splitlines()]
    assert len({name for _, name, _ in ran}) == len({folder for *_, folder in ran}) == 9
    workers = {
        name[:-1]: {pid for pid, each, _ in ran if each[:-1] == name[:-1]} for _, name, _ in ran
    }
    assert all(len(pids) == 1 for pids in workers.values()), "a file has one worker"
    ended = (tmp_path / "ended").read_text().split()
    assert sorted(ended) == sorted({pid for pid, *_ in ran}), "each worker's fixture ended once"
    assert len(ended) == 2


def test_a_death_fails_its_test_alone(tmp_path: Path) -> None:
    done = play(tmp_path, a=BAD, b=GOOD)
    assert done.returncode == 1
    assert "2 failed, 5 passed" in done.stdout
    assert "assert 3 == 4" in done.stdout, "a report has the values of a comparison"
    assert "the worker ended with -9 in test_a.py::test_dies" in done.stdout
    suite = ElementTree.parse(tmp_path / "j.xml").getroot()[0]
    failed = [
        case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None
    ]
    assert failed == ["test_fails", "test_dies"]
    assert suite.get("tests") == "7"


def test_a_fixture_that_fails_at_the_end_fails_the_run(tmp_path: Path) -> None:
    done = play(tmp_path, a=LATE)
    assert done.returncode == 1
    assert "OSError: late" in done.stdout + done.stderr


@pytest.mark.parametrize("how", ["-x", "--maxfail=1"])
def test_the_first_failure_ends_all(tmp_path: Path, how: str) -> None:
    slow = "import time\ndef test_it(mine): time.sleep(60)\n"
    done = play(tmp_path, how, a="def test_it(): assert 0\n", b=slow)
    assert done.returncode == 1
    assert re.search(r"1 failed in [\d.]+s", done.stdout), done.stdout
    assert (tmp_path / "ended").read_text().split(), "its fixtures have ended"


def test_forking_is_refused_where_there_are_threads(tmp_path: Path) -> None:
    done = play(tmp_path, a=THREAD)
    assert done.returncode == 3
    assert "2 threads after the imports of the tests" in done.stdout + done.stderr
