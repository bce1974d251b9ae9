"""Worker of test_trainer_parity: one layout, one process per rank; rank 0 writes what it found.

    torchrun ... trainer_parity_ranks.py --model DIR --work DIR --out FILE [--dp 2] [--ep 2] ...

Saved, in Hugging Face coordinates: logits of a fixed batch, log-probabilities of every sampled
token, gradients and weights of one step, loss and gradient norm; with --overlap also the weights
before the last gather.  A large Adam epsilon keeps the step proportional to the gradient (otherwise
the first step shows its sign only).
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

from moerl.trainer.model import platform

PLACE = platform.prepare("cpu")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core.distributed import DistributedDataParallel  # noqa: E402

from moerl.config.schema import Config, OptimizerConfig, ParallelConfig, TrainerConfig  # noqa: E402
from moerl.core.types import BatchPlan  # noqa: E402
from moerl.data.packing import pack_microbatch  # noqa: E402
from moerl.records.blob_store import BlobStore  # noqa: E402
from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf  # noqa: E402
from moerl.trainer.learner import step  # noqa: E402
from moerl.trainer.learner.step import Learner  # noqa: E402
from moerl.trainer.model import parallel  # noqa: E402
from moerl.trainer.model.gpt import build  # noqa: E402
from moerl.trainer.model.replay import Mode  # noqa: E402
from moerl.trainer.passes import forward  # noqa: E402
from tests.helpers.hf_gather import HfGather  # noqa: E402
from tests.helpers.patience import patience  # noqa: E402
from tests.helpers.te_modules import LinearProduct  # noqa: E402
from tests.helpers.trainer_support import OVERLAPPED, UNUSED_EXPERT, make_plan, replan, without_mask  # noqa: E402


def main() -> None:
    options = _options()
    sizes = ParallelConfig(dp=options.dp, ep=options.ep, tp=options.tp, etp=options.etp)
    ranks = parallel.start(sizes, PLACE, timeout_s=patience(60))
    # eps far above the gradients makes Adam's step proportional to them
    optimizer = OptimizerConfig(lr=1.0, min_lr=1.0, eps=10.0, clip_grad=0.0)
    optimizer = replace(optimizer, distributed=options.distributed_optimizer)
    trainer = TrainerConfig(
        parallel=sizes, optimizer=optimizer, dispatcher=options.dispatcher, dtype=options.dtype
    )
    if options.overlap:
        trainer = replace(trainer, ddp=OVERLAPPED)
    folder = HfFolder(options.model)
    model = build(folder.spec, trainer, ranks, with_replay=True)
    load_hf(dict(model.gpt.named_parameters()), model.tiles, folder)
    store = BlobStore(options.work / f"blobs{dist.get_rank()}", "n0")
    plan = make_plan(store, unused_expert=UNUSED_EXPERT)
    learner = Learner(model, ranks, Config(trainer=trainer), store)
    found: dict[str, object] = {"logits": _logits(learner)}
    for name, mode, records, shift in (
        ("replay", Mode.REPLAY, plan, 0),
        ("shifted", Mode.REPLAY, plan, 1),
        ("live", Mode.OFF, plan, 0),
        ("no_mask", Mode.REPLAY, without_mask(plan), 0),
    ):
        found[name] = _logprobs(learner, records, mode, shift)
    if options.overlap:  # gradients are sent during a backward pass from the second one on
        learner.gradients(replan(plan, sizes.dp))
    with _before_the_gather(learner) as early:
        metrics = learner.step(replan(plan, sizes.dp))
    found |= {"early": early[0]} if options.overlap else {}
    found |= {"loss": metrics["loss/pg"], "grad_norm": metrics["loss/grad_norm"]}
    found["weights"] = _gather(learner, lambda param: param.detach())
    if not options.distributed_optimizer:  # there, a rank holds the sum of its own shard only
        found["gradients"] = _gather(learner, lambda param: param.main_grad)
    found["te_products"] = LinearProduct.weight_gradients
    if ranks.is_first:
        torch.save(found, options.out)
    dist.barrier()


@contextlib.contextmanager
def _before_the_gather(learner: Learner) -> Iterator[list[dict[str, torch.Tensor] | None]]:
    """Gets the weights of a step as they would be if it ended without a gather."""
    found: list[dict[str, torch.Tensor] | None] = []
    plain = step.gather_parameters

    def gather(ddp: Sequence[DistributedDataParallel]) -> None:
        found.append(_gather(learner, lambda param: param.detach()))
        plain(ddp)

    with mock.patch.object(step, "gather_parameters", gather):
        yield found


@torch.no_grad()
def _logits(learner: Learner) -> torch.Tensor:
    """Live logits of a fixed batch, whole vocabulary, padding cut off."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    model = learner.model
    tokens = torch.arange(60).view(3, 20) % model.spec.vocab_size
    logits = model.module(tokens, torch.arange(20).expand(3, 20), None, **model.call_args)
    return gather_from_tensor_model_parallel_region(logits)[..., : model.spec.vocab_size].float()


@torch.no_grad()
def _logprobs(learner: Learner, plan: BatchPlan, mode: Mode, shift: int) -> dict[str, torch.Tensor]:
    """Log-probabilities by rollout, joined over data-parallel ranks; routes rolled by `shift`."""
    ranks, model = learner.parallel, learner.model
    plan = replan(plan, ranks.dp_size)
    mine: dict[str, torch.Tensor] = {}
    assert model.replay is not None
    for index in range(plan.num_microbatches):
        batch = pack_microbatch(
            plan, ranks.dp_rank, index, learner.store, grid=forward.grid_of(ranks, TrainerConfig())
        )
        if mode is Mode.REPLAY:
            rows = batch.tokens.shape[0]
            routes = {
                layer: ids.roll(shift * rows, 0)
                for layer, ids in batch.routes(model.replay.layers).items()
            }
            model.replay.load(index, forward.local_rows(routes, ranks))
        hidden = forward.hidden_states(model, model.module, batch, index, mode)
        logprob = forward.sampled_logprobs(model, hidden, batch, ranks).logprob
        for row, rollout in enumerate(batch.rollouts):
            mine[rollout.rollout_id] = logprob[batch.seq == row]
    model.replay.clear()
    every: list[dict[str, torch.Tensor]] = [{} for _ in range(ranks.dp_size)]
    dist.all_gather_object(every, mine, group=ranks.dp_gloo)
    return {name: values for part in every for name, values in part.items()}


def _gather(
    learner: Learner, view: Callable[[torch.nn.Parameter], torch.Tensor]
) -> dict[str, torch.Tensor] | None:
    """Whole tensors on rank 0, of whatever `view` says of each parameter."""
    model, ranks = learner.model, learner.parallel
    gather = HfGather(
        lambda: {name: view(param) for name, param in model.gpt.named_parameters()},
        model.spec,
        ranks.sizes,
        ranks.rank,
        PLACE.layers,
        ranks.control,
    )
    return gather.gather()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--work", "--out"):
        parser.add_argument(name, type=Path, required=True)
    for name in ("--dp", "--ep", "--tp", "--etp"):
        parser.add_argument(name, type=int, default=1)
    parser.add_argument("--dispatcher", default="alltoall")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--distributed-optimizer", action="store_true")
    parser.add_argument("--overlap", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
