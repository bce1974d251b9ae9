"""Runs stages of the test suite, keeps what came of them, and says it in one table.

`tools/test` is the command; it makes the environment and calls this file.

A result is kept in build/test-stages/TREE/STAGE.json.  TREE is the git tree hash of the working
copy, files that are not committed included: a result belongs to exactly these files, and a commit
of them has the same tree.  `--full` therefore runs only the stages that are missing or not green on
the tree, and may be interrupted and started again.  A green result of another tree counts too when
the two trees differ only in files that the stage does not read (`stage_table.reads`).

Rejected: the commit as the key (another message would run everything again); a pytest plugin that
selects tests (paths and one -m expression do, and a person can type them).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from tools.stage_table import AREAS, CORE, DEFAULT, EXPRESSIONS, STAGES, Stage, area_of, reads

ROOT = Path(__file__).resolve().parents[1]
BIN = ROOT / ".venv/bin"
GPU_PROFILE = ROOT / "build/gpu-profile"  # too large to be made for one stage
PROMISE_S = 1500  # the default selection on two free cores; over it is said, not a failure
DEFAULT_HANG_S = 4200.0  # a default selection that runs longer hangs
STAGE_HANG_S = 7200.0  # so does a stage that takes three times its 40 minutes
NO_TESTS = 5  # pytest's exit status

State = Literal["passed", "failed", "unavailable"]


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one stage on one tree."""

    stage: str
    tree: str
    state: State
    seconds: float = 0.0
    passed: int = 0
    failed: int = 0
    skipped: dict[str, int] = field(default_factory=dict)  # reason -> tests
    files: dict[str, float] = field(default_factory=dict)  # test file -> seconds of its tests
    why: str = ""  # it is unavailable, or failed for another reason than a test


class Results:
    """The kept results of one tree, one JSON file each."""

    def __init__(self, tree: str, root: Path = ROOT / "build/test-stages") -> None:
        self.tree, self.folder = tree, root / tree

    def keep(self, result: Result) -> Result:
        self.folder.mkdir(parents=True, exist_ok=True)
        new = self.folder / f".{result.stage}.json"
        new.write_text(json.dumps(asdict(result), indent=1))
        new.replace(self.folder / f"{result.stage}.json")
        return result

    def of(self, stage: Stage) -> Result | None:
        return _read_result(self.folder / f"{stage.name}.json")

    def adopt(self, stage: Stage, changed: Callable[[str, str], list[str]]) -> Result | None:
        """Keep a green result of another tree that differs in no file that the stage reads.

        changed: names of the files that differ between two trees.
        """
        for path in sorted(self.folder.parent.glob(f"*/{stage.name}.json")):
            old = _read_result(path)
            if old is None or old.state != "passed" or old.tree == self.tree:
                continue
            files = changed(old.tree, self.tree)
            if files and not any(reads(stage, file) for file in files):
                return self.keep(old)
        return None

    def junit(self, stage: Stage) -> Path:
        return self.folder / f"{stage.name}.xml"


def _read_result(path: Path) -> Result | None:
    with contextlib.suppress(FileNotFoundError):
        return Result(**json.loads(path.read_text()))
    return None


def changed_files(one: str, other: str) -> list[str]:
    """Names of the files that differ between two trees; none when git no longer knows a tree."""
    git = ["git", "-C", str(ROOT), "diff", "--name-only", "--no-renames", one, other]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if not done.returncode else []


