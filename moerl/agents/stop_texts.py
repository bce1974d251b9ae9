"""Texts that end a turn, for engines that stop at tokens only.

The engine stops at each token that can end a stop text; the text so far decides whether the turn
continues.  So no token is sampled behind a stop text, and no sampled token is removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from moerl.agents.prompt_tokens import PromptTokens


@dataclass(frozen=True, slots=True)
class Stops:
    """Texts that end a turn, and the tokens that can be their last."""

    texts: tuple[str, ...] = ()
    ids: frozenset[int] = frozenset()

    def cut(self, text: str) -> tuple[str, str | None]:
        """The text up to the first of these texts, and which it is."""
        places = [(place, stop) for stop in self.texts if (place := text.find(stop)) >= 0]
        if not places:
            return text, None
        place, stop = min(places)
        return text[:place], stop

    def begun(self, text: str) -> str:
        """The part of an unfinished text that no stop text can take away."""
        return self.cut(text)[0][: len(text) - held_back(text, self.texts)]


class StopFinder:
    """Remembers the last few sets of stop texts: a client repeats its set in each turn."""

    def __init__(self, tokens: PromptTokens) -> None:
        """It reads the whole vocabulary: seconds for a large one."""
        self._tokens, self._texts = tokens, tokens.token_texts()
        self.find = lru_cache(64)(self._find)

    def _find(self, texts: tuple[str, ...], ends: tuple[int, ...]) -> Stops:
        """Sort the stop tokens; `ends` end a turn whatever its text."""
        ids = [
            index
            for index, token in enumerate(self._texts)
            if any(can_end(token, text) for text in texts)
        ]
        return Stops(texts, frozenset(ids) - set(ends))

    def ends(self, output_ids: Sequence[int], stops: Stops) -> bool:
        """Whether an answer that the engine stopped has ended, at a stop token or text."""
        return output_ids[-1] not in stops.ids or (
            stops.cut(self._tokens.decode(output_ids))[1] is not None
        )


def held_back(text: str, marks: Iterable[str]) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    return max((_overlap(text, mark) for mark in marks), default=0)


def _overlap(text: str, mark: str) -> int:
    sizes = range(min(len(text), len(mark) - 1), 0, -1)
    return next((size for size in sizes if mark.startswith(text[-size:])), 0)


def can_end(token: str, stop: str) -> bool:
    """Whether a text can end with `stop` within this token.

    A token that is a part of a character has no text of its own, and may end any.
    """
    if "\ufffd" in token or stop in token:
        return True
    return any(token.startswith(stop[place:]) for place in range(1, len(stop)))
