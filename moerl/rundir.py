"""The files of a run: one home for every path below runs/NAME."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class RunDir:
    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """Sample rollouts with text and reward, one JSON object each, for the report."""
        return self.root / "samples.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def versions(self) -> Path:
        """HF weights of each published version, with checkpoint.keep_versions."""
        return self.root / "versions"

    @property
    def records(self) -> Path:
        """Headers and blobs of trained groups, with rollout.keep_records."""
        return self.root / "records"

    @property
    def journal(self) -> Path:
        """The controller's journal (unless rollout.journal_dir) and its shipped segments."""
        return self.root / "journal"

    @property
    def hf(self) -> Path:
        return self.root / "hf"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def trace(self) -> Path:
        return self.root / "trace"

    @property
    def perfetto(self) -> Path:
        """The spans of `trace` in one file, for Perfetto and chrome://tracing."""
        return self.root / "trace.json"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    def create(self) -> None:
        for folder in (self.root, self.checkpoints, self.logs, self.trace):
            folder.mkdir(parents=True, exist_ok=True)

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of `step` finished optimizer steps is; it exists only when whole."""
        return self.checkpoints / f"step-{step:06d}"

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """Finished steps and folder of the newest whole checkpoint."""
        found = [
            (int(path.name.removeprefix("step-")), path)
            for path in self.checkpoints.glob("step-*")
            if path.name.removeprefix("step-").isdigit()
        ]
        return max(found, default=None)

    def best_checkpoint(self) -> tuple[int, Path] | None:
        """Finished steps and folder of the best checkpoint by `checkpoint.best`, if it is there."""
        named = self.checkpoints / "best.json"
        if not named.exists():
            return None
        step = int(json.loads(named.read_text())["step"])
        folder = self.checkpoint(step)
        return (step, folder) if folder.is_dir() else None


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of itself: layout, version, time, score (docs/operations.md)."""
    found: dict[str, Any] = json.loads((checkpoint / "manifest.json").read_text())
    return found
