"""Worker of test_resume_layouts: one trainer takes several layouts in turn, phases from a JSON
file.

    torchrun ... trainer_resume_ranks.py --model DIR --work DIR --phases FILE

A phase builds the trainer anew: {"parallel": {...}, "distributed": false, "load": FOLDER or "",
"reset": false, "until": 2, "save": FOLDER or "", "gathered": false, "out": FILE or "",
"optimizer": {...}, "ddp": {...}}.  It trains the steps from where it stands up to `until`;
weights.pt of `save` gets the weights that it saves, `out` loss, gradient norm and rates of the last
step and the weights after it.  Weights are in Hugging Face coordinates.  gathered: also save as
megatron-core does, which gathers the optimizer's state, in two folders named after `save`: -cut as
it is, -gathered with the padding of its buckets counted.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from moerl.trainer.model import platform

PLACE = platform.prepare("cpu")

import torch  # noqa: E402

from moerl.config.schema import (  # noqa: E402
    CheckpointConfig,
    Config,
    OptimizerConfig,
    ParallelConfig,
    TrainerConfig,
)
from moerl.core.types import PolicyVersion  # noqa: E402
from moerl.records.blob_store import BlobStore  # noqa: E402
from moerl.runtime.run_dir import RunDir  # noqa: E402
from moerl.runtime.trace import Tracer  # noqa: E402
from moerl.trainer.checkpoints import checkpoint  # noqa: E402
from moerl.trainer.checkpoints.checkpoint_writer import CheckpointWriter  # noqa: E402
from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf  # noqa: E402
from moerl.trainer.learner.step import Learner  # noqa: E402
from moerl.trainer.model import parallel  # noqa: E402
from moerl.trainer.model.gpt import build  # noqa: E402
from tests.helpers.hf_gather import HfGather  # noqa: E402
from tests.helpers.patience import patience  # noqa: E402
from tests.helpers.rank_server import meet_apart  # noqa: E402
from tests.helpers.saved_checkpoint import save_whole  # noqa: E402
from tests.helpers.trainer_support import make_plan  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--work", "--phases"):
        parser.add_argument(name, type=Path, required=True)
    options = parser.parse_args()
    for number, phase in enumerate(json.loads(options.phases.read_text())):
        meet_apart(number)
        ranks = parallel.start(ParallelConfig(**phase["parallel"]), PLACE, timeout_s=patience(60))
        run_phase(options, phase, ranks)
        parallel.stop()


def run_phase(options: argparse.Namespace, phase: dict[str, Any], ranks: parallel.Parallel) -> None:
    """One trainer: load, train, save."""
    # eps far above the gradients would hide the moments: a small one, as in real runs
    optimizer = OptimizerConfig(lr=1e-2, min_lr=1e-3, decay_style="linear", decay_steps=4)
    optimizer = replace(optimizer, distributed=phase["distributed"], eps=1e-4)
    optimizer = replace(optimizer, **phase["optimizer"])
    trainer = TrainerConfig(parallel=ranks.sizes, optimizer=optimizer, ddp=phase["ddp"])
    config = Config(trainer=trainer)
    folder = HfFolder(options.model)
    model = build(folder.spec, trainer, ranks, with_replay=True)
    load_hf(model.tensors, model.tiles, folder)
    store = BlobStore(Path(tempfile.mkdtemp(dir=options.work)), "n0")
    learner = Learner(model, ranks, config, store)
    step = 0
    if phase["load"]:
        path = Path(phase["load"])
        step = checkpoint.load(path, learner, ranks, reset_optimizer=phase["reset"]).version.step
    writer = begin(Path(phase["save"]), ranks) if phase["save"] else None
    metrics: dict[str, float] = {}
    for index in range(step, phase["until"]):
        metrics = learner.step(make_plan(store, seed=index, step=index, dp_size=ranks.dp_size))
        if writer is not None and index == step:  # the one that counts has its plan and buffers
            early = checkpoint.Progress(PolicyVersion(0, index + 1), ())
            checkpoint.save(writer, learner, early, ranks)
    gather = HfGather(
        lambda: model.tensors, model.spec, ranks.sizes, ranks.rank, "local", ranks.control
    )
    if writer is not None:
        progress = checkpoint.Progress(PolicyVersion(0, phase["until"]), ((1, 3),))
        if phase["gathered"]:
            save_gathered(phase["save"], learner, progress, ranks)
        checkpoint.save(writer, learner, progress, ranks)
        weights = gather.gather()
        if ranks.is_first:
            torch.save(weights, Path(phase["save"]) / "weights.pt")
        learner.step(make_plan(store, seed=9, step=9, dp_size=ranks.dp_size))  # while it is written
        writer.finish()
    weights = gather.gather() if phase["out"] else None
    if weights is not None:
        found = {"loss": metrics["loss/pg"], "norm": metrics["loss/grad_norm"]}
        found["rate"] = metrics["loss/lr"]
        groups = learner.optimizer.param_groups
        found["adam"] = [(*group["betas"], group["eps"]) for group in groups]
        torch.save(found | {"weights": weights}, phase["out"])


def begin(root: Path, ranks: parallel.Parallel) -> CheckpointWriter:
    run = RunDir(root)
    if ranks.is_first:
        run.create()
    return CheckpointWriter(run, CheckpointConfig(), ranks, Tracer(run.trace, "trainer"), 0)


def save_gathered(
    root: str, learner: Learner, progress: checkpoint.Progress, ranks: parallel.Parallel
) -> None:
    """megatron-core 0.19.2 joins buckets without the padding at their ends, and then cuts
    parameters at places that count it."""
    with mock.patch.object(checkpoint, "is_sharded", return_value=False):
        save_whole(Path(f"{root}-cut"), learner, progress, ranks)
        for ddp in learner.ddp:
            for buffer in ddp.buffers + ddp.expert_parallel_buffers:
                buffer.numel_unpadded = buffer.numel
                for bucket in buffer.buckets:
                    bucket.numel_unpadded = bucket.grad_data.numel()
        save_whole(Path(f"{root}-gathered"), learner, progress, ranks)


if __name__ == "__main__":
    main()
