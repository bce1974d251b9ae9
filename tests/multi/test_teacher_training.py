"""Teachers that follow the policy: written by the trainer, read by ranks of any layout, resumed."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moerl.config.load import save_config
from moerl.config.schema import (
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    RefModelsConfig,
    ReplayConfig,
    RunConfig,
    SyncConfig,
    TeacherConfig,
    TrainerConfig,
)
from moerl.core.messages import Scored
from moerl.core.types import BatchPlan, PolicyVersion
from moerl.data.teacher_versions import teachers_at
from moerl.records.blob_store import BlobStore
from moerl.runtime.run_dir import RunDir
from tests.helpers.fake_controller import FakeController, run_gang
from tests.helpers.trainer_support import make_model, make_plan, replan

pytestmark = pytest.mark.full

STEPS = 6
SLOW = TeacherConfig(name="slow", follows="policy", lag=1, every=2)
MEAN = TeacherConfig(name="mean", follows="policy", ema=0.5, weight=0.5)
FILE = "model.safetensors"
_HOOK = Path(__file__).parents[1] / "helpers" / "death_in_swap"


class Bench:
    """One run directory and its records; trainers and reference ranks start in it."""

    def __init__(self, root: Path, model: Path, *teachers: TeacherConfig) -> None:
        self.run = RunDir(root / "run")
        self.run.create()
        self.store = BlobStore(root / "blobs", "n0")
        algorithm = AlgorithmConfig(
            advantage="none", distill_coef=0.5, teachers=list(teachers), aggregation="token_mean"
        )
        self.config = Config(
            run=RunConfig(root=str(root), name="run", steps=STEPS),
            model=ModelConfig(path=str(model)),
            engine=EngineConfig(count=1),
            sync=SyncConfig(transport="shm", bucket_bytes=20_000, timeout_s=30.0),
            replay=ReplayConfig(routing="off"),
            algorithm=algorithm,
            checkpoint=CheckpointConfig(every=3, keep_versions=True),
            trainer=TrainerConfig(parallel=ParallelConfig(dp=2, ep=2), step_timeout_s=30.0),
        )
        save_config(self.config, self.run.config)
        self.begins = [PolicyVersion(0, 0)]
        self.until = STEPS
        self.made: dict[int, BatchPlan] = {}

    def plan(self, step: int) -> BatchPlan | None:
        if step >= self.until:
            return None
        version = PolicyVersion(self.begins[-1].incarnation, step)
        teachers = teachers_at(self.config.algorithm, self.begins, step)
        return replace(replan(self.records(step), 2), version=version, teachers=teachers)

    def records(self, step: int) -> BatchPlan:
        """For one rank, the same every time."""
        if step not in self.made:
            self.made[step] = make_plan(self.store, seed=step, step=step)
        return self.made[step]

    def train(self, until: int = STEPS, checkpoint: Path | None = None) -> tuple[str, list[dict]]:
        """(errors, metrics of the steps)"""
        self.until = until
        controller = FakeController(self.plan, model=Path(self.config.model.path))
        arguments = ["--incarnation", str(self.begins[-1].incarnation)]
        arguments += ["--checkpoint", str(checkpoint)] if checkpoint else []
        done = run_gang(controller, self.run, self.store, 2, *arguments)
        return done.stderr if done.returncode else "", [one.metrics for one in controller.steps]

    def score(
        self, layout: ParallelConfig, *plans: BatchPlan, hook: Path | None = None
    ) -> tuple[str, list[Scored]]:
        """What reference ranks of a layout answer."""
        apart = RefModelsConfig(placement="separate", parallel=layout)
        save_config(replace(self.config, ref_models=apart), self.run.config)
        controller = FakeController(lambda step: None)
        controller.records = list(plans)
        ranks = layout.world_size
        done = run_gang(controller, self.run, self.store, ranks, "--ref-models", hook=hook)
        return done.stderr if done.returncode else "", controller.scored


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("teachers") / "model")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Bench, list[dict]]:
    """A teacher of another model moves the policy, so that versions differ."""
    other = make_model(tmp_path_factory.mktemp("other") / "model", seed=1)
    bench = Bench(
        tmp_path_factory.mktemp("straight"), model, SLOW, MEAN, TeacherConfig(path=str(other))
    )
    errors, rows = bench.train()
    assert not errors, errors[-4000:]
    return bench, rows


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / FILE)


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_a_teacher_has_the_weights_of_its_version(straight: tuple[Bench, list[dict]]) -> None:
    bench, rows = straight
    run = bench.run
    kept = {step: _weights(run.versions / f"0.{step}") for step in range(STEPS)}
    assert not _equal(kept[4], kept[2]), "control: another version has other weights"
    assert _equal(_weights(run.teachers / "slow" / "0.4"), kept[4])
    mean = kept[0]
    for step in range(1, STEPS):
        mean = {name: 0.5 * mean[name] + 0.5 * kept[step][name] for name in mean}
    found = _weights(run.teachers / "mean" / f"0.{STEPS - 1}")
    assert max(float((found[n] - mean[n]).abs().max()) for n in mean) < 1e-6
    assert max(float((found[n] - kept[STEPS - 1][n]).abs().max()) for n in mean) > 1e-4
    slow = [(row["teacher/slow/version"], row["teacher/slow/lag"]) for row in rows]
    assert slow == [(0, 0), (0, 1), (0, 2), (2, 1), (2, 2), (4, 1)]
    assert [row["teacher/slow/swaps"] for row in rows] == [0, 0, 0, 1, 1, 2]
    assert [bool(row.get("teacher/slow/seconds")) for row in rows] == [True, 0, 0, True, 0, True]


def test_a_resume_finds_the_teachers_of_its_steps(
    straight: tuple[Bench, list[dict]], tmp_path: Path
) -> None:
    bench, rows = straight
    again = Bench(tmp_path, Path(bench.config.model.path))
    again.config = replace(bench.config, run=again.config.run)
    save_config(again.config, again.run.config)
    errors, first = again.train(until=4)  # its last step is in no checkpoint
    assert not errors, errors[-4000:]
    shutil.rmtree(again.run.checkpoint(4), ignore_errors=True)
    again.begins.append(PolicyVersion(1, 3))
    errors, second = again.train(checkpoint=again.run.checkpoint(3))
    assert not errors, errors[-4000:]
    names = ("loss/kl_teacher", "loss/grad_norm", "teacher/slow/version", "teacher/mean/version")
    for name in names:
        want = [row[name] for row in rows]
        assert [row[name] for row in first[:3] + second] == want, name
    assert _equal(_weights(again.run.hf), _weights(bench.run.hf))
    assert (again.run.teachers / "mean" / "1.4").is_dir()
    assert not (again.run.teachers / "mean" / "0.4").exists(), "a discarded version is removed"

    for name in ("slow/0.2", "mean/0.3", "mean/0.2"):
        shutil.rmtree(again.run.teachers / name, ignore_errors=True)
    errors, _ = again.train(checkpoint=again.run.checkpoint(3))
    assert "teacher slow: version 0.2 is not in" in errors, errors[-3000:]


STAGES = ParallelConfig(pp=2)


def _one_rank(bench: Bench, step: int) -> BatchPlan:
    teachers = teachers_at(bench.config.algorithm, bench.begins, step)
    return replace(bench.records(step), teachers=teachers)


def test_ranks_of_another_layout_take_a_whole_version_or_none(
    straight: tuple[Bench, list[dict]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded weights have the digest of the written ones; a rank dies in the middle of a swap."""
    bench, _ = straight
    old, new = _one_rank(bench, 3), _one_rank(bench, 5)
    with monkeypatch.context() as patch:
        patch.setenv("MOERL_TEST_DIES_AT", "0.4")
        errors, scored = bench.score(STAGES, old, new, hook=_HOOK)
    assert errors, "a rank died"
    assert len(scored) == 1, "nothing came from a part of a version"
    errors, (after,) = bench.score(STAGES, new)
    assert not errors, errors[-4000:]
    _check(bench, after, "0.4")
    assert {str(one.teachers["slow"]) for one in scored[0].scores} == {"0.2"}


