"""The whole path on real SGLang and real Megatron ranks: learn, publish, save; then the gates.

The short run of the session shows that a run is exact, saves its model and says what it does.  One
training run of 24 steps, in the full suite, feeds all other tests.  Gates and controls are those of
the oracles: max and mean |d| in fp32, E[ratio] with and without the mask, k3 with and without
routing replay in bf16.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moerl.audit.mismatch_command import measure
from moerl.config import load_config, resolve
from moerl.config.load import load_saved
from moerl.core.serialization import decode_value
from moerl.core.types import Rollout
from tests.helpers.documented_metrics import undocumented
from tests.helpers.short_run import ShortRun
from tests.helpers.train_runs import Run, start

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
FULL = pytest.mark.full
STEPS, TOKENS = 24, 20_000
MAX, MEAN = 5e-5, 5e-6  # nats, fp32 engine against fp32 trainer
CONTROLS = ("both_shifted", "both_reversed", "both_corrupted", "both_prompt_live")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("train")
    run = start(root, "quickstart", f"run.steps={STEPS}", "checkpoint.every=12", name="x")
    assert run.finish() == 0, run.text()
    return run


@pytest.fixture(scope="module")
def probed(trained: Run) -> dict[str, Any]:
    """Fresh rollouts of the trained weights at top-p 0.9, scored in every way."""
    config = resolve(
        load_config("quickstart", ["sampling.top_p=0.9", f"model.path={trained.dir.hf}"])
    )
    folder = trained.dir.root / "probe"
    variants = ["none", "routing", "mask", "both", *CONTROLS]
    found = measure(config, folder, num_tokens=TOKENS, variants=variants)
    return found | {"folder": folder}


# --- the run -------------------------------------------------------------------------------------
def check_steps(run: Run, steps: int) -> list[dict[str, Any]]:
    """Rows of the run: each step once, each exact, and nothing refused."""
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(steps))
    config = load_saved(run.dir.config)
    for row in rows:
        assert row["routing/replay_cover_frac"] == 1.0
        assert row["keep/cover_frac"] == 1.0
        assert 0 <= row["async/lag_max"] <= config.rollout.max_lag
        assert not [name for name in row if name.startswith("refused/")]
        assert row.get("alert/replay_exact", 0.0) == 0.0, row["probe/exact_abs_dlogp_max"]
    assert rows[0]["alert/replay_exact"] == 0.0
    assert rows[0]["probe/live_agree_same_input_frac"] > 0.99
    assert math.isclose(rows[0]["mismatch/ratio_mean/lag_0"], 1.0, abs_tol=1e-5)
    return rows


def check_what_a_person_finds(run: Run, steps: int) -> None:
    names = {name for row in run.rows() for name in row}
    assert undocumented(sorted(names), (ROOT / "docs/metrics.md").read_text()) == []
    report = run.dir.report.read_text()
    assert "<svg" in report
    assert "src=" not in report.replace("data:", ""), "the page must be self-contained"
    assert f"step {steps}/{steps}" in run.text()
    assert run.dir.checkpoint(steps).is_dir()


def test_a_short_run_is_exact(short_run: ShortRun) -> None:
    rows = check_steps(short_run.run, 2)
    assert all(row["mismatch/abs_dlogp_max/lag_0"] <= MAX for row in rows)


def test_what_a_person_finds_after_a_short_run(short_run: ShortRun) -> None:
    check_what_a_person_finds(short_run.run, 2)
    assert short_run.run.dir.hf.is_dir()


@FULL
def test_every_step_once_and_nothing_refused(trained: Run) -> None:
    check_steps(trained, STEPS)


@FULL
def test_it_learns(trained: Run) -> None:
    rewards = [row["reward/mean"] for row in trained.rows()]
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.05


@FULL
def test_what_a_person_finds(trained: Run) -> None:
    check_what_a_person_finds(trained, STEPS)
    assert "tokens/s alone" in trained.text()


# --- gates ---------------------------------------------------------------------------------------
def passes(metrics: dict[str, float]) -> bool:
    return metrics["abs_dlogp_max"] <= MAX and metrics["abs_dlogp_mean"] <= MEAN


@FULL
def test_fp32_gate(probed: dict[str, Any]) -> None:
    """Replay off, routers may differ only at a tie, and not about the same input otherwise.

    One tie in a prompt changes all that follows in each of its rollouts (0.02% of all pairs have
    been seen), so agreement counts the pairs whose input no earlier difference has changed.
    """
    both, routing = probed["results"]["fp32"]["both"], probed["routing"]["fp32"]
    assert both["tokens"] >= TOKENS
    assert passes(both), both
    assert routing["executed"] == routing["slots"], "an executed expert differs from the record"
    assert routing["same_input_agreement"] >= 0.9999
    assert routing["root_margin_max"] < 1e-5


@FULL
@pytest.mark.parametrize("control", [*CONTROLS, "routing"])
def test_fp32_gate_rejects(probed: dict[str, Any], control: str) -> None:
    """Wrong records fail the gate; `routing` alone is the record with its masks dropped.

    In fp32 the live router agrees with the record, so live prompt rows show only in bf16.
    """
    if control == "both_prompt_live":
        both, live = (probed["results"]["bf16"][name] for name in ("both", control))
        assert live["abs_dlogp_max"] > both["abs_dlogp_max"], "live prompt rows went unnoticed"
        return
    assert not passes(probed["results"]["fp32"][control])


@FULL
def test_bf16_routers_fail_that_agreement(probed: dict[str, Any]) -> None:
    routing = probed["routing"]["bf16"]
    assert routing["same_input_agreement"] < 0.9999
    assert routing["root_margin_max"] > 1e-5


@FULL
def test_expected_ratio(probed: dict[str, Any]) -> None:
    masked, bare = (probed["results"]["fp32"][name] for name in ("both", "routing"))
    assert abs(masked["ratio_mean"] - 1) <= max(4 * masked["ratio_se"], 1e-5)
    assert bare["ratio_mean"] <= 0.97
    assert bare["ratio_mean"] < 1 - 20 * bare["ratio_se"]


@FULL
def test_bf16_trainer(probed: dict[str, Any]) -> None:
    both, live = (probed["results"]["bf16"][name] for name in ("both", "mask"))
    assert live["k3"] >= 3 * both["k3"]
    assert both["extreme_frac_2"] == 0
    assert abs(both["ratio_mean"] - 1) <= max(4 * both["ratio_se"], 1e-5)


@FULL
def test_hf_folder_gives_the_trainers_numbers(trained: Run, probed: dict[str, Any]) -> None:
    """transformers opens runs/NAME/hf and agrees with the trainer within 1e-5."""
    from moerl.engine import torchvision_fix

    torchvision_fix.arm()
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        trained.dir.hf, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    model.eval()
    data = (probed["folder"] / "rollouts.msgpack").read_bytes()
    rollouts = decode_value(data, list[Rollout])[:64]
    scores = np.load(probed["folder"] / "scores.npz")["fp32/none"]
    at, worst = 0, 0.0
    for rollout in rollouts:
        ids = torch.tensor(rollout.token_ids, dtype=torch.long)
        with torch.no_grad():
            logits = model(ids[None, :-1]).logits[0].float() / rollout.sampling.temperature
        logprob = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        mine = scores[at : at + rollout.num_sampled]
        theirs = logprob[torch.from_numpy(rollout.loss_mask[1:])].numpy()
        worst = max(worst, float(np.abs(mine - theirs).max()))
        at += rollout.num_sampled
    assert worst <= 1e-5, worst
