"""Checkpoints, resumes and model folders of a trainer on the double: same numbers, no memory."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moerl.config.schema import (
    CheckpointConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TinyModel,
    TrainerConfig,
)
from moerl.core.types import PolicyVersion
from moerl.data.tiny_model import make_tiny_model
from moerl.layout import ModelSpec
from moerl.planning.memory import TrainerMemory, Training, optimizer_bytes, trainer_memory
from moerl.runtime.run_dir import RunDir
from moerl.runtime.trace import Tracer
from tests.double.on_offload import OFFLOADED, ON_DEVICE, optimizer_state
from tests.double.train_once import (
    Tensors,
    Trained,
    another,
    largest_difference,
    make_folder,
    prepare,
)
from tests.double.watch import OPS, PAGEABLE, memory, watch
from tests.helpers.trainer_support import EXPERTS, LAYERS, OVERLAPPED, TOP_K

SETTINGS = {
    "fp32": TrainerConfig(optimizer=OptimizerConfig(lr=1e-3, eps=1e-4)),
    "bf16": replace(ON_DEVICE, optimizer=OptimizerConfig(lr=1e-3, eps=1e-4)),
    "distributed": ON_DEVICE,
    "offloaded": OFFLOADED,
}
TWO_RANKS = replace(ON_DEVICE, parallel=ParallelConfig(dp=2), ddp=OVERLAPPED)
Make = Callable[[str], Trained]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_folder(folder)
    return prepare("cuda", folder, trainer=ON_DEVICE)


@pytest.fixture
def fresh(first: Trained) -> Make:
    config = first.learner.config
    return lambda settings: another(first, replace(config, trainer=SETTINGS[settings]))


class Saved:
    """A checkpoint of a trainer after its first step, and what the device had during the copy."""

    def __init__(self, trained: Trained, root: Path) -> None:
        from moerl.trainer.checkpoints import checkpoint
        from moerl.trainer.checkpoints.checkpoint_writer import CheckpointWriter

        self.run, ranks = RunDir(root), trained.learner.parallel
        if ranks.is_first:
            self.run.create()
        self.writer = CheckpointWriter(
            self.run, CheckpointConfig(), ranks, Tracer(self.run.trace, "trainer"), 0
        )
        progress = checkpoint.Progress(PolicyVersion(0, 1), ((1, 3),))
        with watch() as seen, allocated() as most:
            checkpoint.save(self.writer, trained.learner, progress, ranks)
        (self.allocated,) = most
        self.pageable = seen.own_lines(PAGEABLE, "d2h_sync")

    @property
    def path(self) -> Path:
        return self.run.checkpoint(1)

    def host_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.writer._buffers.values())

    def load(self, trained: Trained, *, reset: bool = False) -> Trained:
        from moerl.trainer.checkpoints import checkpoint

        ranks = trained.learner.parallel
        found = checkpoint.load(self.path, trained.learner, ranks, reset_optimizer=reset)
        assert found.version.step == 1
        return trained


@contextlib.contextmanager
def allocated() -> Iterator[list[int]]:
    """Gets the most bytes that a block adds on this rank's device."""
    device, found = torch.cuda.current_device(), list[int]()
    torch.cuda.synchronize()
    before = memory(device=device).live
    OPS.reset_peak(device)
    yield found
    found.append(memory(device=device).peak - before)


def gathered_bytes(trained: Trained) -> int:
    """On the device, while the optimizer's state is taken as megatron-core takes it."""
    from moerl.trainer.checkpoints.checkpoint_writer import METADATA

    learner = trained.learner
    model = {"model0": learner.model.gpt.sharded_state_dict(metadata=dict(METADATA))}
    with allocated() as most:
        learner.optimizer.sharded_state_dict(model, metadata=dict(METADATA))
    return most[0]


def stepped(trained: Trained) -> Trained:
    trained.learner.step(trained.plan)
    return trained


# --- memory ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_checkpoint_takes_host_memory_only(fresh: Make, tmp_path: Path, settings: str) -> None:
    """As much as the dry run says."""
    trained = stepped(fresh(settings))
    saved = Saved(trained, tmp_path)
    saved.writer.finish()
    assert saved.allocated == 0
    assert not saved.pageable, "copies that wait one by one"
    spec = trained.learner.model.spec
    planned = told(spec, SETTINGS[settings]).checkpoint
    assert saved.host_bytes() == pytest.approx(planned, rel=0.001)


LARGE = TinyModel(
    enabled=True,
    hidden_size=384,
    moe_ffn=512,
    num_layers=LAYERS,
    num_experts=EXPERTS,
    experts_per_token=TOP_K,
)


