"""Worker of test_second_model: one rank's learner with a reference and a teacher; prints metrics.

torchrun ... second_model.py --student DIR --reference DIR --teacher DIR --work DIR
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from moerl.trainer import platform

PLACE = platform.prepare("cpu")

import torch.distributed as dist  # noqa: E402
from trainer_support import make_plan  # noqa: E402

from moerl.blob.store import BlobStore  # noqa: E402
from moerl.config.schema import (  # noqa: E402
    AlgorithmConfig,
    Config,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ReplayConfig,
    TrainerConfig,
)
from moerl.trainer import parallel  # noqa: E402
from moerl.trainer.hf_folder import HfFolder, load_hf  # noqa: E402
from moerl.trainer.model import build  # noqa: E402
from moerl.trainer.step import Learner  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("student", "reference", "teacher", "work"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()
    sizes = ParallelConfig(dp=2, ep=2)
    ranks = parallel.start(sizes, PLACE, timeout_s=60)
    config = Config(
        model=ModelConfig(path=str(options.student)),
        trainer=TrainerConfig(parallel=sizes, optimizer=OptimizerConfig(lr=0.01, min_lr=0.01)),
        replay=ReplayConfig(routing="off"),
        algorithm=AlgorithmConfig(
            advantage="none",
            kl="unbiased",
            kl_coef=0.5,
            reference="" if options.reference == options.student else str(options.reference),
            distill_coef=1.0,
            teacher=str(options.teacher),
        ),
    )
    folder = HfFolder(str(options.student))
    model = build(folder.spec, config.trainer, ranks, with_replay=False)
    load_hf(dict(model.gpt.named_parameters()), model.tiles, folder)
    store = BlobStore(options.work / f"blobs{dist.get_rank()}", "n0")
    learner = Learner(model, ranks, config, store)
    rows = [learner.step(make_plan(store, step=step, dp_size=2)) for step in range(2)]
    assert learner.teacher is not None
    assert not any(p.requires_grad for p in learner.teacher.model.gpt.parameters())
    if ranks.is_first:
        names = ("loss/kl_ref", "loss/kl_ref_k3", "loss/kl_teacher", "loss/grad_norm")
        print("FOUND", json.dumps([{name: row[name] for name in names} for row in rows]))
    dist.barrier()


if __name__ == "__main__":
    main()
