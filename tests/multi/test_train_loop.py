"""The whole trainer: plans in; steps, publishes, checkpoints, a Hugging Face folder out."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from moerl.config.load import save_config
from moerl.config.schema import (
    CheckpointConfig,
    Config,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    SyncConfig,
    TrainerConfig,
)
from moerl.core.messages import SetEngines, SyncTarget
from moerl.core.types import PolicyVersion
from moerl.records.blob_store import BlobStore
from moerl.runtime.run_dir import RunDir
from moerl.trainer.checkpoints.convert import convert_to_hf
from moerl.trainer.checkpoints.convert_output import ConversionRanks
from moerl.trainer.checkpoints.megatron_folder import MegatronFolder
from tests.helpers.fake_controller import FakeController, run_gang
from tests.helpers.trainer_support import make_model, make_plan

TOKEN = "a-token"
STEPS = 4


class Bench:
    """One run directory, its records and its fake controller."""

    def __init__(self, root: Path, model: Path, **checkpoint: int | bool) -> None:
        self.run = RunDir(root / "run")
        self.run.create()
        self.store = BlobStore(root / "blobs", "n0")
        self.spoiled = ""  # URI of the damaged blob
        self.config = Config(
            run=RunConfig(name="run", steps=STEPS),
            model=ModelConfig(path=str(model)),
            engine=EngineConfig(count=1),
            sync=SyncConfig(transport="shm", bucket_bytes=20_000, timeout_s=30.0),
            checkpoint=CheckpointConfig(**checkpoint),  # type: ignore[arg-type]
            trainer=TrainerConfig(parallel=ParallelConfig(dp=2, ep=2), step_timeout_s=30.0),
        )
        save_config(self.config, self.run.config)

    def train(
        self,
        *,
        incarnation: int = 0,
        checkpoint: Path | None = None,
        until: int = STEPS,
        spoil: int = -1,
        fleets: Mapping[int, SetEngines] | None = None,
        gives_ahead: bool = False,
        launcher: bool = False,
    ) -> tuple[subprocess.CompletedProcess[str], FakeController]:
        """Run the trainer until `until`; the plan of step `spoil` has a damaged blob."""
        plans = partial(self._plan, incarnation=incarnation, until=until, spoil=spoil)
        model = Path(self.config.model.path)
        controller = FakeController(plans, fleets, model, gives_ahead=gives_ahead)
        arguments = ["--incarnation", str(incarnation)]
        if checkpoint is not None:
            arguments += ["--checkpoint", str(checkpoint)]
        done = run_gang(controller, self.run, self.store, 2, *arguments, launcher=launcher)
        return done, controller

    def _plan(self, step: int, incarnation: int, until: int, spoil: int):  # type: ignore[no-untyped-def]
        if step >= until:
            return None
        plan = make_plan(self.store, seed=step, step=step, dp_size=2)
        if step == spoil:
            self.spoiled = plan.groups[0].rollouts()[0].routing[0].ids.uri
            path = self.store.root / self.spoiled.rpartition("/")[2]
            data = path.read_bytes()
            path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        return replace(plan, version=PolicyVersion(incarnation, step))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("trainer") / "model")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple:
    """One uninterrupted run of all steps; engine 5 takes the place of engine 0 at step 2."""
    bench = Bench(tmp_path_factory.mktemp("straight"), model, every=2, keep=2, keep_versions=True)
    fleets = {2: SetEngines((SyncTarget(5, 1),))}
    done, controller = bench.train(fleets=fleets, gives_ahead=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return bench, controller


def test_every_step_is_reported_once_with_full_coverage(straight: tuple) -> None:
    _, controller = straight
    assert controller.hello.dp_size == 2
    assert [step.step for step in controller.steps] == list(range(STEPS))
    assert [step.version.step for step in controller.steps] == list(range(1, STEPS + 1))
    for step in controller.steps:
        assert step.metrics["routing/replay_cover_frac"] == 1.0
        assert step.metrics["keep/cover_frac"] == 1.0
        assert step.metrics["mismatch/tokens"] == step.metrics["loss/tokens"] > 0


def test_the_first_records_of_a_step_are_read_while_the_one_before_is_trained(
    straight: tuple,
) -> None:
    """`straight` has its plans ahead; runs that resume have not, and end in the same weights."""
    _, controller = straight
    found = [step.metrics["perf/ahead_reads"] for step in controller.steps]
    assert found[0] == 0, found
    assert min(found[1:]) > 0, found


def test_engine_holds_the_published_weights_bitwise(straight: tuple) -> None:
    from safetensors.torch import load_file

    bench, controller = straight
    engine = controller.engines[0]
    assert engine.versions == [PolicyVersion(0, step) for step in (1, 2)]
    want = load_file(bench.run.versions / str(engine.versions[-1]) / "model.safetensors")
    assert want.keys() == engine.weights.keys()
    assert all(torch.equal(want[name], engine.weights[name]) for name in want)
    other = load_file(bench.run.versions / str(engine.versions[0]) / "model.safetensors")
    assert any(not torch.equal(other[name], engine.weights[name]) for name in other)


def test_an_engine_that_joins_gets_the_snapshot_at_once(straight: tuple) -> None:
    from safetensors.torch import load_file

    bench, controller = straight
    joined = controller.engines[5]
    assert joined.versions == [PolicyVersion(0, step) for step in range(2, STEPS)]
    want = load_file(bench.run.versions / str(joined.versions[-1]) / "model.safetensors")
    assert all(torch.equal(want[name], joined.weights[name]) for name in want)


def test_run_leaves_checkpoints_and_a_hugging_face_folder(straight: tuple) -> None:
    bench, _ = straight
    assert bench.run.latest_checkpoint() == (STEPS, bench.run.checkpoint(STEPS))
    assert {path.name for path in bench.run.checkpoints.iterdir()} == {
        "step-000002",
        "step-000004",
    }
    assert (bench.run.hf / "config.json").exists()


def test_any_checkpoint_of_a_run_converts_to_what_the_run_saved(
    straight: tuple, tmp_path: Path
) -> None:
    """The model is found by the run's settings; a conversion may read while the run trains."""
    from safetensors.torch import load_file

    bench, _ = straight
    for folder, saved in (
        (bench.run.checkpoint(2), bench.run.versions / "0.2"),
        (bench.run.root, bench.run.hf),
    ):
        out = tmp_path / saved.name
        convert_to_hf(MegatronFolder(folder), out, ConversionRanks(), lambda *_: None)
        assert {path.name for path in saved.iterdir()} == {path.name for path in out.iterdir()}
        assert (out / "config.json").read_bytes() == (saved / "config.json").read_bytes()
        found, want = (load_file(at / "model.safetensors") for at in (out, saved))
        assert found.keys() == want.keys()
        assert all(torch.equal(found[name], want[name]) for name in want)
        others = load_file(bench.run.versions / "0.3" / "model.safetensors")
        assert all(not torch.equal(found[name], others[name]) for name in want), "control"


