"""`tools/gpu-check`: run checks of tools/gpu_check_list.py, print a table, write a JSON.

Each check is some tests of tests/gpu in a process of their own, so a fault of the device in one
leaves the others as they are.  Figures are properties that tests put into pytest's XML report.  On
the device double all run in one process, because it has no faults of a device and its start is the
longest part.

Rejected: a runner of its own (the tests of `tools/test --stage gpu` would be other code).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.gpu_check_list import CHECKS, Check, Size
from tools.gpu_check_report import Figure, Report, Result, list_checks, markdown, print_report
from tools.gpu_loop_list import LOOP
from tools.gpu_pack import pack, unpacked

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
PARTS = "MOERL_GPU_CHECK_PARTS"  # read by tests/gpu/conftest.py
# Seconds for all checks: a machine is lent for ten minutes a command, and for 15 in all.
BUDGETS_S: dict[Size, float] = {"parts": 540, "loop": 780, "full": math.inf}
_ON_CPU = 3  # as long as on a GPU, and engines on the double are on the CPU
_TAIL = 6000  # characters of a failed check's output in the JSON
_HELP = """\
  tools/gpu-check            everything: needs the environment of `tools/setup.sh --gpu`
  tools/gpu-check --parts    needs Python 3.11 or 3.12, torch with CUDA, gcc, and the wheels that
                             `--pack` put into build/gpu-check/wheels; no network, no SGLang, no
                             Transformer Engine, no Ray; ends after nine minutes
  tools/gpu-check --loop     engine and trainer together on one GPU, in 13 minutes: steps in the
                             order of what would be learned first, each with its own limit; needs
                             the environment of requirements/gpu.lock and no network.  A step that
                             does not fit is not begun: `--loop --from NAME` goes on with it
  tools/gpu-check --parts --double    the same on the device double: no GPU, tiny sizes, 45 s
  tools/gpu-check --loop --double     on the double, with engines on the CPU: seven minutes
  tools/gpu-check --colocated    engine and trainer take turns with one GPU; MOERL_GPU_CHECK_MODEL
                             names a folder of OLMoE-1B-7B, else a tiny model is trained
  tools/gpu-check --pack     on a machine with a package index, before the folder is copied

A check that fails leaves the others as they are.  The exit status is 1 if one failed, and 3 if none
failed and time was over before all were begun.  Every figure is in build/gpu-check.json, or in
build/gpu-loop.json, with hardware, versions and command; a file beside it has the output.
`--markdown` prints that file as tables for README.md.
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One test in pytest's report."""

    name: str  # function, without its case
    seconds: float
    figures: tuple[Figure, ...]
    failure: str
    skipped: str


