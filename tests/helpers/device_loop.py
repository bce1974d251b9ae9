"""Whole runs of `tools/gpu-check --loop`: on one GPU; with the double, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from moerl.core.types import Array
from tests.helpers.device_engine import LAYERS
from tests.helpers.device_figures import on_double
from tests.helpers.tiny_families import RECIPE
from tests.helpers.train_runs import SOME_REWARD, Run, start

FOLDER = Path(__file__).resolve().parents[2] / "build/gpu-loop"  # records and models of the steps
ON_GPU = ("cluster=gpu1", f"trainer.transformer_impl={LAYERS}")
PLACE = ("cluster=laptop",) if on_double() else ON_GPU
# As few tokens as show the path: a step of the loop has two minutes.
SHORT = (
    "rollout.groups_per_step=8",
    "rollout.group_size=4",
    "observe.engine_alone_s=0",
    "evaluation.every=0",
)
_TURNS = ("cluster.colocated=turns", "rollout.in_flight_mode=retract")
_WIDE = ("rollout.groups_per_step=16", "sampling.max_new_tokens=64")
_OFTEN = ("checkpoint.every=2", "supervision.backoff_s=0.1", "supervision.window_s=1")
# name: recipe, steps on a GPU and beside the double, settings
RUNS: dict[str, tuple[str, int, int, tuple[str, ...]]] = {
    "quickstart": ("quickstart", 40, 12, ()),
    "shm": (RECIPE, 4, 4, ("sync.transport=shm", *SHORT)),
    "cuda_ipc": (RECIPE, 4, 4, ("sync.transport=cuda_ipc", *SHORT)),
    "turns": (RECIPE, 8, 4, (*_TURNS, *SHORT)),
    "shared": (RECIPE, 8, 4, SHORT),
    "401m": (
        RECIPE, 10, 3,
        ("model.tiny.enabled=false", SOME_REWARD, *SHORT, *(() if on_double() else _WIDE)),
    ),
    "lora": ("quickstart-lora", 4, 3, SHORT),
    "kills": (RECIPE, 12, 12, (*SHORT, *_OFTEN)),
}  # fmt: skip
_LIMIT_S = 600.0
_LOG_LINES = 30
Told = list[tuple[str, float, str]]  # figures: name, value, unit


def begun(folder: Path, name: str, *more: str) -> Run:
    recipe, _, _, settings = RUNS[name]
    return start(folder, recipe, *PLACE, f"run.steps={steps_of(name)}", *settings, *more, name=name)


def steps_of(name: str) -> int:
    _, on_gpu, on_cpu, _ = RUNS[name]
    return on_cpu if on_double() else on_gpu


def trained(folder: Path, name: str, *more: str) -> Run:
    """A run that ended well: all of its steps, each with replayed records, and its weights served.

    An AssertionError has the run's output and the ends of its processes' logs.
    """
    run, steps = begun(folder, name, *more), steps_of(name)
    assert run.finish(_LIMIT_S) == 0, ends(run)
    rows = trained_rows(run)
    assert [row["step"] for row in rows] == list(range(steps)), ends(run)
    assert all(row["routing/replay_cover_frac"] == row["keep/cover_frac"] == 1.0 for row in rows)
    assert any("async/sync_verify_s" in row for row in rows), "no digest was compared"
    for name in ("async/sync_engines_behind", "async/sync_resent_buckets"):
        assert max(row.get(name, 0) for row in rows) == 0, name
    return run


def ends(run: Run) -> str:
    """The run's output, and the last lines of each log."""
    lines = [run.text()[-4000:]]
    for log in sorted(run.dir.logs.glob("*.log")):
        last = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        lines += [f"--- {log.name}", *last]
    return "\n".join(lines)


def trained_rows(run: Run) -> list[dict[str, Any]]:
    return [row for row in run.rows() if "loss/total" in row]


def said(run: Run) -> Told:
    """Figures of a run: after its first step, which compiles."""
    rows = trained_rows(run)[1:]
    of = lambda name: median(row[name] for row in rows if name in row)  # noqa: E731
    verified = [row for row in rows if "async/sync_verify_s" in row]
    return [
        ("step", of("perf/step_s"), "s"),
        ("trained tokens", of("perf/train_tokens_per_s"), "tokens/s"),
        ("versions with equal digests", float(len(verified)), "versions"),
        ("transfer of a version", of("async/sync_transfer_s"), "s"),
        ("pause of a commit", of("async/sync_commit_s"), "s"),
        ("k3 of trainer and engine", of("mismatch/k3"), "nats"),
        ("largest abs(d)", max(row["mismatch/abs_dlogp_max"] for row in rows), "nats"),
    ]


def rise(rows: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Mean reward of the first and of the last quarter of the steps."""
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    quarter = max(1, len(rewards) // 4)
    return fmean(rewards[:quarter]), fmean(rewards[-quarter:])


def k3(gap: Array) -> float:
    """Mean of exp(d) - 1 - d, d = trainer - engine."""
    d = gap.astype(np.float64)
    return float((np.exp(d) - 1 - d).mean())
