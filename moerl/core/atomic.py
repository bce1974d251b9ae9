"""Atomic file writes: a reader, or a restart after a crash, sees the old content or the new one.

The data goes to a hidden file in the same folder, which is then renamed to the target.  Its name is
random, so several writers do not conflict: the last one to finish wins.  A killed process can leave
the hidden file; an error removes it.

After a power cut a name can be on the disk without its bytes.  So data that must survive a power
cut is flushed in this order: bytes of the files, entries of their folder, rename, entries of the
parent folder.
"""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_NAMES = random.Random()  # seeded by the system once: `secrets` asks it for each name
_JOINED_BYTES = 1 << 20  # parts of a smaller file are joined and written at once


def atomic_write(path: Path, data: bytes | str, *, sync: bool = False, mode: int = 0o666) -> None:
    """Replace the content of `path`, or create it; text is UTF-8.  Raises OSError.

    sync: bytes and name are on disk on return.  mode: permissions of the file, less the umask.
    """
    with atomic_file(path, sync=sync, mode=mode) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def atomic_file(path: Path, *, sync: bool = False, mode: int = 0o666) -> Iterator[BinaryIO]:
    """The same for content that is written in parts; on an error `path` is unchanged."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(handle, "wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    if sync:
        flush(path.parent)


def atomic_parts(path: str, parts: Sequence[bytes | memoryview], *, mode: int) -> None:
    """A file from its parts (bytes), in as few system calls as possible; not flushed.

    An engine's host writes hundreds of such files per second.  Raises OSError; `path` is unchanged
    then.
    """
    folder, _, name = path.rpartition("/")
    fresh = f"{folder}/.{name}.{_NAMES.getrandbits(32):08x}"
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            if sum(map(len, parts)) <= _JOINED_BYTES:
                parts = [b"".join(parts)]
            for part in parts:
                left = memoryview(part)
                while left:
                    left = left[os.write(handle, left) :]
        finally:
            os.close(handle)
        os.replace(fresh, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(fresh)
        raise


def flush(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_tree(folder: Path) -> None:
    """The same for all files and folders below `folder`, and `folder` itself."""
    for path in (*folder.rglob("*"), folder):
        flush(path)


def publish_folder(fresh: Path, target: Path) -> None:
    """Rename a written and flushed folder, whose name is hidden, to a name that does not exist."""
    fresh.rename(target)
    flush(target.parent)
