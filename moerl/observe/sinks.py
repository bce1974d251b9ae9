"""Mirrors of metrics.jsonl: TensorBoard, Weights & Biases and trackio, continued on a resume.

Their charts lose the steps that a resume trains again, so each step is in them once.  TensorBoard's
files are cut; a TensorBoard that shows them already drops the steps at a mark in the next file.
The trackers cannot take a step back: the rows that stay begin another run there, NAME-2, in the
group NAME.

The newest row of metrics.jsonl as Prometheus text, at one address behind the run's token.

    curl -H "Authorization: Bearer $(cat runs/NAME/endpoints/token)" http://127.0.0.1:PORT/metrics

Each scrape reads the end of the file, so a restarted controller changes nothing here.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moerl.config.schema import Config, ObserveConfig
from moerl.core.atomic import atomic_write
from moerl.core.errors import ConfigError
from moerl.observe.metrics import newest_row
from moerl.observe.mirrors import Mirror, Sink
from moerl.runtime.bearer_server import BearerHandler, BearerServer, CallerLimits
from moerl.runtime.run_dir import RunDir


def check_sinks(observe: ObserveConfig) -> None:
    """Raises ConfigError with setting and package when the package of a sink is not installed."""
    for field, value, module in (
        ("tensorboard", observe.tensorboard, TensorBoardSink.module),
        ("wandb_project", observe.wandb_project, WandbSink.name),
        ("trackio_project", observe.trackio_project, TrackioSink.name),
    ):
        if value and not _is_there(module):
            package = module.partition(".")[0]
            allowed = f"it needs the package {package} (pip install {package})"
            raise ConfigError(f"observe.{field}", value, allowed)


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it
        return False


def mirrors_of(run: RunDir, config: Config, tell: Callable[[str], object]) -> list[Mirror]:
    """The mirrors that the settings `observe` enable.  tell: takes sentences about failures."""

    observe, makers = config.observe, dict[str, Callable[[int], Sink]]()
    if observe.tensorboard:
        makers["tensorboard"] = partial(TensorBoardSink, run.tensorboard)
    for kind, project in (
        (WandbSink, observe.wandb_project),
        (TrackioSink, observe.trackio_project),
    ):
        if project:
            makers[kind.name] = partial(kind, project, run.root)
    places = {name: run.mirrors / f"{name}.json" for name in makers}
    return [Mirror(name, make, places[name], tell) for name, make in makers.items()]


class TensorBoardSink:
    """Writes TensorBoard event files with TensorBoard's own writer, without torch."""

    module = "tensorboard.summary"

    def __init__(self, folder: Path, step: int) -> None:
        """step: the first one that comes: the files are cut there."""
        self._module = importlib.import_module(self.module)
        self._folder = folder
        self._open(step)

    def _open(self, step: int) -> None:
        """Cut the files, and mark the start of a session, from which `step` comes again."""
        from tensorboard.compat.proto import event_pb2

        is_cut = [_cut(path, step, event_pb2.Event) for path in event_files(self._folder)]
        self._output = self._module.DirectoryOutput(str(self._folder))
        self._writer = self._module.Writer(self._output)
        if any(is_cut):
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            event = event_pb2.Event(wall_time=time.time(), step=step, session_log=start)
            self._output._ev_writer.add_event(event)  # `Writer` has no call for it
            self._writer.flush()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step=step)
        self._writer.flush()

    def rewind(self, step: int) -> int:
        self._writer.close()
        self._open(step)
        return step

    def close(self) -> None:
        self._writer.close()


def event_files(folder: Path) -> list[Path]:
    """Of TensorBoard, oldest first."""
    return sorted(folder.glob("events.out.tfevents.*"))


def _cut(path: Path, step: int, event: Any) -> bool:
    """Cut a file before its first value of `step` or a later one; whether it had one.

    A record is its length in 8 bytes, a checksum of 4, a serialized `event`, a checksum of 4.
    """
    with path.open("r+b") as file:
        while len(head := file.read(12)) == 12:
            size = int.from_bytes(head[:8], "little")
            body = file.read(size + 4)
            is_torn = len(body) < size + 4  # its process was killed
            found = None if is_torn else event.FromString(body[:size])
            if found is None or (found.HasField("summary") and found.step >= step):
                file.truncate(file.tell() - len(body) - 12)
                return not is_torn
    return False


class _TrackerSink(ABC):
    """A run of a tracker, named after the run directory; a later start continues it."""

    name: str  # of the package

    def __init__(self, project: str, folder: Path, step: int) -> None:
        """step: as for TensorBoard; a tracker's run goes on where it is."""
        self._module = importlib.import_module(self.name)
        self._project, self._folder, self._number = project, folder, 1
        self._run: Any = None
        with contextlib.suppress(OSError, ValueError, KeyError):
            known = json.loads(self.state(folder).read_text(encoding="utf-8"))
            if self._is_copy(Path(known.get("folder", folder))):
                raise ValueError("the tracker's run is that of the folder it was copied from")
            self._number = int(known["number"])
            self._run = self._begin(str(known["name"]), str(known["id"]), resume=True)
        if self._run is None:
            self._begin_new()

    def _is_copy(self, first: Path) -> bool:
        """Whether the run is a copy of one that is still there."""
        return first.is_dir() and not first.samefile(self._folder)

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
        known["folder"] = str(self._folder.resolve())
        atomic_write(self.state(self._folder), json.dumps(known))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def rewind(self, step: int) -> int:
        """Begin another run, which gets all rows again."""
        self._run.finish()
        self._number += 1
        self._begin_new()
        return 0

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


PATH = "/metrics"
_KIND = "text/plain; version=0.0.4; charset=utf-8"
_STRANGE = re.compile(r"[^a-zA-Z0-9_]")


def exposition(row: Mapping[str, Any] | None, run: str) -> str:
    """Gauges `moerl_NAME{run="..."}`; other characters of a metric's name become underscores."""
    label = run.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    values: dict[str, float] = {}
    for name, value in (row or {}).items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            values.setdefault(f"moerl_{_STRANGE.sub('_', name)}", value)
    return "".join(
        f'# TYPE {name} gauge\n{name}{{run="{label}"}} {value!r}\n'
        for name, value in values.items()
    )


class PrometheusServer:
    """Serves the newest row of a run on a thread, until `close`."""

    def __init__(self, run: RunDir, address: str, port: int, token: str) -> None:
        """Raises ConfigError when the port cannot be had."""
        limits = CallerLimits()
        about = {"metrics": run.metrics, "name": run.root.name, "token": token, "limits": limits}
        handler = type("Handler", (_Handler,), about)
        try:
            self._server = BearerServer((address, port), handler, limits.connections)
        except OSError as error:
            raise ConfigError(
                "observe.prometheus_port", port, f"{address}: {error.strerror}; use a free port"
            ) from error
        self.url = f"http://{address}:{self._server.server_address[1]}{PATH}"
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BearerHandler):
    metrics: Path
    name: str

    def do_GET(self) -> None:
        if not self.may_answer():
            return
        if self.path.partition("?")[0] != PATH:
            return self.answer(404)
        self.answer(200, exposition(newest_row(self.metrics), self.name).encode(), _KIND)
