"""What is saved when tokens that rows have in common are forwarded once: tokens and seconds.

    python bench/turn_packing.py [--turns 2 8 32] [--rounds 5]
    python bench/turn_packing.py --siblings 16 [--prompt 512] [--answer 64]

Turns: the same random episodes are trained as one row and as a row per turn (`rollout.turn_rows:
join` and `separate`).  Siblings: the same packed rows of one prompt with `trainer.share_prompts`
and without.  Optimizer step included.  Forms alternate, so that a noisy machine hits both alike;
ratios are taken within a round.

The arithmetic saving is the ratio of multiply-adds.  Of turns: (n + 1) / 2 for n turns of equal
length, less for attention, which sees longer rows when they are joined and saves (n + 1) / 3 of its
own.  A row per turn also pads rows of unequal length to the longest of a microbatch, which comes on
top.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
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
from moerl.episodes.finished_episode import TurnRows
from moerl.records import BlobStore
from tests.helpers.scripted_episode import ScriptedEpisode
from tests.helpers.synthetic import (
    RolloutSpec,
    random_reply,
    random_rollout,
    share_prompt_rows,
)

if TYPE_CHECKING:
    from moerl.trainer.learner.step import Learner
    from moerl.trainer.model.parallel import Parallel

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
    parser.add_argument("--siblings", type=int, help="rows of one prompt, in place of turns")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of their prompt")
    parser.add_argument("--answer", type=int, default=64, help="sampled tokens of each sibling")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved pairs of steps")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="moerl-bench-"))
    try:
        store = BlobStore(folder / "blobs", "bench")
        if args.siblings:
            compare_siblings(store, args.siblings, args.prompt, args.answer, args.rounds)
        else:
            learner = make_learner(
                store, one_rank(), TrainerConfig(max_tokens_per_microbatch=MICROBATCH)
            )
            for turns in args.turns:
                compare(learner, store, turns, args.rounds)
    finally:
        shutil.rmtree(folder)


def compare(learner: Learner, store: BlobStore, turns: int, rounds: int) -> None:
    played = [play(store, f"{turns}.{idx}", turns) for idx in range(TURNS // turns)]
    plans = {form: make_plan(played, form) for form in FORMS}
    seconds = step_seconds({form: partial(learner.step, plans[form]) for form in FORMS}, rounds)
    rows = {form: [(row.num_tokens - 1,) * 2 for row in plans[form].rollouts()] for form in FORMS}
    sampled = sum(row.num_sampled for row in plans["join"].rollouts())
    report(f"{turns:3d} turns", list(rows.values()), list(seconds.values()), sampled)


def compare_siblings(
    store: BlobStore, siblings: int, prompt_len: int, answer: int, rounds: int
) -> None:
    """Both forms pack rows up to the same bound."""
    rng, job = np.random.default_rng(siblings), one_rank()
    ids = rng.integers(0, SPEC.vocab_size, prompt_len).astype(np.int32)
    sampling = SamplingParams(answer, top_p=0.95, top_k=64)
    spec = RolloutSpec(SHAPE, answer, sampling, versions=(START,), kept_mean=8)
    made = [random_rollout(store, rng, f"s{idx}", ids, spec) for idx in range(siblings)]
    episodes = tuple(
        Episode(row.rollout_id, (Turn(row),), Score(float(idx % 2)))
        for idx, row in enumerate(share_prompt_rows(store, made))
    )
    group = EpisodeGroup(0, Prompt(0, tuple(ids.tolist()), "", None, {}), episodes)
    steps = dict[str, Callable[[], object]]()
    for form, share in (("apart", False), ("shared", True)):
        most = max(2 * (prompt_len + answer), MICROBATCH)
        trainer = TrainerConfig(packing=True, share_prompts=share, max_tokens_per_microbatch=most)
        plan = plan_batch(
            0, START, [group], dp_size=1, max_tokens_per_microbatch=most, packed=True, share=share
        )
        steps[form] = partial(make_learner(store, job, trainer).step, plan)
    seconds = step_seconds(steps, rounds)
    length = prompt_len + answer - 1  # the last token of a prompt is not shared
    rows = [[(length, length)] * siblings, [(length, length)] + [(answer, length)] * (siblings - 1)]
    label = f"{siblings} siblings of a prompt of {prompt_len}, answers of {answer}"
    report(label, rows, list(seconds.values()), siblings * answer)


def step_seconds(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each form in interleaved rounds."""
    for step in steps.values():
        step()  # warm-up: allocators, first Adam state
    seconds: dict[str, list[float]] = {form: [] for form in steps}
    for index in range(rounds):
        for form in list(steps)[:: 1 if index % 2 else -1]:
            begin = time.perf_counter()
            steps[form]()
            seconds[form].append(time.perf_counter() - begin)
    return seconds


def report(
    label: str,
    rows: Sequence[Sequence[tuple[int, int]]],
    seconds: Sequence[list[float]],
    sampled: int,
) -> None:
    """Print one line.  rows, seconds: of the form that repeats tokens, then of the other."""
    ratios = [a / b for a, b in zip(*seconds, strict=True)]
    measured = statistics.median(ratios)
    apart, joined = (sum(num for num, _ in some) for some in rows)
    before, after = map(statistics.median, seconds)
    saving = operations(rows[0], sampled) / operations(rows[1], sampled)
    print(
        f"{label}: {apart:6d} -> {joined:5d} tokens forwarded ({apart / joined:5.2f} x), "
        f"{before:6.2f} -> {after:5.2f} s ({measured:5.2f} x, {min(ratios):.2f} .. "
        f"{max(ratios):.2f}); arithmetic {saving:5.2f} x, {measured / saving:.2f} of it reached; "
        f"{len(ratios)} interleaved rounds, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def operations(rows: Sequence[tuple[int, int]], sampled: int) -> float:
    """Multiply-adds of a forward pass over rows of so many tokens, which attend to so many keys; a
    backward pass has twice them.

    sampled: tokens that the head scores, equally many in both forms.  Their sampling masks are of
    random entries here, so a block of rows projects onto nearly the whole vocabulary.
    Attention on the CPU computes the whole square of a row, not its lower half.
    """
    width = SPEC.heads * SPEC.head_dim
    projections = SPEC.hidden * (2 * width + 2 * SPEC.kv_heads * SPEC.head_dim)
    experts = SPEC.experts_per_token * 3 * SPEC.hidden * SPEC.moe_ffn + SPEC.hidden * SPEC.experts
    layer = sum(num * (projections + experts) + 2 * width * num * keys for num, keys in rows)
    return SPEC.layers * layer + sampled * SPEC.hidden * SPEC.vocab_size


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


def make_learner(store: BlobStore, job: Parallel, trainer: TrainerConfig) -> Learner:
    """One rank in this process."""
    config = Config(
        run=RunConfig(steps=1000), trainer=trainer, observe=ObserveConfig(full_entropy=0)
    )
    from moerl.trainer.learner.step import Learner
    from moerl.trainer.model.gpt import build

    model = build(SPEC, config.trainer, job, with_replay=True)
    return Learner(model, job, config, store)


if __name__ == "__main__":
    main()
