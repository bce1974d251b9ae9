"""A few real steps of what most runs are: two recipes, each over another layout of the trainer.

In the default selection test_failure.py interrupts and resumes the second one.  The full suite has
a third, turns over context parallel ranks (test_examples_run.py), and every recipe and layout alone
(test_recipes.py, test_variants.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.train_runs import SOME_REWARD, STAGES, TWO_STEPS, start, trained_rows

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]

JOBS = {  # recipe, trainer, what the recipe must have measured
    "tensor-parallel": ("grpo", ["trainer.parallel={dp: 1, ep: 1, tp: 2, etp: 2}"], ()),
    "stages": ("ppo", STAGES, ("loss/value", "critic/grad_norm")),
}


@pytest.mark.parametrize("name", JOBS)
def test_it_trains_on_what_the_engine_recorded(name: str, tmp_path: Path) -> None:
    recipe, trainer, measured = JOBS[name]
    run = start(tmp_path, recipe, *TWO_STEPS, SOME_REWARD, *trainer, name="x")
    for row in trained_rows(run):
        assert not [metric for metric in measured if metric not in row]
