"""Worker of test_support_training: one layout, one process per rank; rank 0 prints what it found.

    torchrun ... support_ranks.py --student DIR --teacher DIR --work DIR [--tp 2] [--cp 2] [--pp 2]

For each case: the sums of a step's loss, the norm of its gradient and, on one rank, the sum of the
term from all logits.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from moerl.trainer.model import platform

PLACE = platform.prepare("cpu")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from moerl.algorithms.advantages import plan_advantages  # noqa: E402
from moerl.algorithms.aggregation import plan_weights  # noqa: E402
from moerl.algorithms.loss import loss_metrics  # noqa: E402
from moerl.config.schema import (  # noqa: E402
    AlgorithmConfig,
    Config,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TeacherConfig,
    TrainerConfig,
)
from moerl.core.types import BatchPlan, MaskBlob, Rollout  # noqa: E402
from moerl.data.packing import LossInputs, Microbatch, ReadOptions, pack_microbatch  # noqa: E402
from moerl.records.blob_ranges import read_mask  # noqa: E402
from moerl.records.blob_store import BlobStore  # noqa: E402
from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf  # noqa: E402
from moerl.trainer.learner.step import Learner  # noqa: E402
from moerl.trainer.model import parallel  # noqa: E402
from moerl.trainer.model.gpt import Model, build  # noqa: E402
from moerl.trainer.model.parallel import Parallel  # noqa: E402
from moerl.trainer.model.replay import Mode  # noqa: E402
from moerl.trainer.passes import forward  # noqa: E402
from tests.helpers.patience import patience  # noqa: E402
from tests.helpers.trainer_support import VOCAB, make_plan, with_rollouts, without_mask  # noqa: E402

K = 9
CENTERED = {"objective": "reinforce", "centering": True}
CASES = {
    "centering, mask": (CENTERED, True),
    "centering, top": (CENTERED, False),
    "reverse, mask": ({"distill_over": "support"}, True),
    "forward, top": ({"distill_over": "teacher_top_k", "distill_kl": "forward"}, False),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("student", "teacher", "work"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("tp", "cp", "pp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    options = parser.parse_args()
    sizes = ParallelConfig(tp=options.tp, cp=options.cp, pp=options.pp)
    ranks = parallel.start(sizes, PLACE, timeout_s=patience(60))
    store = BlobStore(options.work / f"blobs{dist.get_rank()}", "n0")
    masked = make_plan(store, max_tokens=64)
    plans = {True: supported(store, masked), False: supported(store, without_mask(masked))}
    found = {}
    for name, (settings, truncates) in CASES.items():
        distill = {} if "centering" in settings else {"distill_coef": 0.7, "advantage": "none"}
        algorithm = AlgorithmConfig(
            distill_top_k=K,
            teachers=[TeacherConfig(path=str(options.teacher))],
            **settings,
            **distill,
        )
        trainer = TrainerConfig(
            parallel=sizes, optimizer=OptimizerConfig(lr=0.0, min_lr=0.0), packing=options.cp > 1
        )
        config = Config(
            model=ModelConfig(path=str(options.student)), trainer=trainer, algorithm=algorithm
        )
        folder = HfFolder(str(options.student))
        model = build(folder.spec, trainer, ranks, with_replay=True)
        load_hf(model.tensors, model.tiles, folder)
        learner = Learner(model, ranks, config, store)
        sums = learner.gradients(plans[truncates])
        found[name] = loss_metrics(algorithm, sums.loss) | {
            "grad_norm": learner.step(plans[truncates])["loss/grad_norm"],
            "bytes": sums.counts["support_bytes"] / max(sums.counts["supported"], 1),
        }
        if ranks.is_first and dist.get_world_size() == 1:
            teacher = learner.ref_models["teacher"].model if distill else None
            of = term_from_logits(learner, plans[truncates], teacher, ranks)
            found[name]["oracle"] = of
    if ranks.is_first:
        print("FOUND", json.dumps(found))
    dist.barrier()


def supported(store: BlobStore, plan: BatchPlan) -> BatchPlan:
    """The engine's log-probabilities: of the masks, or of K random entries that hold 0.9."""

    def give(rollout: Rollout) -> Rollout:
        name = f"{rollout.rollout_id}.support{int(rollout.sampling.truncates)}"
        rng = np.random.default_rng(len(name))
        num = rollout.num_sampled
        if rollout.sampling.truncates:
            offsets, ids = read_mask(store, rollout.sampling_mask)
            share = 1.0
        else:
            offsets, share = np.arange(num + 1, dtype=np.int64) * K, 0.9
            rows = [np.sort(rng.choice(VOCAB, K, replace=False)) for _ in range(num)]
            ids = np.concatenate(rows).astype(np.int32)
        q = rng.random(len(ids)) + 0.1
        q *= share / np.repeat(np.add.reduceat(q, offsets[:-1]), np.diff(offsets))
        refs = store.seal(name, [offsets, ids, np.log(q).astype(np.float16)])
        blob = (MaskBlob(refs[0], refs[1], 0, num, refs[2]),)
        if rollout.sampling.truncates:
            return replace(rollout, sampling_mask=blob)
        return replace(rollout, top_logprobs=blob)

    return with_rollouts(plan, give)


