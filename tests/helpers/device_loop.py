"""Whole runs of `tools/gpu-check --loop`: on one GPU; with the double, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from moerl.core.types import Array
from tests.helpers.device_figures import on_double
from tests.helpers.train_runs import Run, start

FOLDER = Path(__file__).resolve().parents[2] / "build/gpu-loop"  # records and models of the steps
# Without Transformer Engine a trainer takes local layers by its setting alone, never by itself.
LAYERS = "auto" if find_spec("transformer_engine") is not None else "local"
ON_GPU = ("cluster=gpu1", f"trainer.transformer_impl={LAYERS}")
PLACE = ("cluster=laptop",) if on_double() else ON_GPU
QUICKSTART_STEPS = 12 if on_double() else 40
# As few tokens as show the path: a step of the loop has two minutes.
SHORT = (
    "rollout.groups_per_step=8",
    "rollout.group_size=4",
    "observe.engine_alone_s=0",
    "evaluation.every=0",
)
_LIMIT_S = 600.0
_LOG_LINES = 30
Told = list[tuple[str, float, str]]  # figures: name, value, unit


def trained(folder: Path, recipe: str, steps: int, *settings: str) -> Run:
    """A run that ended well: all of its steps, each with replayed records, and its weights served.

    An AssertionError has the run's output and the ends of its processes' logs.
    """
    run = start(folder, recipe, *PLACE, f"run.steps={steps}", *settings, name="x")
    assert run.finish(_LIMIT_S) == 0, ends(run)
    rows = _trained_rows(run)
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


def _trained_rows(run: Run) -> list[dict[str, Any]]:
    return [row for row in run.rows() if "loss/total" in row]


def said(run: Run) -> Told:
    """Figures of a run: after its first step, which compiles."""
    rows = _trained_rows(run)[1:]
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
