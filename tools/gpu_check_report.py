"""The findings of `tools/gpu-check`: classes, the JSON, and tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from tools.gpu_check_list import Check, Size

State = Literal["passed", "failed", "skipped", "not begun"]


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    value: float
    unit: str


@dataclass(slots=True)
class Result:
    """The outcome of one check."""

    name: str
    about: str
    state: State = "skipped"
    seconds: float = 0.0
    figures: list[Figure] = field(default_factory=list)
    reason: str = ""
    tail: str = ""  # last lines of the output of a check that failed


@dataclass(slots=True)
class Report:
    """The JSON."""

    size: Size
    double: bool
    command: str
    began: str  # UTC
    seconds: float = 0.0
    machine: dict[str, str] = field(default_factory=dict)
    checks: list[Result] = field(default_factory=list)
    log: list[str] = field(default_factory=list)  # output of pytest; in a file of its own

    def write(self, file: Path) -> None:
        """After each check, so that a machine that is taken away leaves the figures so far."""
        file.parent.mkdir(parents=True, exist_ok=True)
        found = asdict(self)
        file.with_suffix(".log").write_text("".join(found.pop("log")))
        file.write_text(json.dumps(found, indent=1) + "\n")

    def exit_status(self) -> int:
        """1: a check failed; 3: none failed, and time was over before all were begun."""
        states = {check.state for check in self.checks}
        return 1 if "failed" in states else 3 if "not begun" in states else 0


def list_checks(checks: Sequence[Check]) -> None:
    for check in checks:
        limit = f"{check.limit_s:5} s" if check.size == "loop" else check.size
        print(f"{check.name:20} {limit}  {check.about}")


def print_report(report: Report) -> None:
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
    if left := [check.name for check in report.checks if check.state == "not begun"]:
        print(f"not begun: {', '.join(left)}; go on with --from {left[0]}")


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
