"""Disks that a run fills are compared with their free bytes, by path, bytes and setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from moerl.config import Config, load_config, resolve
from moerl.core.errors import ConfigError
from moerl.planning import disks
from moerl.planning.disks import check_disks, disk_lines

MB = 1_000_000


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Free bytes by the first folder of a path, each of which is a disk of its own."""
    found: dict[str, int] = {}
    names = sorted(("runs", "blobs", "sync", "tmp"))
    monkeypatch.setattr(disks, "free_bytes", lambda path: found.get(path.parts[1], 10**12))
    monkeypatch.setattr(disks, "_device", lambda need: names.index(need.path.parts[1]))
    return found


def settings(*words: str) -> Config:
    places = ["run.root=/runs", "cluster.blob_dir=/blobs"]
    return resolve(load_config("quickstart", [*places, *words]))


def test_a_disk_with_room_is_not_mentioned(free: dict[str, int]) -> None:
    assert check_disks(settings()) == []


@pytest.mark.parametrize(
    ("disk", "field", "value", "named"),
    [
        ("runs", "run.root", "/runs", "checkpoint"),
        ("blobs", "cluster.blob_dir", "/blobs", "records"),
        ("tmp", "TMPDIR", "/tmp", "scratch"),
    ],
)
def test_a_disk_without_room_is_refused(
    free: dict[str, int], disk: str, field: str, value: str, named: str
) -> None:
    free[disk] = 100_000
    with pytest.raises(ConfigError) as caught:
        check_disks(settings())
    assert (caught.value.field, caught.value.value) == (field, value)
    text = str(caught.value)
    assert "100,000 bytes free and the run needs" in text
    assert f"{named} " in text
    assert "TOO SMALL" in "\n".join(disk_lines(settings())), "a dry run says it and goes on"


def test_a_disk_that_may_fill_up_is_said(free: dict[str, int]) -> None:
    free["blobs"] = 3 * MB
    (line,) = check_disks(settings())
    assert line.startswith("the disk of /blobs has 3,000,000 bytes free, and the run may take")
    assert "it waits for room" in line


def test_supervised_training_needs_no_records(free: dict[str, int]) -> None:
    free["blobs"] = 0
    assert check_disks(settings(), engines=False) == []
    free["runs"] = 0
    with pytest.raises(ConfigError, match=r"run\.root"):
        check_disks(settings(), engines=False)


@pytest.mark.parametrize(
    ("words", "grows"),
    [
        (["checkpoint.every=1", "checkpoint.keep=5"], True),
        (["checkpoint.keep_versions=true"], True),
        (["stream.keep_steps=-1"], True),
        (["checkpoint.hf=off"], False),
        (["lora.rank=2", "rollout.in_flight_mode=drain"], False),
        (["trainer.dtype=bf16", "engine.dtype=bfloat16"], True),
    ],
)
def test_settings_that_keep_more_need_more(
    free: dict[str, int], words: list[str], grows: bool
) -> None:
    def most(*more: str) -> int:
        needs = disks._needs(settings(*more), engines=True)
        return sum(one.most for one in needs if one.setting == "run.root")

    assert (most(*words) > most()) is grows
    assert most(*words) != most()


def test_the_bytes_of_a_checkpoint_are_those_that_a_run_wrote(tmp_path: Path) -> None:
    """A checkpoint of `quickstart-smoke`, two ranks: 12,159,431 bytes, and hf 3,635,432."""
    config = resolve(load_config("quickstart-smoke", [f"run.root={tmp_path}"]))
    needs = {one.what: one for one in disks._needs(config, engines=True)}
    assert needs["checkpoint"].least == pytest.approx(12_159_431, rel=0.1)
    assert needs["hf"].least == pytest.approx(3_635_432, rel=0.05)


def test_needs_on_one_disk_are_added(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = [f"run.root={tmp_path / 'runs'}", f"cluster.blob_dir={tmp_path}"]
    config = resolve(load_config("quickstart", words))
    every = sum(one.least for one in disks._needs(config, engines=True))
    monkeypatch.setattr(disks, "_device", lambda _: 0)
    monkeypatch.setattr(disks, "free_bytes", lambda _: every - 1)
    with pytest.raises(ConfigError, match=f"the run needs {every:,}"):
        check_disks(config)
    monkeypatch.setattr(disks, "free_bytes", lambda _: every)
    check_disks(config)  # control: with a byte more