def test_an_offloaded_optimizer_is_written_in_pieces(first: Trained, tmp_path: Path) -> None:
    """Beside the copy of the weights the host holds less than a tenth of its state more.

    Control: an optimizer on the device is copied whole.
    """
    Saved(stepped(first), tmp_path / "first").writer.finish()  # what a first one imports
    make_tiny_model(tmp_path / "large", LARGE, seed=0)
    model = ModelConfig(path=str(tmp_path / "large"))
    growth = {}
    for name in ("offloaded", "distributed"):
        config = replace(first.learner.config, model=model, trainer=SETTINGS[name])
        trained = stepped(another(first, config))
        num = sum(parameter.numel() for parameter in trained.learner.model.gpt.parameters())
        reset_peak_rss()
        before = status_bytes("VmRSS")
        saved = Saved(trained, tmp_path / name)
        saved.writer.finish()
        growth[name] = status_bytes("VmHWM") - before - 2 * num
        print(f"{name}: {growth[name] / 1e6:.1f} MB beside weights, state {12 * num / 1e6:.1f} MB")
        del trained, saved
        gc.collect()
    assert growth["offloaded"] < 12 * num / 10
    assert growth["distributed"] > 12 * num


def reset_peak_rss() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def status_bytes(name: str) -> int:
    """VmRSS, or VmHWM: its peak since `reset_peak_rss`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def told(spec: ModelSpec, trainer: TrainerConfig) -> TrainerMemory:
    """By the dry run, of the rank that has most."""
    training = Training(
        dtype=trainer.dtype,
        distributed_optimizer=trainer.optimizer.distributed,
        optimizer=optimizer_bytes(trainer),
        gpu=False,
    )
    (rank,) = trainer_memory(spec, trainer.parallel, training)
    return rank


def test_megatron_would_gather_a_bucket_on_the_device(fresh: Make) -> None:
    """Control: the meter sees the state that its own form gathers."""
    trained = stepped(fresh("distributed"))
    num = sum(parameter.numel() for parameter in trained.learner.model.gpt.parameters())
    assert gathered_bytes(trained) >= 4 * num, "one of the three values of each parameter"


# --- numbers --------------------------------------------------------------------------------------
@pytest.mark.parametrize("settings", ["fp32", "distributed"])
def test_a_resume_continues_exactly(fresh: Make, tmp_path: Path, settings: str) -> None:
    """Bitwise, from a checkpoint that is written while the next step trains.  That of an offloaded
    optimizer is a test of `on_offload`."""
    whole = stepped(fresh(settings))
    at_save = numbers(whole)
    saved = Saved(whole, tmp_path)
    stepped(whole)
    saved.writer.finish()
    resumed = saved.load(fresh(settings))
    assert largest_difference(numbers(resumed), at_save) == 0
    places = {str(parameter.device) for parameter in resumed.learner.model.gpt.parameters()}
    assert places == {"cuda:0"}
    assert largest_difference(numbers(stepped(resumed)), numbers(whole)) == 0
    # control: fresh moments move elsewhere
    other = stepped(saved.load(fresh(settings), reset=True))
    assert largest_difference(other.weights(), whole.weights()) > 1e-3


def numbers(trained: Trained) -> dict[str, torch.Tensor]:
    return trained.weights() | optimizer_state(trained.learner)


def test_a_model_folder_is_the_checkpoint_read_without_a_device(
    fresh: Make, tmp_path: Path
) -> None:
    """`hf/` of the device, and a conversion on the host of the checkpoint of the same weights."""
    from moerl.trainer.checkpoints.convert import convert_to_hf
    from moerl.trainer.checkpoints.convert_output import ConversionRanks
    from moerl.trainer.checkpoints.megatron_folder import MegatronFolder
    from moerl.trainer.hf_io.hf_shards import HfShards, RankGroup, every_rank

    trained = stepped(fresh("distributed"))
    learner, model = trained.learner, trained.learner.model
    source = Path(learner.config.model.path)
    saved = Saved(trained, tmp_path / "run")
    saved.writer.finish()
    held = every_rank(model.spec, learner.parallel.sizes, learner.parallel.platform.layers)
    ranks = RankGroup(learner.parallel.rank, learner.parallel.control)
    with allocated() as most:
        HfShards(lambda: model.tensors, held, ranks, source).save(tmp_path / "hf")
    assert most[0] <= max(tensor.nbytes for tensor in model.tensors.values())
    folder = MegatronFolder(saved.path, source)
    convert_to_hf(folder, tmp_path / "converted", ConversionRanks(), lambda *_: None)
    found, want = in_files(tmp_path / "hf"), in_files(tmp_path / "converted")
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)
    # control: the step moved them
    assert largest_difference(as_fp32(want), as_fp32(in_files(source))) > 1e-3


def in_files(folder: Path) -> Tensors:
    """The tensors of a model folder."""
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def as_fp32(tensors: Tensors) -> Tensors:
    return {name: value.float() for name, value in tensors.items()}
