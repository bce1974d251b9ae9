"""The folder that a conversion writes: streamed, read back, and renamed to its name at the end.

Files are written tensor by tensor into the hidden folder `.NAME.partial` next to the target.  After
all files were read back and match their digests, the folder is renamed.  So an existing target is
complete, and a conversion that fails or is killed leaves nothing that a reader takes for a model.

Several processes (torchrun) share the files and synchronise through their key-value store, so a
conversion needs no process group.
Rejected: torch.distributed.checkpoint (holds every rank's state dict at once), writing in place.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from moerl.core.errors import ModelError, MoerlError
from moerl.core.json_files import read_json
from moerl.trainer.checkpoints.checkpoint_files import SummedStream, sum_of
from moerl.trainer.hf_io.hf_save import replace_folder
from moerl.trainer.hf_io.safetensors_files import Planned, memory, safetensors_header

_LOCK = ".lock"

Plan: TypeAlias = Callable[[], Sequence[Planned]]
"""Lists the tensors of a file."""
ConversionProgress: TypeAlias = Callable[[str, int, int], None]
"""Called with the stage, the bytes done, and the total of this process."""


class Written(NamedTuple):
    """A finished file: its [bytes, digest], and (begin, length) of each tensor in it."""

    sum: list[Any]
    places: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Output:
    """A folder to be written.

    files: the tensors by file name.  A *.safetensors file begins with its header; in any other file
    each tensor is as torch.save writes it.
    finish: writes the files that belong to the whole folder, in one process; its arguments are the
    folder and the written files, by name.
    """

    target: Path
    files: Mapping[str, Plan]
    finish: Callable[[Path, Mapping[str, Written]], None]
    replace: bool = False  # replace an existing target

    @property
    def folder(self) -> Path:
        return self.target.with_name(f".{self.target.name}.partial")


class ConversionRanks:
    """The processes of one conversion: one, or the ranks of torchrun."""

    def __init__(self) -> None:
        self.rank, self.size, self._stage = 0, 1, 0
        self._store: Any = None
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from moerl.distributed.token_store import rank_store

            self._store = rank_store(timedelta(days=2))
            self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

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
            texts = [self._store.get(f"stage{self._stage}/{i}").decode() for i in range(self.size)]
            if failed is None and (first := next(filter(None, texts), "")):
                raise ModelError(first)
        if failed is not None:
            raise failed


def write_output(output: Output, ranks: ConversionRanks, progress: ConversionProgress) -> None:
    """Write, read back and rename.  Collective over the conversion ranks.

    Raises ModelError naming the tensor for a failed read or write, a full disk included, and for
    bytes that do not read back.
    """
    with ranks.together():
        lock = _open_folder(output) if ranks.rank == 0 else None
    try:
        files = dict(list(output.files.items())[ranks.rank :: ranks.size])
        with ranks.together():
            written = _write_files(output, files, progress)
        with ranks.together():
            _read_back(output, written, progress)
            _note(output.folder, ranks.rank).write_text(json.dumps(written), encoding="utf-8")
        with ranks.together():
            if ranks.rank == 0:
                _publish(output, ranks.size)
    finally:
        if lock is not None:
            os.close(lock)
            shutil.rmtree(output.folder, ignore_errors=True)


def _open_folder(output: Output) -> int:
    """Make the hidden folder, empty and locked against a second conversion; returns the lock."""
    folder = output.folder
    if output.target.exists() and not output.replace:
        raise ModelError(
            f"{output.target} exists; choose another folder, or replace it with --force"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise ModelError(f"{folder}: cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise ModelError(f"{folder}: another conversion is writing there") from error
    for path in folder.iterdir():  # of a conversion that was killed
        if path.name != _LOCK:
            path.unlink()
    needed, free = _num_bytes(output.files.values()), shutil.disk_usage(folder).free
    if needed > free:
        shutil.rmtree(folder)
        raise ModelError(
            f"{output.target}: needs {needed:,} bytes and its disk has {free:,}; free some space"
        )
    return lock


def _num_bytes(plans: Iterable[Plan]) -> int:
    return sum(planned.nbytes for plan in plans for planned in plan())


def _write_files(
    output: Output,
    files: Mapping[str, Plan],
    progress: ConversionProgress,
) -> dict[str, Written]:
    done, total = 0, _num_bytes(files.values())

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress("writing", done, total)

    return {file: _write_file(output, file, plan(), advance) for file, plan in files.items()}


def _write_file(
    output: Output, name: str, tensors: Sequence[Planned], advance: Callable[[int], None]
) -> Written:
    places, current, plain = [], "its header", name.endswith(".safetensors")
    try:
        with (output.folder / name).open("wb") as file:
            stream: Any = SummedStream(file)  # torch.save calls `write` and `flush` only
            stream.write(safetensors_header(tensors) if plain else b"")
            for planned in tensors:
                current = f"tensor {planned.name} ({planned.nbytes:,} bytes)"
                begin, tensor = stream.size, planned.made()
                stream.write(memory(tensor)) if plain else torch.save(tensor, stream)
                places.append((begin, stream.size - begin))
                advance(planned.nbytes)
            current = "its last bytes"
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # read back from the disk
    except (OSError, RuntimeError) as error:
        first = error.__context__ or error  # torch.save ends with an error of its own
        cause = first.strerror if isinstance(first, OSError) else str(first)
        raise ModelError(
            f"{output.target / name}: cannot write {current}: {cause}; nothing was published"
        ) from error
    return Written(stream.sum(), places)


def _read_back(
    output: Output, written: Mapping[str, Written], progress: ConversionProgress
) -> None:
    done, total = 0, sum(file.sum[0] for file in written.values())
    for name, file in written.items():
        try:
            found = sum_of(output.folder / name)
        except OSError as error:
            raise ModelError(f"{output.target / name}: cannot be read back: {error}") from error
        if found != file.sum:
            raise ModelError(
                f"{output.target / name}: does not read back as it was written; the disk or its "
                "controller changes bytes"
            )
        done += file.sum[0]
        progress("verifying", done, total)


def _note(folder: Path, rank: int) -> Path:
    """A file in which a rank hands its digests to the first rank."""
    return folder / f".written-{rank}.json"


def _publish(output: Output, num_ranks: int) -> None:
    folder, written = output.folder, dict[str, Written]()
    try:
        for rank in range(num_ranks):
            note = _note(folder, rank)
            written |= {name: Written(*file) for name, file in read_json(note).items()}
            note.unlink()
        (folder / _LOCK).unlink()
        output.finish(folder, written)
        replace_folder(output.target, folder)
    except OSError as error:
        raise ModelError(f"{output.target}: cannot be published: {error.strerror}") from error
