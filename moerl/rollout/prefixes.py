"""Which engine has a prompt's leading tokens in its prefix cache, as far as anyone can tell here.

An engine keeps what it was sent under its present weights; every update empties its cache, so what
is known of it is forgotten with its version.  Prompts are remembered by digests of their leading
tokens, at every `CHUNK` tokens and at their end.  The engine's own evictions are not seen: a wrong
guess costs one prefill, never correctness.

A group goes to the engine that knows most of its prompt, if that is at least half of it and one
chunk, unless that engine has too many groups more than the least busy one (the two thresholds of
SGLang's cache-aware router, the second one counted in groups).
Rejected: that router itself in front of the engines (a call names its engine here, because weight
updates, versions and routes are per engine); a tree of tokens (a set of digests answers the same
question for prompts that repeat or share a head).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import xxhash

from moerl.types import Array, PolicyVersion

CHUNK = 64  # tokens


class Prefixes:
    """What each engine was sent under the weights it serves."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[PolicyVersion, set[bytes]]] = {}

    def sent(self, engine: int, version: PolicyVersion, prompt: Sequence[int]) -> None:
        """The engine, serving `version`, is about to prefill this prompt."""
        held, digests = self._known.get(engine, (version, set()))
        if held != version:
            digests = set()
        digests.update(digest for _, digest in _leads(prompt))
        self._known[engine] = version, digests

    def forget(self, engine: int) -> None:
        """It left the run."""
        self._known.pop(engine, None)

    def length(self, engine: int, version: PolicyVersion, prompt: Sequence[int]) -> int:
        """Leading tokens of a prompt that the engine was sent under this version."""
        held, digests = self._known.get(engine, (None, set[bytes]()))
        if held != version:
            return 0
        known = 0
        for length, digest in _leads(prompt):
            if digest not in digests:
                break
            known = length
        return known


def _leads(prompt: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Lengths and digests of the prompt's leads, shortest first; the whole prompt is the last."""
    tokens: Array = np.asarray(prompt, np.int32)
    state = xxhash.xxh3_64()
    ends = [*range(0, len(tokens), CHUNK), len(tokens)]
    for begin, end in pairwise(ends):
        state.update(tokens[begin:end].tobytes())
        yield end, state.digest()
