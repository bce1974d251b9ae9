"""Files of a run's stream: `runs/NAME/stream`, from which `moerl rerun` trains the run again.

`log.jsonl` has one JSON object per line, in the order of events; nothing is changed later, but for
a torn last line of a killed process.  `previous` is the SHA-256 of the line before, so a line that
is changed, missing or moved breaks the chain.

    start  a trainer begins: version, first versions of its history, layout, seed, all settings
    step   one optimizer step is trained: its file, sums of its groups, digest of the new weights

`steps/INCARNATION.STEP.step` holds the data of a step: its plan, and each group with its blobs, in
the sealed form of `moerl.records.blob_copies`; every part is a zstd frame with a checksum.  Steps
that a later start trains again stay in the stream: `surviving` leaves them out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import xxhash
import zstandard

from moerl.core.errors import BlobError, StreamError
from moerl.core.serialization import decode_value, encode_value
from moerl.core.types import BatchPlan, EpisodeGroup, ModelShape, PolicyVersion
from moerl.records.blob_copies import CopiedBlob, copied_blobs_of, seal
from moerl.records.header_check import group_uris

SUMS = ("tokens", "versions", "rewards", "records", "header")  # `group_sums`, in this order
_PLAN, _GROUP = "plan", "group "
_LEVEL = 1  # of zstd: records of short answers are mostly headers, which any level halves
_HASH_CHARS = 16
_MOST_RATIO = 1000  # of a frame's content to its bytes: a file may be a stranger's


@dataclass(frozen=True, slots=True)
class StartLine:
    """A trainer begins, from the first weights or a checkpoint."""

    version: PolicyVersion
    begins: tuple[PolicyVersion, ...]  # first version of each trainer in its history
    dp_size: int
    pair_cost: float  # of the model, for `moerl.data.batching`
    weights: str  # digest of the weights at the start
    model: ModelShape
    settings: Mapping[str, Any]  # all of them, secrets hidden

    kind = "start"


@dataclass(frozen=True, slots=True)
class StepLine:
    """One trained step."""

    step: int
    version: PolicyVersion  # of the weights after the step
    file: str  # name below `steps`
    index: str  # digest of the file's index, which has the digests of all parts
    num_bytes: int
    tokens: int  # sampled tokens that it trained
    groups: Mapping[str, tuple[str, ...]]  # group id -> `group_sums`
    weights: str  # digest of the weights after the step
    metrics: Mapping[str, float]  # of the trainer
    kept_from: int  # files of earlier steps were deleted (stream.keep_steps)

    kind = "step"


Line = StartLine | StepLine
_KINDS: dict[str, type[StartLine] | type[StepLine]] = {"start": StartLine, "step": StepLine}


@dataclass(frozen=True, slots=True)
class StreamDir:
    """The folder of a stream."""

    root: Path

    @property
    def log(self) -> Path:
        return self.root / "log.jsonl"

    def step_file(self, version: PolicyVersion) -> Path:
        """Name of a step's file.  version: weights that the step starts from."""
        return self.root / "steps" / f"{version.incarnation}.{version.step:06d}.step"

    def delete_before(self, step: int) -> None:
        """Delete the files of all earlier steps, also cut files."""
        for path in (self.root / "steps").glob("*.step"):
            if int(path.name.split(".")[1]) < step:
                path.unlink(missing_ok=True)


