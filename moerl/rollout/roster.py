"""Which engines the trainer publishes to: what it was told last, and what it must be told next.

A gang opens its publisher for the configured engines.  Where others are in the run, it is told with
its hello or instead of its next plan (`SetEngines`), and has taken that in when it asks again; an
engine that leaves is not ended before.
"""

from __future__ import annotations

from collections.abc import Mapping

from moerl.config.schema import EngineConfig
from moerl.messages import SetEngines, SyncTarget

Engines = tuple[SyncTarget, ...]


class Roster:
    """The engines of a run, by number, with their sizes."""

    def __init__(self, config: EngineConfig, sizes: Mapping[int, int], *, changed: bool) -> None:
        """sizes: tensor-parallel ranks by engine.

        changed: the gang that lives may have been told of other engines by an earlier controller.
        """
        self._configured = engines_of(config.sizes)
        self._sizes = dict(sizes)
        self._told: Engines | None = None if changed else self._configured
        self._taken: Engines | None = self._told  # what the gang has taken in

    def join(self, engine: int, tp: int) -> None:
        self._sizes[engine] = tp

    def leave(self, engine: int) -> None:
        """Publish to it no more; `is_free` says when nobody does."""
        del self._sizes[engine]

    def is_free(self, engine: int) -> bool:
        return self._taken is not None and all(one.engine != engine for one in self._taken)

    def begin(self) -> SetEngines | None:
        """A gang says hello: what it must be told, if anything."""
        self._told = self._taken = self._configured
        return self.news()

    def asked(self) -> None:
        """The gang asks for a plan: it has taken in what it was told last."""
        self._taken = self._told

    def news(self) -> SetEngines | None:
        """What the gang must be told before its next plan, once."""
        now = engines_of(self._sizes)
        if now == self._told:
            return None
        self._told = now
        return SetEngines(now)


def engines_of(sizes: Mapping[int, int]) -> Engines:
    return tuple(SyncTarget(index, sizes[index]) for index in sorted(sizes))
