"""Another user of the machine prepares the places that a run will use; none of it is taken.

The stranger owns files by `chown` when the tests run as root.  Otherwise this process claims
another effective user id, so that its own files are a stranger's.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moerl.config import load_config, save_config
from moerl.config.schema import Config
from moerl.controller.journal.journal import Journal
from moerl.core.errors import ConfigError
from moerl.engine.host.scratch_dir import Scratch, remove_abandoned
from moerl.launch import train
from moerl.launch.nodes import engine_node
from moerl.launch.train import outside_folder, prepare
from moerl.observe.page import Page, write_html
from moerl.records import BlobStore
from moerl.records.range_server import RangeServer
from moerl.records.remote_blobs import ClusterBlobs
from moerl.runtime.beside import LineWriter
from moerl.runtime.private_dir import private_dir, private_opener, refuse_planted
from moerl.runtime.run_dir import RunDir

STRANGER = 4_294_967  # has no account here

Plant = Callable[[Path], Path]


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A place such as /dev/shm."""
    tmp_path.chmod(0o755)
    folder = tmp_path / "shm"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.fixture
def of_a_stranger(monkeypatch: pytest.MonkeyPatch) -> Plant:
    def plant(path: Path) -> Path:
        if os.getuid() == 0:
            os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
        return path

    return plant


def folder_of(path: Path, mode: int = 0o777) -> Path:
    path.mkdir()
    path.chmod(mode)
    return path


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def open_journal(folder: Path) -> None:
    journal = Journal(folder, BlobStore(folder.parent / "own", "local"))
    journal.load()
    journal.close()


def serve(folder: Path) -> None:
    RangeServer(folder, "127.0.0.1", 0, "token").close()


TAKERS: dict[str, Callable[[Path], object]] = {
    "records": lambda folder: BlobStore(folder, "local"),
    "record server": serve,
    "records of an engine node": lambda folder: ClusterBlobs(folder, "127.0.0.1:1", "token"),
    "journal": open_journal,
}


@pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS)
def test_a_folder_of_another_user_is_refused(
    take: Callable[[Path], object], shared: Path, of_a_stranger: Plant
) -> None:
    (shared / "own").mkdir(mode=0o700)
    planted = of_a_stranger(folder_of(shared / "run"))
    with pytest.raises(ConfigError, match="belongs to") as refusal:
        take(planted)
    assert str(planted) in str(refusal.value)


@pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS)
def test_a_symlink_is_refused_even_one_of_ours(
    take: Callable[[Path], object], shared: Path, tmp_path: Path
) -> None:
    target = folder_of(tmp_path / "home", 0o700)
    (shared / "run").symlink_to(target)
    with pytest.raises(ConfigError, match="not a folder of its own"):
        take(shared / "run")
    assert not list(target.iterdir())


def test_the_sweep_of_a_planted_folder_deletes_nothing_of_ours(
    shared: Path, tmp_path: Path, of_a_stranger: Plant
) -> None:
    home = folder_of(tmp_path / "home", 0o700)
    (home / "thesis.tex").write_text("x", encoding="utf-8")
    (shared / "run").symlink_to(home)
    of_a_stranger(shared / "run")
    with pytest.raises(ConfigError, match="belongs to"):
        BlobStore(shared / "run", "local").sweep([])
    assert (home / "thesis.tex").exists()


def test_a_parent_of_another_user_is_refused(shared: Path, of_a_stranger: Plant) -> None:
    """Its owner could put another folder in the place of ours at any time."""
    parent = folder_of(shared / f"moerl-{os.getuid()}", 0o755)
    private_dir(parent / "run", "cluster.blob_dir")  # made by us, with our mode
    of_a_stranger(parent)
    with pytest.raises(ConfigError, match="belongs to") as refusal:
        private_dir(parent / "run", "cluster.blob_dir")
    assert refusal.value.field == "cluster.blob_dir"
    assert refusal.value.value == str(parent)


