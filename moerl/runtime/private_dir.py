"""Folders and files that no other user of the machine can read, replace or prepare.

Records hold prompts and answers, and a journal decides which rollouts are trained.  They lie in
places such as /dev/shm and /tmp, where every user can make a folder or a symlink under a name that
we will use.  So an entry of these places counts only if it is ours, a folder, and closed to others.

Rejected: random names (a run that resumes must find its folders again).
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from pathlib import Path

from moerl.core.errors import ConfigError

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def private_dir(path: Path, field: str) -> Path:
    """Make the folder and its missing parents (0700), or take it if only this user could write it.

    A folder of ours that others could read is closed to them.  field: the setting that names the
    place.  Raises ConfigError when the folder is a symlink, belongs to another user or could be
    written by others, and when a parent inside a world-writable folder belongs to another user.
    """
    path = path.absolute()
    for folder in (*reversed(path.parents), path):
        _make(folder, field)
        _refuse_planted(folder, field)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:  # ELOOP or ENOTDIR for a symlink of any owner
        raise ConfigError(field, str(path), f"not a folder of its own: {error.strerror}") from error
    try:
        _close_to_others(handle, path, field)
    finally:
        os.close(handle)
    return path


def refuse_planted(path: Path, field: str) -> None:
    """Refuse a path that another user prepared in a world-writable folder.  Raises ConfigError."""
    path = path.absolute()
    for folder in (*reversed(path.parents), path):
        _refuse_planted(folder, field)


def user_dir(base: Path) -> Path:
    """Name of this user's folder in a place that all users share; nothing is made."""
    return base / f"moerl-{os.geteuid()}"


def private_opener(path: str, flags: int) -> int:
    """For `open(..., opener=private_opener)`: a new file has mode 0600; symlinks are refused."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _make(folder: Path, field: str) -> None:
    if folder.exists():
        return
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigError(field, str(folder), f"cannot be made: {error.strerror}") from error


def _refuse_planted(folder: Path, field: str) -> None:
    """In a folder that everybody can write to, only root's and our own entries are trusted."""
    try:
        entry, parent = folder.lstat(), folder.parent.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    if parent.st_mode & stat.S_IWOTH and entry.st_uid not in (0, os.geteuid()):
        raise _foreign(folder, entry.st_uid, field)


def _close_to_others(handle: int, path: Path, field: str) -> None:
    found = os.fstat(handle)
    if found.st_uid != os.geteuid():
        raise _foreign(path, found.st_uid, field)
    mode = stat.S_IMODE(found.st_mode)
    if mode & _OTHERS_WRITE:
        raise ConfigError(
            field, str(path), f"other users can write to it (mode {mode:04o}), want 0700; remove it"
        )
    if mode & _OTHERS:
        os.fchmod(handle, 0o700)


def _foreign(path: Path, uid: int, field: str) -> ConfigError:
    return ConfigError(field, str(path), f"it belongs to {_user(uid)}, want {_user(os.geteuid())}")


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"