def term_from_logits(
    learner: Learner, plan: BatchPlan, teacher: Model | None, ranks: Parallel
) -> float:
    """The term of centering, or the mean of the KL, from dense rows of logits in fp64."""
    algorithm, total = learner.config.algorithm, 0.0
    num_tokens = sum(rollout.num_sampled for rollout in plan.rollouts())
    loss = LossInputs(plan_advantages(algorithm, plan, None), plan_weights(algorithm, plan))
    for index in range(plan.num_microbatches):
        batch = pack_microbatch(
            plan, 0, index, learner.store, loss=loss, reads=ReadOptions(support=teacher is None)
        )
        model = learner.model
        forward.load_routes(model, batch, index, ranks)
        p = dense(
            model, forward.hidden_states(model, model.module, batch, index, Mode.REPLAY), batch
        )
        model.replay.clear()
        if batch.support is not None:
            q = torch.zeros_like(p)
            rows = torch.repeat_interleave(batch.support.offsets.diff())
            q[rows, batch.support.ids.long()] = batch.support.logprobs.double().exp()
            if batch.mask_offsets is not None:
                q, alpha = q / q.sum(-1, keepdim=True), torch.zeros(len(q), 1)
            else:
                rest = torch.where(q > 0, p.exp(), 0.0).sum(-1, keepdim=True)
                alpha = (1 - q.sum(-1, keepdim=True)) / (1 - rest)
            terms = torch.where(q > 0, (q - alpha * p.exp()) * p, 0.0)
        else:
            t = dense(
                teacher,
                forward.hidden_states(teacher, teacher.module, batch, index, Mode.OFF),
                batch,
            )
            if batch.mask_offsets is not None:
                terms = torch.where(p > -torch.inf, p.exp() * (p - t), 0.0)
            else:
                top = torch.zeros_like(t).scatter_(1, t.topk(K).indices, 1.0)
                inside = top * t.exp() * (t - p)
                rest = [1 - (top * one.exp()).sum(-1, keepdim=True) for one in (t, p)]
                terms = torch.cat([inside, rest[0] * (rest[0] / rest[1]).log()], 1)
        each = batch.weight * batch.advantage if teacher is None else 1.0 / num_tokens
        total += float((terms.sum(-1) * each).sum())
    return total


@torch.no_grad()
def dense(model: Model, hidden: Tensor, batch: Microbatch) -> Tensor:
    """[N, V] log-probabilities, -inf outside of the mask."""
    z = hidden[0].double() @ model.head(None).weight[:VOCAB].double().T
    z = z / batch.temperature[:, None]
    if batch.mask_offsets is not None:
        keep = torch.zeros_like(z, dtype=torch.bool)
        keep[torch.repeat_interleave(batch.mask_offsets.diff()), batch.mask_ids.long()] = True
        z = z.masked_fill(~keep, -torch.inf)
    return z.log_softmax(-1)


if __name__ == "__main__":
    main()
