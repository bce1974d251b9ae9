"""The files of a run: defines every path below runs/NAME."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moerl.atomic import atomic_write
from moerl.config.json_files import read_json
from moerl.errors import ConfigError, TrainerError
from moerl.private_dir import private_dir, refuse_planted


@dataclass(frozen=True, slots=True)
class RunDir:
    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """Sample rollouts with text and reward, one JSON object each, for the report."""
        return self.root / "samples.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def versions(self) -> Path:
        """HF weights of each published version, with checkpoint.keep_versions."""
        return self.root / "versions"

    @property
    def records(self) -> Path:
        """Headers and blobs of trained groups, with rollout.keep_records."""
        return self.root / "records"

    @property
    def journal(self) -> Path:
        """The controller's journal (unless rollout.journal_dir), and `segments`."""
        return self.root / "journal"

    @property
    def segments(self) -> Path:
        """Admitted groups with their blobs, with rollout.durability = shared."""
        return self.journal / "segments"

    @property
    def hf(self) -> Path:
        return self.root / "hf"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def trace(self) -> Path:
        return self.root / "trace"

    @property
    def perfetto(self) -> Path:
        """The spans of `trace` in one file, for Perfetto and chrome://tracing."""
        return self.root / "trace.json"

    @property
    def endpoints(self) -> Endpoints:
        """The folder by which nodes of a cluster find the run's processes."""
        return Endpoints(self.root / "endpoints")

    @property
    def control_api(self) -> Path:
        """Requests of users to a running run, and answers (`moerl.launch.nodes.control_api`)."""
        return self.root / "control"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    def create(self) -> None:
        """Make the folders, closed to other users.  Raises ConfigError when that fails.

        An existing folder keeps its mode: its user may have opened it to others.
        """
        refuse_planted(self.root, "run.root")
        try:
            for folder in (self.root, self.checkpoints, self.logs, self.trace):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                "run.root", str(self.root.parent), f"{folder} cannot be made: {error.strerror}"
            ) from error

    def checkpoint(self, step: int) -> Path:
        """Checkpoint folder after `step` optimizer steps; it exists only when complete."""
        return self.checkpoints / f"step-{step:06d}"

    @property
    def best(self) -> Path:
        """File that names the best checkpoint by `checkpoint.best`, with its score."""
        return self.checkpoints / "best.json"

    def finished_checkpoints(self) -> list[tuple[int, Path]]:
        """Step and folder of each complete checkpoint, ascending."""
        return sorted(
            (int(path.name.removeprefix("step-")), path)
            for path in self.checkpoints.glob("step-*")
            if path.name.removeprefix("step-").isdigit()
        )

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """Step and folder of the newest complete checkpoint."""
        return max(self.finished_checkpoints(), default=None)

    def best_checkpoint(self) -> tuple[int, Path] | None:
        """Step and folder of the best checkpoint by `checkpoint.best`, if it exists."""
        if not self.best.exists():
            return None
        step = int(json.loads(self.best.read_text(encoding="utf-8"))["step"])
        folder = self.checkpoint(step)
        return (step, folder) if folder.is_dir() else None