def _check(bench: Bench, scored: Scored, version: str) -> None:
    """Scores name their version, and are those of a frozen model of the trainer's own folder."""
    frozen = Bench(bench.run.root.parent / f"frozen-{version}", bench.run.versions / version)
    path = str(bench.run.versions / version)
    algorithm = replace(bench.config.algorithm, teachers=[TeacherConfig(name="slow", path=path)])
    frozen.config = replace(bench.config, run=frozen.config.run, algorithm=algorithm)
    frozen.store, step = bench.store, int(version[2:]) + 1
    plan = replace(_one_rank(bench, step), teachers={})
    errors, found = frozen.score(ParallelConfig(), plan)
    assert not errors, errors[-4000:]
    (want,) = found
    assert not errors, errors[-4000:]
    gaps = []
    for one, other in zip(scored.scores, want.scores, strict=True):
        assert str(one.teachers["slow"]) == version
        gaps.append(float(np.abs(one.logprobs["slow"] - other.logprobs["slow"]).max()))
        gaps.append(-float(np.abs(one.logprobs["teacher"] - other.logprobs["slow"]).max()))
    assert max(gaps) < 1e-5
    assert min(gaps) < -1e-2, "control: another model misses"


def test_one_changed_element_of_a_version_is_noticed(
    straight: tuple[Bench, list[dict]],
) -> None:
    bench, _ = straight
    path = bench.run.teachers / "slow" / "0.4" / FILE
    data, tensors = path.read_bytes(), _weights(path.parent)
    name = sorted(tensors)[3]
    flat = tensors[name].view(-1)
    flat[7] = torch.nextafter(flat[7], torch.tensor(torch.inf))
    save_file(tensors, path, {"format": "pt"})
    try:
        errors, scored = bench.score(STAGES, _one_rank(bench, 5))
    finally:
        path.write_bytes(data)
    assert not scored
    assert "the loaded weights have digest" in errors, errors[-3000:]
