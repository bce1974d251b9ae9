"""`tools/gpu-check`: run the checks of tools/gpu_check_list.py, print a table, write a JSON.

Each check is some tests of tests/gpu in a process of their own, so a fault of the device in one
leaves the others as they are.  Figures are properties that tests put into pytest's XML report.  On
the device double all run in one process, because it has no faults of a device and its start is the
longest part.

Rejected: a runner of its own (the tests of `tools/test --stage gpu` would be other code).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from tools.gpu_check_list import CHECKS, Check
from tools.gpu_pack import pack, unpacked

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "build" / "gpu-check.json"
PARTS = "MOERL_GPU_CHECK_PARTS"  # read by tests/gpu/conftest.py
_PARTS_S = 540  # all checks of --parts; machines are lent for ten minutes
_LEAST_S = 20  # a check that has less is not begun
_HELP = """\
  tools/gpu-check            everything: needs the environment of `tools/setup.sh --gpu`
  tools/gpu-check --parts    needs Python 3.11 or 3.12, torch with CUDA, gcc, and the wheels that
                             `--pack` put into build/gpu-check/wheels; no network, no SGLang, no
                             Transformer Engine, no Ray; ends after nine minutes
  tools/gpu-check --parts --double    the same on the device double: no GPU, tiny sizes, 45 s
  tools/gpu-check --colocated    engine and trainer take turns with one GPU; MOERL_GPU_CHECK_MODEL
                             names a folder of OLMoE-1B-7B, else a tiny model is trained
  tools/gpu-check --pack     on a machine with a package index, before the folder is copied

