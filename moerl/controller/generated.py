"""Generated episodes as the scoring stage takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from moerl.controller.turn_rows import TurnRows
from moerl.types import Array, Finish, Prompt, Score, Turn


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
