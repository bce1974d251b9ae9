"""Worker of test_shared_prompts: prints how far shared rows train from rows of their own.

torchrun ... shared_prompts_ranks.py --model DIR --work DIR --parallel JSON [--quick]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from moerl.trainer.model import platform

PLACE = platform.prepare("cpu")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.nn.attention import flex_attention  # noqa: E402

from moerl.config.schema import (  # noqa: E402
    AlgorithmConfig,
    Config,
    ParallelConfig,
    ReplayConfig,
    TrainerConfig,
)
from moerl.core.types import (  # noqa: E402
    Array,
    BatchPlan,
    Episode,
    EpisodeGroup,
    Prompt,
    Rollout,
    SamplingParams,
    Score,
    Turn,
)
from moerl.data import packing, shared_prefix  # noqa: E402
from moerl.data.batching import plan_batch  # noqa: E402
from moerl.data.packing import Microbatch  # noqa: E402
from moerl.episodes.finished_episode import rows_of  # noqa: E402
from moerl.records.blob_store import BlobStore  # noqa: E402
from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf  # noqa: E402
from moerl.trainer.learner.step import Learner  # noqa: E402
from moerl.trainer.model import parallel  # noqa: E402
from moerl.trainer.model.gpt import build  # noqa: E402
from moerl.trainer.model.shared_attention import SharedAttention, attend_blocks  # noqa: E402
from tests.helpers.patience import patience  # noqa: E402
from tests.helpers.random_turns import V0, Call, random_episode  # noqa: E402
from tests.helpers.synthetic import (  # noqa: E402
    RolloutSpec,
    random_rollout,
    share_prompt_rows,
)
from tests.helpers.trainer_support import SHAPE, VOCAB  # noqa: E402

SAMPLING = SamplingParams(16, temperature=0.9, top_p=0.95, top_k=8)
SPEC = RolloutSpec(SHAPE, 1, SAMPLING)
ANSWERS = ((7, 1, 4, 9), (3, 6, 2, 5))  # sampled tokens of the siblings of each group
LOSSES = {
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_z_loss_coeff": 0.3,
    "moe_aux_loss_coeff": 0.2,
}
STEPS, MOST_TOKENS = 3, 80


def groups_of(store: BlobStore) -> list[EpisodeGroup]:
    """Two groups of siblings, one of which has routes of its own, and a group of branches."""
    rng, groups = np.random.default_rng(5), []
    for number, lengths in enumerate(ANSWERS):
        prompt = rng.integers(0, VOCAB, 11).astype(np.int32)
        rows = [
            random_rollout(store, rng, f"{number}.{idx}", prompt, replace(SPEC, num_sampled=num))
            for idx, num in enumerate(lengths)
        ]
        most = len(rows) - number  # of the second group one has routes of its own
        split = len(prompt) - number  # the last token of the second prompt is not shared
        alone = [one for row in rows[most:] for one in share_prompt_rows(store, [row], split)]
        made = [*share_prompt_rows(store, rows[:most], split), *alone]
        groups.append(_group(number, prompt, [[row] for row in made]))
    return [*groups, _branches(store)]


def _branches(store: BlobStore) -> EpisodeGroup:
    """A first turn with two second ones, trained in one branch, and a sibling."""
    prompt = Prompt(2, (1, 2, 3, 4), "", None, {})
    first, left = _turns(store, "2.0", prompt, (4, 5))
    right = _turns(store, "2.0b", prompt, (4, 3))[1]
    begin = first.end
    ids = np.concatenate([first.prompt_ids, first.output_ids, right.prompt_ids[begin:]])
    branch = [replace(first, trained=False), replace(right, prompt_ids=ids)]
    rows = [*rows_of("2.0", [first, left], "join"), *rows_of("2.0b", branch, "join")]
    sibling = rows_of("2.1", _turns(store, "2.1", prompt, (6,)), "join")
    return _group(2, np.array(prompt.token_ids, np.int32), [rows, sibling])


def _turns(store: BlobStore, name: str, prompt: Prompt, lengths: tuple[int, ...]) -> list[Any]:
    episode = random_episode(store, name, prompt, [[Call(num)] for num in lengths], SPEC)
    return [turn.sampled for turn in episode.turns]


def _group(number: int, prompt: Array, episodes: list[list[Rollout]]) -> EpisodeGroup:
    made = tuple(
        Episode(f"{number}.{idx}", tuple(map(Turn, rows)), Score(float(idx % 2)))
        for idx, rows in enumerate(episodes)
    )
    return EpisodeGroup(number, Prompt(number, tuple(prompt.tolist()), "", None, {}), made)


class Bench:
    def __init__(self, model: str, work: Path, sizes: ParallelConfig) -> None:
        self.folder, self.sizes = HfFolder(model), sizes
        self.ranks = parallel.start(sizes, PLACE, timeout_s=patience(60))
        self.store = BlobStore(work / f"blobs{self.ranks.rank}", "n0")
        self.groups = groups_of(self.store)

    def learner(self, *, share: bool, routing: str = "R3", recompute: bool = False) -> Learner:
        megatron: dict[str, Any] = dict(LOSSES) if routing != "off" else {}
        if recompute:
            megatron |= {"recompute_granularity": "full", "recompute_method": "uniform"}
            megatron |= {"recompute_num_layers": 1}
        trainer = TrainerConfig(
            parallel=self.sizes,
            packing=True,
            share_prompts=share,
            max_tokens_per_microbatch=MOST_TOKENS,
            megatron=megatron,
        )
        config = Config(
            trainer=trainer,
            replay=ReplayConfig(routing=routing),  # type: ignore[arg-type]
            algorithm=AlgorithmConfig(),
        )
        model = build(self.folder.spec, trainer, self.ranks, with_replay=routing != "off")
        load_hf(model.tensors, model.tiles, self.folder)
        return Learner(model, self.ranks, config, self.store)

    def plan(self, *, share: bool) -> BatchPlan:
        return plan_batch(
            0, V0, self.groups, dp_size=self.ranks.dp_size,
            max_tokens_per_microbatch=MOST_TOKENS, packed=True, share=share,
        )  # fmt: skip


Trained = tuple[dict[str, float], torch.Tensor]


def train(bench: Bench, *, share: bool, **settings: Any) -> Trained:
    """Sums of a plan, and this rank's gradient."""
    learner = bench.learner(share=share, **settings)
    sums = learner.gradients(bench.plan(share=share))
    grads = [
        param.main_grad.reshape(-1).clone()
        for chunk in learner.model.chunks
        for param in chunk.gpt.parameters()
    ]
    values = dict(sums.counts) | {"loss": float(sums.loss.abs().sum())}
    load = {f"load{idx}": float(n) for idx, n in enumerate(sums.load.flatten())}

    return values | load, torch.cat(grads)


