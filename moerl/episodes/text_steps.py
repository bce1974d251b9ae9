"""Steps of a text, and the tokens with which they end."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence


def step_ends(text: str, begin: int, separator: str, *, is_over: bool) -> list[int]:
    """Characters of a text before the end of each whole step behind `begin`.

    is_over: the rest of the text is a step, too.
    """
    found, end = [], begin
    while (at := text.find(separator, end)) >= 0:
        end = at + len(separator)
        found.append(end)
    if is_over and (end < len(text) or not text):
        found.append(len(text))
    return found


def last_token_of(ids: Sequence[int], end: int, decode: Callable[[Sequence[int]], str]) -> int:
    """The token that holds the last of the first `end` characters."""
    return bisect_left(range(1, len(ids)), end, key=lambda count: len(decode(ids[:count])))
