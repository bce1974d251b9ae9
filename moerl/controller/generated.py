"""Generated episodes as the scoring stage takes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from moerl.controller.turn_rows import TurnRows
from moerl.core.errors import RecordError
from moerl.core.types import Array, Finish, GraphTurn, PolicyVersion, Prompt, Score, Turn


class Sealed(Protocol):
    """A turn, or an episode, with sealed records."""

    def blob_uris(self) -> set[str]:
        """Every blob sealed so far, for deletion when it is dropped."""
        ...


class Generated(Sealed, Protocol):
    """A generated episode as the scoring stage takes it."""

    @property
    def episode_id(self) -> str: ...

    @property
    def prompt(self) -> Prompt: ...

    @property
    def turns(self) -> Sequence[GeneratedTurn]: ...

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled in all turns."""
        ...

    @property
    def lacks_context(self) -> bool:
        """The context had no room for a further turn."""
        ...

    @property
    def own_score(self) -> Score | None:
        """By the agent itself; None = it is scored by task.reward."""
        ...

    @property
    def is_chain(self) -> bool:
        """True if each turn continues the one before."""
        ...

    @property
    def graph(self) -> tuple[GraphTurn, ...]:
        """Every turn that was asked for, trained or not."""
        ...

    def nodes(self, turn_rows: TurnRows) -> tuple[Turn, ...]:
        """The rows that train it.  Raises RecordError."""
        ...

    def texts(self, decode: Callable[[Sequence[int]], str]) -> list[str]:
        """Text of the policy in each turn."""
        ...


class GeneratedTurn(Sealed, Protocol):
    @property
    def output_ids(self) -> Array:
        """Tokens that the policy sampled."""
        ...

    @property
    def finish(self) -> Finish:
        """How it ended."""
        ...


def checked_graph(generated: Generated, nodes: Sequence[Turn]) -> tuple[GraphTurn, ...]:
    """The graph of an episode, of which the rows train the trained turns and nothing else.

    What reads rows (age, admission, advantages, sums of the loss) so counts no other turn.
    Raises RecordError `graph`.
    """
    trained = [turn for turn in generated.graph if turn.trained]
    rows = [node.rollout for node in nodes]
    said = sum(turn.num_sampled for turn in trained), {v for one in trained for v in one.versions}
    found = sum(row.num_sampled for row in rows), {s.version for row in rows for s in row.versions}
    if said != found:
        detail = f"{said[0]} tokens of {_shown(said[1])}, its rows {found[0]} of {_shown(found[1])}"
        raise RecordError("graph", f"{generated.episode_id}: the graph trains {detail}")
    return generated.graph


def _shown(versions: Collection[PolicyVersion]) -> str:
    return ", ".join(map(str, sorted(versions))) or "no version"
