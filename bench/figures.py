"""Figures of the benches, in one form: ratios with intervals, machine and commit, as a JSON file.

`tools/results` makes the table in README.md of such files in docs/results.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
DRAWS = 4000


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table."""

    what: str
    value: float
    form: str = ".2f"  # of value, low and high, as in `format`
    unit: str = ""
    low: float | None = None  # interval of the value
    high: float | None = None
    level: int = 95  # of the interval, in %
    rounds: int = 1
    aim: float | None = None  # the value should be at least this
    at_most: bool = False  # the value should be at most `aim`
    why: str = ""  # why it misses its aim

    @property
    def is_met(self) -> bool:
        if self.aim is None:
            return True
        return self.value <= self.aim if self.at_most else self.value >= self.aim

    def __str__(self) -> str:
        text = format(self.value, self.form) + self.unit
        if self.low is not None and self.high is not None:
            ends = f"{self.low:{self.form}} .. {self.high:{self.form}}"
            text += f" ({self.level} % interval {ends}, {self.rounds} rounds)"
        if self.aim is not None:
            most = "at most " if self.at_most else ""
            text += f"; aim {most}{self.aim:g}: {'met' if self.is_met else 'missed'}"
        return f"{text}, {self.why}" if self.why and not self.is_met else text


@dataclass(frozen=True, slots=True)
class Result:
    """What one run of a bench measured."""

    command: str
    machine: str
    figures: tuple[Figure, ...]
    details: dict[str, Any] = field(default_factory=dict)  # what else it measured


def of_ratios(
    what: str, ratios: Sequence[float], aim: float | None = None, *, at_most: bool = False
) -> Figure:
    """Median of the ratios of interleaved rounds, and its 95 % interval by bootstrap."""
    rng = np.random.default_rng(1)
    medians = np.median(rng.choice(ratios, (DRAWS, len(ratios))), axis=1)
    low, high = map(float, np.percentile(medians, [2.5, 97.5]))
    figure = Figure(what, statistics.median(ratios), ".3f", low=low, high=high, rounds=len(ratios))
    return replace(figure, aim=aim, at_most=at_most)


def result(figures: Sequence[Figure], details: dict[str, Any] | None = None) -> Result:
    """The result of this process's bench, with its command and this machine."""
    script = Path(sys.argv[0]).resolve().relative_to(ROOT)
    command = shlex.join(["python", str(script), *_shown(sys.argv[1:])])
    return Result(command, machine(), tuple(figures), details or {})


def _shown(arguments: Sequence[str]) -> list[str]:
    """Without `--json FILE`, which changes no figure."""
    if "--json" not in arguments:
        return list(arguments)
    at = arguments.index("--json")
    return [*arguments[:at], *arguments[at + 2 :]]


def report(found: Result, path: Path | None) -> None:
    """Print the figures, machine and commit; write them to a file if one is given."""
    for figure in found.figures:
        print(f"{figure.what}: {figure}")
    print(found.machine, flush=True)
    if path is not None:
        path.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> Result:
    """A result that `report` wrote."""
    found = json.loads(path.read_text(encoding="utf-8"))
    figures = tuple(Figure(**figure) for figure in found.pop("figures"))
    return Result(figures=figures, **found)


def machine() -> str:
    """Processor, cores, load and commit."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    load_1, load_5, _ = os.getloadavg()
    cores = os.cpu_count()
    return f"{platform.machine()}, {cores} cores, load {load_1:.1f} ({load_5:.1f}), commit {commit}"
