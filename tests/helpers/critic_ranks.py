"""Worker of test_critic: policy and critic of one rank over a few plans; rank 0 prints metrics.

torchrun ... critic_ranks.py --model DIR --work DIR --dp N [--ep N]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from moerl.trainer.model import platform

PLACE = platform.prepare("cpu")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from moerl.config.schema import (  # noqa: E402
    AlgorithmConfig,
    Config,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainerConfig,
)
from moerl.core.errors import TrainerError  # noqa: E402
from moerl.core.types import BatchPlan, PolicyVersion  # noqa: E402
from moerl.records.blob_store import BlobStore  # noqa: E402
from moerl.trainer.checkpoints import checkpoint  # noqa: E402
from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf  # noqa: E402
from moerl.trainer.learner.critic import Critic  # noqa: E402
from moerl.trainer.learner.step import Learner  # noqa: E402
from moerl.trainer.model import parallel  # noqa: E402
from moerl.trainer.model.gpt import build  # noqa: E402
from tests.helpers.patience import patience  # noqa: E402
from tests.helpers.saved_checkpoint import save_whole  # noqa: E402
from tests.helpers.trainer_support import make_plan, replan  # noqa: E402

NAMES = ("loss/total", "loss/value", "critic/explained_frac", "critic/grad_norm", "adv/std")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--dp", type=int, required=True)
    options = parser.parse_args()
    sizes = ParallelConfig(dp=options.dp, ep=options.dp)
    ranks = parallel.start(sizes, PLACE, timeout_s=patience(60))
    optimizer = OptimizerConfig(lr=1e-3, min_lr=1e-3)
    config = Config(
        model=ModelConfig(path=str(options.model)),
        trainer=TrainerConfig(parallel=sizes, optimizer=optimizer),
        algorithm=AlgorithmConfig(advantage="gae", gae_lambda=0.9, critic_lr=5e-3),
    )
    store = BlobStore(options.work / f"blobs{dist.get_rank()}", "n0")
    plan = replan(make_plan(store), options.dp)

    def learner(config: Config = config) -> Learner:
        folder = HfFolder(str(options.model))
        model = build(folder.spec, config.trainer, ranks, with_replay=True)
        load_hf(dict(model.gpt.named_parameters()), model.tiles, folder)
        return Learner(model, ranks, config, store, Critic(config, ranks, store))

    halves = []
    for distributed in (False, True):
        own = replace(optimizer, distributed=distributed)
        half = replace(config, trainer=replace(config.trainer, dtype="bf16", optimizer=own))
        before, again = learner(half), learner(half)
        before.step(plan)
        progress = checkpoint.Progress(PolicyVersion(0, 1), ())
        saved = save_whole(options.work / f"bf16-{distributed}", before, progress, ranks)
        checkpoint.load(saved, again, ranks)
        halves.append([{n: one.step(plan)[n] for n in NAMES} for one in (before, again)])
    first = learner()
    assert first.critic is not None
    assert all(not value.any() for value in first.critic.values(plan)), "a head of zeros"
    rows = [first.step(plan) for _ in range(6)]
    values = torch.cat([torch.from_numpy(value) for value in first.critic.values(plan)])
    progress = checkpoint.Progress(PolicyVersion(0, 6), ())
    saved = save_whole(options.work / "run", first, progress, ranks)
    after = first.step(plan)
    again = learner()
    checkpoint.load(saved, again, ranks)
    resumed = again.step(plan)
    refused = _refusal(again, plan)
    if ranks.is_first:
        found = {
            "refused": refused,
            "halves": halves,
            "rows": [{name: row[name] for name in NAMES} for row in rows],
            "after": {name: after[name] for name in NAMES},
            "resumed": {name: resumed[name] for name in NAMES},
            "values": values.tolist(),
        }
        print("FOUND", json.dumps(found))
    dist.barrier()


def _refusal(learner: Learner, plan: BatchPlan) -> str:
    """What a step says when the critic's values are too large to be squared."""
    assert learner.critic is not None
    with torch.no_grad():
        learner.critic.model.gpt.output_layer.weight.fill_(1e30)
    try:
        learner.step(plan)
    except TrainerError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
