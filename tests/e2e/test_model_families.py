"""Every family in the real loop: engine, transformers and the trainer agree on each record.

The small form serves a tiny model of each family from a fork and compares its records with
transformers and with the trainer's own forward pass, both under the recorded routes and masks.  The
full form is `moerl mismatch` and two trainings per family; with MOERL_WRITE_FAMILIES=1 it writes
its figures into tests/data/model_families.json, from which docs/replay-support.md is made.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from moerl.audit import mismatch_command
from moerl.audit.mismatch_command import measure
from moerl.audit.score_job import ScoreJob
from moerl.config import load_config, resolve
from moerl.config.schema import Precision
from moerl.core.types import Rollout
from moerl.launch.run_context import RunContext
from tests.helpers import warm_score
from tests.helpers.family_table import RESULTS, FamilyResult
from tests.helpers.rank_server import run_ranks, start_server
from tests.helpers.tiny_families import FAMILY_FIELDS, RECIPE, make_family_model
from tests.helpers.train_runs import Run, start

if TYPE_CHECKING:
    from tests.helpers.warm_engines import WarmEngines

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = tuple(FAMILY_FIELDS)
# Of the default selection: grouped choice and latent attention, sinks, a shared expert, qk norm.
FEW = ("qwen3_moe", "deepseek_v3", "gpt_oss", "glm4_moe")
FULL = pytest.mark.full
EACH = pytest.mark.parametrize(
    "family", [one if one in FEW else pytest.param(one, marks=FULL) for one in FAMILIES]
)
MAX, FAR = 5e-5, 0.05  # nats: right records in fp32, and the least of a control
Scores = Mapping[str, np.ndarray]


# --- small form -----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    warm_engines: WarmEngines,
) -> Path:
    """Records of the families that are tested, and all their scores."""
    folder = tmp_path_factory.mktemp("families")
    wanted = {item.callspec.params["family"] for item in request.session.items if _of_here(item)}
    start_server()  # it imports Megatron while the engines run
    for family in FAMILIES:
        if family in wanted:
            warm_engines.run_family(family, folder / family)
    for job in sorted(folder.glob("*/job.json")):
        try:
            run_ranks(1, ["-m", "moerl.audit.score_ranks", "--job", str(job)])
        except AssertionError as error:  # the tests of this family fail, and no others
            (job.parent / "failed.txt").write_text(str(error))
    return folder


def _of_here(item: pytest.Item) -> bool:
    return item.path == Path(__file__) and hasattr(item, "callspec")


def scores_of(served: Path, family: str) -> tuple[Scores, Scores]:
    """Of transformers and of the trainer; the trainer's has the engine's own."""
    folder = served / family
    failed = folder / "failed.txt"
    assert not failed.exists(), failed.read_text()
    assert (folder / "scores.npz").exists(), "the engine did not answer in time"
    return np.load(folder / "scores-hf.npz"), np.load(folder / "scores.npz")


def gap(scores: np.ndarray, engine: np.ndarray) -> float:
    return float(np.abs(scores - engine).max())


@EACH
def test_records_equal_transformers(served: Path, family: str) -> None:
    found, trainer = scores_of(served, family)
    engine = trainer["engine"]
    assert len(engine) >= 80
    assert gap(found["both"], engine) <= MAX
    assert gap(found["both_rotated"], engine) > FAR, "control: the next expert of each"
    assert gap(found["routing"], engine) > FAR, "control: the whole vocabulary"
    assert found["agree"].min() == 1.0, "routers of transformers choose the recorded experts"
    assert found["agree_rotated"].mean() < 0.5, "control: the next expert of each"
    assert found["masks"].all(), "transformers keeps the recorded tokens"
    assert found["masks_moved"].mean() < 0.5, "control: those of the token before"


@EACH
def test_records_equal_the_trainer(served: Path, family: str) -> None:
    _, found = scores_of(served, family)
    engine = found["engine"]
    assert gap(found["fp32/both"], engine) <= MAX
    assert gap(found["fp32/both_rotated"], engine) > FAR, "control: the next expert of each"
    assert gap(found["fp32/routing"], engine) > FAR, "control: the whole vocabulary"
    assert found["fp32/executed"] == found["fp32/slots"], "dispatched experts are the recorded"
    assert found["fp32/slots_agree"] >= 0.99 * found["fp32/slots"]


@FULL
@pytest.mark.parametrize("family", ["deepseek_v32"])
def test_positions_of_sparse_attention_are_replayed(served: Path, family: str) -> None:
    """The tests above give the recorded ones; here each side chooses, or reads the row before."""
    found, trainer = scores_of(served, family)
    for variant in ("both_indexer_live", "both_indexer_moved"):
        assert gap(found[variant], trainer["engine"]) > FAR, variant
        assert gap(trainer[f"fp32/{variant}"], trainer["engine"]) > FAR, variant


# --- full form ------------------------------------------------------------------------------------
STEPS = 6
# A random model earns some: its weights move in each step, so that digests tell publishes apart.
REWARD = "task.reward=tests.helpers.run_rewards:digit_share"
SYNCHRONOUS = ("rollout.buffer_depth=0", "rollout.max_lag=0")
_SERVES = re.compile(r"engine 0 serves \S+, digest (\w+)")


@FULL
@pytest.mark.parametrize("family", FAMILIES)
def test_mismatch_and_training(
    served: Path, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    make_family_model(model, family)
    monkeypatch.setattr(mismatch_command, "score", score_in_warm_ranks)
    found = measured(model, tmp_path / "mismatch")
    synchronous = trained(model, tmp_path, "sync", *SYNCHRONOUS)
    trained(model, tmp_path, "async")
    result = FamilyResult(
        routes_exact=min(float(scores_of(served, family)[0]["agree"].min()), found["executed"]),
        mask_exact=float(scores_of(served, family)[0]["masks"].mean()),
        fp32_max=max(found["fp32_max"], *largest(synchronous)),
        control=found["control"],
        bf16_both=found["bf16_both"],
        bf16_none=found["bf16_none"],
        publishes=2 * STEPS,
        trained_steps=2 * STEPS,
    )
    if os.environ.get("MOERL_WRITE_FAMILIES"):
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        results[family] = {name: round_to(value) for name, value in asdict(result).items()}
        RESULTS.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")


def score_in_warm_ranks(
    plan: RunContext,
    rollouts: Sequence[Rollout],
    folder: Path,
    *,
    variants: Sequence[str],
    dtypes: Sequence[Precision],
) -> ScoreJob:
    """In place of a start of torchrun for each family; test_train.py has the real one."""
    return warm_score.score(
        plan, rollouts, folder, variants=variants, dtypes=dtypes, model=plan.model_path
    )


def measured(model: Path, folder: Path) -> dict[str, float]:
    """What `moerl mismatch` measures, and a control."""
    variants = ["none", "routing", "mask", "both", "both_rotated"]
    config = resolve(load_config(RECIPE, [f"model.path={model}"]))
    found: dict[str, Any] = measure(config, folder, num_tokens=2000, variants=variants)
    fp32, bf16 = found["results"]["fp32"], found["results"]["bf16"]
    routing = found["routing"]["fp32"]
    assert fp32["both"]["abs_dlogp_max"] <= MAX
    assert fp32["both_rotated"]["abs_dlogp_max"] > FAR
    assert fp32["routing"]["abs_dlogp_max"] > FAR
    assert bf16["both"]["k3"] < bf16["none"]["k3"] / 10
    assert routing["executed"] == routing["slots"]
    return {
        "executed": routing["executed"] / routing["slots"],
        "fp32_max": fp32["both"]["abs_dlogp_max"],
        "control": fp32["both_rotated"]["abs_dlogp_max"],
        "bf16_both": bf16["both"]["k3"],
        "bf16_none": bf16["none"]["k3"],
    }


def trained(model: Path, root: Path, name: str, *settings: str) -> Run:
    """A run with a publish after every step; its weights open in transformers."""
    fixed = (f"model.path={model}", f"run.steps={STEPS}", "checkpoint.every=0", REWARD)
    run = start(root, RECIPE, *fixed, *settings, name=name)
    assert run.finish() == 0, run.text()
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(STEPS))
    for row in rows:
        assert row["routing/replay_cover_frac"] == row["keep/cover_frac"] == 1.0
        assert row.get("alert/replay_exact", 0.0) == 0.0
        resent = row.get("async/sync_resent_buckets", 0)  # before the first publish: none
        assert resent == 0, "a digest did not agree"
    assert max(largest(run)) <= MAX
    digests = _SERVES.findall((run.dir.logs / "trainer-0.log").read_text())
    assert len(set(digests)) >= STEPS - 1, "each publish sent other weights"
    opens(run.dir.hf)
    return run


def largest(run: Run) -> list[float]:
    """Of each step: max abs(d) of tokens that the weights of the step sampled."""
    return [row["probe/exact_abs_dlogp_max"] for row in run.rows() if exact(row)]


def exact(row: Mapping[str, float]) -> bool:
    return row.get("probe/exact_tokens", 0) > 0


def opens(folder: Path) -> None:
    from moerl.engine import torchvision_fix

    torchvision_fix.arm()
    from transformers import AutoModelForCausalLM

    _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info


def round_to(value: float, digits: int = 2) -> float:
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value