def test_a_folder_of_another_user_in_a_folder_of_ours_is_refused(
    tmp_path: Path, of_a_stranger: Plant
) -> None:
    planted = of_a_stranger(folder_of(tmp_path / "run", 0o700))
    with pytest.raises(ConfigError, match="belongs to"):
        private_dir(planted, "cluster.blob_dir")


def test_a_folder_that_others_could_write_is_refused(shared: Path) -> None:
    planted = folder_of(shared / "run", 0o770)
    with pytest.raises(ConfigError, match=r"other users can write to it \(mode 0770\)"):
        private_dir(planted, "cluster.blob_dir")


def test_a_folder_of_ours_is_closed_to_readers(shared: Path) -> None:
    private_dir(folder_of(shared / "run", 0o755), "cluster.blob_dir")
    assert mode_of(shared / "run") == 0o700
    private_dir(shared / "new" / "run", "cluster.blob_dir")
    assert mode_of(shared / "new") == mode_of(shared / "new" / "run") == 0o700


def test_folders_of_root_and_links_of_ours_may_lead_to_the_place(
    shared: Path, tmp_path: Path
) -> None:
    disk = folder_of(tmp_path / "disk", 0o755)
    (shared / "link").symlink_to(disk)
    private_dir(shared / "link" / "run", "cluster.blob_dir")
    assert mode_of(disk / "run") == 0o700


@pytest.mark.parametrize("setting", ["cluster.blob_dir", "rollout.journal_dir"])
def test_a_run_does_not_start_over_a_planted_folder(
    setting: str,
    shared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    of_a_stranger: Plant,
) -> None:
    monkeypatch.setattr(train, "with_tiny_model", lambda config, _: config)
    monkeypatch.setattr(train, "check_model", lambda _: {})
    monkeypatch.setattr(train, "check_planned_layout", lambda *_, **__: None)
    run = RunDir(tmp_path / "run")
    run.create()
    name = outside_folder(str(shared), run)
    assert name.parent == shared / f"moerl-{os.getuid()}"
    of_a_stranger(folder_of(name.parent))
    with pytest.raises(ConfigError, match="belongs to") as refusal:
        prepare(load_config("quickstart-smoke", [f"{setting}={shared}"]), run, resume=False)
    assert refusal.value.field == setting
    assert not (run.root / "state.json").exists(), "a start that was refused is not counted"


def test_a_run_directory_in_a_planted_folder_is_refused(shared: Path, of_a_stranger: Plant) -> None:
    of_a_stranger(folder_of(shared / "runs"))
    with pytest.raises(ConfigError, match="belongs to"):
        RunDir(shared / "runs" / "mine").create()
    refuse_planted(shared / "other", "run.root")


