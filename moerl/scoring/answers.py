"""Questions as functions take them, and the check of everything that a scorer answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from moerl.core.episode_view import ScoreRequest
from moerl.core.errors import ScoreError
from moerl.core.types import Prompt, Score, reward_problem
from moerl.data.reward_values import metrics_problem

_REASON = 2000  # most characters of a reason


def prompt_of(asked: ScoreRequest) -> Prompt:
    """With the text of the step, if the request is about a step."""
    if asked.step_begin < 0:
        return asked.prompt
    step = asked.episode.responses[-1][asked.step_begin :]
    return replace(asked.prompt, extra=asked.prompt.extra | {"step": step})


def usable_score(name: str, score: Score | None, asked: ScoreRequest) -> Score | ScoreError:
    """The score, if it can be used.  name: of the scorer, for the error."""
    problem = "gave no score" if score is None else refusal(score, asked.episode.responses)
    if score is None or problem:
        return ScoreError(f"{name} {problem} for {asked.prompt.name}")
    return score


def refusal(score: Score, responses: Sequence[str]) -> str:
    """Why a score cannot be used; "" if it can."""
    length = len(responses[-1])
    if score.turns and len(score.turns) != len(responses):
        return f"has rewards for {len(score.turns)} of {len(responses)} turns"
    steps = (value for _, value in score.text_steps)
    for number in (score.reward, *steps, *score.turns, *score.roles.values()):
        if problem := reward_problem(number):
            return f"gave {number}, which {problem}"
    if not 0.0 <= score.errors < math.inf:
        return f"counted {score.errors} errors"
    if problem := metrics_problem(score.metrics):
        return problem
    if len(score.reason) > _REASON:
        return f"gave a reason of {len(score.reason)} characters, more than {_REASON}"
    ends = [end for end, _ in score.text_steps]
    if ends != sorted(ends) or any(not 0 <= end <= length for end in ends):
        return f"has steps that end at characters {ends[:16]} of {length}"
    if len(ends) > length + 1:
        return f"has {len(ends)} steps in {length} characters"
    return ""
