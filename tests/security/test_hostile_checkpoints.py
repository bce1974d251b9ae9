"""Checkpoints of strangers whose `.metadata` names files outside of their folder, or no files."""

from __future__ import annotations

import contextlib
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from moerl.core.errors import ModelError
from moerl.trainer.checkpoints.torch_dist_files import TorchDistFiles

WEIGHT = torch.arange(6.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint next to another one, whose files are as good."""
    for name in ("ours", "other"):
        dcp.save({"w": WEIGHT}, checkpoint_id=tmp_path / name, no_dist=True)
    return tmp_path / "ours"


def read(folder: Path) -> list[float]:
    out = torch.zeros(6)
    TorchDistFiles(folder).read_into(out, "w", (range(6),))
    found: list[float] = out.tolist()
    return found


def data_file(folder: Path) -> Path:
    (file,) = folder.glob("*.distcp")
    return file


def name_in_metadata(folder: Path, name: object) -> None:
    described = pickle.loads((folder / ".metadata").read_bytes())
    places = described.storage_data.items()
    described.storage_data = {key: replace(one, relative_path=name) for key, one in places}
    (folder / ".metadata").write_bytes(pickle.dumps(described))


def test_a_whole_checkpoint_is_read_and_a_file_that_is_missing_is_named(folder: Path) -> None:
    """The control."""
    assert read(folder) == WEIGHT.tolist()
    name_in_metadata(folder, "__1_0.distcp")
    with pytest.raises(ModelError, match=r"__1_0\.distcp: tensor w cannot be read"):
        read(folder)


@pytest.mark.parametrize(
    "name", ["{other}", "../other/{file}", "./{file}", "", ".", "..", "a\0b", ["{file}"], 7]
)
def test_a_name_that_leads_out_of_the_folder_is_refused(folder: Path, name: object) -> None:
    other = data_file(folder.parent / "other")
    if isinstance(name, str):
        name = name.format(other=other, file=other.name)
    name_in_metadata(folder, name)
    with pytest.raises(ModelError, match=r"no plain name of a file|is no regular file"):
        read(folder)


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
@pytest.mark.timeout(60)
def test_what_is_no_regular_file_is_not_opened(folder: Path, kind: str) -> None:
    file = data_file(folder)
    file.unlink()
    with contextlib.ExitStack() as ends:
        if kind == "pipe":
            os.mkfifo(file)
            ends.callback(os.close, os.open(file, os.O_RDWR))  # opening it does not wait
        elif kind == "link":
            file.symlink_to(data_file(folder.parent / "other"))
        else:
            file.mkdir()
        with pytest.raises(ModelError, match="is no regular file"):
            read(folder)
