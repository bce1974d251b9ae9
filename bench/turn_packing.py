"""What one row for all turns of an episode saves against a row per turn: tokens and seconds.

    python bench/turn_packing.py [--turns 2 8 32] [--rounds 5]

The same random episodes are trained in both forms (`rollout.turn_rows: join` and `separate`) by one
learner, optimizer step included.  Forms alternate, so that a noisy machine hits both alike; ratios
are taken within a round.

The arithmetic saving is the ratio of multiply-adds: (n + 1) / 2 for n turns of equal length, less
for attention, which sees longer rows when they are joined and saves (n + 1) / 3 of its own.  A row
per turn also pads rows of unequal length to the longest of a microbatch, which comes on top.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from one_rank import one_rank
from small_moe import SPEC as SMALL_MOE

from moerl.config.schema import Config, ObserveConfig, RunConfig, TrainerConfig
from moerl.core.types import (
    BatchPlan,
    Episode,
    EpisodeGroup,
    ModelShape,
    PolicyVersion,
    Prompt,
    SamplingParams,
    Score,
    Turn,
)
from moerl.data.batching import plan_batch
from moerl.episodes.rows import TurnRows
from moerl.records import BlobStore
from tests.helpers.scripted_episode import ScriptedEpisode
from tests.helpers.synthetic import RolloutSpec, random_reply

if TYPE_CHECKING:
    from moerl.trainer.learner.step import Learner

SPEC = replace(SMALL_MOE, vocab_size=4096)
SHAPE = ModelShape(
    SPEC.vocab_size, SPEC.layers, SPEC.moe_layers, SPEC.experts, SPEC.experts_per_token
)
PROMPT, REPLY, SAMPLED = 32, 8, 24  # tokens; tokens; tokens of a turn
TURNS = 64  # of a batch, so that what a step costs in any case weighs the same
MICROBATCH = 1152  # tokens: one row of 32 turns
START = PolicyVersion(0, 0)
FORMS: tuple[TurnRows, TurnRows] = ("separate", "join")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--rounds", type=int, default=5, help="interleaved pairs of steps")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="moerl-bench-"))
    try:
        store = BlobStore(folder / "blobs", "bench")
        learner = make_learner(store)
        for turns in args.turns:
            compare(learner, store, turns, args.rounds)
    finally:
        shutil.rmtree(folder)


def compare(learner: Learner, store: BlobStore, turns: int, rounds: int) -> None:
    played = [play(store, f"{turns}.{idx}", turns) for idx in range(TURNS // turns)]
    plans = {form: make_plan(played, form) for form in FORMS}
    for plan in plans.values():
        learner.step(plan)  # warm-up: allocators, first Adam state
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    for index in range(rounds):
        for form in FORMS if index % 2 else FORMS[::-1]:
            begin = time.perf_counter()
            learner.step(plans[form])
            seconds[form].append(time.perf_counter() - begin)
    tokens: dict[str, list[int]] = {
        form: [row.num_tokens - 1 for row in plan.rollouts()] for form, plan in plans.items()
    }
    sampled = sum(row.num_sampled for row in plans["join"].rollouts())
    saving = operations(tokens["separate"], sampled) / operations(tokens["join"], sampled)
    report(turns, tokens, seconds, saving)


def report(
    turns: int,
    tokens: Mapping[str, list[int]],
    seconds: Mapping[str, list[float]],
    saving: float,
) -> None:
    ratios = [a / b for a, b in zip(seconds["separate"], seconds["join"], strict=True)]
    measured = statistics.median(ratios)
    apart, joined = (sum(tokens[form]) for form in FORMS)
    before, after = (statistics.median(seconds[form]) for form in FORMS)
    print(
        f"{turns:3d} turns: {apart:6d} -> {joined:5d} tokens forwarded ({apart / joined:5.2f} x), "
        f"{before:6.2f} -> {after:5.2f} s ({measured:5.2f} x, {min(ratios):.2f} .. "
        f"{max(ratios):.2f}); arithmetic {saving:5.2f} x, {measured / saving:.2f} of it reached; "
        f"{len(ratios)} interleaved rounds, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def operations(lengths: Sequence[int], sampled: int) -> float:
    """Multiply-adds of a forward pass over rows of these lengths; a backward pass has twice them.

    sampled: tokens that the head scores, equally many in both forms.  Their sampling masks are of
    random entries here, so a block of rows projects onto nearly the whole vocabulary.
    Attention on the CPU computes the whole square of a row, not its lower half.
    """
    width = SPEC.heads * SPEC.head_dim
    projections = SPEC.hidden * (2 * width + 2 * SPEC.kv_heads * SPEC.head_dim)
    experts = SPEC.experts_per_token * 3 * SPEC.hidden * SPEC.moe_ffn + SPEC.hidden * SPEC.experts
    rows = sum(num * (projections + experts) + 2 * width * num * num for num in lengths)
    return SPEC.layers * rows + sampled * SPEC.hidden * SPEC.vocab_size


def play(store: BlobStore, name: str, turns: int) -> ScriptedEpisode:
    """An episode of random turns."""
    rng = np.random.default_rng([turns, *name.encode()])
    prompt = Prompt(0, tuple(rng.integers(0, SPEC.vocab_size, PROMPT).tolist()), "", None, {})
    sampling = SamplingParams(SAMPLED, top_p=0.95, top_k=64)
    spec = RolloutSpec(SHAPE, SAMPLED, sampling, versions=(START,), kept_mean=8)
    episode = ScriptedEpisode(name, prompt, sampling)
    for number in range(turns):
        if number:
            episode.reply(rng.integers(0, SPEC.vocab_size, REPLY).tolist())
        episode.add(random_reply(store, rng, episode.request(), spec))
    return episode


def make_plan(played: Sequence[ScriptedEpisode], form: TurnRows) -> BatchPlan:
    episodes = tuple(
        Episode(one.name, tuple(map(Turn, one.rows(form))), Score(float(idx % 2)))
        for idx, one in enumerate(played)
    )
    group = EpisodeGroup(0, played[0].prompt, episodes)
    return plan_batch(0, START, [group], dp_size=1, max_tokens_per_microbatch=MICROBATCH)


def make_learner(store: BlobStore) -> Learner:
    """One rank in this process."""
    config = Config(
        run=RunConfig(steps=1000),
        trainer=TrainerConfig(max_tokens_per_microbatch=MICROBATCH),
        observe=ObserveConfig(full_entropy=0),
    )
    job = one_rank()
    from moerl.trainer.learner.step import Learner
    from moerl.trainer.model.gpt import build

    model = build(SPEC, config.trainer, job, with_replay=True)
    return Learner(model, job, config, store)


if __name__ == "__main__":
    main()
