"""What both replays cost a training step: fetch, decode, replay and masked log-probability.

    python bench/replay_overhead.py [--pairs 24] [--tokens 4096]

Two learners with the same weights train the same tokens: one replays recorded routes and kept sets
read from sealed blobs, the other routes live and scores the full vocabulary.  Steps are
interleaved (ABBA), so that a noisy machine hits both; the ratio is taken per pair.

The bound: replay saves the top-k and adds reads of rows x layers x K bytes plus a gather of the
kept logits; nothing of it grows with parameters, so the share falls with model size.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import numpy as np

from moerl.blob import BlobStore
from moerl.config.schema import Config, ParallelConfig, RunConfig, TrainerConfig
from moerl.data.batching import plan_batch
from moerl.layout import ModelSpec
from moerl.types import (
    BatchPlan,
    Episode,
    EpisodeGroup,
    Finish,
    MaskBlob,
    PolicyVersion,
    Prompt,
    Rollout,
    RoutingBlob,
    SamplingParams,
    Score,
    Turn,
    VersionSpan,
)

SPEC = ModelSpec(
    family="qwen3_moe",
    vocab_size=32000,
    hidden=256,
    layers=4,
    heads=8,
    kv_heads=2,
    head_dim=32,
    experts=16,
    experts_per_token=4,
    moe_ffn=128,
    moe_layers=(0, 1, 2, 3),
    tied=False,
    norm_topk_prob=True,
    rms_eps=1e-6,
    rope_theta=1e6,
    max_positions=4096,
    dtype="float32",
)
PROMPT, LENGTH, KEPT_MEAN = 32, 256, 32
START = PolicyVersion(0, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=24, help="interleaved pairs of steps (>= 20)")
    parser.add_argument("--tokens", type=int, default=4096, help="fed-in tokens of a step")
    args = parser.parse_args()
    if args.pairs < 20:
        parser.error("--pairs: at least 20 are needed for the interval")
    folder = Path(tempfile.mkdtemp(prefix="moerl-bench-"))
    try:
        run(folder, args.pairs, args.tokens)
    finally:
        shutil.rmtree(folder)


def run(folder: Path, num_pairs: int, num_tokens: int) -> None:
    store = BlobStore(folder / "blobs", "bench")
    rng = np.random.default_rng(0)
    rollouts = [make_rollout(store, rng, i) for i in range(max(2, num_tokens // LENGTH))]
    recorded, bare = make_plan(rollouts), make_plan([without_records(r) for r in rollouts])
    with_replay, without = learners(store)
    with_replay.step(recorded)  # warm-up: allocators, first Adam state
    without.step(bare)
    ratios, times = [], []
    for pair in range(num_pairs):
        first = pair % 2 == 0
        order = [(with_replay, recorded), (without, bare)]
        seconds = {}
        for learner, plan in order if first else order[::-1]:
            begin = time.perf_counter()
            learner.step(plan)
            seconds[learner is with_replay] = time.perf_counter() - begin
        ratios.append(seconds[True] / seconds[False])
        times.append(seconds)
        print(
            f"pair {pair + 1:2d}/{num_pairs}: with {seconds[True]:.3f} s, "
            f"without {seconds[False]:.3f} s",
            flush=True,
        )
    report(ratios, times)


def report(ratios: list[float], times: list[dict[bool, float]]) -> None:
    rng = np.random.default_rng(1)
    draws = [statistics.median(rng.choice(ratios, len(ratios)).tolist()) for _ in range(4000)]
    low, high = np.percentile(draws, [2.5, 97.5])
    load = os.getloadavg()[0]
    print(f"step with both replays    {statistics.median(t[True] for t in times):.3f} s (median)")
    print(f"step without              {statistics.median(t[False] for t in times):.3f} s (median)")
    print(
        f"overhead                  {100 * (statistics.median(ratios) - 1):+.2f} % "
        f"(95% interval {100 * (low - 1):+.2f} .. {100 * (high - 1):+.2f} %, "
        f"{len(ratios)} interleaved pairs, load {load:.1f})"
    )


def learners(store: BlobStore):
    """(with both replays, without), equal weights, one rank each in this process."""
    from moerl.trainer import parallel
    from moerl.trainer.platform import prepare

    platform = prepare("auto")
    for key, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ[key] = value
    os.environ["MASTER_PORT"] = "0"
    config = Config(
        run=RunConfig(steps=1000),
        trainer=TrainerConfig(parallel=ParallelConfig(), max_tokens_per_microbatch=2048),
    )
    gang = parallel.start(config.trainer.parallel, platform, timeout_s=600)
    from moerl.trainer.model import build
    from moerl.trainer.step import Learner

    models = [build(SPEC, config.trainer, gang, with_replay=flag) for flag in (True, False)]
    models[1].gpt.load_state_dict(models[0].gpt.state_dict())
    off = replace(config, replay=replace(config.replay, routing="off", sampling_mask=False))
    return Learner(models[0], gang, config, store), Learner(models[1], gang, off, store)


def make_plan(rollouts: list[Rollout]) -> BatchPlan:
    episodes = tuple(
        Episode(r.rollout_id, (Turn(r),), Score(float(i % 2))) for i, r in enumerate(rollouts)
    )
    group = EpisodeGroup(0, Prompt(0, (1,), "", None, {}), episodes)
    return plan_batch(0, START, [group], dp_size=1, max_tokens_per_microbatch=2048)


def make_rollout(store: BlobStore, rng: np.random.Generator, index: int) -> Rollout:
    """Random tokens, random valid routes, kept sets of geometric size (mean KEPT_MEAN)."""
    tokens = rng.integers(0, SPEC.vocab_size, LENGTH).astype(np.int32)
    rows, sampled = LENGTH - 1, LENGTH - PROMPT
    scores = rng.random((SPEC.layers, rows, SPEC.experts))
    routes = np.argsort(scores, axis=-1)[..., : SPEC.experts_per_token].astype(np.uint8)
    sizes = np.minimum(rng.geometric(1 / KEPT_MEAN, sampled), 512)
    kept = [
        np.union1d(rng.choice(SPEC.vocab_size, size, replace=False), [token])
        for size, token in zip(sizes, tokens[PROMPT:], strict=True)
    ]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in kept])]).astype(np.int64)
    refs = store.seal(f"r{index}", [routes, offsets, np.concatenate(kept).astype(np.int32)])
    return Rollout(
        rollout_id=f"r{index}",
        token_ids=tokens,
        loss_mask=np.arange(LENGTH) >= PROMPT,
        logprobs=np.full(sampled, -3.0, np.float32),
        versions=(VersionSpan(0, START),),
        routing=(RoutingBlob(refs[0], 0, rows, START, SPEC.moe_layers, SPEC.experts),),
        sampling_mask=(MaskBlob(refs[1], refs[2], 0, sampled),),
        finish=Finish.LENGTH,
        sampling=SamplingParams(max_new_tokens=sampled, top_p=0.95, top_k=512),
        engine=0,
    )


def without_records(rollout: Rollout) -> Rollout:
    free = SamplingParams(max_new_tokens=rollout.sampling.max_new_tokens)
    return replace(rollout, routing=(), sampling_mask=(), sampling=free)


if __name__ == "__main__":
    main()
