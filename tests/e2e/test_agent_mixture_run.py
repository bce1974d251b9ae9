"""A mixture of tasks on real SGLang and Megatron: rows are exact under their own sampling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moerl.core.types import Rollout
from tests.helpers.documented_metrics import undocumented
from tests.helpers.short_agent_runs import LAG_0
from tests.helpers.train_runs import Run, start
from tests.helpers.warm_score import score

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = [
    "run.steps=2",
    "rollout.groups_per_step=8",
    "rollout.group_size=4",
    # Else a batch is what is finished: the first ones lack the episodes of several turns.
    "rollout.selection=strict",
    "checkpoint.every=0",
    "evaluation.every=2",
    "evaluation.prompts=4",
    "observe.engine_alone_s=0",
    # All versions have the weights of the first one, so one model scores every row.
    "trainer.optimizer={lr: 0, min_lr: 0, warmup_steps: 0}",
]
SAMPLING = {"three": (0.9, 64, 3), "five": (1.0, 32, 5), "turns": (1.0, 64, 4)}


def test_each_row_is_trained_with_the_sampling_of_its_task(tmp_path: Path) -> None:
    run = start(tmp_path, "digits-mixture", *SETTINGS, name="x", copies=True)
    assert run.finish() == 0, run.text()
    check_metrics(run)
    by_task: dict[str, list[Rollout]] = {label: [] for label in SAMPLING}
    groups = [group for _, group in run.trained.groups(run.rows())]
    for group in groups:
        by_task[group.prompt.task] += group.rollouts()
    assert Counter(group.prompt.task for group in groups) == {"three": 8, "five": 4, "turns": 4}
    for label, rows in by_task.items():
        found = {
            (r.sampling.temperature, r.sampling.top_k, r.sampling.max_new_tokens) for r in rows
        }
        assert found == {SAMPLING[label]}
    assert max(len(row.ends) for row in by_task["turns"]) == 3
    rows = [row for mine in by_task.values() for row in mine]
    gap = largest_gap(run, rows, tmp_path / "own")
    other = [
        replace(row, sampling=replace(row.sampling, temperature=1.0)) for row in by_task["three"]
    ]
    wrong = largest_gap(run, other, tmp_path / "other")
    print(f"{len(rows)} rows of three tasks: {gap:.2g} nats; temperature of another: {wrong:.2g}")
    assert gap <= 5e-5
    assert wrong > 5e-3, "control: the temperature of another task"


def test_text_a_program_and_an_environment_are_trained_in_one_run(tmp_path: Path) -> None:
    program = f"tasks.five.agent.command=[python, {ROOT}/examples/tool_agent.py]"
    played = "tasks.three.environment=examples.live_environment:Locks"
    limits = ["tasks.five.max_turns=3", "tasks.three.max_turns=3"]
    settings = [*SETTINGS, program, played, *limits, "evaluation.hold_s=180"]
    run = start(tmp_path, "digits-mixture", *settings, name="x", copies=True)
    assert run.finish(540.0) == 0, run.text()
    rows = run.rows()
    groups = [group for _, group in run.trained.groups(rows)]
    assert Counter(group.prompt.task for group in groups) == {"three": 8, "five": 4, "turns": 4}
    gaps = [row[LAG_0] for row in rows if LAG_0 in row]
    assert gaps
    assert max(gaps) <= 5e-5
    found = [row for row in rows if "eval/step" in row]
    assert [row["eval/step"] for row in found] == [0.0, 2.0]
    assert {f"eval/reward_mean/{label}" for label in SAMPLING} <= found[0].keys()
    page = (ROOT / "docs/metrics.md").read_text()
    assert not undocumented({name for row in rows for name in row}, page)


def check_metrics(run: Run) -> None:
    rows = [row for row in run.rows() if "loss/total" in row]
    assert [row["step"] for row in rows] == [0, 1]
    for row in rows:
        assert (row["keep/cover_frac"], row["routing/replay_cover_frac"]) == (1.0, 1.0)
        assert [row[f"sample/groups/{label}"] for label in SAMPLING] == [4.0, 2.0, 2.0]
        parts = [row[f"reward/mean/{name}"] * share for name, share in WEIGHTS.items()]
        assert row["reward/mean"] == pytest.approx(sum(parts))
    names = {name for row in run.rows() for name in row}
    assert {f"eval/reward_mean/{label}" for label in SAMPLING} <= names
    assert undocumented(sorted(names), (ROOT / "docs/metrics.md").read_text()) == []
    page = run.dir.report.read_text()
    assert "Reward by task" in page
    assert "three (2), five (1), turns (1)" in page


WEIGHTS = {"three": 0.5, "five": 0.25, "turns": 0.25}


def largest_gap(run: Run, rows: Sequence[Rollout], folder: Path) -> float:
    """Largest difference between trainer and engine, in nats, with both replays."""
    folder.mkdir()
    plan = run.plan()
    job = score(plan, rows, folder, variants=["both"], dtypes=["fp32"], model=plan.model_path)
    scores = np.load(job.out)
    return float(np.abs(scores["fp32/both"] - scores["engine"]).max())
