"""Ranks of test_ref_model_ranks: one plan trained with reference and teacher inside the trainer,
and with the scores of reference ranks of another layout; rank 0 prints what both found.

torchrun ... ref_model_loop_ranks.py --run-dir RUN --scored FILE --work DIR
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from moerl.trainer.model import platform

PLACE = platform.prepare("cpu")

import numpy as np  # noqa: E402
import torch.distributed as dist  # noqa: E402

from moerl.config.load import load_saved  # noqa: E402
from moerl.config.schema import Config, RefModelsConfig  # noqa: E402
from moerl.core.errors import RecordError  # noqa: E402
from moerl.core.messages import Scored  # noqa: E402
from moerl.core.serialization import decode  # noqa: E402
from moerl.core.types import BatchPlan  # noqa: E402
from moerl.data.packing import by_row  # noqa: E402
from moerl.records.blob_store import BlobStore  # noqa: E402
from moerl.runtime.run_dir import RunDir  # noqa: E402
from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf  # noqa: E402
from moerl.trainer.learner.step import Learner  # noqa: E402
from moerl.trainer.model import parallel  # noqa: E402
from moerl.trainer.model.gpt import build  # noqa: E402
from moerl.trainer.passes.schedule import Batches  # noqa: E402
from tests.helpers.patience import patience  # noqa: E402
from tests.helpers.trainer_support import make_plan  # noqa: E402

NAMES = ("loss/total", "loss/kl_ref_k3", "loss/kl_teacher", "loss/grad_norm")


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("run-dir", "scored", "work"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()
    config = load_saved(RunDir(options.run_dir).config)
    ranks = parallel.start(config.trainer.parallel, PLACE, timeout_s=patience(60))
    store = BlobStore(options.work / f"blobs{dist.get_rank()}", "n0")
    scored = decode(options.scored.read_bytes())
    assert isinstance(scored, Scored)
    plan = make_plan(store, dp_size=ranks.dp_size)
    by_id = {scores.rollout_id: scores for scores in scored.scores}
    plan = replace(plan, ref_models=tuple(by_id[r.rollout_id] for r in plan.rollouts()))

    def learner(config: Config) -> Learner:
        folder = HfFolder(config.model.path)
        model = build(folder.spec, config.trainer, ranks, with_replay=False)
        load_hf(dict(model.gpt.named_parameters()), model.tiles, folder)
        return Learner(model, ranks, config, store)

    inside = learner(replace(config, ref_models=RefModelsConfig()))
    gaps = {}
    batches = Batches(plan, config, ranks, store)
    for role, policy in inside.ref_models.items():
        for idx, values in by_row(plan, ranks.dp_rank, policy.logprobs(batches)).items():
            for other in inside.ref_models:
                gap = float(np.abs(plan.ref_models[idx].logprobs[other] - values).max())
                name = f"{role}/{other}"
                gaps[name] = max(gaps.get(name, 0.0), gap)
    outside = learner(config)
    assert not outside.ref_models, "no second model on the trainer's ranks"
    every: list[dict[str, float]] = [{} for _ in range(ranks.world_size)]
    dist.all_gather_object(every, gaps, group=ranks.control)
    found = {
        "gaps": {name: max(part[name] for part in every) for name in gaps},
        "inside": _picked(inside.step(plan)),
        "refused": _refused(outside, plan),
        "outside": _picked(outside.step(plan)),
    }
    if ranks.is_first:
        print("FOUND", json.dumps(found))
    dist.barrier()


def _picked(row: dict[str, float]) -> dict[str, float]:
    return {name: row[name] for name in NAMES}


def _refused(learner: Learner, plan: BatchPlan) -> dict[str, str]:
    """What is said of scores that are not of this plan's records."""
    first, second, *rest = plan.ref_models
    other = replace(learner.config.algorithm, reference=learner.config.algorithm.teachers[0].path)
    cases = {
        "swapped": (replace(plan, ref_models=(second, first, *rest)), learner.config),
        "absent": (replace(plan, ref_models=()), learner.config),
        "other model": (plan, replace(learner.config, algorithm=other)),
    }
    found = {}
    for name, (wrong, config) in cases.items():
        learner.config, kept = config, learner.config
        try:
            learner.step(wrong)
        except RecordError as error:
            found[name] = error.reason
        learner.config = kept
    return found


if __name__ == "__main__":
    main()
