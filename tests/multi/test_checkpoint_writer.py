"""Checkpoints beside training: frozen, at most one in flight, whole or absent, best kept.

One rank, a state of one tensor and one object; layouts are test_resume_layouts' subject.
"""

from __future__ import annotations

import io
import json
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from moerl.config.schema import CheckpointConfig
from moerl.core.errors import ModelError, NonRetryableError, TrainerError
from moerl.observe.metrics import MetricsWriter
from moerl.runtime import disk_wait
from moerl.runtime.disk_wait import DiskPatience
from moerl.runtime.run_dir import RunDir, next_incarnation, read_manifest
from moerl.runtime.trace import Tracer
from moerl.trainer.checkpoints import checkpoint, checkpoint_writer
from moerl.trainer.checkpoints.checkpoint_writer import CheckpointWriter
from tests.helpers.patience import patience


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.create()
    return run


def _writer(
    run: RunDir, disk: DiskPatience = DiskPatience(), device: str = "cpu", **config: Any
) -> CheckpointWriter:
    """device: of the trainer, whose tensors in other memory are not copied."""
    first: Any = SimpleNamespace(
        is_first=True, timeout=timedelta(seconds=60), device=torch.device(device)
    )
    return CheckpointWriter(
        run, CheckpointConfig(**config), first, Tracer(run.trace, "trainer-0"), 0, disk
    )


def _state(weights: torch.Tensor, note: int) -> dict[str, Any]:
    return {"weights": ShardedTensor.from_rank_offsets("weights", weights), "note": note}


def _load(run: RunDir, step: int) -> tuple[torch.Tensor, int]:
    wanted = _state(torch.zeros(1000), 0)
    state = dist_checkpointing.load(wanted, str(run.checkpoint(step)))
    return state["weights"], state["note"]


class _Gate:
    """Holds the writing thread until it is opened, or lets it fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.error = threading.Event(), None
        original = checkpoint_writer._Writer.write

        def write(writer: Any) -> Any:
            assert self.open.wait(patience(60))
            if self.error is not None:
                raise self.error
            return original(writer)

        monkeypatch.setattr(checkpoint_writer._Writer, "write", write)


def test_what_is_written_is_what_was_copied(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, writer = _Gate(monkeypatch), _writer(run)
    weights = torch.arange(1000.0)
    writer.save(4, _state(weights, 4), {"step": 4})
    weights.zero_()  # training goes on
    assert run.latest_checkpoint() is None
    assert writer.metrics() == {}
    gate.open.set()
    writer.finish()
    found, note = _load(run, 4)
    assert torch.equal(found, torch.arange(1000.0))
    assert note == read_manifest(run.checkpoint(4))["step"] == 4
    metrics = writer.metrics()
    assert set(metrics) == {"checkpoint/pause_s", "checkpoint/write_s", "checkpoint/failed"}
    assert metrics["checkpoint/failed"] == 0.0
    assert writer.metrics() == {}


def test_an_offloaded_state_is_written_from_its_own_memory(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next update waits for it.  Control: what is not waited for is written as it is then."""
    gate, writer = _Gate(monkeypatch), _writer(run, device="cuda")
    whole = torch.arange(2000.0)
    for step in (1, 2):
        gate.open.clear()
        writer.save(step, _state(whole[:1000], step), {}, is_offloaded=step == 1)
        assert not writer._buffers, "a copy"
        update = threading.Thread(target=writer.before_update, daemon=True)
        update.start()
        update.join(0.3)
        assert update.is_alive() is (step == 1)
        if step == 2:
            whole.zero_()
        gate.open.set()
        update.join(patience(60))
        assert not update.is_alive()
        writer.wait()
        assert _load(run, step)[0].sum() == (499500.0 if step == 1 else 0.0)
        assert (writer.metrics()["checkpoint/pause_s"] > 0.2) is (step == 1)
    (file,) = run.checkpoint(1).glob("*.distcp")
    assert file.stat().st_size < whole.nbytes, "a view takes the rest of its storage along"