# --- the log --------------------------------------------------------------------------------------
def encode_line(line: Line, previous: str) -> bytes:
    """The bytes of one line.  previous: `line_hash` of the line before, "" for the first."""
    body = {"previous": previous, "kind": line.kind} | msgspec.to_builtins(line)
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def line_hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def read_lines(log: Path) -> list[tuple[Line, str]]:
    """All lines, each with its hash; a torn last line is left out.

    Raises StreamError for a line that is malformed or does not follow the line before.
    """
    found: list[tuple[Line, str]] = []
    previous = ""
    for number, data in enumerate(whole_lines(log), 1):
        try:
            body = json.loads(data)
            line = msgspec.convert(body, _KINDS[body["kind"]])
            told = body["previous"]
        except (ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
            raise StreamError(f"line {number} of {log} cannot be read: {error}") from error
        if told != previous:
            raise StreamError(
                f"line {number} of {log} does not follow the line before: a line was changed, "
                "removed or moved",
                line.step if isinstance(line, StepLine) else -1,
            )
        previous = line_hash(data)
        found.append((line, previous))
    return found


def whole_lines(log: Path) -> list[bytes]:
    """Lines of the log with their newline; raises StreamError without a log."""
    try:
        data = log.read_bytes()
    except FileNotFoundError:
        raise StreamError(f"{log} does not exist; stream.keep_steps=-1 writes it") from None
    return data[: data.rfind(b"\n") + 1].splitlines(keepends=True)


def surviving(lines: Iterable[Line]) -> tuple[list[StepLine], list[StepLine]]:
    """(steps of the surviving history by number, cut steps).  Raises StreamError for a gap."""
    kept: list[StepLine] = []
    cut: list[StepLine] = []
    for line in lines:
        if isinstance(line, StartLine):
            cut += kept[line.version.step :]
            del kept[line.version.step :]
            if line.version.step != len(kept):
                raise StreamError(
                    f"a trainer began at {line.version}, and step {len(kept)} is missing", len(kept)
                )
        elif line.step != len(kept):
            raise StreamError(f"step {line.step} follows step {len(kept) - 1}", len(kept))
        else:
            kept.append(line)
    return kept, cut


# --- one step -------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, eq=False)
class GroupContent:
    """A trained group and the bytes of its blobs."""

    group: EpisodeGroup
    blobs: dict[str, bytes]  # by URI


def write_step(
    path: Path, plan: BatchPlan, read: Callable[[str], bytes], *, sync: bool = False
) -> None:
    """Seal the file of a step.  read: the sealed bytes of a blob.  Raises OSError, BlobError."""
    first = [(_PLAN, encode_value(replace(plan, groups=())))]
    write_groups(path, plan.groups, read, first, sync=sync)


def write_groups(
    path: Path,
    groups: Iterable[EpisodeGroup],
    read: Callable[[str], bytes],
    first: Iterable[tuple[str, bytes]] = (),
    *,
    sync: bool = False,
) -> None:
    """The same of some groups, for `groups_in`.  first: parts before them."""
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
    parts = [(name, compressor.compress(data)) for name, data in first]
    for group in groups:
        content = GroupContent(group, {uri: read(uri) for uri in sorted(group_uris(group))})
        data = encode_value((content.group, content.blobs))
        parts.append((f"{_GROUP}{group.group_id}", compressor.compress(data)))
    seal(path, parts, sync=sync)


def index_digest(path: Path) -> str:
    """Digest of a step file's index.  Raises OSError."""
    with path.open("rb") as file:
        return file.read(_HASH_CHARS).decode("ascii", "replace")


class StepFile:
    """Reads the file of one step and checks every part that it reads."""

    def __init__(self, folder: StreamDir, line: StepLine) -> None:
        """Raises StreamError for a file that is missing or has no whole index."""
        path = folder.root / "steps" / Path(line.file).name
        parts = copied_blobs_of(path)
        if parts is None or _PLAN not in parts:
            raise StreamError(f"{path} is missing, or has no whole index", line.step)
        self._line, self._parts = line, parts
        self.changes: list[str] = []  # of the index, against the log
        if index_digest(path) != line.index:
            self.changes.append(f"the index of {path.name} is not the one in the log")
        own = {str(group_id) for group_id in self.group_ids()}
        self.changes += [f"group {name}: missing" for name in sorted(line.groups.keys() - own)]
        self.changes += [f"group {name}: added" for name in sorted(own - line.groups.keys())]

    def group_ids(self) -> list[int]:
        """In the order of the plan."""
        return [int(name.removeprefix(_GROUP)) for name in self._parts if name != _PLAN]

    def group(self, group_id: int) -> GroupContent:
        """Raises StreamError when its bytes were changed."""
        name = f"{_GROUP}{group_id}"
        value = self._decoded(name, tuple[EpisodeGroup, dict[str, bytes]])
        return GroupContent(*value)

    def plan(self) -> BatchPlan:
        """The plan without its groups.  Raises StreamError."""
        found: BatchPlan = self._decoded(_PLAN, BatchPlan)
        return found

    def _decoded(self, name: str, type_: Any) -> Any:
        try:
            return _decoded(self._parts[name], type_)
        except StreamError as error:
            detail = f"{name} of step {self._line.step} was changed: {error}"
            raise StreamError(detail, self._line.step) from error


def groups_in(path: Path) -> list[GroupContent]:
    """All groups of a step file, for a reader that has no log.  Raises StreamError."""
    if (parts := copied_blobs_of(path)) is None:
        raise StreamError(f"{path} is missing, or has no whole index")
    type_ = tuple[EpisodeGroup, dict[str, bytes]]
    found = [_decoded(part, type_) for name, part in parts.items() if name.startswith(_GROUP)]
    return [GroupContent(*value) for value in found]


def _decoded(part: CopiedBlob, type_: Any) -> Any:
    try:
        data = part.read()
        if zstandard.frame_content_size(data) > _MOST_RATIO * len(data):
            raise StreamError(f"a frame of {len(data)} bytes would become too large")
        return decode_value(zstandard.ZstdDecompressor().decompress(data), type_)
    except (OSError, BlobError, zstandard.ZstdError, msgspec.MsgspecError) as error:
        raise StreamError(str(error)) from error


def whole_plan(file: StepFile) -> tuple[BatchPlan, dict[str, bytes]]:
    """The plan with its groups, and the blobs of all.  Raises StreamError."""
    contents = [file.group(group_id) for group_id in file.group_ids()]
    blobs = {uri: data for content in contents for uri, data in content.blobs.items()}
    return replace(file.plan(), groups=tuple(content.group for content in contents)), blobs


def group_sums(group: EpisodeGroup) -> tuple[str, ...]:
    """Digests of a group by kind of content, so that a difference can be named: `SUMS`."""
    rollouts = group.rollouts()
    records = [
        (r.routing, r.sampling_mask, r.sealed_logprobs, r.indexer, r.top_logprobs) for r in rollouts
    ]
    values: tuple[Any, ...] = (
        [(r.token_ids, r.loss_mask) for r in rollouts],
        [r.versions for r in rollouts],
        [episode.score for episode in group.episodes],
        records,
        group,
    )
    return tuple(xxhash.xxh3_64_hexdigest(encode_value(value)) for value in values)


def differing_sums(group: EpisodeGroup, told: Sequence[str]) -> list[str]:
    """Kinds of content in which a group differs from its sums; `header`: in anything else."""
    pairs = zip(SUMS, group_sums(group), told or [""] * len(SUMS), strict=True)
    named = [kind for kind, own, other in pairs if own != other]
    return [kind for kind in named if kind != "header"] or named
