"""An environment of several turns: after each answer it says something, and the policy goes on.

    moerl train digits-in-turns task.environment=examples.turn_environment:reply \
        task.reward=examples.turn_environment:reward run.steps=40 --run own-turns

The task shows digits and wants them sorted.  The environment names the first position that is
wrong and asks again, up to `task.max_turns` times; an empty reply ends the episode.  The reward is
less for every turn that was needed.

A later turn goes to the engine that holds its prefix, and the trainer replays the routes of every
turn.  The loss is on what the policy said; replies are context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast


def reply(prompt: str, answer: object, turns: Sequence[str], extra: dict[str, object]) -> str:
    """What stands behind the last turn; empty: the episode is over.

    turns: what the policy said so far, oldest first.  The text is put into the context as it is,
    so write the markup that the model's chat template expects around a user's message.
    """
    place = first_wrong(turns[-1], str(answer))
    return "" if place is None else f"\n{place + 1} is wrong\n{prompt}"


def reward(prompt: str, answer: object, response: str, extra: dict[str, object]) -> float:
    """1 for a right first answer, a tenth less for each further turn; shares for wrong ones."""
    turns = cast(list[str], extra["turns"])
    place = first_wrong(response, str(answer))
    if place is None:
        return 1.0 - 0.1 * (len(turns) - 1)
    return 0.5 * place / max(len(str(answer)), 1)


def first_wrong(responses: str, answer: str) -> int | None:
    """Index of the first character that is not as it should be; None: all are."""
    if responses == answer:
        return None
    same = (a == b for a, b in zip(responses, answer, strict=False))
    return next(
        (place for place, right in enumerate(same) if not right), min(map(len, (responses, answer)))
    )
