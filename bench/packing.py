"""CPU of a trainer's rank for one microbatch: its records read, checked, packed, its routes loaded.

    python bench/packing.py [--groups 16] [--siblings 8] [--prompt 5] [--tokens 4] [--rounds 20]

Records lie as an engine seals them: a blob per rollout, the rows of a prompt in the blob of its
first sibling.  The defaults are a rank's share of the quickstart's step.  Milliseconds of CPU of
the calling thread, so that other work on the machine does not count; the median of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from moerl.core.types import (
    BatchPlan,
    Episode,
    EpisodeGroup,
    Finish,
    LogprobBlob,
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
from moerl.data.batching import plan_batch
from moerl.data.packing import LossInputs, Microbatch, ReadOptions, pack_microbatch
from moerl.records import BlobStore
from moerl.trainer.model.replay import RouteReplay

LAYERS, EXPERTS, TOP_K, VOCAB, KEPT = (0, 1, 2, 3), 16, 2, 64, 8
START = PolicyVersion(0, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=5, help="tokens")
    parser.add_argument("--tokens", type=int, default=4, help="of an answer")
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moerl-bench-") as folder:
        store = BlobStore(Path(folder) / "blobs", "bench")
        plan = make_plan(store, asked)
        parts: dict[str, Callable[[], object]] = {
            "pack": lambda: pack(plan, store),
            "pack, read and check routes, load": lambda: pack_and_load(plan, store),
        }
        for name, work in parts.items():
            spent = [cpu_ms(work) for _ in range(asked.rounds + 2)][2:]
            print(f"{name}: {statistics.median(spent):.2f} ms ({min(spent):.2f} least)", flush=True)


def cpu_ms(work: Callable[[], object]) -> float:
    begin = time.thread_time()
    work()
    return 1e3 * (time.thread_time() - begin)


def pack(plan: BatchPlan, store: BlobStore, layers: tuple[int, ...] = ()) -> Microbatch:
    values = [0.5] * len(plan.rows)
    return pack_microbatch(
        plan, 0, 0, store, loss=LossInputs(values, values), reads=ReadOptions(layers=layers)
    )


def pack_and_load(plan: BatchPlan, store: BlobStore) -> None:
    replay = RouteReplay(LAYERS, num_experts=EXPERTS, top_k=TOP_K)
    batch = pack(plan, store, LAYERS)
    routes = batch.routes(LAYERS)
    replay.check(0, routes)
    replay.load(0, routes, checked=True)


def make_plan(store: BlobStore, asked: argparse.Namespace) -> BatchPlan:
    rng = np.random.default_rng(0)
    groups = [make_group(store, rng, number, asked) for number in range(asked.groups)]
    plan = plan_batch(0, START, groups, dp_size=1, max_tokens_per_microbatch=1 << 20)
    assert plan.num_microbatches == 1, "rows of one length share a microbatch"
    return plan


def make_group(
    store: BlobStore, rng: np.random.Generator, number: int, asked: argparse.Namespace
) -> EpisodeGroup:
    ids = rng.integers(0, VOCAB, asked.prompt).astype(np.int32)
    known: RoutingBlob | None = None
    rows = []
    for sibling in range(asked.siblings):
        rows.append(make_rollout(store, rng, f"{number}.{sibling}", ids, known, asked.tokens))
        known = rows[0].routing[0]
    episodes = (Episode(r.rollout_id, (Turn(r),), Score(float(i % 2))) for i, r in enumerate(rows))
    prompt = Prompt(number, tuple(ids.tolist()), "", None, {})
    return EpisodeGroup(number, prompt, tuple(episodes))


def make_rollout(
    store: BlobStore,
    rng: np.random.Generator,
    name: str,
    prompt: np.ndarray,
    known: RoutingBlob | None,
    num: int,
) -> Rollout:
    """known: the rows of the prompt in the blob of an earlier sibling."""
    split, output = len(prompt) - 1, rng.integers(0, VOCAB, num).astype(np.int32)
    kept = [np.union1d(rng.choice(VOCAB, KEPT, replace=False), [token]) for token in output]
    offsets = np.cumsum([0] + [len(row) for row in kept]).astype(np.int64)
    arrays = [] if known else [routes(rng, split)]
    arrays += [routes(rng, num), offsets, np.concatenate(kept).astype(np.int32)]
    arrays += [(-rng.random(num)).astype(np.float32)]
    refs = list(store.seal(name, arrays))
    prompt_rows = known or RoutingBlob(refs.pop(0), 0, split, START, LAYERS, EXPERTS)
    own = RoutingBlob(refs[0], split, split + num, START, LAYERS, EXPERTS)
    return Rollout(
        rollout_id=name,
        token_ids=np.concatenate([prompt, output]),
        loss_mask=np.arange(len(prompt) + num) >= len(prompt),
        logprobs=np.zeros(0, np.float32),
        sealed_logprobs=(LogprobBlob(refs[3], 0, num),),
        versions=(VersionSpan(0, START),),
        routing=(prompt_rows, own),
        sampling_mask=(MaskBlob(refs[1], refs[2], 0, num),),
        finish=Finish.LENGTH,
        sampling=SamplingParams(num, top_p=0.95, top_k=VOCAB),
        engine=0,
    )


def routes(rng: np.random.Generator, rows: int) -> np.ndarray:
    """[layers, rows, top-k] u8, distinct experts."""
    return rng.random((len(LAYERS), rows, EXPERTS)).argsort(-1)[..., :TOP_K].astype(np.uint8)


if __name__ == "__main__":
    main()
