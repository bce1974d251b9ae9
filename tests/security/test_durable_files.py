"""What is on the disk after a power cut, a flipped bit, or a second trainer.

A recorder of `os` calls proves the order: bytes of a file, entries of its folder, rename, entries
of the parent folder.
"""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from moerl.config.schema import CheckpointConfig
from moerl.controller.journal.shared_groups import SharedGroups
from moerl.core.errors import ConfigError, ModelError, TrainerError
from moerl.launch import train
from moerl.layout import hf_shapes, model_spec
from moerl.observe.metrics import MetricsWriter
from moerl.records import BlobStore
from moerl.runtime import run_dir
from moerl.runtime.run_dir import RunDir, newest_incarnation, next_incarnation, refuse_foreign
from moerl.trainer.checkpoints.checkpoint_files import damage, newest_checkpoint, set_aside
from moerl.trainer.checkpoints.checkpoint_store import CheckpointStore
from tests.helpers.journals import group_of
from tests.helpers.saved_hf import save_hf
from tests.helpers.write_fault_runs import MODEL


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    return run


class Recorder:
    """The flushes and renames of files, by name, in their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, Path]] = []
        fsync, rename, replace = os.fsync, os.rename, os.replace

        def flushed(handle: int) -> None:
            self.calls.append(("flush", Path(os.readlink(f"/proc/self/fd/{handle}"))))
            fsync(handle)

        def renamed(plain: Callable[..., None]) -> Callable[..., None]:
            def call(source: Any, target: Any) -> None:
                self.calls.append(("rename", Path(target)))
                self.flushed_before = {p for what, p in self.calls if what == "flush"}
                self.unflushed = _files_below(Path(source)) - self.flushed_before
                plain(source, target)

            return call

        self.unflushed: set[Path] = set()
        monkeypatch.setattr(os, "fsync", flushed)
        monkeypatch.setattr(os, "rename", renamed(rename))
        monkeypatch.setattr(os, "replace", renamed(replace))

    def assert_durable(self, target: Path) -> None:
        """The last rename was to `target`, after a flush of all below it, then of the parent."""
        at = max(i for i, (what, _) in enumerate(self.calls) if what == "rename")
        assert self.calls[at] == ("rename", target), self.calls
        assert self.unflushed == set(), "not on the disk before the rename"
        assert ("flush", target.parent) in self.calls[at + 1 :], "the new name is not on the disk"


def _files_below(path: Path) -> set[Path]:
    return {path, *path.rglob("*")} if path.is_dir() else {path}


def _publish(run: RunDir, step: int, incarnation: int = 0, text: str = "weights") -> Path:
    store = CheckpointStore(run, CheckpointConfig(keep=3), incarnation)
    hidden = store.hidden(step)
    hidden.mkdir(parents=True)
    (hidden / "__0_0.distcp").write_text(text)
    (hidden / "metadata.json").write_text("{}")
    store.publish(step, {"version": f"{incarnation}.{step}", "step": step}, {})
    return run.checkpoint(step)


# --- order ---------------------------------------------------------------------------------------
def test_a_checkpoint_is_on_the_disk_before_its_name(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch)
    recorder.assert_durable(_publish(run, 2))


def test_an_hf_folder_is_on_the_disk_before_its_name(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.root / "config.json").write_text(json.dumps(MODEL))
    tensors = {name: torch.zeros(shape) for name, shape in hf_shapes(model_spec(MODEL)).items()}
    recorder = Recorder(monkeypatch)
    save_hf(run.hf, tensors, run.root)
    recorder.assert_durable(run.hf)


def test_state_and_shared_groups_are_on_the_disk_before_their_names(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = BlobStore(run.root / "blobs", "n")
    group = group_of(0, blobs)
    recorder = Recorder(monkeypatch)
    next_incarnation(run, resume=False)
    recorder.assert_durable(run.root / "state.json")
    SharedGroups(run.segments).share(group, blobs)
    recorder.assert_durable(run.segments / "0.group")


def test_rows_are_on_the_disk_when_the_file_is_closed_or_cut(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch)
    writer = MetricsWriter(run.metrics)
    writer.write(0, "0.1", {})
    assert recorder.calls == []
    writer.rewind(0)
    writer.close()
    assert recorder.calls == [("flush", run.metrics)] * 2


def test_the_recorder_sees_a_missing_flush(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moerl.trainer.checkpoints.checkpoint_store.flush_tree", lambda folder: 0)
    recorder = Recorder(monkeypatch)
    with pytest.raises(AssertionError, match="not on the disk before the rename"):
        recorder.assert_durable(_publish(run, 2))


# --- damage --------------------------------------------------------------------------------------
def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_is_found_by_the_digest(run: RunDir) -> None:
    folder = _publish(run, 2)
    names = ["__0_0.distcp", "metadata.json"]
    assert damage(folder, names) == ""
    _flip(folder / "__0_0.distcp")
    assert damage(folder, names) == "__0_0.distcp does not match its digest"


@pytest.mark.parametrize(
    ("name", "how", "cause"),
    [
        ("manifest.json", "empty", "not JSON"),
        ("metadata.json", "empty", "metadata.json is empty"),
        ("__0_0.distcp", "empty", "0 bytes"),
        ("__0_0.distcp", "gone", "No such file"),
        ("manifest.json", "gone", "there is no such file"),
    ],
)
def test_a_checkpoint_that_lacks_bytes_is_set_aside(
    run: RunDir, caplog: pytest.LogCaptureFixture, name: str, how: str, cause: str
) -> None:
    before, newest = _publish(run, 2), _publish(run, 4)
    if how == "gone":
        (newest / name).unlink()
    else:
        (newest / name).write_bytes(b"")
    assert run.latest_whole_checkpoint()[0] == before
    assert newest.is_dir(), "a look renames nothing"
    assert newest_checkpoint(run) == before
    assert (run.checkpoints / ".step-000004.bad").is_dir()
    assert run.finished_checkpoints() == [(2, before)]
    assert "set aside as .step-000004.bad" in caplog.text
    assert cause in caplog.text
    _publish(run, 4)
    assert newest_checkpoint(run) == newest


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_again(run: RunDir) -> None:
    """Its rows would be cut, all of them."""
    newest = _publish(run, 2)
    (newest / "__0_0.distcp").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(ModelError, match="holds 0 bytes, 7 were written"):
            newest_checkpoint(run)
        assert newest.is_dir()
    set_aside(newest, "as a rank does that finds it")
    with pytest.raises(ModelError, match=r"\.step-000002\.bad: this checkpoint is damaged"):
        newest_checkpoint(run)


def test_a_name_alone_is_no_checkpoint(run: RunDir) -> None:
    run.checkpoint(6).mkdir()
    (run.checkpoints / ".step-000008.0.writing").mkdir()
    assert run.finished_checkpoints() == []


def test_a_replaced_checkpoint_counts_until_the_new_one_does(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained again after a damaged one: at no moment is there none."""
    _publish(run, 2, text="old")
    seen = []
    for name in ("rename", "rmdir", "unlink"):
        plain = getattr(os, name)

        def call(*args: Any, plain: Callable[..., None] = plain, **named: Any) -> None:
            plain(*args, **named)
            newest, _ = run.latest_whole_checkpoint()
            assert newest is not None, "no checkpoint"
            seen.append((newest / "__0_0.distcp").read_text())

        monkeypatch.setattr(os, name, call)
    _publish(run, 2, text="new")
    assert set(seen) == {"old", "new"}
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-000002"]


