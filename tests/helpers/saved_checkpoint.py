"""One checkpoint of a trainer's worker, written to its end; imported after the platform is set."""

from __future__ import annotations

from pathlib import Path

from moerl.config.schema import CheckpointConfig
from moerl.runtime.run_dir import RunDir
from moerl.runtime.trace import Tracer
from moerl.trainer.checkpoints import checkpoint
from moerl.trainer.checkpoints.checkpoint_writer import CheckpointWriter
from moerl.trainer.learner.step import Learner
from moerl.trainer.model.parallel import Parallel


def save_whole(
    root: Path, learner: Learner, progress: checkpoint.Progress, ranks: Parallel
) -> Path:
    """Its folder, below the run directory `root`; collective."""
    run = RunDir(root)
    if ranks.is_first:
        run.create()
    writer = CheckpointWriter(run, CheckpointConfig(), ranks, Tracer(run.trace, "trainer"), 0)
    checkpoint.save(writer, learner, progress, ranks)
    writer.finish()
    return run.checkpoint(progress.version.step)
