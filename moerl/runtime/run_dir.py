"""The files of a run: defines every path below runs/NAME."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moerl.core.atomic import atomic_write
from moerl.core.errors import ConfigError, ModelError, TrainerError
from moerl.core.json_files import read_json
from moerl.runtime.private_dir import private_dir, refuse_planted
from moerl.runtime.run_lock import holder_of

log = logging.getLogger(__name__)

# A finished checkpoint, or one in replacement: it counts until the new checkpoint exists.
_CHECKPOINT = re.compile(r"(?:step-(\d+)|\.step-(\d+)\.replaced)")
_UNSEEN_STARTS = 1_000_000  # more than there are between two checkpoints


class _Below:
    """A path below the root of a run."""

    def __init__(self, *parts: str) -> None:
        self._place = Path(*parts)

    def __get__(self, run: RunDir, _owner: type[RunDir]) -> Path:
        return run.root / self._place


@dataclass(frozen=True, slots=True)
class RunDir:
    root: Path

    config = _Below("config.yaml")
    # seed, task and algorithm of the last start, which a resume must share
    identity = _Below("identity.json")
    metrics = _Below("metrics.jsonl")
    # sample rollouts with text and reward, one JSON object each, for the report
    samples = _Below("samples.jsonl")
    # tokens of each expert and layer in some steps, one JSON object each, for the report
    expert_load = _Below("expert_load.jsonl")
    checkpoints = _Below("checkpoints")
    best = _Below("checkpoints", "best.json")  # names the best one by `checkpoint.best`, its score
    versions = _Below("versions")  # HF weights of each version, with checkpoint.keep_versions
    teachers = _Below("teachers")  # versions of the policy that are teachers, by name and version
    stream = _Below("stream")  # the trained steps, with stream.keep_steps
    journal = _Below("journal")  # the controller's (unless rollout.journal_dir), and `segments`
    # admitted groups with their blobs, with rollout.durability = shared
    segments = _Below("journal", "segments")
    hf = _Below("hf")
    adapter = _Below("adapter", "peft")  # low-rank factors as a folder of peft
    served_adapter = _Below("adapter", "sglang")  # the same for SGLang's loader
    logs = _Below("logs")
    trace = _Below("trace")
    tensorboard = _Below("tensorboard")
    mirrors = _Below("mirrors")  # place of each mirror in metrics.jsonl
    # sentences of the console about failures, one JSON object each, for the report
    notices = _Below("notices.jsonl")
    bad_steps = _Below("bad_steps")  # records of steps whose loss or gradient was not finite
    perfetto = _Below("trace.json")  # the spans of `trace`, for Perfetto and chrome://tracing
    # requests of users to a running run, and answers (`moerl.launch.nodes.control_api`)
    control_api = _Below("control")
    report = _Below("report.html")

    @property
    def endpoints(self) -> Endpoints:
        """The folder by which nodes of a cluster find the run's processes."""
        return Endpoints(self.root / "endpoints")

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

    def finished_checkpoints(self) -> list[tuple[int, Path]]:
        """Step and folder of each complete checkpoint, ascending; their files are not read."""
        found = self._named_checkpoints()
        return [one for one in found if (one[1] / "manifest.json").is_file()]

    def _named_checkpoints(self) -> list[tuple[int, Path]]:
        """Step and folder by name only, ascending."""
        found = {}
        for path in sorted(self.checkpoints.glob("*step-*")):  # hidden names come first
            if match := _CHECKPOINT.fullmatch(path.name):
                found[int(match[1] or match[2])] = path
        return sorted(found.items())

    def began_s(self) -> float | None:
        """Unix time of the first start; None where nothing says so."""
        try:
            state = json.loads((self.root / "state.json").read_text(encoding="utf-8"))
            began = state.get("began_s", state["time_s"] if state["starts"] == 1 else None)
            return None if began is None else float(began)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """Step and folder of the newest complete checkpoint."""
        return max(self.finished_checkpoints(), default=None)

    def latest_whole_checkpoint(self) -> tuple[Path | None, dict[Path, str]]:
        """Folder of the newest checkpoint that lacks no bytes, and the faults of newer checkpoints.

        Raises ModelError when checkpoints exist, also damaged and set aside, but none is whole: a
        run starts over only on request.
        """
        torn: dict[Path, str] = {}
        for _, path in reversed(self._named_checkpoints()):
            if not (cause := torn_checkpoint(path)):
                return path, torn
            torn[path] = cause
        if torn:
            raise ModelError(next(iter(torn.values())))
        if damaged := sorted(self.checkpoints.glob(".step-*.bad*")):
            raise ModelError(
                f"{damaged[-1]}: this checkpoint is damaged and no earlier one is whole; remove it "
                "to train from the first step again"
            )
        return None, {}

    def best_checkpoint(self) -> tuple[int, Path] | None:
        """Step and folder of the best checkpoint by `checkpoint.best`, if it exists."""
        try:
            step = int(json.loads(self.best.read_text(encoding="utf-8"))["step"])
        except (FileNotFoundError, ValueError, KeyError):
            return None
        folder = dict(self.finished_checkpoints()).get(step)
        return None if folder is None else (step, folder)