def test_what_a_run_writes_is_for_its_user_only(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        run = RunDir(tmp_path / "run")
        run.create()
        run.endpoints.open("tcp://127.0.0.1:1", "token")
        save_config(load_config("quickstart-smoke", []), run.config)
        write_html(run.report, Page("run", "", ""))
        LineWriter(run.samples).write([{"step": 0, "text": "x"}])
        blobs = BlobStore(tmp_path / "blobs", "local")
        (ref,) = blobs.seal("a", [np.zeros(4, np.uint8)])
        data = blobs.read(ref.uri)
        blobs.delete(ref.uri)
        blobs.put_back(ref.uri, data)
        blobs.seal("b", [np.zeros(4, np.uint8)])
    finally:
        os.umask(umask)
    folders = (run.root, run.checkpoints, run.logs, run.trace, run.endpoints.folder, blobs.root)
    assert {mode_of(folder) for folder in folders} == {0o700}
    secret = (run.config, run.report, run.samples, run.endpoints.folder / "token")
    assert {mode_of(path) for path in (*secret, *blobs.root.iterdir())} == {0o600}


def test_samples_do_not_follow_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic links"):
        private_opener(str(tmp_path / "samples.jsonl"), os.O_WRONLY | os.O_CREAT)
    assert not (tmp_path / "other").exists()


# --- scratch folders of engines -------------------------------------------------------------------
@pytest.fixture
def semaphore() -> Any:
    """Shared memory of a live server of ours."""
    path = Path(f"/dev/shm/sem.mp-test-{os.getpid()}")
    path.write_text("x", encoding="utf-8")
    yield path
    path.unlink(missing_ok=True)


def test_a_scratch_folder_of_another_user_names_nothing(
    shared: Path, semaphore: Path, of_a_stranger: Plant
) -> None:
    planted = folder_of(shared / "moerl-engine-planted")
    (planted / "owner.lock").write_text(json.dumps([str(semaphore)]), encoding="utf-8")
    of_a_stranger(planted)  # the file in it is ours: a hard link
    remove_abandoned(shared)
    assert semaphore.exists()
    assert planted.exists()


def test_a_lock_of_another_user_names_nothing(
    shared: Path, semaphore: Path, of_a_stranger: Plant
) -> None:
    ours = folder_of(shared / "moerl-engine-ours", 0o700)
    (ours / "owner.lock").write_text(json.dumps([str(semaphore)]), encoding="utf-8")
    of_a_stranger(ours / "owner.lock")
    remove_abandoned(shared)
    assert semaphore.exists()
    assert ours.exists()


@pytest.mark.parametrize("name", ["owner.lock", "moerl-engine-planted"])
def test_a_symlink_to_a_list_names_nothing(
    name: str, shared: Path, tmp_path: Path, semaphore: Path
) -> None:
    """The file, or the folder, is ours: only the way to it is planted."""
    home = folder_of(tmp_path / "home", 0o700)
    (home / "owner.lock").write_text(json.dumps([str(semaphore)]), encoding="utf-8")
    if name == "owner.lock":
        folder_of(shared / "moerl-engine-planted")
        (shared / "moerl-engine-planted" / name).symlink_to(home / "owner.lock")
    else:
        (shared / name).symlink_to(home)
    remove_abandoned(shared)
    assert semaphore.exists()
    assert (home / "owner.lock").exists()


def test_a_scratch_folder_of_ours_is_still_removed(shared: Path, semaphore: Path) -> None:
    """The control: the same list in a folder of a dead host."""
    left = folder_of(shared / "moerl-engine-left", 0o700)
    (left / "owner.lock").write_text(json.dumps([str(semaphore)]), encoding="utf-8")
    remove_abandoned(shared)
    assert not semaphore.exists()
    assert not left.exists()


def test_scratch_folders_are_private(monkeypatch: pytest.MonkeyPatch, shared: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    scratch = Scratch()
    assert mode_of(scratch.path) == 0o700
    scratch.remove()


def test_rays_scratch_of_an_engine_node_cannot_be_prepared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    run.endpoints.post_ray("127.0.0.1:1", "token")
    used: list[Path] = []

    def command(_config: object, _offer: object, _address: str, scratch: Path) -> list[str]:
        used.append(scratch)
        assert mode_of(scratch) == 0o700
        return ["true"]

    monkeypatch.setattr(engine_node, "load_saved", lambda _: Config())
    monkeypatch.setattr(engine_node, "_command", command)
    monkeypatch.setattr(engine_node, "request", lambda *_, **__: [])
    monkeypatch.setattr(engine_node, "end_descendants", lambda _: None)
    monkeypatch.setattr(engine_node.signal, "signal", lambda *_: None)
    monkeypatch.setattr(engine_node, "_LOOK_S", 0.01)
    args = SimpleNamespace(wait_s=0.0, index=None, slots=1, gpus=0, leave_s=0.0)
    lease = SimpleNamespace(check=lambda: None)
    for _ in range(2):
        assert engine_node._join(run, args, lease) == 1  # type: ignore[arg-type]
    assert used[0] != used[1], "a name that nobody can know"
    assert not used[0].exists()