def find_run(name: str, option: str) -> Path:
    """The folder of a run, by its name or path.  Raises ConfigError for `option`."""
    for folder in (Path(name), Path("runs") / name):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(option, name, "no config.yaml there; give a run's name or its folder")


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Manifest of a checkpoint: layout, version, time, score (docs/fault-tolerance.md).

    Raises ModelError when it is missing or damaged.
    """
    return read_json(checkpoint / "manifest.json")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """A folder on the shared file system by which trainer nodes find the controller.

    Only its owner may read it, because it has the run's token.  `start` names one opening; files of
    earlier openings are ignored.
    """

    folder: Path

    def open(self, controller: str, token: str) -> None:
        """Write the controller's endpoint; removes the files of earlier openings."""
        self._secret("token", token)
        for mark in ("done.json", "given_up.json"):
            (self.folder / mark).unlink(missing_ok=True)
        start = secrets.token_hex(8)
        atomic_write(
            self.folder / "controller.json", json.dumps({"controller": controller, "start": start})
        )

    def close(self) -> None:
        """The controller is not listening; trainer nodes wait for the next opening, or end."""
        for name in ("controller.json", "token"):
            (self.folder / name).unlink(missing_ok=True)

    def post_ray(self, address: str, token: str) -> None:
        """Write the address of Ray's head for the other engine nodes."""
        self._secret("ray-token", token)
        atomic_write(self.folder / "ray.json", json.dumps({"address": address}))

    def close_ray(self) -> None:
        for name in ("ray.json", "ray-token"):
            (self.folder / name).unlink(missing_ok=True)

    def read_ray(self, timeout_s: float) -> tuple[str, str]:
        """(HOST:PORT, token) of Ray's head.  Raises TrainerError on timeout."""
        found, token = self._wait("ray.json", "ray-token", timeout_s, "Ray head")
        return found["address"], token

    def names_ray(self, address: str, token: str) -> bool:
        """True if this is still the head of the run."""
        try:
            return self.read_ray(0.0) == (address, token)
        except TrainerError:
            return False

    def _secret(self, name: str, text: str) -> None:
        private_dir(self.folder, "run.root")
        atomic_write(self.folder / name, text, mode=0o600)

    def read(self, timeout_s: float) -> tuple[str, str, str]:
        """(endpoint, token, start).  Raises TrainerError on timeout."""
        found, token = self._wait("controller.json", "token", timeout_s, "controller")
        return found["controller"], token, found["start"]

    def _wait(
        self, place: str, secret: str, timeout_s: float, what: str
    ) -> tuple[dict[str, str], str]:
        """The content of both files, once both exist."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                found = json.loads((self.folder / place).read_text(encoding="utf-8"))
                return found, (self.folder / secret).read_text(encoding="utf-8")
            except FileNotFoundError:
                if time.monotonic() > deadline:
                    raise TrainerError(
                        f"{self.folder} names no {what} after {timeout_s:g} s"
                    ) from None
                time.sleep(0.2)

    def start(self) -> str:
        """Name of the current opening; empty while closed.  Raises OSError."""
        try:
            found: dict[str, str] = json.loads(
                (self.folder / "controller.json").read_text(encoding="utf-8")
            )
        except FileNotFoundError:
            return ""
        return found["start"]

    def done(self, start: str) -> None:
        """The trainer has trained the last step and saved the model."""
        atomic_write(self.folder / "done.json", json.dumps({"start": start}))

    def is_done(self) -> bool:
        return self._marked("done.json") is not None

    def was_done(self, start: str) -> bool:
        """True if the trainer of this opening finished the run; used after closing."""
        try:
            return bool(
                json.loads((self.folder / "done.json").read_text(encoding="utf-8"))["start"]
                == start
            )
        except FileNotFoundError:
            return False

    def give_up(self, cause: str) -> None:
        """A trainer node failed and will not retry."""
        _, _, start = self.read(0.0)
        atomic_write(self.folder / "given_up.json", json.dumps({"start": start, "cause": cause}))

    def given_up(self) -> str:
        """Cause of a failed trainer node; empty if none failed."""
        return str((self._marked("given_up.json") or {"cause": ""})["cause"])

    def _marked(self, name: str) -> dict[str, str] | None:
        """Content of a file of this opening; None without one."""
        try:
            found: dict[str, str] = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return found if found["start"] == self.start() else None


def newest_incarnation(run: RunDir) -> int:
    """Incarnation of the trainer that started last; -1 before the first."""
    path = run.root / "state.json"
    return int(json.loads(path.read_text(encoding="utf-8"))["starts"]) - 1 if path.exists() else -1


def next_incarnation(run: RunDir, *, resume: bool) -> int:
    """Number of earlier starts of a trainer in this run; kept in state.json."""
    path = run.root / "state.json"
    started = int(json.loads(path.read_text(encoding="utf-8"))["starts"]) if path.exists() else 0
    if started and not resume:
        raise ConfigError(
            "run.name", run.root.name, f"{run.root} exists; choose another --run or use --resume"
        )
    atomic_write(path, json.dumps({"starts": started + 1, "time_s": time.time()}))
    return started
