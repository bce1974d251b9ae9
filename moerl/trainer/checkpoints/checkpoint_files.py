"""Files of a finished checkpoint: their digests, and the treatment of damaged checkpoints.

The manifest, which is written last, lists size and digest (xxh3) of every other file.  Sizes are
compared whenever a checkpoint is chosen, digests when it is loaded.  A damaged checkpoint is
renamed to `.step-NNNNNN.bad`, for the user, and its predecessor is taken; the rows of the steps in
between are cut by the next hello of the trainer, because its version says where it starts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import xxhash

from moerl.core.atomic import publish_folder
from moerl.runtime.run_dir import RunDir, read_manifest

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_CHUNK = 4 * 2**20

Sums = dict[str, list[Any]]  # name of a file -> [bytes, digest]


class SummedStream:
    """Computes the digest of a file while it is written, from begin to end.

    So an error on the way from memory to the disk is found by the first reader.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._digest, self.size = xxhash.xxh3_64(), 0
        self.tell, self.flush = stream.tell, stream.flush

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        self._digest.update(view)
        self.size += len(view)
        return self._stream.write(view)

    def sum(self) -> list[Any]:
        """[bytes, digest], as in the manifest."""
        return [self.size, self._digest.hexdigest()]


def sum_of(path: Path) -> list[Any]:
    """[bytes, digest] of a file.  Raises OSError."""
    digest, size = xxhash.xxh3_64(), 0
    with path.open("rb") as file:
        while data := file.read(_CHUNK):
            digest.update(data)
            size += len(data)
    return [size, digest.hexdigest()]


def sums_of(folder: Path, written: Mapping[str, list[Any]]) -> Sums:
    """Sums of all files of a folder; files that are not `written` are read."""
    names = sorted(path.name for path in folder.iterdir() if path.name != MANIFEST)
    return {name: written[name] if name in written else sum_of(folder / name) for name in names}


def damage(folder: Path, names: Iterable[str]) -> str:
    """Which of these files differs from its digest in the manifest; empty for none."""
    sums: Sums = read_manifest(folder)["files"]
    for name in names:
        try:
            if sum_of(folder / name) != sums[name]:
                return f"{name} does not match its digest"
        except OSError as error:
            return str(error)
    return ""


def newest_checkpoint(run: RunDir) -> Path | None:
    """Folder of the newest checkpoint that lacks no bytes; newer checkpoints are set aside.

    Raises OSError; ModelError where checkpoints exist and none is whole.
    """
    whole, torn = run.latest_whole_checkpoint()
    for path, cause in torn.items():
        set_aside(path, cause)
    return whole


def damaged_in(run: RunDir) -> set[Path]:
    """Checkpoints of a run that were set aside."""
    return set(run.checkpoints.glob(".step-*.bad*"))


def set_aside(folder: Path, cause: str) -> None:
    """Rename a damaged checkpoint, so that its predecessor is the newest.  Raises OSError."""
    name = f".{folder.name.lstrip('.')}.bad"
    earlier = len(list(folder.parent.glob(f"{name}*")))
    aside = folder.with_name(name + (f"-{earlier}" if earlier else ""))
    publish_folder(folder, aside)
    log.error("checkpoint %s is damaged and set aside as %s: %s", folder.name, aside.name, cause)
