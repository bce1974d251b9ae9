"""Reference and teacher on ranks of their own give the numbers of those inside the trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moerl.config.load import save_config
from moerl.config.schema import (
    AlgorithmConfig,
    Config,
    ModelConfig,
    ParallelConfig,
    RefModelsConfig,
    ReplayConfig,
    TeacherConfig,
    TrainerConfig,
)
from moerl.core.messages import Scored
from moerl.core.serialization import encode
from moerl.records.blob_store import BlobStore
from moerl.runtime.run_dir import RunDir
from tests.helpers.fake_controller import FakeController, run_gang
from tests.helpers.rank_server import run_ranks
from tests.helpers.trainer_support import ROOT, make_model, make_plan

GATE = 1e-5  # fp32, another layout: other orders of summation
LAYOUTS = {
    "stages": ParallelConfig(pp=2),
    "tensor": ParallelConfig(tp=2, etp=2),
    "data": ParallelConfig(dp=2, ep=2),
    "context": ParallelConfig(cp=2, ep=2),
    "one": ParallelConfig(),
}


def _scored(root: Path, models: list[Path], layout: ParallelConfig) -> tuple[RunDir, Scored]:
    """What a reference ranks of this layout says of a plan that is cut for it."""
    student, reference, teacher = map(str, models)
    run = RunDir(root / "run")
    run.create()
    config = Config(
        model=ModelConfig(path=student),
        trainer=TrainerConfig(parallel=ParallelConfig(dp=2, ep=2), step_timeout_s=60.0),
        replay=ReplayConfig(routing="off"),
        algorithm=AlgorithmConfig(
            advantage="none",
            kl="unbiased",
            kl_coef=0.5,
            reference=reference,
            distill_coef=1.0,
            teachers=[TeacherConfig(path=teacher)],
        ),
        ref_models=RefModelsConfig(placement="separate", parallel=layout),
    )
    save_config(config, run.config)
    store = BlobStore(root / "blobs", "n0")
    controller = FakeController(lambda step: None)
    controller.records = [make_plan(store, dp_size=layout.dp)]
    done = run_gang(controller, run, store, layout.world_size, "--ref-models")
    assert done.returncode == 0, done.stderr[-4000:]
    (scored,) = controller.scored
    return run, scored


def _compared(root: Path, models: list[Path], layout: ParallelConfig) -> dict[str, Any]:
    run, scored = _scored(root, models, layout)
    path = root / "scored.msgpack"
    path.write_bytes(encode(scored))
    arguments = [f"--run-dir={run.root}", f"--scored={path}", f"--work={root / 'work'}"]
    output = run_ranks(2, [str(ROOT / "tests" / "helpers" / "ref_model_loop_ranks.py"), *arguments])
    return json.loads(output.split("FOUND ")[1].splitlines()[0])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("ref_models")
    return [make_model(root / f"model{seed}", seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, models: list[Path]) -> dict[str, Any]:
    return _compared(tmp_path_factory.mktemp("stages"), models, LAYOUTS["stages"])


def _check_equal(found: dict[str, Any]) -> None:
    for role in ("reference", "teacher"):
        assert found["gaps"][f"{role}/{role}"] <= GATE, found["gaps"]
    assert found["gaps"]["reference/teacher"] > 1000 * GATE, "control: another model misses"
    for name, value in found["inside"].items():
        assert found["outside"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert found["inside"]["loss/kl_ref_k3"] > 0.01
    assert found["inside"]["loss/grad_norm"] > 0.01


def test_own_ranks_give_the_numbers_of_the_trainers(found: dict[str, Any]) -> None:
    _check_equal(found)


def test_scores_of_another_record_or_model_are_refused(found: dict[str, Any]) -> None:
    assert found["refused"] == {
        "swapped": "ref_scores_record",
        "absent": "ref_scores_rows",
        "other model": "ref_scores_record",
    }


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "stages"])
def test_every_layout_of_the_trainer_gives_them(
    name: str, tmp_path: Path, models: list[Path]
) -> None:
    _check_equal(_compared(tmp_path, models, LAYOUTS[name]))
