"""Worker of test_trainer_probe: records that the model itself made, and the same ones damaged."""

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

from moerl.config.schema import Config, ParallelConfig, ReplayConfig, TrainerConfig  # noqa: E402
from moerl.core.types import BatchPlan, Rollout, RoutingBlob  # noqa: E402
from moerl.data.packing import pack_microbatch  # noqa: E402
from moerl.records.blob_store import BlobStore  # noqa: E402
from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf  # noqa: E402
from moerl.trainer.model import parallel  # noqa: E402
from moerl.trainer.model.gpt import Model, build  # noqa: E402
from moerl.trainer.model.replay import Mode  # noqa: E402
from moerl.trainer.passes import forward, probe  # noqa: E402
from tests.helpers.patience import patience  # noqa: E402
from tests.helpers.trainer_support import EXPERTS, LAYERS, make_plan, replan  # noqa: E402


def main() -> None:
    options = _options()
    sizes = ParallelConfig(dp=options.ranks, ep=options.ranks)
    ranks = parallel.start(sizes, PLACE, timeout_s=patience(60))
    trainer = TrainerConfig(parallel=sizes)
    config = Config(trainer=trainer, replay=ReplayConfig(probe=1))
    folder = HfFolder(options.model)
    model = build(folder.spec, trainer, ranks, with_replay=True)
    load_hf(dict(model.gpt.named_parameters()), model.tiles, folder)
    store = BlobStore(options.work / f"blobs{dist.get_rank()}", "n0")
    # Every rank records every rollout: one microbatch, one data-parallel rank.
    random = make_plan(store, max_tokens=4096)
    recorded = _record(model, random, ranks, store)
    found = {}
    for name, plan in (
        ("recorded", recorded),
        ("shifted", _damaged(recorded, store, 1)),
        ("random", _with_logprobs(random, recorded)),
        ("stale", replace(_aged(recorded), step=3)),
    ):
        plan = replan(plan, sizes.dp, 4096)
        found[name] = probe.probe(model, plan, config, ranks, store)
    if ranks.is_first:
        options.out.write_text(json.dumps(found))
    dist.barrier()


@torch.no_grad()
def _record(model: Model, plan: BatchPlan, ranks: parallel.Parallel, store: BlobStore) -> BatchPlan:
    """The plan as an engine with these very weights would have recorded it."""
    assert model.replay is not None
    batch = pack_microbatch(plan, 0, 0, store)
    hidden = forward.hidden_states(model, model.module, batch, 0, Mode.RECORD)
    logprob = forward.sampled_logprobs(model, hidden, batch, ranks)[0]
    count = len(batch.tokens)
    live = torch.stack([model.replay.live(0, layer).ids for layer in range(LAYERS)])
    model.replay.clear()
    made = {}
    for row, rollout in enumerate(batch.rollouts):
        ids = live[:, row::count][:, : rollout.num_tokens - 1]
        made[rollout.rollout_id] = replace(
            rollout,
            logprobs=logprob[batch.seq == row].numpy().astype(np.float32),
            sealed_logprobs=(),
            routing=(_seal(store, f"live.{rollout.rollout_id}", ids.numpy(), rollout),),
        )
    return _replaced(plan, made)


def _seal(store: BlobStore, name: str, ids: np.ndarray, like: Rollout) -> RoutingBlob:
    (ref,) = store.seal(name, [np.ascontiguousarray(ids.astype(np.uint8))])
    version = like.routing[0].version
    return RoutingBlob(ref, 0, ids.shape[1], version, tuple(range(LAYERS)), EXPERTS)


def _damaged(plan: BatchPlan, store: BlobStore, shift: int) -> BatchPlan:
    made = {}
    for group in plan.groups:
        for rollout in group.rollouts():
            ids = np.roll(store.load(rollout.routing[0].ids), shift, axis=1)
            blob = _seal(store, f"shift.{rollout.rollout_id}", ids, rollout)
            made[rollout.rollout_id] = replace(rollout, routing=(blob,))
    return _replaced(plan, made)


def _with_logprobs(plan: BatchPlan, source: BatchPlan) -> BatchPlan:
    """Random routes beside log-probabilities of the model's own."""
    by_id = {r.rollout_id: r for group in source.groups for r in group.rollouts()}
    made = {
        r.rollout_id: replace(r, logprobs=by_id[r.rollout_id].logprobs, sealed_logprobs=())
        for group in plan.groups
        for r in group.rollouts()
    }
    return _replaced(plan, made)


def _aged(plan: BatchPlan) -> BatchPlan:
    """The same records trained three steps later: no token is at lag 0."""
    version = replace(plan.version, step=plan.version.step + 3)
    return replace(plan, version=version)


def _replaced(plan: BatchPlan, made: dict[str, Rollout]) -> BatchPlan:
    groups = tuple(
        replace(
            group,
            episodes=tuple(
                replace(
                    episode,
                    turns=tuple(
                        replace(turn, rollout=made[turn.rollout.rollout_id])
                        for turn in episode.turns
                    ),
                )
                for episode in group.episodes
            ),
        )
        for group in plan.groups
    )
    return replace(plan, groups=groups)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--work", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
