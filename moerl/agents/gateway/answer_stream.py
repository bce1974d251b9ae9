"""The part of an answer that is shown while the engine samples the rest.

Shown text is never taken back.  So that is held back which the end of the answer may change: a
part of a character, the beginning of a stop text or of a mark, what may be a call.  When tokens
that were heard are lost with their engine, the turn fails: other tokens would follow them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moerl.core.types import Array


@dataclass(frozen=True, slots=True)
class PartialAnswer:
    """The beginning of an answer.  prompt_len: tokens of its prompt."""

    prompt_len: int
    reasoning: str = ""
    text: str = ""

    def begins(self, whole: PartialAnswer) -> bool:
        return whole.reasoning.startswith(self.reasoning) and whole.text.startswith(self.text)


class GrowingText:
    """The text of tokens that arrive in pieces, without decoding all of them again."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode, self._text = decode, ""
        self._begin = self._end = 0  # of the newest piece, with which the next one is decoded

    def add(self, ids: Sequence[int]) -> str:
        """ids: all tokens so far.  A character of which a part is missing is not in the text."""
        known = self._decode(ids[self._begin : self._end])
        found = self._decode(ids[self._begin :])
        if len(found) > len(known) and not found.endswith("\ufffd"):
            self._text += found[len(known) :]
            self._begin, self._end = self._end, len(ids)
        return self._text


class AnswerStream:
    """One answer.  Used from one event loop."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        begun: Callable[[str], tuple[str, str]],
        stop_ids: frozenset[int],
        prompt_len: int,
        tell: Callable[[PartialAnswer], None],
    ) -> None:
        """begun: reasoning and text that an answer has in any case, from the text so far.

        tell: receives what is shown, each time it has grown.
        """
        self._begun, self._stop_ids, self._tell = begun, stop_ids, tell
        self._growing = GrowingText(decode)
        self.shown = PartialAnswer(prompt_len)

    def heard(self, output_ids: Array) -> None:
        """output_ids: of this turn, so far."""
        ids = output_ids.tolist()
        if ids and ids[-1] in self._stop_ids:  # one that ends a turn has no text
            ids = ids[:-1]
        found = PartialAnswer(self.shown.prompt_len, *self._begun(self._growing.add(ids)))
        if found != self.shown:
            self.shown = found
            self._tell(found)