def refuse_foreign(run: RunDir, option: str = "--resume") -> None:
    """Raises ConfigError for `option` unless the run and its checkpoints belong to this user.

    A checkpoint holds pickled objects and its run names reward functions: their owner could run
    code as this process.
    """
    for folder in (run.root, run.checkpoints, *(path for _, path in run.finished_checkpoints())):
        if folder.exists() and (owner := folder.stat().st_uid) != os.geteuid():
            raise ConfigError(
                option,
                str(folder),
                f"it belongs to user {owner}, and to load a checkpoint can run code that is in it; "
                "if you trust them, copy the run's folder and use the copy",
            )


def find_run(name: str, option: str) -> Path:
    """The folder of a run, by its name or path.  Raises ConfigError for `option`."""
    for folder in (Path(name), Path("runs") / name):
        if (folder / "config.yaml").is_file():
            return folder
        if (holder := holder_of(folder)) is not None:
            raise ConfigError(option, name, f"its first start is {holder}, without config.yaml yet")
    raise ConfigError(option, name, "no config.yaml there; give a run's name or its folder")


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Manifest of a checkpoint: layout, version, time, score (docs/fault-tolerance.md).

    Raises ModelError when it is missing or damaged.
    """
    return read_json(checkpoint / "manifest.json")


def torn_checkpoint(folder: Path) -> str:
    """Why a checkpoint lacks bytes, by the sizes in its manifest; empty when it lacks none."""
    try:
        files = read_manifest(folder).get("files")
        if not files:
            return "manifest.json lists no files"
        if not (folder / "metadata.json").stat().st_size:
            return "metadata.json is empty"
        for name, (size, _) in files.items():
            if (found := (folder / name).stat().st_size) != size:
                return f"{name} holds {found} bytes, {size} were written"
    except (ModelError, OSError) as error:
        return str(error)
    return ""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """A folder on the shared file system by which trainer nodes find the controller.

    Only its owner may read it, because it has the run's token and keys.  `start` names one opening;
    files of earlier openings are ignored.
    """

    folder: Path

    @property
    def lease(self) -> Path:
        """Renewed by the root process as long as it lives (`moerl.launch.nodes.lease`)."""
        return self.folder / "lease"

    @property
    def keys(self) -> Path:
        """Keys of the run's requests (`moerl.core.rpc`), made at its start."""
        return self.folder / "keys"

    def make_folder(self) -> None:
        """Raises ConfigError when others could read it."""
        private_dir(self.folder, "run.root")

    def open(self, controller: str, token: str) -> None:
        """Write the controller's endpoint; removes the files of earlier openings."""
        self._secret("token", token)
        for mark in ("done.json", "given_up.json"):
            (self.folder / mark).unlink(missing_ok=True)
        start = secrets.token_hex(8)
        atomic_write(
            self.folder / "controller.json", json.dumps({"controller": controller, "start": start})
        )

    def post_metrics(self, url: str, token: str) -> None:
        """Where Prometheus finds the run's metrics."""
        self._secret("token", token)
        atomic_write(self.folder / "metrics.json", json.dumps({"url": url}))

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

    def close_lease(self) -> None:
        """The run is over."""
        self.lease.unlink(missing_ok=True)

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

    def store(self, job: str) -> Path:
        """Where the first node of a job says how its ranks find each other, token included."""
        return self.folder / f"{job}-store.json"

    def _secret(self, name: str, text: str) -> None:
        self.make_folder()
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
        found = self._content("controller.json")
        return "" if found is None else found["start"]

    def done(self, start: str) -> None:
        """The trainer has trained the last step and saved the model."""
        atomic_write(self.folder / "done.json", json.dumps({"start": start}))

    def is_done(self) -> bool:
        return self._marked("done.json") is not None

    def was_done(self, start: str) -> bool:
        """True if the trainer of this opening finished the run; used after closing."""
        found = self._content("done.json")
        return found is not None and found["start"] == start

    def give_up(self, cause: str) -> None:
        """A trainer node failed and will not retry."""
        _, _, start = self.read(0.0)
        atomic_write(self.folder / "given_up.json", json.dumps({"start": start, "cause": cause}))

    def given_up(self) -> str:
        """Cause of a failed trainer node; empty if none failed."""
        return str((self._marked("given_up.json") or {"cause": ""})["cause"])

    def _marked(self, name: str) -> dict[str, str] | None:
        """Content of a file of this opening; None without one."""
        found = self._content(name)
        return found if found is not None and found["start"] == self.start() else None

    def _content(self, name: str) -> dict[str, str] | None:
        try:
            found: dict[str, str] = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return found


