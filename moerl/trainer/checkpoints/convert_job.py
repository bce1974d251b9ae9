"""A conversion as a list of files to write: streamed, resumable, verified, published at once.

A job writes `units` (one file each) into the hidden folder `.NAME.partial` next to its target.  A
unit is written tensor by tensor, flushed, and only then gets its name and its digest; after all
units are read back and agree, the folder is renamed to the target.  So an existing target is
complete, and a killed or failed job leaves only a hidden folder, which the same command continues:
units whose bytes still match their digests are kept.

Several processes (torchrun) share the units and synchronise through their key-value store, so
a conversion needs no process group.
Rejected: torch.distributed.checkpoint (holds every rank's state dict at once), writing in place.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from moerl.core.errors import ModelError, MoerlError
from moerl.core.json_files import read_json
from moerl.trainer.checkpoints.checkpoint_files import SummedStream, sum_of
from moerl.trainer.hf_io.hf_save import replace_folder, write_json
from moerl.trainer.hf_io.tensor_stream import Planned, memory, safetensors_header

_JOB = ".job"  # folder of the lock, the identity, and what is known of the finished units


class Form(Protocol):
    """How the tensors of a unit become a file."""

    def header(self, plan: Sequence[Planned]) -> bytes: ...

    def write(self, tensor: Tensor, stream: SummedStream) -> None: ...


class Safetensors:
    """The header first, then the bytes of each tensor."""

    def header(self, plan: Sequence[Planned]) -> bytes:
        return safetensors_header(plan)

    def write(self, tensor: Tensor, stream: SummedStream) -> None:
        stream.write(memory(tensor))


class TorchSaved:
    """Each tensor as torch.save writes it, as in the files of a `torch_dist` checkpoint."""

    def header(self, plan: Sequence[Planned]) -> bytes:
        return b""

    def write(self, tensor: Tensor, stream: SummedStream) -> None:
        file: Any = stream  # torch calls `write` and `flush` only
        torch.save(tensor, file)


class Written(NamedTuple):
    """A finished unit: [bytes, digest] of its file, and (begin, length) of each tensor in it."""

    sum: list[Any]
    places: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Unit:
    """One file.  `plan` lists its tensors; it is called when the file is written."""

    file: str
    plan: Callable[[], Sequence[Planned]]


@dataclass(frozen=True, slots=True)
class Job:
    """identity: runs with equal identities are the same job; other partial folders are deleted.

    finish: writes the files that belong to the whole folder, in one process, after verification;
    it is given what is known of the units, by file.
    """

    target: Path
    units: tuple[Unit, ...]
    form: Form
    identity: Mapping[str, Any]
    finish: Callable[[Path, Mapping[str, Written]], None]
    replace: bool = False  # replace an existing target


class ConversionProgress(Protocol):
    """Called with the stage, the bytes done, and the total once it is known."""

    def __call__(self, stage: str, done: int, total: int) -> None: ...


class ConversionRanks:
    """The processes of one conversion: one, or the ranks of torchrun."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self._store: Any = None
        self._stage = 0
        self._alone: dict[str, int] = {}
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from moerl.distributed.token_store import rank_store

            self._store = rank_store(timedelta(days=2))
            self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that all processes share; returns its value."""
        if self._store is None:
            self._alone[key] = self._alone.get(key, 0) + amount
            return self._alone[key]
        return int(self._store.add(key, amount))

    @contextmanager
    def together(self) -> Iterator[None]:
        """All processes leave the block together, or all with the first one's error."""
        self._stage += 1
        failed: MoerlError | None = None
        try:
            yield
        except MoerlError as error:
            failed = error
        if self._store is not None:
            self._store.set(f"stage{self._stage}/{self.rank}", str(failed or ""))
            responses = [
                self._store.get(f"stage{self._stage}/{i}").decode() for i in range(self.size)
            ]
            first = next((text for text in responses if text), "")
            if first and failed is None:
                raise ModelError(first)
        if failed is not None:
            raise failed


@dataclass(slots=True)
class _Run:
    job: Job
    ranks: ConversionRanks
    progress: ConversionProgress
    folder: Path
    total: int = 0
    kept: set[str] = field(default_factory=set)

    def known(self, file: str) -> Path:
        """Where the digest of a finished unit is."""
        return self.folder / _JOB / f"{file}.json"

    def advance(self, stage: str, nbytes: int) -> None:
        self.progress(stage, self.ranks.add(f"{self.job.target}/{stage}", nbytes), self.total)


def run_job(job: Job, ranks: ConversionRanks, progress: ConversionProgress) -> None:
    """Write, verify and publish.  Collective over the conversion ranks.

    Raises ModelError naming the tensor for a failed read or write, a full disk included, and for
    bytes that do not read back.
    """
    run = _Run(job, ranks, progress, job.target.with_name(f".{job.target.name}.partial"))
    with ranks.together():
        lock = _prepare(run) if ranks.rank == 0 else None
    try:
        with ranks.together():
            mine = job.units[ranks.rank :: ranks.size]  # neighbours read the same source files
            _keep_finished(run, mine)
        with ranks.together():
            _count(run, mine)
        with ranks.together():
            if ranks.rank == 0:
                _check_space(run)
        with ranks.together():
            for unit in mine:
                if unit.file not in run.kept:
                    _write(run, unit)
        with ranks.together():
            for unit in mine:
                if unit.file not in run.kept:
                    _verify(run, unit)
        with ranks.together():
            if ranks.rank == 0:
                _publish(run)
    finally:
        if lock is not None:
            os.close(lock)


