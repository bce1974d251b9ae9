"""Settings of the shortest runs with agents, and what must be true of such a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moerl.core.types import Rollout
from tests.helpers.documented_metrics import undocumented
from tests.helpers.train_runs import Run, check_deletion
from tests.helpers.warm_score import score_all

LAG_0 = "mismatch/abs_dlogp_max/lag_0"
SETTINGS = [
    "rollout.groups_per_step=2",
    "rollout.group_size=2",
    "rollout.max_groups_in_flight=2",
    "rollout.buffer_depth=1",
    "checkpoint.every=0",
    "replay.probe=1",
    "observe.engine_alone_s=0",
    "trainer.optimizer.warmup_steps=0",
]
ROOT = Path(__file__).resolve().parents[2]
METRICS = (ROOT / "docs/metrics.md").read_text()


def check_agent_run(run: Run, steps: int) -> None:
    """Every step is there, exact, and made of what the program asked for."""
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(steps))
    assert not undocumented((name for row in rows for name in row if "/" in name), METRICS)
    gaps = [row[LAG_0] for row in rows if LAG_0 in row]
    assert gaps
    assert max(gaps) <= 5e-5
    assert sum(row["agent/turns"] for row in rows if "agent/turns" in row) >= 4 * steps
    groups = [group for _, group in run.trained.groups(rows)]
    assert len({group.group_id for group in groups}) == len(groups) == 2 * steps
    ends = [len(node.rollout.ends) for g in groups for e in g.episodes for node in e.turns]
    assert max(ends) > 1, "turns of one conversation are one row"
    check_deletion(run, in_flight=16)


def check_scores(run: Run, folder: Path, rows: list[Rollout]) -> None:
    """The trainer with a version's saved weights gives what the engine recorded under it."""
    version = max(rows, key=lambda row: (row.oldest.step < 2, row.num_sampled)).oldest
    own, other = (run.dir.versions / f"0.{step}" for step in (version.step, version.step + 1))
    jobs = score_all(
        run.plan(),
        [row for row in rows if row.oldest == version],
        folder,
        variants=["both", "both_shifted"],
        dtypes=["fp32"],
        weights=[(own, str(version)), (other, str(version))],
    )
    found = {}
    for name, job in zip(("own", "other"), jobs, strict=True):
        scores = np.load(job.out)
        for variant in job.variants:
            gap = np.abs(scores[f"fp32/{variant}"] - scores["engine"])
            found[f"{name}/{variant}"] = float(gap.max())
    print(f"{len(gap)} tokens of {version}: {found}")
    assert found["own/both"] <= 5e-5
    assert found["own/both_shifted"] > 1e-2, "control: rows of the token before"
    assert found["other/both"] > 1e-3, "control: weights of another version"
