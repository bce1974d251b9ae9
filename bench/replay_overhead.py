"""What both replays cost a training step: fetch, decode, replay and masked log-probability.

    python bench/replay_overhead.py [--pairs 24] [--tokens 4096]

Three learners with the same weights train the same tokens: `both` replays recorded routes and
sampling masks read from sealed blobs, `routing` replays routes alone, `none` routes live and scores
the full vocabulary.  Steps are interleaved in rotating order, so that a noisy machine hits all
alike; ratios are taken within a round.  `routing` against `none` is the cost of Keep Routing alone;
`both` also swaps a log-softmax over the vocabulary for one over the sampling masks, which is
cheaper.

The bound: replay saves the top-k and adds reads of rows x layers x K bytes plus a gather of the
kept logits; nothing of it grows with parameters, so the share falls with model size.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, of_ratios, report, result
from one_rank import one_rank
from small_moe import SPEC

from moerl.config.schema import Config, ObserveConfig, RunConfig, TrainerConfig
from moerl.core.types import (
    BatchPlan,
    Episode,
    EpisodeGroup,
    ModelShape,
    PolicyVersion,
    Prompt,
    Rollout,
    SamplingParams,
    Score,
    Turn,
)
from moerl.data.batching import plan_batch
from moerl.records import BlobStore
from tests.helpers.synthetic import RolloutSpec, random_rollout

PROMPT, LENGTH, KEPT_MEAN = 32, 256, 32
START = PolicyVersion(0, 0)
SHAPE = ModelShape(
    SPEC.vocab_size, SPEC.layers, SPEC.moe_layers, SPEC.experts, SPEC.experts_per_token
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=24, help="interleaved pairs of steps (>= 20)")
    parser.add_argument("--tokens", type=int, default=4096, help="fed-in tokens of a step")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    args = parser.parse_args()
    if args.pairs < 20:
        parser.error("--pairs: at least 20 are needed for the interval")
    folder = Path(tempfile.mkdtemp(prefix="moerl-bench-"))
    try:
        report(result(run(folder, args.pairs, args.tokens)), args.json)
    finally:
        shutil.rmtree(folder)


ARMS = ("both", "routing", "none")


def run(folder: Path, num_rounds: int, num_tokens: int) -> list[Figure]:
    store = BlobStore(folder / "blobs", "bench")
    rng = np.random.default_rng(0)
    rollouts = [make_rollout(store, rng, i) for i in range(max(2, num_tokens // LENGTH))]
    recorded, bare = make_plan(rollouts), make_plan([without_records(r) for r in rollouts])
    arms = dict(zip(ARMS, learners(store), strict=True))
    plans = {"both": recorded, "routing": recorded, "none": bare}
    for name, learner in arms.items():
        learner.step(plans[name])  # warm-up: allocators, first Adam state
    rounds = []
    for index in range(num_rounds):
        seconds = {}
        shift = index % len(ARMS)
        for name in (*ARMS[shift:], *ARMS[:shift]):
            begin = time.perf_counter()
            arms[name].step(plans[name])
            seconds[name] = time.perf_counter() - begin
        rounds.append(seconds)
        shown = ", ".join(f"{name} {seconds[name]:.3f} s" for name in ARMS)
        print(f"round {index + 1:2d}/{num_rounds}: {shown}", flush=True)
    medians = {name: round(statistics.median(r[name] for r in rounds), 3) for name in ARMS}
    print(f"seconds of a step, median: {medians}")
    return [
        of_ratios(f"seconds of a step, {name} / none", [r[name] / r["none"] for r in rounds])
        for name in ("both", "routing")
    ]


def learners(store: BlobStore) -> list[Any]:
    """Learners of the three arms, equal weights, one rank in this process."""
    config = Config(
        run=RunConfig(steps=1000),
        trainer=TrainerConfig(max_tokens_per_microbatch=2048),
        observe=ObserveConfig(full_entropy=0),  # a metric, not part of replay
    )
    job = one_rank()
    from moerl.trainer.learner.step import Learner
    from moerl.trainer.model.gpt import build

    flags = (True, True, False)
    models = [build(SPEC, config.trainer, job, with_replay=flag) for flag in flags]
    for model in models[1:]:
        model.gpt.load_state_dict(models[0].gpt.state_dict())
    no_mask = replace(config, replay=replace(config.replay, sampling_mask=False))
    off = replace(config, replay=replace(config.replay, routing="off", sampling_mask=False))
    return [
        Learner(model, job, settings, store)
        for model, settings in zip(models, (config, no_mask, off), strict=True)
    ]


def make_plan(rollouts: list[Rollout]) -> BatchPlan:
    episodes = tuple(
        Episode(r.rollout_id, (Turn(r),), Score(float(i % 2))) for i, r in enumerate(rollouts)
    )
    group = EpisodeGroup(0, Prompt(0, (1,), "", None, {}), episodes)
    return plan_batch(0, START, [group], dp_size=1, max_tokens_per_microbatch=2048)


def make_rollout(store: BlobStore, rng: np.random.Generator, index: int) -> Rollout:
    num_sampled = LENGTH - PROMPT
    prompt = rng.integers(0, SPEC.vocab_size, PROMPT).astype(np.int32)
    spec = RolloutSpec(
        SHAPE,
        num_sampled,
        SamplingParams(max_new_tokens=num_sampled, top_p=0.95, top_k=512),
        versions=(START,),
        kept_mean=KEPT_MEAN,
    )
    return random_rollout(store, rng, f"r{index}", prompt, spec)


def without_records(rollout: Rollout) -> Rollout:
    free = SamplingParams(max_new_tokens=rollout.sampling.max_new_tokens)
    return replace(rollout, routing=(), sampling_mask=(), sampling=free)


if __name__ == "__main__":
    main()
