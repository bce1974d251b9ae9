"""Worker of test_second_model: one rank's learner with a reference and a teacher, which are
the student's own weights and then other ones; prints metrics.

torchrun ... ref_models_ranks.py --student DIR --reference DIR --teacher DIR --work DIR
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from moerl.trainer.model import platform

PLACE = platform.prepare("cpu")

import torch.distributed as dist  # noqa: E402

from moerl.config.schema import (  # noqa: E402
    AlgorithmConfig,
    Config,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ReplayConfig,
    TeacherConfig,
    TrainerConfig,
)
from moerl.records.blob_store import BlobStore  # noqa: E402
from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf  # noqa: E402
from moerl.trainer.learner.step import Learner  # noqa: E402
from moerl.trainer.model import parallel  # noqa: E402
from moerl.trainer.model.gpt import build  # noqa: E402
from tests.helpers.patience import patience  # noqa: E402
from tests.helpers.trainer_support import make_plan  # noqa: E402

NAMES = ("loss/kl_ref", "loss/kl_ref_k3", "loss/kl_teacher", "loss/grad_norm")


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("student", "other", "work"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()
    sizes = ParallelConfig(dp=2, ep=2)
    ranks = parallel.start(sizes, PLACE, timeout_s=patience(60))
    store = BlobStore(options.work / f"blobs{dist.get_rank()}", "n0")
    plans = [make_plan(store, step=step, dp_size=2) for step in range(2)]
    found = {}
    for case, reference, teacher in (
        ("itself", "", str(options.student)),
        ("other", str(options.other), str(options.other)),
    ):
        config = Config(
            model=ModelConfig(path=str(options.student)),
            trainer=TrainerConfig(parallel=sizes, optimizer=OptimizerConfig(lr=0.01, min_lr=0.01)),
            replay=ReplayConfig(routing="off"),
            algorithm=AlgorithmConfig(
                advantage="none",
                kl="unbiased",
                kl_coef=0.5,
                reference=reference,
                distill_coef=1.0,
                teachers=[TeacherConfig(path=teacher)],
            ),
        )
        folder = HfFolder(str(options.student))
        model = build(folder.spec, config.trainer, ranks, with_replay=False)
        load_hf(dict(model.gpt.named_parameters()), model.tiles, folder)
        learner = Learner(model, ranks, config, store)
        rows = [learner.step(plan) for plan in plans]
        assert not any(
            p.requires_grad for p in learner.ref_models["teacher"].model.gpt.parameters()
        )
        found[case] = [{name: row[name] for name in NAMES} for row in rows]
    if ranks.is_first:
        print("FOUND", json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main()