# --- state.json ----------------------------------------------------------------------------------
@pytest.mark.parametrize("text", ["", '{"starts"', "[]", "{}"])
def test_a_damaged_state_is_counted_on_from(run: RunDir, text: str) -> None:
    for _ in range(3):
        next_incarnation(run, resume=True)
    _publish(run, 2, incarnation=2)
    (run.root / "state.json").write_text(text)
    assert next_incarnation(run, resume=True) > 2
    assert newest_incarnation(run) > 2


def test_starts_at_the_same_time_get_different_numbers(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, numbers = run_dir.atomic_write, []

    def slow(path: Path, *args: Any, **named: Any) -> None:
        threading.Event().wait(0.01)
        plain(path, *args, **named)

    monkeypatch.setattr(run_dir, "atomic_write", slow)
    threads = [
        threading.Thread(target=lambda: numbers.append(next_incarnation(run, resume=True)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(8))


def test_no_trainer_starts_between_the_look_and_the_rename(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor waits for the lock; then the checkpoint is there, and it starts from it."""
    next_incarnation(run, resume=True)
    store, found = CheckpointStore, []
    plain = store._replace

    def start() -> None:
        next_incarnation(run, resume=True)
        found.append(run.latest_checkpoint())

    successor = threading.Thread(target=start)

    def slow(hidden: Path, target: Path) -> None:
        successor.start()
        successor.join(0.2)
        assert successor.is_alive(), "a trainer started in between"
        plain(hidden, target)

    with monkeypatch.context() as slowly:
        slowly.setattr(store, "_replace", staticmethod(slow))
        _publish(run, 2)
    successor.join()
    assert found == [(2, run.checkpoint(2))]
    with pytest.raises(TrainerError, match="trainer 0 was replaced by 1"):
        _publish(run, 4)


def test_a_run_of_another_user_is_not_resumed(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _publish(run, 2)
    refuse_foreign(run)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(ConfigError, match=r"--resume = .* belongs to user"):
        refuse_foreign(run)


# --- the end of a run ----------------------------------------------------------------------------
def test_a_report_that_cannot_be_written_changes_nothing_else(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(train, "write_report", full)
    monkeypatch.setattr(train, "write_trace", full)
    err = io.StringIO()
    assert train._close(MagicMock(run=run), MagicMock(), {}, "", "", err) == 0
    assert "was not written: OSError: [Errno 28] No space left on device" in err.getvalue()


def test_the_named_resume_is_accepted(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that no checkpoint holds are trained again on request only, and the line says so."""
    monkeypatch.setattr(train, "write_report", MagicMock())
    monkeypatch.setattr(train, "write_trace", MagicMock())
    said = {}
    run.metrics.write_text('{"step": 0, "time_s": 1.0}\n')
    for has_checkpoint in (False, True):
        if has_checkpoint:
            run.checkpoint(1).mkdir(parents=True)
            (run.checkpoint(1) / "manifest.json").write_text("{}")
        err = io.StringIO()
        assert train._close(MagicMock(run=run), MagicMock(), {}, "stopped", "", err) == 1
        said[has_checkpoint] = err.getvalue().splitlines()[-1]
    assert said[False].endswith(f"continue with: moerl train --resume {run.root} --from-start")
    assert said[True].endswith(f"continue with: moerl train --resume {run.root}")