A check that fails leaves the others as they are; the exit status is 1 if one failed.  Every figure
is in build/gpu-check.json with hardware, versions and command; `--markdown` prints that file as
tables for README.md.
"""


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    value: float
    unit: str


@dataclass(slots=True)
class Result:
    """What came of one check."""

    name: str
    about: str
    state: Literal["passed", "failed", "skipped"] = "skipped"
    seconds: float = 0.0
    figures: list[Figure] = field(default_factory=list)
    reason: str = ""


@dataclass(slots=True)
class Report:
    """The JSON."""

    size: str  # parts | full
    double: bool
    command: str
    began: str  # UTC
    seconds: float = 0.0
    machine: dict[str, str] = field(default_factory=dict)
    checks: list[Result] = field(default_factory=list)
    log: list[str] = field(default_factory=list)  # what pytest printed; in a file of its own


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
    if asked.list:
        _list(asked.parts)
        return 0
    if asked.pack:
        size = pack(asked.python)
        print(f"gpu-check: {size / 1e6:.1f} MB of wheels for Python {asked.python}")
        return 0
    if asked.markdown:
        print(markdown(json.loads(Path(asked.markdown).read_text())))
        return 0
    names = [*asked.only, *(["colocated"] if asked.colocated else [])]
    checks = chosen(names, parts=asked.parts)
    report = run(checks, asked.json, parts=asked.parts, double=asked.double)
    _print(report)
    print(f"written: {asked.json}")
    return int(any(check.state == "failed" for check in report.checks))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/gpu-check",
        description="What this machine's GPU does with moerl: right or wrong, how fast.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", action="store_true", help="only what torch is enough for")
    parser.add_argument(
        "--double", action="store_true", help="on the device double of tests/double"
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="repeatable")
    parser.add_argument(
        "--colocated", action="store_true", help="the run of engine and trainer in turns"
    )
    parser.add_argument("--list", action="store_true", help="names of checks, and end")
    parser.add_argument("--json", type=Path, default=REPORT, help="file of the figures")
    parser.add_argument(
        "--pack", action="store_true", help="collect the wheels of --parts, and end"
    )
    parser.add_argument("--python", default="3.12", help="of the machine that is packed for")
    parser.add_argument("--markdown", metavar="JSON", help="print a report's tables, and end")
    return parser


def chosen(names: Sequence[str], *, parts: bool) -> list[Check]:
    """Checks of these names, or all.  SystemExit for an unknown name."""
    known = {check.name: check for check in CHECKS if check.parts or not parts}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"gpu-check: no check {unknown[0]!r}; there are {', '.join(known)}")
    return [known[name] for name in names] or list(known.values())


def run(checks: Sequence[Check], file: Path, *, parts: bool, double: bool) -> Report:
    """Run them in order; `file` gets the JSON.  Checks of --parts end after `_PARTS_S` seconds."""
    command = " ".join(["tools/gpu-check", *sys.argv[1:]])
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    report = Report("parts" if parts else "full", double, command, began)
    begin = time.monotonic()
    end = begin + _PARTS_S if parts else math.inf
    environment = _environment(parts=parts)
    if double:
        report.checks = _on_double(checks, environment, report)
    else:
        for check in checks:
            print(f"{check.name}: {check.about} ..", flush=True)
            limit_s = min(check.limit_s, end - time.monotonic())
            if limit_s < _LEAST_S:
                why = f"{_PARTS_S} s of --parts are over"
                report.checks.append(Result(check.name, check.about, reason=why))
                continue
            cases, why = _pytest(check.nodes(), environment, limit_s, report)
            report.checks.append(_judged(check, cases, why))
            report.seconds = time.monotonic() - begin
            _write(report, file)
    report.seconds = time.monotonic() - begin
    _write(report, file)
    return report


def _write(report: Report, file: Path) -> None:
    """After each check, so that a machine that is taken away leaves what was measured."""
    file.parent.mkdir(parents=True, exist_ok=True)
    found = asdict(report)
    file.with_suffix(".log").write_text("".join(found.pop("log")))
    file.write_text(json.dumps(found, indent=1) + "\n")


def _on_double(
    checks: Sequence[Check], environment: dict[str, str], report: Report
) -> list[Result]:
    """All in one process."""
    nodes = {check.name: check.nodes(double=True) for check in checks}
    every = [node for found in nodes.values() for node in found]
    limit_s = sum(check.limit_s for check in checks)
    print(f"{len(checks)} checks on the double, in one process ..", flush=True)
    cases, why = _pytest(every, environment, limit_s, report, "-p", "tests.double.plugin")
    results = []
    for check in checks:
        if not nodes[check.name]:
            results.append(Result(check.name, check.about, reason="the double cannot do it"))
            continue
        wanted = {node.rpartition("::")[2] for node in nodes[check.name]}
        mine = [case for case in cases if _belongs(case, wanted)]
        results.append(_judged(check, mine, why))
    return results


def _belongs(case: Case, wanted: set[str]) -> bool:
    return case.name in wanted or case.name.partition("[")[0] in wanted


def _environment(*, parts: bool) -> dict[str, str]:
    site = unpacked() if parts else None
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
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True,
                timeout=limit_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            report.log.append((late.stdout or b"").decode(errors="replace"))
            return [], f"not done after {limit_s:.0f} s"
        report.log += [done.stdout, done.stderr]
        why = "" if done.returncode in (0, 1) else _why(done)  # 1: a test failed
        if not file.exists():
            return [], why or _why(done)
        root = xml.parse(file).getroot()
    for found in root.iter("property"):
        if found.get("name") == "machine":
            report.machine = json.loads(found.get("value") or "{}")
    return [_case(node) for node in root.iter("testcase")], why


def _why(done: subprocess.CompletedProcess[str]) -> str:
    """The error that pytest stopped for, else its last line."""
    lines = (done.stdout + done.stderr).strip().splitlines()
    told = [line for line in lines if line.startswith(("E  ", "ERROR"))] or lines[-1:]
    return f"exit status {done.returncode}: {''.join(told[:1]).strip()[:300]}"


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


# --- what is printed ------------------------------------------------------------------------------
def _list(parts: bool) -> None:
    for check in chosen([], parts=parts):
        size = "parts" if check.parts else "full"
        print(f"{check.name:14} {size}  {check.about}")


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"gpu-check, {report.size}{', on the double' if report.double else ''}"
    table = Table(title=title, caption=", ".join(f"{k} {v}" for k, v in report.machine.items()))
    for column in ("check", "result", "s", "figures, or why"):
        table.add_column(column, justify="right" if column == "s" else "left")
    for check in report.checks:
        told = [_told(figure) for figure in check.figures]
        lines = [check.reason] if check.reason else told
        table.add_row(check.name, check.state, f"{check.seconds:.1f}", "\n".join(lines))
    Console().print(table)


def _told(figure: Figure) -> str:
    return f"{figure.name}: {figure.value:.4g} {figure.unit}"


def markdown(report: dict[str, object]) -> str:
    """Tables of a JSON report: the machine, then a row per figure."""
    machine, checks = report["machine"], report["checks"]
    assert isinstance(machine, dict)
    assert isinstance(checks, list)
    lines = [f"`{report['command']}`, {report['began']}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in machine.items()]
    lines += ["", "| check | result | figure | value | unit |", "|---|---|---|---|---|"]
    for check in checks:
        head = f"| {check['name']} | {check['state']} |"
        rows = [f" {f['name']} | {f['value']:.4g} | {f['unit']} |" for f in check["figures"]]
        lines += [head + row for row in rows or [f" {check['reason']} | | |"]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
