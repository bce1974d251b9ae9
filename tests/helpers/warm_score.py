"""`moerl.audit.mismatch_command.score` with ranks forked from a warm process.

A test that scores with many versions of the weights would wait for as many starts of torchrun.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moerl.audit.mismatch_command import make_job
from moerl.audit.score_job import ScoreJob
from moerl.config.schema import Precision
from moerl.core.serialization import encode_value
from moerl.core.types import Rollout
from moerl.launch.run_context import RunContext
from tests.helpers.rank_server import run_ranks


def score(
    plan: RunContext,
    rollouts: Sequence[Rollout],
    folder: Path,
    *,
    variants: Sequence[str],
    dtypes: Sequence[Precision],
    model: Path,
    version: str = "",
) -> ScoreJob:
    """Score `rollouts` (or, with `version`, their segments of it) as the run's trainer would."""
    (job,) = score_all(
        plan, rollouts, folder, variants=variants, dtypes=dtypes, weights=[(model, version)]
    )
    return job


def score_all(
    plan: RunContext,
    rollouts: Sequence[Rollout],
    folder: Path,
    *,
    variants: Sequence[str],
    dtypes: Sequence[Precision],
    weights: Sequence[tuple[Path, str]],
) -> list[ScoreJob]:
    """`score` with each (model, version) in one start of the ranks."""
    records = folder / "rollouts.msgpack"
    records.write_bytes(encode_value(list(rollouts)))
    jobs = [
        make_job(
            plan,
            records,
            folder / f"scores-{number}.npz",
            variants=variants,
            dtypes=dtypes,
            model=model,
            version=version,
        )
        for number, (model, version) in enumerate(weights)
    ]
    files = [folder / f"job-{number}.json" for number in range(len(jobs))]
    for job, file in zip(jobs, files, strict=True):
        job.save(file)
    arguments = ["-m", "moerl.audit.score_ranks", "--job", *map(str, files)]
    run_ranks(plan.config.trainer.parallel.dp, arguments, timeout_s=300.0)
    return jobs


def difference(path: Path) -> np.ndarray:
    scores = np.load(path)
    return np.abs(scores["fp32/both"] - scores["engine"])
