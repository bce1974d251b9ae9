"""Where the seconds before the first step go, of a start and of a resume.

    python bench/startup.py [--rounds 3] [--preset quickstart] [--json FILE] [SETTING=VALUE ...]

Each round trains one step from nothing, then resumes that run for one more.  Phases, by the lines
that the command prints, in seconds since the one before:

    command    Python, its imports, the settings and their checks, the model folder
    ray        its daemons
    servers    engine host and its SGLang server, and the trainer ranks beside them
    first step the first batch is generated, trained and reported
    end        publish, checkpoint, model folder, report, and the end of every process

Also the seconds that fresh interpreters take to import what the processes need, one after the
other, alone on the machine: what of the start no order of starts can hide.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from figures import ROOT, Figure, report, result

LIMIT_S = 600.0
PHASES = ("command", "ray", "servers", "first step", "end")
IMPORTS = ("torch", "ray", "moerl.launch.train", "moerl.trainer.main", "moerl.engine.host.host")
Phases = dict[str, float]


def phases(words: Sequence[str]) -> Phases:
    """Run a command of moerl; seconds of each phase."""
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "moerl", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines = [(line, time.monotonic()) for line in process.stdout]
    status, end = process.wait(LIMIT_S), time.monotonic()

    def last(mark: str) -> float:
        found = [when for line, when in lines if mark in line]
        if status or not found:
            text = "".join(line for line, _ in lines)
            sys.exit(f"moerl {' '.join(words)} did not do one step: {text[-3000:]}")
        return found[-1]

    # of engines and trainer, the last one that is ready
    times = [
        begin,
        last("waiting for ray"),
        last("ray ready"),
        last(" ready after "),
        last("step "),
    ]
    gaps = zip(times, [*times[1:], end], strict=True)
    return dict(zip(PHASES, [after - before for before, after in gaps], strict=True))


def imports() -> dict[str, float]:
    """Seconds of a fresh interpreter that imports one module, its files in the page cache."""
    found = {}
    for name in IMPORTS:
        words = [sys.executable, "-c", f"import {name}"]
        subprocess.run(words, cwd=ROOT, check=True, timeout=LIMIT_S)
        begin = time.monotonic()
        subprocess.run(words, cwd=ROOT, check=True, timeout=LIMIT_S)
        found[name] = time.monotonic() - begin
    return found


def play(options: argparse.Namespace) -> dict[str, list[Phases]]:
    found: dict[str, list[Phases]] = {"start": [], "resume": []}
    for number in range(options.rounds):
        name = f"startup-{number}"
        shutil.rmtree(ROOT / "runs" / name, ignore_errors=True)
        settings = ["observe.engine_alone_s=0", "checkpoint.every=1", *options.setting]
        first = ["train", options.preset, *settings, "run.steps=1", "--run", name]
        found["start"].append(phases(first))
        found["resume"].append(phases(["train", "--resume", name, "run.steps=2"]))
        shutil.rmtree(ROOT / "runs" / name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("setting", nargs="*", metavar="SETTING=VALUE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--preset", default="quickstart")
    parser.add_argument("--json", type=Path, help="write the figures for tools/results")
    options = parser.parse_args()
    figures = []
    for kind, rounds in play(options).items():
        for name in PHASES:
            seconds = [one[name] for one in rounds]
            low, high, value = min(seconds), max(seconds), statistics.median(seconds)
            figures.append(Figure(f"{kind}: {name}, median and range", value, ".1f", " s"))
            print(f"{kind:6} {name:10} {value:6.1f} s ({low:.1f} .. {high:.1f})")
        to_step = [sum(list(one.values())[:-1]) for one in rounds]
        figures.append(Figure(f"{kind}: until the first step is done", statistics.median(to_step)))
    found = imports()
    for name, took in found.items():
        print(f"import {name:20} {took:6.1f} s")
    report(result(figures, {"imports_s": found}), options.json)


if __name__ == "__main__":
    main()
