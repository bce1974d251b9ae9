"""A real pretrained model in the loop: SmolLM2-135M, dense and upcycled to a MoE of 401 M.

The folders are made by tools/smollm2.py from the package in this stage's environment, in
models/ as tools/get_smollm2 makes them, once.  `tools/test --stage smollm2` runs this file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.patience import patience
from tests.helpers.train_runs import Run, start

pytestmark = [pytest.mark.e2e, pytest.mark.smollm2, pytest.mark.timeout(1500)]

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "models"
SHORT = (
    "run.steps=2",
    "rollout.groups_per_step=2",
    "rollout.group_size=4",
    "sampling.max_new_tokens=12",
    "evaluation.prompts=4",
    "trainer.max_tokens_per_microbatch=512",
    "trainer.optimizer.lr=1e-6",  # the recipe's rate changes how it answers within two steps
    "trainer.optimizer.min_lr=1e-6",
)
MODEL_OF = {"smollm2-arithmetic": "smollm2", "smollm2-moe": "smollm2-moe"}
LAG_0 = "mismatch/abs_dlogp_max/lag_0"
SPEAKS = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
asked = [{"role": "user", "content": "What is 7 + 5? Answer with the number only."}]
prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
out = model.generate(ids, max_new_tokens=12, do_sample=False)
print(tokenizer.decode(out[0, ids.shape[1]:], skip_special_tokens=True))
"""


@pytest.fixture(scope="module", autouse=True)
def models() -> None:
    subprocess.run([sys.executable, "tools/smollm2.py"], cwd=ROOT, check=True)


def answer_of(folder: Path, tmp_path: Path) -> str:
    """By plain transformers of the environment, outside the checkout."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", SPEAKS, str(folder)],
        cwd=tmp_path, env=clean, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("recipe", MODEL_OF)
def test_the_model_trains_and_what_it_leaves_opens_in_transformers(
    recipe: str, tmp_path: Path
) -> None:
    model = MODELS / MODEL_OF[recipe]
    assert "12" in answer_of(model, tmp_path), "it speaks before it is trained"
    run: Run = start(tmp_path, recipe, f"model.path={model}", *SHORT, name="x")
    assert run.finish(1200) == 0, run.text()
    rows = [row for row in run.rows() if "loss/total" in row]
    assert [row["step"] for row in rows] == [0, 1]
    for row in rows:
        assert row[LAG_0] < 5e-4, "fp32 on both sides"
    assert "12" in answer_of(run.dir.hf, tmp_path), "two small steps leave it able to speak"


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_moe_learns_sums_that_it_was_not_trained_on(seed: int, tmp_path: Path) -> None:
    """The recipe as it is: Wilson's 95 % interval of 64 held-out prompts ends above the start's."""
    folder = MODELS / "smollm2-moe"
    run = start(tmp_path, "smollm2-moe", f"model.path={folder}", f"run.seed={seed}", name="x")
    assert run.finish(2200) == 0, run.text()
    rows = run.rows()
    done = [row for row in rows if "eval/reward_mean" in row]
    print("held-out reward:", [(row["eval/step"], row["eval/reward_mean"]) for row in done])
    assert [row["eval/step"] for row in done] == [0, 12]
    assert done[-1]["eval/reward_low"] > done[0]["eval/reward_high"]
    worst = max(row[LAG_0] for row in rows if "loss/total" in row)
    assert worst < 5e-4, "fp32 on both sides, with the weights of every step"
    page = run.dir.report.read_text()
    assert "Held-out reward" in page
    assert "Largest mismatch" in page
    answer_of(run.dir.hf, tmp_path)


def test_mismatch_of_real_chat_prompts_is_rounding_with_both_replays(tmp_path: Path) -> None:
    settings = (
        "rollout.group_size=2", "sampling.max_new_tokens=24",
    )  # fmt: skip
    done = subprocess.run(
        [
            sys.executable, "-m", "moerl", "mismatch", "smollm2-moe", *settings,
            f"model.path={MODELS / 'smollm2-moe'}", "--tokens", "100", "--json",
            "--page", str(tmp_path / "page.html"),
        ],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, timeout=patience(1200),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    both = {dtype: found["results"][dtype]["both"] for dtype in ("fp32", "bf16")}
    live = {dtype: found["routing"][dtype]["live_agreement"] for dtype in both}
    print("max|dlogp| fp32, live agreement fp32, bf16:", both["fp32"]["abs_dlogp_max"], live)
    assert both["fp32"]["abs_dlogp_max"] < 1e-4
    assert live["fp32"] > 0.999
    assert 0.9 < live["bf16"] < 1.0, "rounding moves some near ties of four similar experts"
    assert both["bf16"]["k3"] < found["results"]["bf16"]["none"]["k3"], "the control"
