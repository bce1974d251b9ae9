"""Every recipe of docs/algorithms.md runs for a few steps with the quickstart model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moerl.data.environments import calculator
from moerl.data.tasks import load_tokenizer
from tests.helpers.patience import patience
from tests.helpers.train_runs import ENOUGH, SMALL, start
from tests.helpers.warm_score import score

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]

RECIPES = {  # what the recipe must have measured, beyond what every run does
    "grpo": (),
    "dr-grpo": (),
    "dapo": (),
    "gspo": (),
    "cispo": (),
    "deepseek-v32": ("loss/opsm_frac", "loss/kl_ref_k3", "loss/cut_frac/opsm"),
    "ppo": ("loss/value", "critic/return_mean"),
    "decoupled-ppo": ("loss/cut_frac/importance",),
    "process-rewards": (),
    "grpo-roc": (),
    "digits-in-turns": (),
    "digits-mixture": (),
    "m2po": ("loss/cut_frac/m2",),
    "minibatches": ("loss/moved_k3", "loss/cut_frac/tis_token"),
    "online-dpo": ("dpo/loss", "dpo/right_frac"),
}
WARM = ("run.steps=40", "rollout.groups_per_step=64")  # enough for the form of a call
EVERY = ("loss/total", "loss/grad_norm", "mismatch/ess_seq_frac", "mismatch/ratio_p999")


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name: str, tmp_path: Path) -> None:
    run = start(tmp_path, name, *SMALL, *ENOUGH, name="x")
    assert run.finish() == 0, run.text()
    rows = [row for row in run.rows() if "loss/total" in row]  # an evaluation may have the last
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert not [metric for metric in (*EVERY, *RECIPES[name]) if metric not in row]
    assert any(row["loss/grad_norm"] > 0 for row in rows), "some answer was rewarded"
    if name == "digits-mixture":  # a step takes what is ready, which need not be of every task
        assert {"reward/mean/three", "sample/groups/turns"} <= {key for row in rows for key in row}
    if name == "deepseek-v32":  # the student starts as its reference
        assert abs(rows[0]["loss/kl_ref_k3"]) < 1e-3


CHANGED = {  # recipe, settings, what it must have measured
    "turns": (
        "digits-in-turns",
        ("task.reward=turn_gains", "algorithm.advantage=process_mean"),
        ("adv/std",),
    ),
    "critic-over-stages": (
        "ppo",
        ("trainer.parallel={dp: 1, ep: 1, pp: 2}", "algorithm.reward_kl_coef=0.05"),
        ("loss/value", "critic/grad_norm", "loss/kl_ref_k3"),
    ),
    "own-reference": (
        "deepseek-v32",
        ("ref_models.placement=separate", "ref_models.parallel={tp: 2, etp: 2}"),
        ("loss/kl_ref_k3", "loss/grad_norm_router"),
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_changed_recipe(name: str, tmp_path: Path) -> None:
    recipe, settings, measured = CHANGED[name]
    run = start(tmp_path, recipe, *SMALL, *ENOUGH, *settings, name="x")
    assert run.finish() == 0, run.text()
    rows = [row for row in run.rows() if "loss/total" in row]  # an evaluation may have the last
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert not [metric for metric in (*EVERY, *measured) if metric not in row]


def test_distillation_from_a_trained_folder(tmp_path: Path) -> None:
    teacher = start(tmp_path, "quickstart", *SMALL, "trainer.optimizer.lr=0.02", name="teacher")
    assert teacher.finish() == 0, teacher.text()
    folder = f"algorithm.teachers=[{{path: {teacher.dir.hf}}}]"
    run = start(tmp_path, "on-policy-distillation", *SMALL, folder, name="x")
    assert run.finish() == 0, run.text()
    assert all(row["loss/kl_teacher"] != 0 for row in run.rows())
    assert all(row["loss/grad_norm"] > 0 for row in run.rows())


def test_tool_use_from_its_demonstrations(tmp_path: Path) -> None:
    """Turns with calls and their results are trained on exact rows."""
    sft = ["-m", "moerl", "sft", "tool-use-start", f"run.root={tmp_path}", "--run", "warm"]
    done = subprocess.run([sys.executable, *sft, *WARM], timeout=patience(400), check=False)
    assert done.returncode == 0
    # One version of the weights: every row can be scored with the same model.
    still = "trainer.optimizer={lr: 0, min_lr: 0, warmup_steps: 0}"
    settings = [*SMALL, f"model.path={tmp_path / 'warm' / 'hf'}", still]
    settings += ["evaluation.every=3", "evaluation.prompts=8"]
    run = start(tmp_path, "tool-use", *settings, name="x", copies=True)
    assert run.finish() == 0, run.text()
    steps = [row for row in run.rows() if "loss/total" in row]
    assert not [name for row in run.rows() for name in row if name.startswith("refused/")]
    for row in steps:
        assert (row["keep/cover_frac"], row["routing/replay_cover_frac"]) == (1.0, 1.0)
    groups = [group for _, group in run.trained.groups(run.rows())]
    rows = [row for group in groups for row in group.rollouts()]
    called = [row for row in rows if len(row.ends) > 1]
    assert called, "the demonstrations showed calls"
    tokenizer = load_tokenizer(tmp_path / "warm" / "hf")
    for text in (tokenizer.decode(row.token_ids) for row in called):
        reply = calculator(groups[0].prompt, [text])
        assert reply, text
        assert reply in text, "the result is in the context of the next turn"
    plan = run.plan()
    job = score(
        plan,
        rows,
        tmp_path,
        variants=["both", "both_shifted"],
        dtypes=["fp32"],
        model=plan.model_path,
    )
    scores = np.load(job.out)
    gap, shifted = (
        float(np.abs(scores[f"fp32/{name}"] - scores["engine"]).max()) for name in job.variants
    )
    print(f"{len(rows)} rows, {len(called)} with calls: {gap:.2g} nats; shifted {shifted:.2g}")
    assert gap <= 5e-5
    assert shifted > 1e-2, "control: rows of the token before"