def test_an_update_waits_until_an_offloaded_state_found_room(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk: what is written at last is the state of that step."""
    monkeypatch.setattr(disk_wait, "PAUSE_S", 0.01)
    said: list[str] = []
    gate = _Gate(monkeypatch)
    writer = _writer(run, DiskPatience(60.0, said.append), device="cuda")
    weights = torch.full((1000,), 2.0)
    gate.open.set()
    gate.error = OSError(28, "No space left on device")
    writer.save(2, _state(weights, 2), {}, is_offloaded=True)

    def update() -> None:
        writer.before_update()
        weights.zero_()

    training = threading.Thread(target=update, daemon=True)
    training.start()
    while not said:
        time.sleep(0.01)
    assert training.is_alive()
    assert f"{run.checkpoint(2)} needs 4,000 bytes" in said[0]
    gate.error = None
    training.join(patience(60))
    writer.finish()
    assert not weights.any()
    assert _load(run, 2)[0].unique().tolist() == [2.0]


def test_one_is_in_flight_at_most(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, writer = _Gate(monkeypatch), _writer(run)
    writer.save(1, _state(torch.full((1000,), 1.0), 1), {})
    second = threading.Thread(
        target=writer.save, args=(2, _state(torch.full((1000,), 2.0), 2), {}), daemon=True
    )
    second.start()
    second.join(0.3)
    assert second.is_alive()  # waits: its copy would overwrite what is being written
    gate.open.set()
    second.join(patience(60))
    writer.finish()
    assert _load(run, 1)[0].unique().tolist() == [1.0]
    assert _load(run, 2)[0].unique().tolist() == [2.0]


def test_a_full_disk_costs_one_checkpoint(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, writer = _Gate(monkeypatch), _writer(run)
    gate.open.set()
    writer.save(1, _state(torch.ones(1000), 1), {})
    writer.wait()
    gate.error = OSError(28, "No space left on device")
    writer.save(2, _state(torch.ones(1000), 2), {})
    writer.wait()
    assert writer.metrics()["checkpoint/failed"] == 1.0
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-000001"]
    with pytest.raises(TrainerError, match="No space left"):
        writer.finish()
    gate.error = None
    writer.save(3, _state(torch.ones(1000), 3), {})
    writer.finish()
    assert run.latest_checkpoint() == (3, run.checkpoint(3))


def test_a_full_disk_is_waited_for(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is written when there is room; the console learns of wait and end."""
    monkeypatch.setattr(disk_wait, "PAUSE_S", 0.01)
    said: list[str] = []
    gate, writer = _Gate(monkeypatch), _writer(run, DiskPatience(60.0, said.append))
    gate.open.set()
    gate.error = OSError(28, "No space left on device")
    writer.save(2, _state(torch.ones(1000), 2), {})
    while not said:
        time.sleep(0.01)
    assert not run.checkpoint(2).exists()
    gate.error = None
    writer.finish()
    assert _load(run, 2)[0].unique().tolist() == [1.0]
    assert f"{run.checkpoint(2)} needs 4,000 bytes and its disk has " in said[0]
    assert said[1].startswith("the checkpoint of step 2: written after ")
    assert writer.metrics()["checkpoint/failed"] == 0.0


def test_a_disk_that_stays_full_ends_the_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_wait, "PAUSE_S", 0.01)
    said: list[str] = []
    gate, writer = _Gate(monkeypatch), _writer(run, DiskPatience(0.1, said.append))
    gate.open.set()
    gate.error = OSError(5, "Input/output error")
    writer.save(2, _state(torch.ones(1000), 2), {})
    writer.wait()
    assert "was not written: OSError: [Errno 5]" in said[0], "control: another fault waits not"
    gate.error = OSError(28, "No space left on device")
    writer.save(4, _state(torch.ones(1000), 4), {})
    with pytest.raises(NonRetryableError, match="No space left"):
        writer.save(6, _state(torch.ones(1000), 6), {})
    assert "waits for room" in said[1]


