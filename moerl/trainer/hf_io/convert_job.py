"""A conversion as a list of files to write: streamed, resumable, verified, published at once.

A job writes `units` (one safetensors file each) into the hidden folder `.NAME.partial` next to its
target.  A unit is written tensor by tensor, flushed, and only then gets its name and its list of
checksums; after all units are read back and agree, the folder is renamed to the target.  So an
existing target is complete, and a killed or failed job leaves only a hidden folder, which the same
command continues: units whose bytes still match their checksums are kept.

Several processes (torchrun) share the units and synchronise through their key-value store, so
a conversion needs no process group.
Rejected: torch.distributed.checkpoint (holds every rank's state dict at once), writing in place.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import xxhash
from torch import Tensor

from moerl.config.json_files import read_json
from moerl.errors import ModelError, MoerlError
from moerl.layout import Box, at
from moerl.trainer.hf_io.hf_save import replace_folder, write_json
from moerl.trainer.hf_io.mapped_files import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_READ_BYTES = 8 * 2**20


class Planned(NamedTuple):
    """A tensor of a unit, made when it is written and dropped afterwards."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]
    boxes: tuple[Box, ...] = ()  # parts with separate checksums

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Sums(NamedTuple):
    """xxh3-64 of a tensor's bytes, and of each of its tiles, in hexadecimal."""

    whole: str
    tiles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """One file.  `plan` lists its tensors; it is called when the file is written."""

    file: str
    sums: str  # file of the checksums, relative like `file`
    plan: Callable[[], Sequence[Planned]]


@dataclass(frozen=True, slots=True)
class Job:
    """identity: runs with equal identities are the same job; other partial folders are deleted.

    finish: writes the files that belong to the whole folder, in one process, after verification.
    """

    target: Path
    units: tuple[Unit, ...]
    identity: Mapping[str, Any]
    finish: Callable[[Path], None]
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
    written: dict[str, dict[str, Sums]] = field(default_factory=dict)

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
                    run.written[unit.file] = _write(run, unit)
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
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise ModelError(f"{folder}: cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise ModelError(f"{folder}: another conversion is writing there") from error
    identity = json.loads(json.dumps(job.identity))
    if not (folder / "job.json").exists() or read_json(folder / "job.json") != identity:
        for path in folder.iterdir():
            if path.name != "lock":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        write_json(folder / "job.json", identity)
    return lock


def _keep_finished(run: _Run, units: Sequence[Unit]) -> None:
    for unit in units:
        if (run.folder / unit.file).exists() and (run.folder / unit.sums).exists():
            try:
                _verify(run, unit)
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
def _write(run: _Run, unit: Unit) -> dict[str, Sums]:
    """Stream one unit; its name appears last."""
    plan = unit.plan()
    path = run.folder / unit.file
    writing = path.with_name(f"{path.name}.writing")
    sums: dict[str, Sums] = {}
    current = "its header"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing.open("wb") as file:
            file.write(_header(plan))
            for planned in plan:
                current = f"tensor {planned.name} ({planned.nbytes:,} bytes)"
                tensor = planned.make().contiguous()
                assert tuple(tensor.shape) == planned.shape, f"{planned.name}: {tensor.shape}"
                assert tensor.dtype == planned.dtype, f"{planned.name}: {tensor.dtype}"
                file.write(memory(tensor))
                tiles = (digest(memory(tensor[at(box)])) for box in planned.boxes)
                sums[planned.name] = Sums(digest(memory(tensor)), tuple(tiles))
                run.advance("writing", planned.nbytes)
            current = "its last bytes"
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # verify from the disk
        (run.folder / unit.sums).parent.mkdir(parents=True, exist_ok=True)
        write_json(run.folder / unit.sums, {name: list(both) for name, both in sums.items()})
        writing.rename(path)
    except OSError as error:
        raise ModelError(
            f"{run.job.target / unit.file}: cannot write {current}: {error.strerror}; nothing was "
            f"published, and the same command continues"
        ) from error
    finally:
        writing.unlink(missing_ok=True)
    return sums


def _header(plan: Sequence[Planned]) -> bytes:
    """Length and JSON header of a safetensors file, padded so that the data is aligned."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    first = 0
    for planned in plan:
        entries[planned.name] = {
            "dtype": _NAMES[planned.dtype],
            "shape": list(planned.shape),
            "data_offsets": [first, first + planned.nbytes],
        }
        first += planned.nbytes
    body = json.dumps(entries, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    return struct.pack("<Q", len(body)) + body


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor in row-major order."""
    data: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data


def digest(data: memoryview) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def _publish(run: _Run) -> None:
    try:
        run.job.finish(run.folder)
        for name in ("job.json", "lock"):
            (run.folder / name).unlink()
        replace_folder(run.job.target, run.folder)
    except OSError as error:
        raise ModelError(f"{run.job.target}: cannot be published: {error.strerror}") from error


# --- reading back --------------------------------------------------------------------------------
def _verify(run: _Run, unit: Unit) -> None:
    """Check that every tensor of a unit reads back as written, and the file holds nothing else."""
    wanted = dict(run.written.get(unit.file) or {}) or read_sums(run.folder / unit.sums)
    for name, found, nbytes in _read_back(run.folder / unit.file):
        if name not in wanted or found != wanted[name].whole:
            raise ModelError(
                f"{run.job.target / unit.file}: tensor {name} does not read back as it was written"
            )
        del wanted[name]
        if unit.file in run.written:
            run.advance("verifying", nbytes)
    if wanted:
        raise ModelError(f"{run.job.target / unit.file}: tensor {next(iter(wanted))} is missing")


def read_sums(path: Path) -> dict[str, Sums]:
    return {name: Sums(whole, tuple(tiles)) for name, (whole, tiles) in read_json(path).items()}


def _read_back(path: Path) -> Iterator[tuple[str, str, int]]:
    """(name, checksum, bytes) of each tensor, in bounded pieces, without mapping the file."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            entries = json.loads(file.read(length))
            for name, entry in entries.items():
                if name != "__metadata__":
                    first, stop = entry["data_offsets"]
                    yield name, _digest_stream(file, stop - first), stop - first
            if file.read(1):
                raise ModelError(f"{path}: has bytes behind its last tensor")
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ModelError(f"{path}: cannot be read back: {error}") from error


def _digest_stream(file: Any, nbytes: int) -> str:
    state = xxhash.xxh3_64()
    while nbytes:
        piece = file.read(min(nbytes, _READ_BYTES))
        if not piece:
            raise ValueError("it ends early")
        state.update(piece)
        nbytes -= len(piece)
    return state.hexdigest()