@contextlib.contextmanager
def state_lock(run: RunDir) -> Iterator[None]:
    """Protects state.json, and acts of the newest trainer alone, also between nodes."""
    with (run.root / ".state.lock").open("a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def newest_incarnation(run: RunDir) -> int:
    """Incarnation of the trainer that started last; -1 before the first."""
    return _starts(run) - 1


def next_incarnation(run: RunDir, *, resume: bool) -> int:
    """Number of earlier starts of a trainer in this run; kept in state.json.  Raises OSError."""
    with state_lock(run):
        started = _starts(run)
        if started and not resume:
            raise ConfigError(
                "run.name",
                run.root.name,
                f"{run.root} exists; choose another --run or use --resume",
            )
        now = time.time()
        began = {"began_s": run.began_s() if started else now}  # of the first start
        state = json.dumps({"starts": started + 1, "time_s": now} | began)
        atomic_write(run.root / "state.json", state, sync=True)
    return started


def _starts(run: RunDir) -> int:
    """Starts of a trainer so far; of a damaged file, a number above all that were used."""
    path = run.root / "state.json"
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["starts"])
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError) as error:
        versions = [_incarnation_in(folder) for _, folder in run.finished_checkpoints()]
        starts = max(versions, default=0) + _UNSEEN_STARTS
        log.error("%s is damaged (%s); starts are counted on from %d", path, error, starts)
        return starts


def _incarnation_in(checkpoint: Path) -> int:
    try:
        return int(str(read_manifest(checkpoint)["version"]).split(".")[0])
    except (ModelError, ValueError, KeyError):
        return 0


def write_pids(run: RunDir, pids: dict[str, int]) -> None:
    """pids.json, for users; without room it stays as it was."""
    try:
        atomic_write(run.root / "pids.json", json.dumps(pids))
    except OSError as error:
        log.error("pids.json is not up to date: %s", error)
