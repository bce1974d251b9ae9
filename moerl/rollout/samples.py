"""What the controller says of a finished step, with text and reward of a rollout for the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from moerl.config import Config
from moerl.types import EpisodeGroup, PolicyVersion


@dataclass(frozen=True, slots=True, eq=False)
class StepReport:
    """One finished optimizer step, for metrics.jsonl, the panel and the report."""

    step: int
    version: PolicyVersion
    metrics: dict[str, float]
    samples: list[dict[str, object]]


def samples_of(
    config: Config,
    groups: Sequence[EpisodeGroup],
    step: int,
    decode: Callable[[Sequence[int]], str],
) -> list[dict[str, object]]:
    """One rollout of a step, as long as the report has room for it."""
    every = max(1, config.run.steps // max(1, config.observe.sample_rollouts))
    if not config.observe.sample_rollouts or step % every:
        return []
    group = groups[0]
    episode = group.episodes[0]  # not the best one: the report shows what is typical
    rollout = episode.turns[-1].rollout
    return [
        {
            "step": step,
            "version": str(rollout.versions[-1].version),
            "lag": step - rollout.oldest.step,
            "prompt": group.prompt.text,
            "response": decode(rollout.token_ids[rollout.prompt_len :].tolist()),
            "reward": episode.score.reward if episode.score else None,
            "group_mean": float(
                np.mean([e.score.reward for e in group.episodes if e.score is not None])
            ),
        }
    ]