def tree_hash(root: Path = ROOT) -> str:
    """The git tree of the working copy: what a commit of all files, ignored ones left out, has."""
    git = ["git", "-C", str(root)]
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / "index"
        own = subprocess.run(
            [*git, "rev-parse", "--path-format=absolute", "--git-path", "index"],
            capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
        if Path(own).exists():
            shutil.copy(own, index)  # spares reading files that did not change
        env = os.environ | {"GIT_INDEX_FILE": str(index)}
        subprocess.run([*git, "add", "--all"], env=env, check=True, capture_output=True)
        wrote = subprocess.run(
            [*git, "write-tree"], env=env, check=True, capture_output=True, text=True
        )
    return wrote.stdout.strip()


# --- one stage -----------------------------------------------------------------------------------
def run_stage(stage: Stage, results: Results, hang_s: float = STAGE_HANG_S) -> Result:
    """Run it and keep its result; its own output goes to standard output as it comes."""
    if why := unavailable(stage):
        return results.keep(Result(stage.name, results.tree, "unavailable", why=why))
    start = time.monotonic()
    result = _checks(results) if stage.kind == "none" else _tests(stage, results, hang_s)
    if tree_hash() != results.tree:
        result = replace(result, state="failed", why="files changed while it ran")
    return results.keep(replace(result, seconds=time.monotonic() - start))


def unavailable(stage: Stage) -> str:
    """Why this machine cannot run the stage; empty when it can."""
    if stage.kind == "gpu":
        see = "import sys, torch; sys.exit(not torch.cuda.is_available())"
        seen = subprocess.run([str(BIN / "python"), "-c", see], check=False, capture_output=True)
        return "torch sees no CUDA device" if seen.returncode else ""
    if stage.kind == "gpu_profile":
        stamp = GPU_PROFILE / ".moerl-stamp"
        whole = stamp.is_file() and stamp.read_text().startswith("gpu ")
        return "" if whole else "tools/setup.sh --gpu build/gpu-profile makes what it needs: 12 GB"
    if not stage.environment:
        return ""
    made = subprocess.run(
        ["tools/test_env.sh", stage.environment],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    lines = made.stderr.strip().splitlines() or [f"exit status {made.returncode}"]
    return lines[-1] if made.returncode else ""


def _checks(results: Results) -> Result:
    for words in ("ruff check .", "ruff format --check .", "mypy"):
        program, *arguments = words.split()
        if code := _run([str(BIN / program), *arguments], {}, STAGE_HANG_S):
            why = f"{words} ended with exit status {code}"
            return Result("checks", results.tree, "failed", why=why)
    return Result("checks", results.tree, "passed")


def _tests(stage: Stage, results: Results, hang_s: float) -> Result:
    junit = results.junit(stage)
    junit.parent.mkdir(parents=True, exist_ok=True)
    junit.unlink(missing_ok=True)
    command = [*pytest_command(stage), f"--junitxml={junit}", "-o", "junit_family=xunit1"]
    code = _run(command, _environment(stage), hang_s)
    if not junit.exists():
        why = f"pytest ended with exit status {code} and no report"
        return Result(stage.name, results.tree, "failed", why=why)
    result = read_junit(junit, Result(stage.name, results.tree, "failed" if code else "passed"))
    if not code and not result.passed:
        return replace(result, state="failed", why="every test was skipped")
    if code and not result.failed:
        return replace(result, why="no test" if code == NO_TESTS else f"exit status {code}")
    return result


def pytest_command(stage: Stage) -> list[str]:
    own = stage.environment and not stage.of_programs
    python = ROOT / "build" / stage.environment / "bin/python" if own else BIN / "python"
    command = [str(python), "-m", "pytest"]
    if own:
        command += ["-p", "no:cacheprovider"]
    if EXPRESSIONS[stage.kind]:
        command += ["-m", EXPRESSIONS[stage.kind]]
    if stage.workers > 1:
        command += [f"--numprocesses={stage.workers}", "--dist=loadfile"]
    return command + list(stage.paths)


def _environment(stage: Stage) -> dict[str, str]:
    """What the tests of a stage find in their environment, beyond what the caller has."""
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if stage.environment and not stage.of_programs:  # libraries that tools/test_env.sh unpacked
        quiet["LD_LIBRARY_PATH"] = str(ROOT / "build" / stage.environment / "lib/system")
    return quiet


def _run(command: list[str], environment: dict[str, str], hang_s: float) -> int:
    """The exit status; SIGINT at the deadline, so that fixtures end the processes they started."""
    # A job in the background of a shell ignores SIGINT, and so would all that it starts.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | environment) as child:
        try:
            return child.wait(max(hang_s, 1.0))
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as ended:
            if isinstance(ended, subprocess.TimeoutExpired):  # the terminal told it otherwise
                say(f"no end after {hang_s:.0f} s: interrupted")
                child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(60)
            child.kill()
            if isinstance(ended, KeyboardInterrupt):
                raise
            return 124


def read_junit(path: Path, result: Result) -> Result:
    """`result` with the counts, the reasons and the seconds of a report of pytest."""
    skipped: Counter[str] = Counter()
    files: dict[str, float] = {}
    passed = failed = 0
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        file = case.get("file", "")
        files[file] = files.get(file, 0.0) + float(case.get("time", "0"))
        skip = case.find("skipped")
        if skip is not None:
            skipped[skip.get("message", "")] += 1
        elif case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        else:
            passed += 1
    return replace(result, passed=passed, failed=failed, skipped=dict(skipped), files=files)


# --- what a person reads -------------------------------------------------------------------------
def say(line: str) -> None:
    print(f"[test] {line}", flush=True)


def table(results: Sequence[Result]) -> list[str]:
    """One line a stage, and below it the reasons of skips or of what is missing."""
    lines = [f"{'stage':12}{'state':13}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}"]
    for each in results:
        counts = (each.passed, each.failed, sum(each.skipped.values()), round(each.seconds))
        numbers = "{:8}{:8}{:9}{:9}".format(*counts)
        lines.append(f"{each.stage:12}{each.state:13}{numbers}")
        lines += [f"    {each.why}"] if each.why else []
        lines += [f"    {count} skipped: {why}" for why, count in sorted(each.skipped.items())]
    return lines


def area_seconds(results: Iterable[Result]) -> dict[str, float]:
    """Seconds of wall time per area: a stage's seconds, shared out as its tests' seconds are."""
    found = dict.fromkeys((area.name for area in AREAS), 0.0)
    for result in results:
        of_tests = sum(result.files.values())
        if not of_tests:
            found[CORE] += result.seconds
        for file, seconds in result.files.items():
            found[area_of(file)] += result.seconds * seconds / of_tests if of_tests else 0.0
    return found


def area_table(results: Sequence[Result]) -> list[str]:
    found = area_seconds(results)
    lines = [f"{'area':12}{'seconds':>9}{'allowance':>11}"]
    for area in AREAS:
        over = round(found[area.name]) - area.allowance_s
        note = f"   over its allowance by {over} s" if over > 0 else ""
        lines.append(f"{area.name:12}{round(found[area.name]):9}{area.allowance_s:11}{note}")
    files = Counter({name: s for each in results for name, s in each.files.items()})
    slowest = ", ".join(f"{Path(name).name} {s:.0f}" for name, s in files.most_common(8))
    return [*lines, f"slowest files, seconds: {slowest}"]


# --- the commands --------------------------------------------------------------------------------
def run_one(stage: Stage, results: Results, hang_s: float = STAGE_HANG_S) -> Result:
    say(f"{stage.name}: begins at {time.strftime('%H:%M:%S')}")
    result = run_stage(stage, results, hang_s)
    say(f"{stage.name}: {result.state}, {result.seconds:.0f} s {result.why}".rstrip())
    return result


def run_default(results: Results) -> int:
    """Always anew, to the first stage that fails."""
    start, done = time.monotonic(), []
    for stage in DEFAULT:
        done.append(run_one(stage, results, DEFAULT_HANG_S - (time.monotonic() - start)))
        if done[-1].state != "passed":
            return 1
    total = time.monotonic() - start
    for line in (*table(done), "", *area_table(done)):
        say(line)
    slower = "slower than promised: " if total > PROMISE_S else ""
    say(f"{slower}{total:.0f} s in all, {PROMISE_S} s are promised on two free cores")
    return 0


def run_full(results: Results) -> int:
    """Stages that are not green on this tree; then one table of all, and 0 if all are green."""
    kept = {s.name: results.of(s) or results.adopt(s, changed_files) for s in STAGES}
    missing = [stage for stage in STAGES if (old := kept[stage.name]) is None or not _green(old)]
    say(f"tree {results.tree}: {len(STAGES) - len(missing)} of {len(STAGES)} stages are green")
    for number, stage in enumerate(missing, 1):
        minutes = sum(each.estimate_s for each in missing[number - 1 :]) / 60
        say(f"stage {number} of {len(missing)}, about {minutes:.0f} min to the end of the last")
        kept[stage.name] = run_one(stage, results)
    done = [result for result in kept.values() if result is not None]
    for line in table(done):
        say(line)
    red = [each.stage for each in done if not _acceptable(each)]
    say(f"not green: {', '.join(red)}" if red else f"green on tree {results.tree}")
    return 1 if red else 0


def run_named(name: str, results: Results) -> int:
    """One stage, whatever its last result was."""
    result = run_one(next(stage for stage in STAGES if stage.name == name), results)
    for line in table([result]):
        say(line)
    return 0 if _acceptable(result) else 1


def _green(result: Result) -> bool:
    return result.state == "passed"


def _acceptable(result: Result) -> bool:
    """Green, or an optional stage that this machine cannot run."""
    optional = any(stage.optional for stage in STAGES if stage.name == result.stage)
    return _green(result) or (optional and result.state == "unavailable")


def listing(results: Results) -> list[str]:
    lines = [f"{'stage':12}{'estimate':>10}   {'on this tree':14}"]
    for stage in STAGES:
        old = results.of(stage)
        names = ", ".join(path.removesuffix(".py") for path in stage.paths)
        tests = f"{stage.kind} tests of {names}" if names else "ruff, mypy"
        optional = "optional: " if stage.optional else ""
        state = old.state if old else "-"
        lines.append(
            f"{stage.name:12}{stage.estimate_s / 60:6.0f} min   {state:14}{optional}{tests}"
        )
    return lines


def run_pytest(arguments: Sequence[str], *, full: bool) -> int:
    """The person's own arguments to one pytest, after the checks."""
    if _checks(Results("")).state != "passed":
        return 1
    cuda = not unavailable(next(stage for stage in STAGES if stage.kind == "gpu"))
    selection = EXPRESSIONS["default"] if not full else "" if cuda else "not gpu"
    command = [str(BIN / "python"), "-m", "pytest", "-m", selection, *arguments]
    return _run(command, _environment(STAGES[0]), STAGE_HANG_S if full else DEFAULT_HANG_S)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--stage", choices=[stage.name for stage in STAGES])
    asked, others = parser.parse_known_args(arguments)
    if others:
        return run_pytest(others, full=asked.full)
    results = Results(tree_hash())
    if asked.list:
        print("\n".join(listing(results)))
        return 0
    if asked.stage:
        return run_named(asked.stage, results)
    return run_full(results) if asked.full else run_default(results)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