def main(words: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(words)
    size: Size = "loop" if asked.loop else "parts" if asked.parts else "full"
    if asked.list:
        list_checks(chosen([], size))
        return 0
    if asked.pack:
        num_bytes = pack(asked.python)
        print(f"gpu-check: {num_bytes / 1e6:.1f} MB of wheels for Python {asked.python}")
        return 0
    if asked.markdown:
        print(markdown(json.loads(Path(asked.markdown).read_text())))
        return 0
    names = [*asked.only, *(["colocated"] if asked.colocated else [])]
    checks = chosen(names, size, asked.begin)
    file = asked.json or default_file(size, checks)
    budget_s = asked.budget or BUDGETS_S[size]
    report = run(checks, file, size, double=asked.double, budget_s=budget_s)
    print_report(report)
    print(f"written: {file}")
    return report.exit_status()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/gpu-check",
        description="What this machine's GPU does with moerl: right or wrong, how fast.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, flag = parser.add_argument, "store_true"
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--parts", action=flag, help="only what torch is enough for")
    sizes.add_argument("--loop", action=flag, help="engine and trainer together on one GPU")
    add("--double", action=flag, help="on the device double of tests/double")
    add("--only", action="append", default=[], metavar="NAME", help="repeatable")
    add("--from", dest="begin", default="", metavar="NAME", help="this check and all after it")
    add("--budget", type=float, metavar="SECONDS", help="for all checks")
    add("--colocated", action=flag, help="the run of engine and trainer in turns")
    add("--list", action=flag, help="names of checks, and end")
    add("--json", type=Path, help="file of the figures")
    add("--pack", action=flag, help="collect the wheels of --parts, and end")
    add("--python", default="3.12", help="of the machine that is packed for")
    add("--markdown", metavar="JSON", help="print a report's tables, and end")
    return parser


def chosen(names: Sequence[str], size: Size, begin: str = "") -> list[Check]:
    """Checks of these names, or all; from `begin` on.  SystemExit for an unknown name."""
    listed = LOOP if size == "loop" else CHECKS
    known = {check.name: check for check in listed if size in ("full", check.size)}
    if unknown := [name for name in (*names, begin) if name and name not in known]:
        raise SystemExit(f"gpu-check: no check {unknown[0]!r}; there are {', '.join(known)}")
    found = [known[name] for name in names] or list(known.values())
    return found[[check.name for check in found].index(begin) if begin else 0 :]


def default_file(size: Size, checks: Sequence[Check]) -> Path:
    """A part of the loop has a file of its own: it overwrites nothing that a visit has found."""
    if size != "loop":
        return BUILD / "gpu-check.json"
    return BUILD / f"gpu-loop{'' if checks[0] == LOOP[0] else f'-{checks[0].name}'}.json"


def run(
    checks: Sequence[Check], file: Path, size: Size, *, double: bool, budget_s: float = math.inf
) -> Report:
    """Run them in order; `file` gets the JSON after each.  A check that does not fit into the
    budget is not begun.
    """
    command = " ".join(["tools/gpu-check", *sys.argv[1:]])
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    report = Report(size, double, command, began)
    begin = time.monotonic()
    environment = _environment(parts=size == "parts")
    if double:
        report.checks = _on_double(checks, environment, report)
    else:
        for check in checks:
            left_s = budget_s - (time.monotonic() - begin)
            report.checks.append(_one(check, left_s, environment, report))
            report.seconds = time.monotonic() - begin
            report.write(file)
    report.seconds = time.monotonic() - begin
    report.write(file)
    return report


def _one(check: Check, left_s: float, environment: dict[str, str], report: Report) -> Result:
    """In a process of its own."""
    if left_s < check.least_s:
        why = f"{max(0, left_s):.0f} s are left, it takes {check.least_s}"
        print(f"{check.name}: not begun, {why}", flush=True)
        return Result(check.name, check.about, "not begun", reason=why)
    print(f"{check.name}: {check.about} ..", flush=True)
    begin, known = time.monotonic(), len(report.log)
    cases, why = _pytest(check.nodes(), environment, min(check.limit_s, left_s), report)
    result = _judged(check, cases, why)
    result.seconds = time.monotonic() - begin
    if result.state == "failed":
        result.tail = "".join(report.log[known:])[-_TAIL:]
    print(f"{check.name}: {result.state} in {result.seconds:.0f} s {result.reason}", flush=True)
    return result


def _on_double(
    checks: Sequence[Check], environment: dict[str, str], report: Report
) -> list[Result]:
    """All in one process."""
    nodes = {check.name: check.nodes(double=True) for check in checks}
    every = [node for found in nodes.values() for node in found]
    limit_s = _ON_CPU * sum(check.limit_s for check in checks)
    print(f"{len(checks)} checks on the double, in one process ..", flush=True)
    cases, why = _pytest(every, environment, limit_s, report, "-p", "tests.double.plugin")
    results = []
    for check in checks:
        if not nodes[check.name]:
            why_not = f"not on the double: {check.absent}"
            results.append(Result(check.name, check.about, reason=why_not))
            continue
        wanted = {node.rpartition("::")[2] for node in nodes[check.name]}
        mine = [case for case in cases if _belongs(case, wanted)]
        results.append(_judged(check, mine, why))
    return results


def _belongs(case: Case, wanted: set[str]) -> bool:
    return case.name in wanted or case.name.partition("[")[0] in wanted


def _environment(*, parts: bool) -> dict[str, str]:
    site = unpacked() if parts else None
    if site is None and importlib.util.find_spec("pytest") is None:
        raise SystemExit("gpu-check: this environment lacks pytest: pip install pytest")
    paths = [str(ROOT), *([str(site)] if site else [])]
    sys.path += paths[1:]  # the table is printed with a packed package
    own = {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONWARNINGS": "ignore",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return os.environ | own | ({PARTS: "1"} if parts else {})


def _pytest(
    nodes: Sequence[str],
    environment: dict[str, str],
    limit_s: float,
    report: Report,
    *words: str,
) -> tuple[list[Case], str]:
    """Cases of its report, and why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
        command += [*words, f"--junitxml={file}", *nodes]
        code, output = call(command, environment, limit_s)
        report.log.append(output)
        if code is None:
            return [], f"not done after {limit_s:.0f} s"
        why = "" if code in (0, 1) else _why(code, output)  # 1: a test failed
        if not file.exists():
            return [], why or _why(code, output)
        root = xml.parse(file).getroot()
    for found in root.iter("property"):
        if found.get("name") == "machine":
            report.machine = json.loads(found.get("value") or "{}")
    return [_case(node) for node in root.iter("testcase")], why


def call(
    command: Sequence[str], environment: dict[str, str], limit_s: float
) -> tuple[int | None, str]:
    """(exit status, output); no status after the limit.

    Then all processes below it are ended too: an engine would keep the GPU from the next check.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        code: int | None = None
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            end_tree(child)
        output.seek(0)
        return code, output.read()


def end_tree(child: subprocess.Popen[bytes]) -> None:
    import psutil

    parent = psutil.Process(child.pid)
    for process in (parent, *parent.children(recursive=True)):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    child.wait()


def _why(code: int, output: str) -> str:
    """The error that pytest stopped for, else its last line."""
    lines = output.strip().splitlines()
    told = [line for line in lines if line.startswith(("E  ", "ERROR"))] or lines[-1:]
    return f"exit status {code}: {''.join(told[:1]).strip()[:300]}"


def _case(node: xml.Element) -> Case:
    figures = [
        Figure(*json.loads(found.get("value") or "[]"))
        for found in node.iter("property")
        if found.get("name") == "figure"
    ]
    wrong = [part for kind in ("failure", "error") for part in node.iter(kind)]
    skipped = [part.get("message") or "skipped" for part in node.iter("skipped")]
    return Case(
        node.get("name") or "",
        float(node.get("time") or 0),
        tuple(figures),
        _first_line(wrong[0].get("message") or wrong[0].text or "failed") if wrong else "",
        skipped[0] if skipped else "",
    )


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "failed")[:300]


def _judged(check: Check, cases: Sequence[Case], why: str) -> Result:
    result = Result(check.name, check.about, "failed", sum(case.seconds for case in cases))
    result.figures = [figure for case in cases for figure in case.figures]
    failed = [f"{case.name}: {case.failure}" for case in cases if case.failure]
    ran = [case for case in cases if not case.skipped]
    if failed or not cases:
        result.reason = failed[0] if failed else why or "pytest found none of its tests"
    elif not ran:
        result.state, result.reason = "skipped", cases[0].skipped
    else:
        result.state = "passed"
    return result


if __name__ == "__main__":
    sys.exit(main())
