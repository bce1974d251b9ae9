"""The part of an answer that is shown while the engine samples the rest.

Shown text is never taken back.  So that is held back which the end of the answer may change: a
part of a character, the beginning of a stop text or of a mark, what may be a call.  When tokens
that were heard are lost with their engine, the turn fails: other tokens would follow them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from moerl.core.types import Array

Kind = Literal["reasoning", "text"]
Change = tuple[Literal["start", "delta", "stop"], Kind, str]


@dataclass(frozen=True, slots=True)
class PartialAnswer:
    """The beginning of an answer.  prompt_len: tokens of its prompt."""

    prompt_len: int
    reasoning: str = ""
    text: str = ""

    def begins(self, whole: PartialAnswer) -> bool:
        return whole.reasoning.startswith(self.reasoning) and whole.text.startswith(self.text)

    def beyond(self, before: PartialAnswer) -> dict[Kind, str]:
        """Text that this answer has behind an earlier one, without empty text."""
        reasoning, text = self.reasoning[len(before.reasoning) :], self.text[len(before.text) :]
        found: dict[Kind, str] = {"reasoning": reasoning} if reasoning else {}
        return found | ({"text": text} if text else {})


class Blocks:
    """An answer as blocks of reasoning and text, of which the last one is open while it grows.

    The text of a change is added by a delta, and is the whole text of a block that stops.
    """

    def __init__(self) -> None:
        self._shown = PartialAnswer(0)
        self._open: Kind | None = None
        self.place = 0  # of the open block, else of the next one

    @property
    def is_begun(self) -> bool:
        return self._shown.prompt_len > 0

    def grow(self, partial: PartialAnswer) -> Iterator[Change]:
        before, self._shown = self._shown, partial
        for kind, text in partial.beyond(before).items():
            yield from self._switch(kind)
            yield "delta", kind, text

    def end(self, *, is_empty: bool) -> Iterator[Change]:
        """is_empty: the answer has neither text nor calls, so it gets a block of empty text."""
        if is_empty:
            yield from self._switch("text")
        yield from self._switch(None)

    def _switch(self, kind: Kind | None) -> Iterator[Change]:
        if self._open == kind:
            return
        if self._open is not None:
            shown = self._shown
            yield "stop", self._open, shown.text if self._open == "text" else shown.reasoning
            self.place += 1
        self._open = kind
        if kind is not None:
            yield "start", kind, ""


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
