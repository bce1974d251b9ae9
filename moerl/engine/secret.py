"""A string that does not show itself: SGLang logs its whole configuration at start."""

from __future__ import annotations


class Secret(str):
    """Compares, formats and pickles as the string; its repr is masked."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"
