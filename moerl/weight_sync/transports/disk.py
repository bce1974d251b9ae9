"""Files on a shared file system: for engines in another cluster that no socket reaches.

A staging is a folder; every put becomes one safetensors file in it, a flat uint8 tensor named by
its offset, with its digest in the header, written under another name and renamed.  So a file that
exists is whole, any safetensors reader opens it, and the engine can fetch it after its sender died.

All files are removed: the engine rank removes a file once it is in the buffer and the folder when
it closes; a sender removes files that it did not flush.  The owner holds a lock on its folder,
which the kernel releases when it dies, so a sender notices a dead engine, and every process that
uses the same root (a sender closing, an engine opening) removes folders without an owner.  The file
system must support flock across machines (NFS 4 and Lustre do).

Rejected: safetensors' own writer (a second copy of every tensor in memory), fsync (the digest finds
a torn file).
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import time
from pathlib import Path

import msgspec
import torch
import xxhash
from torch import Tensor

from moerl.core.errors import TransportError
from moerl.weight_sync.transports.base import Link, check_range, read_endpoint

_PREFIX = "moerl-staging-"
_OWNER = "owner.lock"
_CHUNK = 16 * 2**20  # bytes between two checks of the deadline


class _Endpoint(msgspec.Struct, frozen=True):
    folder: str
    num_bytes: int


class Disk:
    """A `Transport` through a folder that both sides mount under the same name."""

    name = "disk"

    def __init__(self, root: Path) -> None:
        """Use an existing folder that only the user of both sides can write to."""
        self._root = root

    def open(self, num_bytes: int) -> DiskStaging:
        for folder in self._root.glob(_PREFIX + "*"):
            _remove_if_abandoned(folder)
        return DiskStaging(self._root, num_bytes)

    def connect(self, endpoint: bytes, deadline: float) -> DiskLink:
        target = read_endpoint(endpoint, _Endpoint, self.name)
        folder = Path(target.folder)
        if folder.parent != self._root.resolve() or not folder.name.startswith(_PREFIX):
            raise TransportError("refused", f"{folder} is not a staging folder of {self._root}")
        return DiskLink(folder, target.num_bytes)


def make(root: str) -> Disk:
    """Transport over a shared folder; the temporary folder is each engine's own."""
    return Disk(Path(root))


class DiskStaging:
    """A folder of one engine rank, and the buffer that its files are read into."""

    def __init__(self, root: Path, num_bytes: int) -> None:
        self.buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        self._lock = -1
        # created under a name that cleanup ignores: before it is locked it looks abandoned
        folder = root.resolve() / f".{_PREFIX}{secrets.token_hex(16)}"
        try:
            folder.mkdir(mode=0o700)
            self._lock = os.open(folder / _OWNER, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self._folder = folder.rename(folder.with_name(folder.name[1:]))
        except OSError as error:  # full, or a file system without locks
            shutil.rmtree(folder, ignore_errors=True)
            if self._lock >= 0:
                os.close(self._lock)
            raise TransportError("room", f"no staging folder in {root}: {error}") from error
        self.endpoint = msgspec.json.encode(_Endpoint(str(self._folder), num_bytes))

    def fetch(self, deadline: float) -> None:
        try:
            files = sorted(self._folder.glob("*.safetensors"))
            for file in files:
                _read(file, self.buffer, deadline)
                file.unlink()
        except FileNotFoundError as error:
            raise TransportError("missing", f"a staged file vanished: {error}") from error

    def close(self) -> None:
        if self._lock >= 0:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
        self._lock = -1


class DiskLink(Link):
    """Writes files into one staging folder."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self._folder, self._size = folder, num_bytes
        self._written: list[Path] = []  # since the last flush
        self._puts = 0
        self._check_owner()

    def put(self, offset: int, data: Tensor, deadline: float) -> None:
        check_range(offset, data.numel(), self._size)
        self._check_owner()
        if not data.numel():
            return
        # in the order of the puts: a later one to the same place wins
        name = f"{self._puts:08d}-{offset}-{secrets.token_hex(8)}.safetensors"
        target = self._folder / name
        temporary = target.with_suffix(".part")
        self._written.append(temporary)
        self._puts += 1
        try:
            _write(temporary, offset, data.cpu(), deadline)
            self._written[-1] = temporary.rename(target)
        except FileNotFoundError as error:
            raise TransportError("peer", f"staging folder {self._folder} is gone") from error
        except OSError as error:
            raise TransportError("room", f"{temporary} could not be written: {error}") from error

    def flush(self, deadline: float) -> None:
        """The puts have renamed the files; from here the engine owns them.  Fails if it is dead."""
        self._check_owner()
        self._written = []

    def close(self) -> None:
        for file in self._written:
            file.unlink(missing_ok=True)
        self._written = []
        _remove_if_abandoned(self._folder)

    def _check_owner(self) -> None:
        if _abandoned(self._folder):
            raise TransportError("peer", f"staging folder {self._folder} has no living owner")


# --- one file -------------------------------------------------------------------------------------
def _write(path: Path, offset: int, data: Tensor, deadline: float) -> None:
    """A safetensors file with one uint8 tensor named by its offset."""
    raw = data.numpy().data
    digest = xxhash.xxh3_128_hexdigest(raw)
    header = json.dumps(
        {
            "__metadata__": {"xxh3_128": digest},
            str(offset): {"dtype": "U8", "shape": [len(raw)], "data_offsets": [0, len(raw)]},
        }
    ).encode()
    header += b" " * (-len(header) % 8)  # the format requires aligned data
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for begin in range(0, len(raw), _CHUNK):
            _on_time(deadline, path)
            file.write(raw[begin : begin + _CHUNK])
    _on_time(deadline, path)


def _read(path: Path, buffer: Tensor, deadline: float) -> None:
    """Copy a file to its place and verify the copy."""
    with path.open("rb") as file:
        try:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            digest = header.pop("__metadata__")["xxh3_128"]
            ((name, entry),) = header.items()
            offset, (begin, end) = int(name), entry["data_offsets"]
        except (ValueError, KeyError, TypeError, MemoryError, OverflowError) as error:
            raise TransportError("refused", f"{path} is no staged file: {error}") from error
        if begin != 0:
            raise TransportError(
                "refused", f"{path} has data at {begin}; a staged file starts at 0"
            )
        check_range(offset, end, buffer.numel())
        raw = buffer[offset : offset + end].numpy().data
        for start in range(0, end, _CHUNK):
            _on_time(deadline, path)
            part = raw[start : start + _CHUNK]
            if file.readinto(part) != len(part):
                raise TransportError("refused", f"{path} ends before its {end} bytes")
        if xxhash.xxh3_128_hexdigest(raw) != digest:
            raise TransportError("refused", f"{path} does not match its digest")


def _on_time(deadline: float, path: Path) -> None:
    if time.monotonic() > deadline:
        raise TransportError("deadline", f"{path} was not finished in time")


# --- owners of folders ----------------------------------------------------------------------------
def _abandoned(folder: Path) -> bool:
    """Whether no process holds the owner's lock; a missing folder counts as abandoned."""
    try:
        lock = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False  # unknown; a put finds out
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def _remove_if_abandoned(folder: Path) -> None:
    if _abandoned(folder):
        shutil.rmtree(folder, ignore_errors=True)