def gap(found: Trained, want: Trained) -> dict[str, float]:
    """Relative distances; of router losses and loads the largest."""
    names = [name for name in want[0] if name.startswith(("load", "router"))]
    far = [abs(found[0][name] - want[0][name]) / max(abs(want[0][name]), 1e-9) for name in names]
    return {
        "gradient": float((found[1] - want[1]).norm() / want[1].norm()),
        "loss": abs(found[0]["loss"] - want[0]["loss"]) / abs(want[0]["loss"]),
        "routers": max(far, default=0.0),
        "forwarded": found[0]["forwarded"] / want[0]["forwarded"],
    }


@contextmanager
def flex() -> Iterator[None]:
    """The form of a GPU, not compiled."""

    def forward(self: Any, q: Any, k: Any, v: Any, seen_until: Any, *_: Any, **__: Any) -> Any:
        return attend_blocks(q, k, v, seen_until, self.scale).flatten(2)

    with (
        patch.object(SharedAttention, "forward", forward),
        patch.object(flex_attention, "_validate_device", lambda *_: None),
    ):
        yield


@contextmanager
def wrong(kind: str) -> Iterator[None]:
    """A mistake."""
    place, content = packing.place_shared, shared_prefix._content

    def sees_siblings(*args: Any) -> Any:
        own, every, seen_until = place(*args)
        return own, every, np.full_like(seen_until, len(seen_until))

    def any_routes(part: Any) -> Any:
        return content(replace(part, ids=replace(part.ids, digest="")))

    patches = {
        "sees_siblings": lambda: patch.object(packing, "place_shared", sees_siblings),
        "not_weighed": lambda: patch.object(Microbatch, "uses", Microbatch.pieces),
        "any_routes": lambda: patch.object(shared_prefix, "_content", any_routes),
        "own_positions": lambda: patch.object(
            packing, "_slot_tensors", _slots(packing._slot_tensors)
        ),
    }
    with patches[kind]():
        yield


def _slots(slot_tensors: Any) -> Any:
    def changed(placed: Any) -> Any:
        positions = torch.arange(placed.shape[1]).expand(placed.shape).clone()
        return slot_tensors(placed) | {"positions": positions}

    return changed


def steps(bench: Bench) -> dict[str, Any]:
    """A few optimizer steps in both forms."""
    rows = {}
    for share in (False, True):
        learner = bench.learner(share=share)
        rows[share] = [learner.step(bench.plan(share=share)) for _ in range(STEPS)]
    names = ("loss/total", "loss/grad_norm", "loss/router_z", "loss/router_balance")
    names += ("routing/load_max_over_mean", "mismatch/k3", "loss/entropy")
    far = {
        name: max(abs(b[name] / a[name] - 1) for a, b in zip(*rows.values(), strict=True))
        for name in names
    }
    one = rows[True][0]
    kept = ("perf/shared_frac", "routing/prompts_apart", "routing/replay_cover_frac")
    return {"far": far} | {name: one[name] for name in kept} | {
        "moved": abs(rows[True][0]["loss/grad_norm"] / rows[True][-1]["loss/grad_norm"] - 1),
        "alone": [name for name in kept[:2] if name in rows[False][0]],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--parallel", type=json.loads, required=True)
    parser.add_argument("--quick", action="store_true", help="gradients of the default form alone")
    options = parser.parse_args()
    bench = Bench(options.model, options.work, ParallelConfig(**options.parallel))
    apart = train(bench, share=False)
    found: dict[str, Any] = {"shared": gap(train(bench, share=True), apart)}
    if not options.quick:
        for routing in ("R2", "off"):
            plain = train(bench, share=False, routing=routing)
            found[routing] = gap(train(bench, share=True, routing=routing), plain)
        found["recompute"] = gap(train(bench, share=True, recompute=True), apart)
        with flex():
            found["flex"] = gap(train(bench, share=True), apart)
        for kind in ("sees_siblings", "not_weighed", "any_routes", "own_positions"):
            with wrong(kind):
                found[kind] = gap(train(bench, share=True), apart)
        found["steps"] = steps(bench)
    if bench.ranks.rank == 0:
        print("FOUND " + json.dumps(found))
    parallel.stop()


if __name__ == "__main__":
    main()
