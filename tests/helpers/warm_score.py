"""`moerl.audit.mismatch_command.score` with ranks forked from a warm process.

A test that scores with many versions of the weights would wait for as many starts of torchrun.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moerl.audit.score_job import ScoreJob
from moerl.config.schema import Precision
from moerl.launch.run_context import RunContext
from moerl.serialization import encode_value
from moerl.types import Rollout
from tests.helpers.rank_server import run_ranks


def score(
    plan: RunContext,
    rollouts: Sequence[Rollout],
    folder: Path,
    *,
    variants: Sequence[str],
    dtypes: Sequence[Precision],
    model: Path,
    version: str = "",
) -> ScoreJob:
    """Score `rollouts` (or, with `version`, their segments of it) as the run's trainer would."""
    records, saved = folder / "rollouts.msgpack", folder / "job.json"
    records.write_bytes(encode_value(list(rollouts)))
    trainer = plan.config.trainer
    job = ScoreJob(
        model=str(model),
        rollouts=str(records),
        blob_dir=str(plan.blob_dir),
        blob_node=plan.node,
        out=str(folder / f"scores{version and '-' + version}.npz"),
        variants=list(variants),
        dtypes=list(dtypes),
        ep=trainer.parallel.ep,
        platform=trainer.platform,
        dispatcher=trainer.dispatcher,
        max_tokens_per_microbatch=trainer.max_tokens_per_microbatch,
        version=version,
        megatron=dict(trainer.megatron),
    )
    job.save(saved)
    arguments = ["-m", "moerl.audit.score_ranks", "--job", str(saved)]
    run_ranks(trainer.parallel.dp, arguments, timeout_s=300.0)
    return job
