"""`moerl verify`: check a run's stream from its files alone, without torch.

The chain of the log, the digest of every group and array, one row per fed-in and per sampled token,
the versions of all tokens, and that the surviving history trained each group once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moerl.config.schema import AlgorithmConfig
from moerl.config.validate import read_section
from moerl.core.errors import BlobError, RecordError, StreamError
from moerl.core.types import BatchPlan, BlobRef, EpisodeGroup, PolicyVersion, Rollout
from moerl.data.ref_scores import named
from moerl.data.teacher_versions import teachers_at
from moerl.records.blob_store import BlobStore, Run
from moerl.records.header_check import check
from moerl.records.stream_files import (
    GroupContent,
    StartLine,
    StepFile,
    StepLine,
    StreamDir,
    differing_sums,
    read_lines,
    surviving,
)

_SHOWN = 20  # differences that are printed


@dataclass(slots=True)
class Verified:
    """Counts and differences of one stream."""

    seconds: float = 0.0
    starts: int = 0
    steps: int = 0
    cut: int = 0  # steps that a later start trained again
    kept_from: int = 0  # files of earlier steps were deleted
    groups: int = 0
    rollouts: int = 0
    tokens: int = 0  # sampled
    num_bytes: int = 0  # of the files that were read
    oldest: int = 0  # largest lag of a token, in versions
    differences: list[str] = field(default_factory=list)

    def table(self) -> str:
        """The counts, then the differences."""
        rows = {
            "trainer starts": f"{self.starts}",
            "steps": f"{self.steps} ({self.cut} cut by a later start)",
            "groups, rollouts": f"{self.groups:,}, {self.rollouts:,}",
            "sampled tokens": f"{self.tokens:,}",
            "bytes per sampled token": f"{self.num_bytes / max(self.tokens, 1):.1f}",
            "largest lag": f"{self.oldest} versions",
            "seconds": f"{self.seconds:.2f}",
            "differences": f"{len(self.differences)}",
        }
        if self.kept_from:
            rows["steps with records"] = f"from {self.kept_from} on (stream.keep_steps)"
        width = max(map(len, rows))
        lines = [f"{name:<{width}}  {value}" for name, value in rows.items()]
        if len(self.differences) > _SHOWN:
            lines.append(f"the first {_SHOWN}:")
        return "\n".join(lines + self.differences[:_SHOWN])


def verify(folder: Path) -> Verified:
    """Check the stream of a run directory.  Raises StreamError when there is none."""
    begin, found, stream = time.perf_counter(), Verified(), StreamDir(folder / "stream")
    if not stream.log.exists():
        read_lines(stream.log)  # raises with the setting that writes it
    try:
        lines = [line for line, _ in read_lines(stream.log)]
        kept, cut = surviving(lines)
    except StreamError as error:
        found.differences.append(str(error))
        return found
    found.starts = sum(isinstance(line, StartLine) for line in lines)
    found.steps, found.cut = len(kept), len(cut)
    found.kept_from = kept[-1].kept_from if kept else 0
    found.differences += _trained_twice(kept)
    start: StartLine | None = None
    for line in lines:
        if isinstance(line, StartLine):
            start = line
        elif start is not None and line in kept:
            _count(found, line)
            if line.step >= found.kept_from:
                found.differences += step_differences(stream, start, line, found)
    found.seconds = time.perf_counter() - begin
    return found


def _count(found: Verified, line: StepLine) -> None:
    found.groups += len(line.groups)
    found.tokens += line.tokens if line.step >= found.kept_from else 0


def _trained_twice(kept: Sequence[StepLine]) -> Iterator[str]:
    counts = Counter(name for line in kept for name in line.groups)
    for line in kept:
        for name in line.groups:
            if counts[name] > 1:
                yield f"step {line.step}, group {name}: trained {counts[name]} times"


def step_differences(
    stream: StreamDir, start: StartLine, line: StepLine, found: Verified | None = None
) -> Iterator[str]:
    """Differences of one step's file from the log, each with step, group and rollout.

    start: of the trainer that trained the step.  found: counts to add to.
    """
    found = Verified() if found is None else found
    try:
        file = StepFile(stream, line)
        plan, groups = file.plan(), file.group_ids()
    except StreamError as error:
        yield f"step {line.step}: {error}"
        return
    for change in file.changes:
        yield f"step {line.step}: {change}"
    found.num_bytes += line.num_bytes
    rows = []
    for index, group_id in enumerate(groups):
        where = f"step {line.step}, group {group_id}"
        try:
            content = file.group(group_id)
        except StreamError as error:
            yield f"{where}: {error}"
            continue
        rows += _rows(index, content.group)
        found.rollouts += len(content.group.rollouts())
        told = line.groups.get(str(group_id), ())
        for difference in _group_differences(content, told, start, line):
            yield f"{where}: {difference}"
        ages = [line.step - r.oldest.step for r in content.group.rollouts()]
        found.oldest = max([found.oldest, *ages])
    yield from _plan_differences(line, plan, rows)
    yield from _teacher_differences(start, line, plan)


def _rows(index: int, group: EpisodeGroup) -> list[tuple[int, int, int]]:
    return [
        (index, episode, turn)
        for episode, content in enumerate(group.episodes)
        for turn in range(len(content.turns))
    ]


def _plan_differences(
    line: StepLine, plan: BatchPlan, rows: Sequence[tuple[int, int, int]]
) -> Iterator[str]:
    planned = Counter((row.group, row.episode, row.turn) for row in plan.rows)
    if planned != Counter(rows):
        yield f"step {line.step}: the plan does not train every rollout once"
    if plan.step != line.step or plan.version.incarnation != line.version.incarnation:
        yield f"step {line.step}: the file has the plan of step {plan.step}, {plan.version}"


def _teacher_differences(start: StartLine, line: StepLine, plan: BatchPlan) -> Iterator[str]:
    """Teachers that follow the policy have the step's version, in the plan and in every score."""
    algorithm = read_section(AlgorithmConfig, start.settings.get("algorithm", {}), "algorithm.")
    want = teachers_at(algorithm, start.begins, line.step)
    for what, found in (
        ("the plan", plan.teachers),
        *((f"scores of {one.rollout_id}", one.teachers) for one in plan.ref_models),
    ):
        if found != want:
            yield f"step {line.step}: {what}: teachers {named(found)}, want {named(want)}"


