"""Writes the stream of a run: the content of each planned step, and a line per trained step.

A step's file is written while the step trains.  File and line are complete before the step is done
in the journal, so every step that counts has both, whatever process is killed; a step that is
reported twice has one line.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moerl.core.messages import Hello, StepDone
from moerl.core.types import BatchPlan, EpisodeGroup, ModelShape, PolicyVersion
from moerl.records.blob_store import BlobStore
from moerl.records.stream_files import (
    Line,
    StartLine,
    StepLine,
    StreamDir,
    encode_line,
    group_sums,
    index_digest,
    line_hash,
    read_lines,
    whole_lines,
    write_step,
)
from moerl.runtime.line_file import LineFile


class StreamWriter:
    """The stream of one run; one process writes it."""

    def __init__(
        self,
        folder: StreamDir,
        blobs: BlobStore,
        model: ModelShape,
        settings: Mapping[str, Any],
        *,
        keep_steps: int,
        sync: bool,
    ) -> None:
        """Open the log and cut a torn last line.  Raises OSError; StreamError when it is damaged.

        settings: of the run, without secrets.  keep_steps: -1 keeps the files of all steps.
        sync: each file is on the disk before its step is done (durability `shared`).
        """
        self._folder, self._blobs = folder, blobs
        self._model, self._settings = model, settings
        self._keep_steps, self._sync = keep_steps, sync
        lines = read_lines(folder.log) if folder.log.exists() else []
        self._previous = lines[-1][1] if lines else ""
        steps = [line for line, _ in lines if isinstance(line, StepLine)]
        self._done = {line.version for line in steps}
        self._starts = {line.version for line, _ in lines if isinstance(line, StartLine)}
        self._kept_from = steps[-1].kept_from if steps else 0
        end = sum(map(len, whole_lines(folder.log))) if lines else 0
        self._log = LineFile(folder.log, end)
        self._sums: dict[PolicyVersion, Mapping[str, tuple[str, ...]]] = {}  # of written files
        self._wait_s = 0.0  # seconds that a trainer waited for files and lines
        self._plans: dict[int, tuple[BatchPlan, asyncio.Task[None]]] = {}  # being written, by step

    def began(self, hello: Hello) -> None:
        """A trainer begins; a second call with its hello changes nothing.  Raises OSError."""
        if hello.version in self._starts:
            return
        self._plans.clear()
        self._sums.clear()
        start = StartLine(
            hello.version,
            hello.begins,
            hello.dp_size,
            hello.pair_cost,
            hello.weights,
            self._model,
            self._settings,
        )
        self._append(start)
        self._starts.add(hello.version)

    # --- a step's file ----------------------------------------------------------------------------
    def prepare(self, plan: BatchPlan) -> None:
        """Begin to write the file of a plan; an earlier file of its step is replaced."""
        _, before = self._plans.get(plan.step, (None, None))
        self._plans[plan.step] = (plan, asyncio.ensure_future(self._write_after(before, plan)))

    async def _write_after(self, before: asyncio.Task[None] | None, plan: BatchPlan) -> None:
        if before is not None:
            await asyncio.wait([before])
        await asyncio.to_thread(self._write, plan)

    def _write(self, plan: BatchPlan) -> None:
        path = self._folder.step_file(plan.version)
        write_step(path, plan, self._blobs.read, sync=self._sync)
        self._sums[plan.version] = _sums_of(plan.groups)  # now: the trainer waits for `done`

    def is_prepared(self, step: int) -> bool:
        return step in self._plans

    async def sealed(self, step: int) -> None:
        """Wait for the file of a prepared step.  Raises OSError, BlobError; then `write_again`."""
        begin = time.monotonic()
        if step in self._plans:
            await self._plans[step][1]
        self._wait_s += time.monotonic() - begin

    def write_again(self, step: int) -> None:
        """Write the file of a prepared step in this thread.  Raises OSError, BlobError."""
        self._write(self._plans[step][0])

    # --- a step's line ----------------------------------------------------------------------------
    def has(self, version: PolicyVersion) -> bool:
        """Whether the step that made these weights has its line."""
        return version in self._done

    async def done(self, done: StepDone, groups: Sequence[EpisodeGroup]) -> StepLine:
        """The line of a trained step.  Raises OSError."""
        self._plans.pop(done.step, None)
        begin = time.monotonic()
        line = await asyncio.to_thread(self._line, done, groups)
        self._wait_s += time.monotonic() - begin
        return line

    def metrics(self, line: StepLine | None) -> dict[str, float]:
        """Metrics of a step; the wait is the trainer's, since the last call."""
        wait_s, self._wait_s = self._wait_s, 0.0
        found = {"stream/wait_s": wait_s}
        if line is not None:
            found["stream/bytes"] = float(line.num_bytes)
            found["stream/bytes_per_token"] = line.num_bytes / max(line.tokens, 1)
        return found

    def _line(self, done: StepDone, groups: Sequence[EpisodeGroup]) -> StepLine:
        begin = PolicyVersion(done.version.incarnation, done.step)
        path = self._folder.step_file(begin)
        kept_from = done.step + 1 - self._keep_steps if self._keep_steps > 0 else 0
        return StepLine(
            step=done.step,
            version=done.version,
            file=path.name,
            index=index_digest(path),
            num_bytes=path.stat().st_size,
            tokens=sum(rollout.num_sampled for group in groups for rollout in group.rollouts()),
            groups=self._sums.pop(begin, {}) or _sums_of(groups),
            weights=done.weights,
            metrics={name: value for name, value in done.metrics.items() if math.isfinite(value)},
            kept_from=max(kept_from, self._kept_from),
        )

    def add(self, line: StepLine) -> None:
        """Append a step's line, then delete files that are not kept.  Raises OSError."""
        self._append(line)
        self._done.add(line.version)
        if line.kept_from > self._kept_from:
            self._kept_from = line.kept_from
            self._folder.delete_before(line.kept_from)

    def _append(self, line: Line) -> None:
        data = encode_line(line, self._previous)
        self._log.append(data)
        self._previous = line_hash(data)


def _sums_of(groups: Iterable[EpisodeGroup]) -> dict[str, tuple[str, ...]]:
    return {str(group.group_id): group_sums(group) for group in groups}
