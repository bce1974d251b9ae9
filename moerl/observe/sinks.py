"""Mirrors of metrics.jsonl: TensorBoard, Weights & Biases and trackio, continued on a resume.

Their charts lose the steps that a resume trains again, so each step is in them once.  TensorBoard's
files are cut; a TensorBoard that shows them already drops the steps at a mark in the next file.
The trackers cannot take a step back: the rows that stay begin another run there, NAME-2, in the
group NAME.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moerl.config.schema import Config
from moerl.core.atomic import atomic_write
from moerl.core.errors import ConfigError
from moerl.observe.metrics import Row, Sink
from moerl.runtime.run_dir import RunDir

_NOT_METRICS = ("step", "version", "time_s", "nonfinite")


def open_sinks(run: RunDir, config: Config) -> list[Sink]:
    """The sinks that the settings `observe` enable.

    Raises ConfigError with the setting and the package when a sink's package is not installed.
    """
    sinks: list[Sink] = []
    if config.observe.tensorboard:
        sinks.append(TensorBoardSink(run.tensorboard))
    if config.observe.wandb_project:
        sinks.append(WandbSink(config.observe.wandb_project, run.root))
    if config.observe.trackio_project:
        sinks.append(TrackioSink(config.observe.trackio_project, run.root))
    return sinks


class TensorBoardSink:
    """Writes TensorBoard event files with TensorBoard's own writer, without torch."""

    def __init__(self, folder: Path) -> None:
        self._module = _load("tensorboard.summary", "observe.tensorboard", True, "tensorboard")
        self._folder = folder
        self._open()

    def _open(self) -> None:
        self._output = self._module.DirectoryOutput(str(self._folder))
        self._writer = self._module.Writer(self._output)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step=step)
        self._writer.flush()

    def rewind(self, step: int, rows: Sequence[Row]) -> None:
        """Cut the files, and mark the start of a session, from which `step` comes again."""
        from tensorboard.compat.proto import event_pb2

        self._writer.close()
        for path in event_files(self._folder):
            _cut(path, step, event_pb2.Event)
        self._open()
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        event = event_pb2.Event(wall_time=time.time(), step=step, session_log=start)
        self._output._ev_writer.add_event(event)  # `Writer` has no call for it
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def event_files(folder: Path) -> list[Path]:
    """Of TensorBoard, oldest first."""
    return sorted(folder.glob("events.out.tfevents.*"))


def _cut(path: Path, step: int, event: Any) -> None:
    """Cut a file before its first value of `step` or a later one.

    A record is its length in 8 bytes, a checksum of 4, a serialized `event`, a checksum of 4.
    """
    with path.open("r+b") as file:
        while len(head := file.read(12)) == 12:
            size = int.from_bytes(head[:8], "little")
            found = event.FromString(file.read(size + 4)[:size])
            if found.HasField("summary") and found.step >= step:
                file.truncate(file.tell() - size - 16)
                return


class _TrackerSink(ABC):
    """A run of a tracker, named after the run directory; a later start continues it."""

    name: str  # of the package

    def __init__(self, project: str, folder: Path) -> None:
        setting = f"observe.{self.name}_project"
        self._module = _load(self.name, setting, project, self.name)
        self._project, self._folder, self._number = project, folder, 1
        self._run: Any = None
        with contextlib.suppress(OSError, ValueError, KeyError):
            known = json.loads(self.state(folder).read_text(encoding="utf-8"))
            self._number = int(known["number"])
            self._run = self._begin(str(known["name"]), str(known["id"]), resume=True)
        if self._run is None:
            self._begin_new()

    @classmethod
    def state(cls, folder: Path) -> Path:
        """The file that names the tracker's run."""
        return folder / f"{cls.name}.json"

    @abstractmethod
    def _begin(self, name: str, ident: str, *, resume: bool) -> Any:
        """A run of the tracker, new or continued."""

    def _begin_new(self) -> None:
        suffix = f"-{self._number}" if self._number > 1 else ""
        name, ident = f"{self._folder.name}{suffix}", secrets.token_hex(8)
        self._run = self._begin(name, ident, resume=False)
        known = {"number": self._number, "id": ident, "name": getattr(self._run, "name", name)}
        atomic_write(self.state(self._folder), json.dumps(known))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def rewind(self, step: int, rows: Sequence[Row]) -> None:
        self._run.finish()
        self._number += 1
        self._begin_new()
        for row in rows:
            values = {name: value for name, value in row.items() if name not in _NOT_METRICS}
            self.write(row["step"], values)

    def close(self) -> None:
        self._run.finish()


class WandbSink(_TrackerSink):
    """Weights & Biases."""

    name = "wandb"

    def _begin(self, name: str, ident: str, *, resume: bool) -> Any:
        settings = self._module.Settings(silent=True, console="off")  # it writes standard output
        return self._module.init(
            project=self._project,
            name=name,
            group=self._folder.name,
            id=ident,
            resume="allow",
            dir=str(self._folder),
            settings=settings,
        )


class TrackioSink(_TrackerSink):
    """trackio, whose runs have no id: a name that is taken becomes another one."""

    name = "trackio"

    def _begin(self, name: str, ident: str, *, resume: bool) -> Any:
        how = "allow" if resume else "never"
        return self._module.init(
            project=self._project, name=name, group=self._folder.name, resume=how, embed=False
        )


def _load(module: str, field: str, value: object, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            field, value, f"it needs the package {package} (pip install {package}): {error}"
        ) from None
