"""Which folder is meant by a run, a step, or a folder of Megatron-LM; and of which model it is."""

from __future__ import annotations

from pathlib import Path

from moerl.config.load import load_saved
from moerl.core.errors import ModelError
from moerl.runtime.run_dir import RunDir

METADATA_FILE = ".metadata"
LATEST = "latest_checkpointed_iteration.txt"


def find_checkpoint(path: Path) -> Path:
    """The folder with `.metadata`: of a run its newest whole step, of Megatron-LM its latest.

    Raises ModelError when no folder has it.
    """
    if (path / METADATA_FILE).is_file():
        return path
    if (path / "config.yaml").is_file():
        newest, _ = RunDir(path).latest_whole_checkpoint()
        if newest is not None:
            return newest
        raise ModelError(f"{path}: this run has no checkpoint yet")
    if (path / LATEST).is_file():
        return _latest_of_megatron(path)
    raise ModelError(
        f"{path}: no torch_dist checkpoint; name a run, one of its checkpoints/step-N, or a folder "
        f"of Megatron-LM ({LATEST}, iter_N)"
    )


def _latest_of_megatron(path: Path) -> Path:
    latest = (path / LATEST).read_text(encoding="utf-8").strip()
    folder = path / (f"iter_{int(latest):07d}" if latest.isdigit() else "release")
    if not (folder / METADATA_FILE).is_file():
        raise ModelError(
            f"{path / LATEST} names {latest!r}, and {folder} has no {METADATA_FILE}: it is not a "
            "whole torch_dist checkpoint"
        )
    return folder


def model_of(checkpoint: Path) -> Path:
    """The model folder of a checkpoint: itself, or the model with which its run was started."""
    if (checkpoint / "config.json").is_file():
        return checkpoint
    settings = checkpoint.resolve().parents[1] / "config.yaml"
    if settings.is_file():
        return Path(load_saved(settings).model.path)
    raise ModelError(
        f"{checkpoint}: has no config.json and belongs to no run; name the model's folder "
        "(config.json and tokenizer)"
    )
