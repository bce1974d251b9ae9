"""Every disk that a run fills: bytes it needs by shapes, against the bytes that are free."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from moerl.config import Config
from moerl.config.clusters import is_local
from moerl.core.errors import ConfigError
from moerl.layout import ModelSpec, hf_shapes, model_spec
from moerl.layout.adapters import adapter_shapes
from moerl.planning.estimates import model_shapes, record_bytes
from moerl.planning.layout_check import ITEMSIZE
from moerl.planning.memory import optimizer_bytes
from moerl.runtime.disk_wait import free_bytes

_LOGS = 1_000_000  # logs, metrics and report of a short run
_MORE = 1.15  # random states, names and alignment of a checkpoint
_SCRATCH = 20_000_000  # logs of Ray


class Need(NamedTuple):
    """A kind of files.  least: bytes with which the run can go on; most: with all that it keeps."""

    setting: str
    path: Path
    what: str
    least: int
    most: int


def check_disks(config: Config, *, engines: bool = True) -> list[str]:
    """A sentence per disk that may fill up.  Raises ConfigError for one without the least bytes.

    engines: the run has some; `moerl sft` has not.
    """
    said = []
    for needs, free in _disks(config, engines):
        least, most = sum(one.least for one in needs), sum(one.most for one in needs)
        largest = max(needs, key=lambda one: one.least)
        parts = ", ".join(f"{one.what} {one.least:,}" for one in needs if one.least)
        if free < least:
            raise ConfigError(
                largest.setting,
                str(largest.path),
                f"its disk has {free:,} bytes free and the run needs {least:,} ({parts}); make "
                "room, or name a folder on another disk",
            )
        if free < most:
            parts = ", ".join(f"{one.setting} {one.what} {one.most:,}" for one in needs if one.most)
            said.append(
                f"the disk of {largest.path} has {free:,} bytes free, and the run may take "
                f"{most:,} ({parts}); it waits for room where it finds none"
            )
    return said


def disk_lines(config: Config) -> list[str]:
    """The table, for a dry run: it may be another machine's run, and refuses nothing."""
    lines = []
    for needs, free in _disks(config, engines=True):
        least = sum(one.least for one in needs)
        short = "  TOO SMALL: " if free < least else "  "
        lines += [
            f"{short}{one.setting} {one.path}: {one.what}, {one.least:,} to {one.most:,} bytes; "
            f"{free:,} are free here"
            for one in needs
        ]
    return ["disks, at most:", *lines]


def _disks(config: Config, engines: bool) -> Iterator[tuple[list[Need], int]]:
    """Needs that share a disk of this machine, and its free bytes."""
    needs = [need for need in _needs(config, engines) if free_bytes(need.path) >= 0]
    for _, shared in groupby(sorted(needs, key=_device), key=_device):
        found = list(shared)
        yield found, free_bytes(found[0].path)


def _device(need: Need) -> int:
    path = need.path.absolute()
    return os.stat(next(one for one in (path, *path.parents) if one.exists())).st_dev


def _needs(config: Config, engines: bool) -> Iterator[Need]:
    root, spec = Path(config.run.root), model_spec(model_shapes(config))
    yield Need("run.root", root, "logs", _LOGS, _LOGS)
    yield from _weights(config, spec, root)
    if not engines:
        return
    record = record_bytes(config, spec)
    if config.stream.keep_steps:
        kept = config.stream.keep_steps if config.stream.keep_steps > 0 else config.run.steps
        yield Need("run.root", root, "stream", 0, kept * record.step)
    if config.sync.transport == "disk":
        weights = ITEMSIZE[config.engine.dtype] * _count(hf_shapes(spec))
        yield Need("sync.folder", Path(config.sync.folder), "a version", weights, 2 * weights)
    if is_local(config.cluster):
        blobs = Path(config.cluster.blob_dir)
        yield Need("cluster.blob_dir", blobs, "records", record.step, record.waiting)
    if not config.cluster.ray:
        yield Need("TMPDIR", Path(tempfile.gettempdir()), "scratch", _SCRATCH, _SCRATCH)


def _weights(config: Config, spec: ModelSpec, root: Path) -> Iterator[Need]:
    """Model folders and checkpoints below run.root."""
    shapes, checkpoint = hf_shapes(spec), config.checkpoint
    size = 2 if config.trainer.dtype == "bf16" else 4
    if config.model.tiny.enabled and not config.model.path:
        made = 0 if (root / config.run.name / "model").is_dir() else 4 * _count(shapes)
        yield Need("run.root", root, "model", made, made)
    trained = _count(shapes)
    if config.lora.rank:
        trained = _count(adapter_shapes(shapes, config.lora.rank_of, shared=config.lora.shares))
    hf = 0 if checkpoint.hf == "off" else size * trained
    versions = config.run.steps * size * trained if checkpoint.keep_versions else 0
    yield Need("run.root", root, "hf", hf, 2 * hf + versions)
    state = trained * (size + (optimizer_bytes(config.trainer).saved or 12))
    state = round(_MORE * state * (2 if config.algorithm.advantage == "gae" else 1))
    every = checkpoint.every or config.run.steps
    written = min(checkpoint.keep + 1 + bool(checkpoint.best), math.ceil(config.run.steps / every))
    yield Need("run.root", root, "checkpoint", state, written * state)


def _count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes.values()))
