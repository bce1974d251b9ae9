"""Random records scored by the trainer's own forward pass, in two precisions, and the controls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moerl.audit.score_job import VARIANTS, ScoreJob
from moerl.core.serialization import encode_value
from moerl.core.types import Rollout
from moerl.records.blob_store import BlobStore
from tests.helpers.trainer_support import LAYERS, make_model, make_plan, torchrun


def scores_of_a_record(folder: Path, platform: str) -> list[str]:
    """Asserts; returns one line per variant for a person to read.

    Gates: every executed expert is the recorded one, in both precisions; bf16 within 0.3 of fp32
    under both replays; each control moves the fp32 log-probability by more than 0.01.
    """
    store = BlobStore(folder / "blobs", "n0")
    rollouts = [r for group in make_plan(store).groups for r in group.rollouts()]
    (folder / "rollouts").write_bytes(encode_value(rollouts))
    ScoreJob(
        model=str(make_model(folder / "model")),
        rollouts=str(folder / "rollouts"),
        blob_dir=str(folder / "blobs"),
        blob_node="n0",
        out=str(folder / "found.npz"),
        variants=list(VARIANTS),
        dtypes=["fp32", "bf16"],
        platform=platform,
        max_tokens_per_microbatch=64,
        version="0.0",
    ).save(folder / "job.json")
    torchrun(1, ["-m", "moerl.audit.score_ranks", "--job", str(folder / "job.json")], timeout_s=300)
    found = dict(np.load(folder / "found.npz"))

    lines = []
    right = found["fp32/both"]
    for dtype in ("fp32", "bf16"):
        slots = int(found[f"{dtype}/slots"])
        assert slots == LAYERS * int(found[f"{dtype}/tokens"]) > 0
        assert int(found[f"{dtype}/executed"]) == slots, f"{dtype}: other experts than recorded"
        for name in VARIANTS:
            moved = float(np.abs(found[f"{dtype}/{name}"] - right).max())
            lines.append(f"{dtype} {name:16s} largest distance from fp32 both {moved:.2e}")
            if name != "both":
                assert moved > 1e-2, lines[-1]
    assert 0 < float(np.abs(found["bf16/both"] - right).max()) < 0.3, lines
    return lines


def gaps_of(
    folder: Path,
    rollouts: Sequence[Rollout],
    model: Path,
    blob_dir: Path,
    variants: Sequence[str],
    *,
    through: str = "",
    **more: Any,
) -> dict[str, np.ndarray]:
    """Trainer in fp32 minus engine, log-probability of each sampled token, by variant.

    through: a module that runs the trainer's; more: fields of its job.
    """
    (folder / "rollouts").write_bytes(encode_value(list(rollouts)))
    ScoreJob(
        model=str(model),
        rollouts=str(folder / "rollouts"),
        blob_dir=str(blob_dir),
        blob_node="node0",
        out=str(folder / "found.npz"),
        variants=list(variants),
        dtypes=["fp32"],
        platform="auto",
        **more,
    ).save(folder / "job.json")
    program = ["-m", *filter(None, [through]), "moerl.audit.score_ranks"]
    torchrun(1, [*program, "--job", str(folder / "job.json")], timeout_s=300)
    found = dict(np.load(folder / "found.npz"))
    return {name: found[f"fp32/{name}"] - found["engine"] for name in variants}