# --- before writing ------------------------------------------------------------------------------
def _prepare(run: _Run) -> int:
    """The partial folder, empty or of the same job, locked against a second conversion."""
    job, folder = run.job, run.folder
    if job.target.exists() and not job.replace:
        raise ModelError(f"{job.target} exists; choose another folder, or replace it with --force")
    about = folder / _JOB
    try:
        about.mkdir(parents=True, exist_ok=True)
        lock = os.open(about / "lock", os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise ModelError(f"{folder}: cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise ModelError(f"{folder}: another conversion is writing there") from error
    identity = json.loads(json.dumps(job.identity))
    if not (about / "job.json").exists() or read_json(about / "job.json") != identity:
        for path in (*folder.iterdir(), *about.iterdir()):
            if path.name not in (_JOB, "lock"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        write_json(about / "job.json", identity)
    return lock


def _keep_finished(run: _Run, units: Sequence[Unit]) -> None:
    for unit in units:
        if (run.folder / unit.file).exists() and run.known(unit.file).exists():
            try:
                _verify(run, unit, is_new=False)
            except ModelError:
                (run.folder / unit.file).unlink()
            else:
                run.kept.add(unit.file)


def _count(run: _Run, units: Sequence[Unit]) -> None:
    """Bytes still to be written, over all processes."""
    todo = [unit for unit in units if unit.file not in run.kept]
    nbytes = sum(planned.nbytes for unit in todo for planned in unit.plan())
    run.ranks.add(f"{run.job.target}/total", nbytes)


def _check_space(run: _Run) -> None:
    needed = run.total = run.ranks.add(f"{run.job.target}/total", 0)
    free = shutil.disk_usage(run.folder).free
    if needed > free:
        raise ModelError(
            f"{run.job.target}: needs {needed:,} bytes and its disk has {free:,}, which ends in "
            f"tensor {_where_it_ends(run, free)}; free some space"
        )


def _where_it_ends(run: _Run, free: int) -> str:
    """The tensor at which the disk would be full if the files were written in order."""
    todo = (unit for unit in run.job.units if not (run.folder / unit.file).exists())
    names = [(planned.name, planned.nbytes) for unit in todo for planned in unit.plan()]
    ends = accumulate(nbytes for _, nbytes in names)
    return next(name for (name, _), end in zip(names, ends, strict=True) if end > free)


# --- writing -------------------------------------------------------------------------------------
def _write(run: _Run, unit: Unit) -> None:
    """Stream one unit; its name appears last."""
    plan = unit.plan()
    path = run.folder / unit.file
    writing = path.with_name(f"{path.name}.writing")
    places = []
    current = "its header"
    try:
        with writing.open("wb") as file:
            stream = SummedStream(file)
            stream.write(run.job.form.header(plan))
            for planned in plan:
                current = f"tensor {planned.name} ({planned.nbytes:,} bytes)"
                begin = stream.size
                run.job.form.write(planned.made(), stream)
                places.append((begin, stream.size - begin))
                run.advance("writing", planned.nbytes)
            current = "its last bytes"
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # verify from the disk
        write_json(run.known(unit.file), Written(stream.sum(), places)._asdict())
        writing.rename(path)
    except (OSError, RuntimeError) as error:
        first = error.__context__ or error  # torch.save ends with an error of its own
        cause = first.strerror if isinstance(first, OSError) else str(first)
        raise ModelError(
            f"{run.job.target / unit.file}: cannot write {current}: {cause}; nothing was "
            f"published, and the same command continues"
        ) from error
    finally:
        writing.unlink(missing_ok=True)


def _publish(run: _Run) -> None:
    known = {unit.file: Written(**read_json(run.known(unit.file))) for unit in run.job.units}
    try:
        run.job.finish(run.folder, known)
        shutil.rmtree(run.folder / _JOB)
        replace_folder(run.job.target, run.folder)
    except OSError as error:
        raise ModelError(f"{run.job.target}: cannot be published: {error.strerror}") from error


# --- reading back --------------------------------------------------------------------------------
def _verify(run: _Run, unit: Unit, *, is_new: bool = True) -> None:
    """Check that a unit reads back as it was written.  is_new: count its bytes as progress."""
    try:
        found = sum_of(run.folder / unit.file)
    except OSError as error:
        raise ModelError(f"{run.job.target / unit.file}: cannot be read back: {error}") from error
    if found != read_json(run.known(unit.file))["sum"]:
        raise ModelError(
            f"{run.job.target / unit.file}: does not read back as it was written; the disk or its "
            "controller changes bytes"
        )
    if is_new:
        run.advance("verifying", sum(planned.nbytes for planned in unit.plan()))
