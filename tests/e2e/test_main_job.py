"""A few real steps of what most runs are: two recipes, each over another layout of the trainer.

The default selection has one.  The full suite has a third, turns over context parallel ranks
(test_examples_run.py), and every recipe and layout alone (test_recipes.py, test_variants.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.train_runs import PACKED, TWO_STEPS, start, trained_rows

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

# A random model earns some: its weights move.
REWARD = "task.reward=tests.helpers.run_rewards:digit_share"
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
    run = start(tmp_path, recipe, *TWO_STEPS, REWARD, *trainer, name="x")
    for row in trained_rows(run):
        assert not [metric for metric in measured if metric not in row]
