"""The folder of finished checkpoints: publishing, removing, and naming the best.

A checkpoint's score is the mean of the metric `checkpoint.best` over the rows since the previous
checkpoint.  For an `eval/` metric it is the evaluation of exactly its weights, which ends some
steps later: each new checkpoint, and the end of the run, scores the existing checkpoints again.
"""

from __future__ import annotations

import json
import logging
import shutil
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moerl.config.schema import CheckpointConfig
from moerl.core.atomic import atomic_write, flush_tree, publish_folder
from moerl.core.errors import TrainerError
from moerl.runtime.run_dir import RunDir, newest_incarnation, state_lock
from moerl.trainer.checkpoints.checkpoint_files import MANIFEST, Sums, sums_of

log = logging.getLogger(__name__)


@dataclass(slots=True)
class CheckpointStore:
    """Owner of the folder, on rank 0."""

    run: RunDir
    config: CheckpointConfig
    incarnation: int
    _read_bytes: int = 0  # bytes of metrics.jsonl read so far
    _values: dict[int, float] = field(default_factory=dict)  # metric, by step of the weights

    def hidden(self, step: int) -> Path:
        """Folder of the checkpoint of `step` while it is being written."""
        path = self.run.checkpoint(step)
        return path.with_name(f".{path.name}.{self.incarnation}.writing")

    def clean(self) -> None:
        """Remove the partial folders of writers that died."""
        for pattern in (".step-*.writing", ".step-*.removed"):
            for path in self.run.checkpoints.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)
        finished = {path for _, path in self.run.finished_checkpoints()}
        for path in self.run.checkpoints.glob(".step-*.replaced"):
            if path not in finished:
                _remove(path)

    def publish(self, step: int, manifest: dict[str, Any], sums: Sums) -> None:
        """Rename the hidden folder to a checkpoint and remove checkpoints that are not kept.

        sums: of files that were summed when they were written.  Raises TrainerError when another
        trainer has started: the folder then belongs to it.
        """
        self._expect_newest(step)
        hidden = self.hidden(step)
        score = self._mean_before(step)
        if score is not None:
            manifest[self.config.best] = score
        manifest["files"] = sums_of(hidden, sums)
        atomic_write(hidden / MANIFEST, json.dumps(manifest, indent=1), sync=True)
        flush_tree(hidden)
        with state_lock(self.run):  # no trainer starts between the look and the rename
            self._expect_newest(step)
            self._replace(hidden, self.run.checkpoint(step))
        try:
            if score is not None:
                self._offer(step, score)
            self.rank()
            self._remove_old()
        except OSError:  # the checkpoint itself is whole
            log.exception("after the checkpoint of step %d", step)

    def _expect_newest(self, step: int) -> None:
        if (newest := newest_incarnation(self.run)) > self.incarnation:
            raise TrainerError(
                f"checkpoint of step {step}: trainer {self.incarnation} was replaced by {newest}"
            )

    @staticmethod
    def _replace(hidden: Path, target: Path) -> None:
        """Rename; a checkpoint of a step that was trained again counts until the new one does."""
        before = target.with_name(f".{target.name}.replaced")
        if target.exists():
            if before.exists():
                _remove(before)
            target.rename(before)
        publish_folder(hidden, target)
        if before.exists():
            _remove(before)

    def rank(self) -> None:
        """Name the best by the evaluations that have ended."""
        if not self._is_evaluated:
            return
        self._read()
        for step, score in sorted(self._values.items()):
            if self.run.checkpoint(step).is_dir():
                self._offer(step, score)

    @property
    def _is_evaluated(self) -> bool:
        return self.config.best.startswith("eval/")

    def _mean_before(self, step: int) -> float | None:
        """Mean over the rows since the previous checkpoint; None without a metric or row."""
        if not self.config.best or self._is_evaluated:
            return None
        self._read()
        earlier = [found for found, _ in self.run.finished_checkpoints() if found < step]
        before = max(earlier, default=0)
        values = [value for row, value in self._values.items() if before <= row < step]
        if not values:
            log.warning("no row before step %d has checkpoint.best = %s", step, self.config.best)
        return statistics.fmean(values) if values else None

    def _read(self) -> None:
        """Read the rows that were added; all rows when some were removed."""
        if not self.run.metrics.exists():
            return
        with self.run.metrics.open("rb") as file:
            file.seek(max(0, self._read_bytes - 1))
            if self._read_bytes and file.read(1) != b"\n":
                self._read_bytes = file.seek(0)
            lines = file.read().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        self._read_bytes += sum(map(len, whole))
        at = "eval/step" if self._is_evaluated else "step"
        for row in map(json.loads, whole):
            if self.config.best in row:
                self._values[int(row[at])] = row[self.config.best]

    def _offer(self, step: int, score: float) -> None:
        """Name this checkpoint the best if its score is."""
        found = self.run.best_checkpoint()
        sign = 1.0 if self.config.best_is == "highest" else -1.0
        before = (
            json.loads(self.run.best.read_text(encoding="utf-8")).get(self.config.best)
            if found
            else None
        )
        is_same = found is not None and found[0] == step  # written again, or unchanged
        if before is None or is_same or sign * score > sign * before:
            named = {"step": step, self.config.best: score}
            atomic_write(self.run.best, json.dumps(named, indent=1), sync=True)

    def _remove_old(self) -> None:
        best, finished = self.run.best_checkpoint(), self.run.finished_checkpoints()
        for _, path in finished[: -self.config.keep]:
            if best is None or path != best[1]:
                _remove(path)
        oldest = finished[-self.config.keep :][0][0]
        self._values = {step: value for step, value in self._values.items() if step >= oldest}


def _remove(path: Path) -> None:
    """Delete a folder; a kill on the way leaves nothing under its name."""
    gone = path.with_name(f".{path.name.lstrip('.')}.removed")
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
