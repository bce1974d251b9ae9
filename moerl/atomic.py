"""Atomic file writes: a reader, or a restart after a crash, sees the old content or the new one.

The data goes to a hidden file in the same folder, which is then renamed to the target.  Its name is
random, so several writers do not conflict: the last one to finish wins.  A killed process can leave
the hidden file; an error removes it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def atomic_write(path: Path, data: bytes | str, *, sync: bool = False, mode: int = 0o666) -> None:
    """Replace the content of `path`, or create it; text is UTF-8.  Raises OSError.

    sync: the bytes are on disk on return.  mode: permissions of the file, less the umask.
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
