"""Two roles of one policy in one episode: a proposer writes digits, a solver answers with letters.

    moerl train proposer-solver run.steps=40 --run roles

The roles take turns in the order of `task.roles`.  The proposer is to put the digits of the prompt
into descending order and earns up to ten points; the solver reads that, is to write the same digits
in ascending order as letters (a for 0), and earns up to one.  Each role is compared with its own
rewards in the group; with one baseline for both (`task.roles.ROLE.baseline=group`) the advantage of
a solver is its distance to the points of the proposer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

LETTERS = str.maketrans("0123456789", "abcdefghij")


def reply(prompt: str, answer: object, turns: Sequence[str], extra: Mapping[str, object]) -> str:
    """Text between the turns; empty: the episode is over."""
    return "=" if len(turns) == 1 else ""


def reward(
    prompt: str, answer: object, response: str, extra: Mapping[str, object]
) -> dict[str, object]:
    """The rewards of the roles; the reward of the episode is the solver's."""
    proposed, solved = [*cast(Sequence[str], extra["turns"]), ""][:2]  # the context may end
    ascending = str(answer)
    found = {
        "proposer": 10 * share(ascending[::-1], proposed),
        "solver": share(ascending.translate(LETTERS), solved),
    }
    return {"reward": found["solver"], "roles": found}


def share(want: str, said: str) -> float:
    """Share of positions with the right character."""
    return sum(a == b for a, b in zip(want, said, strict=False)) / max(len(want), len(said), 1)