def test_resume_continues_exactly_and_publishes_first(
    straight: tuple, tmp_path: Path, model: Path
) -> None:
    _, whole = straight
    bench = Bench(tmp_path, model, every=2, keep=2)
    done, _ = bench.train(until=2)
    assert done.returncode == 0, done.stderr[-4000:]
    _, path = bench.run.latest_checkpoint()
    done, resumed = bench.train(incarnation=1, checkpoint=path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert resumed.hello.version == PolicyVersion(1, 2)
    assert resumed.hello.consumed == ((0, 2), (1000, 1002))
    assert resumed.hello.begins == (PolicyVersion(0, 0), PolicyVersion(1, 2))
    assert resumed.engines[0].versions[0] == PolicyVersion(1, 2)
    assert [step.step for step in resumed.steps] == [2, 3]
    for before, after in zip(whole.steps[2:], resumed.steps, strict=True):
        assert after.metrics["loss/pg"] == before.metrics["loss/pg"]
        assert after.metrics["loss/grad_norm"] == before.metrics["loss/grad_norm"]
    # control: without the checkpoint the same plans give another loss
    assert whole.steps[0].metrics["loss/pg"] != whole.steps[2].metrics["loss/pg"]


def test_a_failing_rank_ends_the_trainer_with_its_cause(tmp_path: Path, model: Path) -> None:
    bench = Bench(tmp_path, model, every=0, keep=1)
    done, controller = bench.train(spoil=1, launcher=True)
    assert done.returncode != 0
    assert len(controller.steps) == 1, done.stderr[-3000:]
    assert controller.failed
    assert any(bench.spoiled in failed.cause for failed in controller.failed)
    assert bench.spoiled in {failed.blob for failed in controller.failed}, "it is not named"
    assert {failed.blob for failed in controller.failed} <= {bench.spoiled, ""}
    assert "blob://n0/" in done.stderr
