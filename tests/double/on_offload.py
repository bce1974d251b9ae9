"""Megatron's optimizer offload on the double: the same step, its bytes, and a resume."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from moerl.config.schema import CheckpointConfig, OptimizerConfig, TrainerConfig
from moerl.core.types import PolicyVersion
from moerl.planning.memory import Training, optimizer_bytes, trainer_memory
from moerl.runtime.run_dir import RunDir
from moerl.runtime.trace import Tracer
from tests.double.train_once import (
    Tensors,
    Trained,
    another,
    largest_difference,
    make_folder,
    prepare,
)
from tests.double.watch import memory, purpose

if TYPE_CHECKING:
    from moerl.trainer.learner.step import Learner

ON_DEVICE = TrainerConfig(
    dtype="bf16", optimizer=OptimizerConfig(lr=1e-3, eps=1e-4, distributed=True)
)
OFFLOADED = replace(ON_DEVICE, optimizer_args={"optimizer_cpu_offload": True})
# Both are torch's AdamW in fp32: on the device operation by operation, on the host in one kernel.
BOUND = 2e-6  # of the fp32 weights' largest, after one step
NUMBERS = itertools.count()


@dataclass(frozen=True)
class Made:
    """A trainer under a purpose of its own, whose bytes the double counts."""

    trained: Trained
    name: str

    @property
    def learner(self) -> Learner:
        return self.trained.learner

    def step(self) -> None:
        with purpose(self.name):
            self.learner.step(self.trained.plan)


Make = Callable[[TrainerConfig], Made]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("offload")
    make_folder(folder)
    return prepare("cuda", folder, trainer=ON_DEVICE)


@pytest.fixture
def fresh(first: Trained) -> Make:
    """Makes trainers of the same model, in the same groups."""

    def make(trainer: TrainerConfig) -> Made:
        name = f"trainer {next(NUMBERS)}"
        with purpose(name):
            return Made(another(first, replace(first.learner.config, trainer=trainer)), name)

    return make


def optimizer_state(learner: Learner) -> Tensors:
    """fp32 weights and moments, by the optimizer and place of a parameter; on the host."""
    found = {}
    for number, chained in enumerate(learner.optimizer.chained_optimizers):
        places = [p for group in chained.optimizer.param_groups for p in group["params"]]
        for place, parameter in enumerate(places):
            state = dict(chained.optimizer.state[parameter])
            state.setdefault("master_param", parameter)
            found |= {
                f"{number}.{place}.{name}": value.detach().float().cpu().clone()
                for name, value in state.items()
            }
    return found


def test_a_step_is_that_of_an_optimizer_on_the_device(fresh: Make) -> None:
    here, there = fresh(ON_DEVICE), fresh(OFFLOADED)
    before = there.trained.weights()
    for made in (here, there):
        made.step()
    mine, theirs = optimizer_state(there.learner), optimizer_state(here.learner)
    print("difference:", largest_difference(mine, theirs))
    assert largest_difference(mine, theirs) <= BOUND
    weights = there.trained.weights()
    for name, value in here.trained.weights().items():
        # bf16 keeps 8 bits: the nearest number or the one beside it
        torch.testing.assert_close(weights[name], value, rtol=2**-7, atol=1e-6)
    # controls: the step moves the weights, and another rate moves them elsewhere
    assert largest_difference(weights, before) > 100 * BOUND
    faster = replace(OFFLOADED, optimizer=replace(OFFLOADED.optimizer, lr=2e-3))
    other = fresh(faster)
    other.step()
    assert largest_difference(optimizer_state(other.learner), theirs) > 100 * BOUND


@pytest.mark.parametrize(
    "trainer",
    [TrainerConfig(), ON_DEVICE, OFFLOADED],
    ids=["fp32", "bf16", "offloaded"],
)
def test_bytes_are_those_of_the_dry_run(fresh: Make, trainer: TrainerConfig) -> None:
    """Weights, gradients and optimizer; what a step leaves besides is below the bound."""
    made = fresh(trainer)
    made.step()
    made.learner.optimizer.zero_grad()
    training = Training(
        dtype=trainer.dtype,
        distributed_optimizer=trainer.optimizer.distributed,
        optimizer=optimizer_bytes(trainer),
        gpu=False,
    )
    spec = made.learner.model.spec
    (told,) = trainer_memory(spec, trainer.parallel, training)
    print("bytes:", memory(made.name).live, "dry run:", told.static, told.offloaded)
    assert memory(made.name).live == pytest.approx(told.static, rel=0.05)
    counted = sum(p.numel() for p in made.learner.model.gpt.parameters())
    assert told.parameters == counted


def test_a_resume_continues_exactly(fresh: Make, tmp_path: Path) -> None:
    from moerl.trainer.checkpoints import checkpoint
    from moerl.trainer.checkpoints.checkpoint_writer import CheckpointWriter

    whole = fresh(OFFLOADED)
    whole.step()
    run = RunDir(tmp_path / "run")
    run.create()
    ranks = whole.learner.parallel
    writer = CheckpointWriter(run, CheckpointConfig(), ranks, Tracer(run.trace, "trainer"), 0)
    progress = checkpoint.Progress(PolicyVersion(0, 1), ((1, 3),))
    checkpoint.save(writer, whole.learner, progress, ranks)
    writer.finish()
    saved = optimizer_state(whole.learner)
    whole.step()
    for trainer, bound in ((OFFLOADED, 0.0), (ON_DEVICE, BOUND)):
        resumed = fresh(trainer)
        path = run.checkpoint(1)
        assert checkpoint.load(path, resumed.learner, ranks).version.step == 1
        assert largest_difference(optimizer_state(resumed.learner), saved) == 0
        resumed.step()
        after = optimizer_state(resumed.learner)
        assert largest_difference(after, optimizer_state(whole.learner)) <= bound
    # control: fresh moments move elsewhere
    forgetful = fresh(OFFLOADED)
    checkpoint.load(run.checkpoint(1), forgetful.learner, ranks, reset_optimizer=True)
    forgetful.step()
    other = optimizer_state(forgetful.learner)
    assert largest_difference(other, optimizer_state(whole.learner)) > 1e-3
