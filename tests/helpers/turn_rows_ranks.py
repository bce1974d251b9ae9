"""Worker of test_turn_rows_training: one rank; prints what each form of the same turns trains.

torchrun ... turn_rows_ranks.py --model DIR --work DIR
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from moerl.trainer.model import platform

PLACE = platform.prepare("cpu")

import numpy as np  # noqa: E402
import torch  # noqa: E402

from moerl.algorithms.loss import loss_metrics  # noqa: E402
from moerl.config.schema import Config, ParallelConfig, TrainerConfig  # noqa: E402
from moerl.core.types import (  # noqa: E402
    BatchPlan,
    Episode,
    EpisodeGroup,
    Prompt,
    Rollout,
    SamplingParams,
    Score,
    Turn,
)
from moerl.data.batching import plan_batch  # noqa: E402
from moerl.episodes.finished_episode import rows_of  # noqa: E402
from moerl.episodes.turn import SampledTurn  # noqa: E402
from moerl.records.blob_store import BlobStore  # noqa: E402
from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf  # noqa: E402
from moerl.trainer.learner.step import Learner  # noqa: E402
from moerl.trainer.model import parallel  # noqa: E402
from moerl.trainer.model.gpt import build  # noqa: E402
from tests.helpers.patience import patience  # noqa: E402
from tests.helpers.random_turns import V0, Call, random_episode  # noqa: E402
from tests.helpers.synthetic import RolloutSpec  # noqa: E402
from tests.helpers.trainer_support import SHAPE  # noqa: E402

SPEC = RolloutSpec(SHAPE, 1, SamplingParams(16, temperature=0.9, top_p=0.95, top_k=8))
TURNS = ((3, 5, 2), (4, 4), (6, 2, 3, 4))  # sampled tokens of each turn of each episode
Forms = dict[str, list[list[Rollout]]]  # rows of each episode


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--work", type=Path, required=True)
    options = parser.parse_args()
    ranks = parallel.start(ParallelConfig(), PLACE, timeout_s=patience(60))
    store = BlobStore(options.work / "blobs", "n0")
    played = [_turns(store, f"0.{idx}", lengths) for idx, lengths in enumerate(TURNS)]
    forms = _chains(store, played) | _branches(store, played[0])
    found: dict[str, dict[str, float]] = {}
    for packed in (False, True):
        trainer = TrainerConfig(packing=packed)
        folder = HfFolder(options.model)
        model = build(folder.spec, trainer, ranks, with_replay=True)
        load_hf(model.tensors, model.tiles, folder)
        learner = Learner(model, ranks, Config(trainer=trainer), store)
        trained = {name: _train(learner, _plan(rows)) for name, rows in forms.items()}
        for name in forms:
            kind = name.partition("/")[0]
            found[f"{name}{'/packed' if packed else ''}"] = _gap(
                trained[name], trained[f"{kind}/separate"]
            )
    print(json.dumps(found))
    parallel.stop()


def _turns(store: BlobStore, name: str, lengths: Sequence[int]) -> list[SampledTurn]:
    prompt = Prompt(0, (1, 2, 3, 4), "", None, {})
    episode = random_episode(store, name, prompt, [[Call(num)] for num in lengths], SPEC)
    return [turn.sampled for turn in episode.turns]


def _chains(store: BlobStore, played: Sequence[list[SampledTurn]]) -> Forms:
    """Episodes of one chain; `shifted` and `twice` are wrong on purpose."""
    joined = [rows_of(f"0.{idx}", turns, "join") for idx, turns in enumerate(played)]
    apart = [rows_of(f"0.{idx}", turns, "separate") for idx, turns in enumerate(played)]
    return {
        "chain/separate": apart,
        "chain/join": joined,
        "chain/shifted": [[_shifted(store, row)] for (row,) in joined],
        "chain/twice": [[*rows, more[0]] for rows, more in zip(joined, apart, strict=True)],
    }


def _branches(store: BlobStore, turns: list[SampledTurn]) -> Forms:
    """A first turn with two second ones, and a sibling that gives them an advantage."""
    first, left = turns[:2]
    sibling = rows_of("8.0", _turns(store, "8.0", (4,)), "join")
    right = _turns(store, "9.0", (3, 7))[1]
    begin = first.end
    prompt = np.concatenate([first.prompt_ids, first.output_ids, right.prompt_ids[begin:]])
    right = replace(right, prompt_ids=prompt)
    context = replace(first, trained=False)
    own = rows_of("9.0", [context, right], "join")
    return {
        "branch/separate": [[*rows_of("0.0", [first, left], "separate"), *own], sibling],
        "branch/join": [[*rows_of("0.0", [first, left], "join"), *own], sibling],
        "branch/twice": [
            [*rows_of("0.0", [first, left], "join"), *rows_of("9.0", [first, right], "join")],
            sibling,
        ],
    }


def _shifted(store: BlobStore, row: Rollout) -> Rollout:
    """The record with the routing rows of the token before."""
    ids = np.concatenate([store.load(part.ids) for part in row.routing], 1)
    (ref,) = store.seal(f"{row.rollout_id}.shifted", [np.roll(ids, 1, axis=1)])
    whole = replace(row.routing[0], ids=ref, row_end=row.num_tokens - 1)
    return replace(row, rollout_id=f"{row.rollout_id}.shifted", routing=(whole,))


def _plan(rows: list[list[Rollout]]) -> BatchPlan:
    episodes = tuple(
        Episode(f"0.{idx}", tuple(map(Turn, some)), Score(float(idx % 2)))
        for idx, some in enumerate(rows)
    )
    group = EpisodeGroup(0, Prompt(0, (1, 2, 3, 4), "", None, {}), episodes)
    return plan_batch(0, V0, (group,), dp_size=1, max_tokens_per_microbatch=48)


def _train(learner: Learner, plan: BatchPlan) -> tuple[float, torch.Tensor]:
    sums = learner.gradients(plan)
    grads = [param.main_grad.reshape(-1).clone() for param in learner.model.gpt.parameters()]
    loss = loss_metrics(learner.config.algorithm, sums.loss)["loss/total"]
    return loss, torch.cat(grads)


def _gap(found: tuple[float, torch.Tensor], want: tuple[float, torch.Tensor]) -> dict[str, float]:
    """Relative distances of loss and gradient."""
    apart = float((found[1] - want[1]).norm() / want[1].norm())
    return {"loss": abs(found[0] - want[0]) / abs(want[0]), "gradient": apart}


if __name__ == "__main__":
    main()