def _group_differences(
    content: GroupContent, told: Sequence[str], start: StartLine, line: StepLine
) -> Iterator[str]:
    for kind in differing_sums(content.group, told):
        yield f"its {kind} differ from the log"
    reads_routes = start.settings["replay"]["routing"] == "R3"
    blobs = MemoryBlobs(content.blobs)
    for rollout in content.group.rollouts():
        name = f"rollout {rollout.rollout_id}"
        try:
            check(rollout, start.model, routing=reads_routes)
        except RecordError as error:
            yield f"{name}: {error.reason}: {error.detail}"
        for kind, ref in _arrays(rollout):
            try:
                blobs.read_runs(ref, [(0, ref.num_bytes)])
            except BlobError as error:
                yield f"{name}: {kind}: {error}"
        for span in rollout.versions:
            if why := _impossible(span.version, start, line):
                yield f"{name}: version {span.version}: {why}"


def _arrays(rollout: Rollout) -> Iterator[tuple[str, BlobRef]]:
    for route in (*rollout.routing, *rollout.audit_rows):
        yield "routes", route.ids
    for mask in (*rollout.sampling_mask, *rollout.top_logprobs):
        yield "mask", mask.offsets
        yield "mask", mask.ids
        if mask.logprobs is not None:
            yield "mask", mask.logprobs
    for logprobs in rollout.sealed_logprobs:
        yield "log-probabilities", logprobs.values
    for positions in (*rollout.indexer, *rollout.audit_indexer):
        yield "positions", positions.packed


def _impossible(version: PolicyVersion, start: StartLine, line: StepLine) -> str:
    """Why no token of the step can have this version; "" if it can."""
    begins = {begin.incarnation: begin.step for begin in start.begins}
    if version.incarnation not in begins:
        return "no trainer of this history published it"
    if not begins[version.incarnation] <= version.step <= line.step:
        return f"it is not between the trainer's start and step {line.step}"
    later = [step for number, step in begins.items() if number > version.incarnation]
    return "a later start discarded it" if later and version.step > min(later) else ""


class MemoryBlobs(BlobStore):
    """Blobs of a step in memory, read and checked like files."""

    def __init__(self, blobs: Mapping[str, bytes]) -> None:
        self._blobs = blobs
        self.bytes_read = 0

    def _fetch(self, spans: Mapping[str, Sequence[Run]]) -> Iterator[list[memoryview]]:
        for uri, runs in spans.items():
            data = memoryview(self._blobs.get(uri, b""))
            if len(data) < max(end for _, end in runs):
                raise BlobError(f"{uri} holds {len(data)} bytes", uri)
            yield [data[low:high] for low, high in runs]
