"""A grammar that a client gives: the texts that one answer may be.

It is part of a request.  A record has none: which tokens were allowed is in its sampling mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """Named and written as a sampling parameter of SGLang."""

    kind: GrammarKind
    text: str
