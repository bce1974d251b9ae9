"""A reward of your own: a function of the prompt and the answer, named in a setting.

    moerl train quickstart task.reward=examples.own_reward:reward run.steps=40 --run own-reward

The quickstart's task shows four digits and wants them sorted.  This reward gives no point for the
right digits in the wrong order: a half for a rising answer, a half for the right set of digits.

A reward runs in a worker process (`task.scorer_workers`) with a deadline (`task.score_timeout_s`).
When one raises, hangs or returns something else than a number, the group is replaced and counted;
`task.on_score_error=stop` stops the run and names the prompt.  A reward sees few environment
variables, and those that `task.pass_environment` names (docs/sandbox.md).  Rewards of steps or
turns, counted errors and further metrics are returned as a dict; a parameter named `episode` gets
all turns: docs/scoring.md.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise


def reward(prompt: str, answer: object, response: str, extra: dict[str, object]) -> float:
    """Called once per response.

    prompt: its text; answer: what the task calls right; response: the last thing the policy said;
    extra: other fields of a JSONL line, and `turns` where an episode has several.
    """
    return 0.5 * rising_share(response) + 0.5 * common_share(response, str(answer))


def rising_share(response: str) -> float:
    """Share of neighbours in order; 0 for an answer without two characters.

    A policy that repeats one digit gets all of it: such a half is a hint, not a goal.
    """
    pairs = list(pairwise(response))
    return sum(left <= right for left, right in pairs) / len(pairs) if pairs else 0.0


def common_share(response: str, answer: str) -> float:
    """Share of characters that both have, each as often as in the one that has it less often."""
    common = Counter(response) & Counter(answer)
    return common.total() / max(len(response), len(answer), 1)
