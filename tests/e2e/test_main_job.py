"""A few real steps of what most runs are: two recipes, each over another layout of the trainer.

The default selection has one.  The full suite has a third, turns over context parallel ranks
(test_examples_run.py), and every recipe and layout alone (test_recipes.py, test_variants.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.train_runs import Run, start

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SHORT = [
    "run.steps=2",
    "rollout.groups_per_step=8",
    "rollout.group_size=8",
    "rollout.groups_per_request=8",
    "rollout.buffer_depth=0",  # what was published is what was gathered
    "observe.engine_alone_s=0",
    "checkpoint.every=0",
    "evaluation.every=0",
    "trainer.optimizer.warmup_steps=0",
]
# A random model earns some: its weights move.
REWARD = "task.reward=tests.helpers.run_rewards:digit_share"
PACKED = "trainer.packing=true"
RECOMPUTE = (
    "trainer.megatron={recompute_granularity: full, recompute_method: uniform, "
    "recompute_num_layers: 1}"
)
JOBS = {  # recipe, trainer, what the recipe must have measured
    "tensor-parallel": ("grpo", ["trainer.parallel={dp: 1, ep: 1, tp: 2, etp: 2}"], ()),
    "stages": (
        "ppo",
        ["trainer.parallel={dp: 1, ep: 1, pp: 2}", PACKED, RECOMPUTE],
        ("loss/value", "critic/grad_norm"),
    ),
}


@pytest.mark.parametrize(
    "name", ["stages", pytest.param("tensor-parallel", marks=pytest.mark.full)]
)
def test_it_trains_on_what_the_engine_recorded(name: str, tmp_path: Path) -> None:
    recipe, trainer, measured = JOBS[name]
    run = start(tmp_path, recipe, *SHORT, REWARD, *trainer, name="x")
    for row in trained_rows(run):
        assert not [metric for metric in measured if metric not in row]


def trained_rows(run: Run) -> list[dict]:
    """Rows of the two steps of a run of SHORT, each of which has trained what was recorded."""
    assert run.finish() == 0, run.text()
    rows = [row for row in run.rows() if "loss/total" in row]
    assert [row["step"] for row in rows] == [0, 1]
    for row in rows:
        assert row["routing/replay_cover_frac"] == row["keep/cover_frac"] == 1.0
        assert row["mismatch/abs_dlogp_max/lag_0"] <= 5e-5, "step 1 has the published weights"
        assert row["loss/grad_norm"] > 0
        assert not [key for key in row if key.startswith("refused/")]
    return rows