def test_a_state_is_planned_once(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later checkpoints use that plan, unless the state has other tensors."""
    checked: list[Any] = []
    monkeypatch.setattr(checkpoint_writer, "validate_sharding_integrity", checked.append)
    writer = _writer(run, keep=3)
    for step, size in ((1, 1000), (2, 1000), (3, 500)):
        writer.save(step, _state(torch.full((size,), float(step)), step), {})
        writer.finish()
        assert len(checked) == {1: 1, 2: 1, 3: 2}[step]
    assert _load(run, 1)[0].unique().tolist() == [1.0]
    assert _load(run, 2)[0].unique().tolist() == [2.0]
    smaller = dist_checkpointing.load(_state(torch.zeros(500), 0), str(run.checkpoint(3)))
    assert smaller["weights"].unique().tolist() == [3.0]


class _Full(io.RawIOBase):
    """A file on a disk that fills while it is written."""

    written = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self.written

    def write(self, data: Any) -> int:
        self.written += len(data)
        if self.written > 5000:
            raise OSError(28, "No space left on device")
        return len(data)


def test_a_disk_that_fills_in_the_middle_costs_one_checkpoint(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch then raises an error of its own; the ranks that wait for this one must hear of it."""
    writer = _writer(run)
    writer.save(1, _state(torch.ones(1000), 1), {})
    writer.wait()
    plain = Path.open

    def opened(path: Path, *args: Any, **fields: Any) -> Any:
        is_data = path.suffix == ".distcp" and args == ("wb",)
        return io.BufferedWriter(_Full()) if is_data else plain(path, *args, **fields)

    with monkeypatch.context() as full:
        full.setattr(Path, "open", opened)
        writer.save(2, _state(torch.ones(100_000), 2), {})
        writer.wait()
    assert writer.metrics()["checkpoint/failed"] == 1.0
    with pytest.raises(TrainerError, match="the last checkpoint was not written"):
        writer.finish()
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-000001"]


@pytest.mark.parametrize(("owner", "call"), [(Path, "mkdir"), (os, "open")])
def test_a_disk_that_is_full_already_costs_one_checkpoint(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, owner: Any, call: str
) -> None:
    """Neither the folder nor the part that one rank writes for all may end training."""
    writer = _writer(run)
    writer.save(1, _state(torch.ones(1000), 1), {})
    writer.wait()
    writer.metrics()
    plain, refused = getattr(owner, call), {"mkdir": "writing", "open": ".common.pt."}[call]

    def refuse(path: Path | str, *args: Any, **fields: Any) -> Any:
        if refused in Path(path).name:
            raise OSError(28, "No space left on device")
        return plain(path, *args, **fields)

    with monkeypatch.context() as full:
        full.setattr(owner, call, refuse)
        writer.save(2, _state(torch.ones(1000), 2), {})
        writer.wait()
    assert writer.metrics()["checkpoint/failed"] == 1.0
    with pytest.raises(TrainerError, match="No space left"):
        writer.finish()
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-000001"]
    writer.save(3, _state(torch.ones(1000), 3), {})
    writer.finish()
    assert _load(run, 3)[1] == 3


def test_what_cannot_be_scored_is_said_to_all_ranks(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, responses = _Gate(monkeypatch), []
    plain = checkpoint_writer.broadcast_value

    def broadcast(verdict: str, *fields: Any) -> str:
        responses.append(verdict)
        return plain(verdict, *fields)

    run.metrics.write_text("no row\n")
    writer = _writer(run, best="reward/mean")
    writer.save(1, _state(torch.ones(1000), 1), {})
    monkeypatch.setattr(checkpoint_writer, "broadcast_value", broadcast)
    gate.open.set()
    with pytest.raises(TrainerError, match="the last checkpoint was not written"):
        writer.finish()
    assert len(responses) == 1, "the other ranks wait for it"
    assert list(run.checkpoints.iterdir()) == []


def test_a_trainer_that_was_replaced_publishes_nothing(run: RunDir) -> None:
    """It was cut off and lives on: the folder is its successor's, whose step has the same name."""
    assert next_incarnation(run, resume=True) == 0
    old = _writer(run)
    old.save(1, _state(torch.ones(1000), 1), {})
    old.finish()
    assert next_incarnation(run, resume=True) == 1
    old.save(2, _state(torch.full((1000,), 2.0), 2), {})
    with pytest.raises(TrainerError, match="trainer 0 was replaced by 1"):
        old.finish()
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-000001"]


def test_a_writer_that_was_killed_leaves_the_one_before(run: RunDir) -> None:
    writer = _writer(run)
    writer.save(1, _state(torch.ones(1000), 1), {})
    writer.finish()
    hidden = run.checkpoints / ".step-000002.0.writing"  # as a kill leaves it
    hidden.mkdir()
    (hidden / "__0_0.distcp").write_bytes(b"half")
    assert run.latest_checkpoint() == (1, run.checkpoint(1))
    _writer(run)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-000001"]


def _add_rows(run: RunDir, *rows: dict[str, float]) -> None:
    with run.metrics.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(("best_is", "best"), [("highest", 4), ("lowest", 6)])
def test_the_newest_are_kept_and_the_best(run: RunDir, best_is: str, best: int) -> None:
    writer = _writer(run, keep=2, best="reward/mean", best_is=best_is)
    assert run.best_checkpoint() is None
    rewards = dict(enumerate([0.4, 0.6, 0.9, 0.8, 0.1, 0.2, 0.5, 0.5]))
    for step in range(2, 11, 2):
        for row in (step - 2, step - 1):
            figure = {"reward/mean": rewards[row]} if row in rewards else {"loss/pg": 1.0}
            _add_rows(run, {"step": row} | figure)
        if step == 2:  # a row of later weights may be there already, and is taken back
            _add_rows(run, {"step": 2, "reward/mean": 99.0})
        writer.save(step, _state(torch.ones(1000), step), {"step": step})
        writer.finish()
        metrics = MetricsWriter(run.metrics)
        metrics.rewind(step)
        metrics.close()
    kept = [step for step, _ in run.finished_checkpoints()]
    assert kept == sorted({best, 8, 10})
    assert run.best_checkpoint() == (best, run.checkpoint(best))
    assert read_manifest(run.checkpoint(8))["reward/mean"] == 0.5
    assert "reward/mean" not in read_manifest(run.checkpoint(10))


def test_a_trainer_that_started_again_ranks_as_the_one_before(run: RunDir) -> None:
    for step, reward in ((1, 0.2), (2, 0.9), (3, 0.5)):
        writer = _writer(run, keep=1, best="reward/mean")  # it has read nothing yet
        _add_rows(run, {"step": step - 1, "reward/mean": reward})
        writer.save(step, _state(torch.ones(1000), step), {"step": step})
        writer.finish()
    assert run.best_checkpoint() == (2, run.checkpoint(2))
    assert read_manifest(run.checkpoint(3))["reward/mean"] == 0.5


def test_evaluations_rank_the_weights_that_they_saw(run: RunDir) -> None:
    """Each ends a step after its weights were saved, in a row of later weights."""
    writer = _writer(run, keep=2, best="eval/reward_mean")
    for step, reward in ((1, 0.3), (2, 0.8), (3, 0.5), (4, 0.9)):
        writer.save(step, _state(torch.ones(1000), step), {"step": step})
        writer.wait()
        if step < 4:
            _add_rows(run, {"step": step, "eval/step": step, "eval/reward_mean": reward})
    assert run.best_checkpoint() == (2, run.checkpoint(2))
    assert [step for step, _ in run.finished_checkpoints()] == [2, 3, 4]
    _add_rows(run, {"step": 4, "eval/step": 4, "eval/reward_mean": 0.9})
    writer.finish()
    assert run.best_checkpoint() == (4, run.checkpoint(4)), "the last one is ranked at the end"


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_loaded(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flipped bit of a tensor would otherwise be trained on without a word."""
    writer = _writer(run, keep=3)
    for step in (1, 2, 3):
        writer.save(step, _state(torch.full((1000,), float(step)), step), {})
        writer.finish()
    monkeypatch.setattr(checkpoint, "load", lambda path, *_, **__: path)
    ranks: Any = SimpleNamespace(rank=0, world_size=1, is_first=True, control=dist.group.WORLD)
    learner: Any = None

    def loaded() -> Any:
        newest = run.latest_checkpoint()
        assert newest is not None
        return checkpoint.load_newest(run, newest[1], learner, ranks)

    assert loaded() == run.checkpoint(3)
    sums = read_manifest(run.checkpoint(3))["files"]
    assert set(sums) == {"__0_0.distcp", ".metadata", "common.pt", "metadata.json"}
    for step, name in ((3, "__0_0.distcp"), (2, "common.pt")):
        path = run.checkpoint(step) / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert loaded() == run.checkpoint(1)
    assert _load(run, 1)[0].unique().tolist() == [1.0]
    names = {path.name for path in run.checkpoints.iterdir()}
    assert names == {"step-000001", ".step-000002.bad", ".step-000003.bad"}
    (run.checkpoint(1) / ".metadata").write_bytes(b"")
    with pytest.raises(ModelError, match="no earlier one is whole"):
        loaded()
