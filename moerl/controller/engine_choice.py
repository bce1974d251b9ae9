"""Which engine samples a turn, and on which engine a group begins.

A group begins on the engine that its siblings share, its home: the engine with the longest known
prefix of its prompt, or the engine with the fewest groups.  Later turns of an episode go to the
engine that sampled the turn before, for its prefix cache; where that cannot be, to the engine with
the fewest requests.  Versions never go backwards inside an episode.

`PrefixIndex`: which engine has a prompt's leading tokens in its prefix cache.  Prompts are stored
as digests of their leading tokens, at every `CHUNK` tokens and at their end, and forgotten with the
engine's version, because an update empties its cache.  Evictions are not seen: a wrong guess costs
one prefill, never correctness.  A group goes to the engine with the longest known prefix, if that
is at least half of the prompt and one chunk, unless that engine has too many groups more than the
least busy one (the two thresholds of SGLang's cache-aware router, the second counted in groups).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import xxhash

from moerl.config.schema import RolloutConfig
from moerl.controller.engine_pool import EnginePhase, EnginePool
from moerl.controller.step_metrics import StepMetrics
from moerl.core.types import Array, PolicyVersion
from moerl.episodes.open_episode import Home, TurnCall

CHUNK = 64  # tokens
Leads = Sequence[tuple[int, bytes]]  # prefixes of a prompt: length, digest


class EngineChoice:
    """Used by one event loop."""

    def __init__(self, pool: EnginePool, config: RolloutConfig, step_metrics: StepMetrics) -> None:
        self._pool, self._config, self._step_metrics = pool, config, step_metrics
        self._prefix_index = PrefixIndex()

    # --- groups -----------------------------------------------------------------------------------
    def for_group(self, wanted: Callable[[int], int]) -> int | None:
        """The engine whose turn it is to begin a group; None when no engine may.

        wanted(step): groups that an engine serving `step` should still begin.
        """
        engines = self._pool.engines
        able = [index for index in engines if self._pool.serves(index)]
        for index in sorted(able, key=lambda one: engines[one].groups):
            count = wanted(engines[index].version.step)
            if count and self._pool.share(index, count):
                return index
        return None

    def settle(self, index: int, prompt: Sequence[int]) -> Home:
        """The home of a group whose turn it is on engine `index`."""
        leads = leads_of(prompt)
        home = Home(self._with_prefix(index, leads))
        self._step_metrics.add("async/routed_groups", home.engine != index)
        engine = self._pool.engines[home.engine]
        engine.groups += 1
        self._prefix_index.sent(home.engine, engine.version, leads)
        return home

    def leave(self, home: Home) -> None:
        """A group has no running episode any more."""
        if engine := self._pool.engines.get(home.engine):
            engine.groups -= 1

    def forget(self, index: int) -> None:
        """The engine left the run."""
        self._prefix_index.forget(index)

    def _with_prefix(self, index: int, leads: Leads) -> int:
        """The engine with the longest cached prefix; `index` if there is none or it is too busy."""
        engines, slack = self._pool.engines, self._config.prefix_slack
        if slack < 0 or len(engines) == 1 or self._config.fixed_lag >= 0:  # no prefix routing
            return index
        length = leads[-1][0] if leads else 0  # an agent's prompt may have no tokens
        best, found = max(length // 2, CHUNK - 1), index
        for other in (index, *engines):  # `index` first, so that it wins ties
            engine = engines[other]
            busier = engine.groups - engines[index].groups
            if not self._pool.serves(other) or engine.version < engines[index].version:
                continue
            known = self._prefix_index.length(other, engine.version, leads)
            if known > best and busier <= slack:
                best, found = known, other
        return found

    # --- turns ------------------------------------------------------------------------------------
    def for_turn(self, call: TurnCall) -> int | None:
        """The engine for a turn; None when none serves it now."""
        episode = call.episode
        if call.turn.num_sampled and self._may_finish_on(episode.engine):
            return episode.engine
        if self._serves(episode.engine, call):
            return episode.engine
        if (home := episode.spec.home) is not None and self._serves(home.engine, call):
            return home.engine
        engines = self._pool.engines
        able = [index for index in engines if self._serves(index, call)]
        if not able:
            return None
        index = min(able, key=lambda one: engines[one].generating)
        if home is not None:
            self.leave(home)
            home.engine = index
            engines[index].groups += 1
        return index

    def has(self, version: PolicyVersion) -> bool:
        """Whether an engine has these weights, although it may not serve now."""
        return any(engine.version == version for engine in self._pool.engines.values())

    def _serves(self, index: int, call: TurnCall) -> bool:
        if index not in self._pool.engines or not self._pool.serves(index):
            return False
        version, wanted = self._pool.engines[index].version, call.wanted.version
        return version >= call.episode.newest if wanted is None else version == wanted

    def _may_finish_on(self, index: int) -> bool:
        """An engine that is drained finishes the turns that it has begun, under one version."""
        engine = self._pool.engines.get(index)
        if engine is None or engine.phase != EnginePhase.UP or self._pool.interrupts:
            return False
        return engine.draining or engine.leaving


class PrefixIndex:
    """Prompts that each engine prefilled under its current weights."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[PolicyVersion, set[bytes]]] = {}

    def sent(self, engine: int, version: PolicyVersion, leads: Leads) -> None:
        """Record that the engine, serving `version`, will prefill this prompt."""
        held, digests = self._known.get(engine, (version, set()))
        if held != version:
            digests = set()
        digests.update(digest for _, digest in leads)
        self._known[engine] = version, digests

    def forget(self, engine: int) -> None:
        """The engine left the run."""
        self._known.pop(engine, None)

    def length(self, engine: int, version: PolicyVersion, leads: Leads) -> int:
        """Number of leading tokens of a prompt that the engine prefilled under this version."""
        held, digests = self._known.get(engine, (None, set[bytes]()))
        if held != version:
            return 0
        known = 0
        for length, digest in leads:
            if digest not in digests:
                break
            known = length
        return known


def leads_of(prompt: Sequence[int]) -> Leads:
    """The prefixes of a prompt, shortest first; the last is the whole prompt."""
    tokens: Array = np.asarray(prompt, np.int32)
    state = xxhash.xxh3_64()
    found = []
    for begin, end in pairwise([*range(0, len(tokens), CHUNK), len(tokens)]):
        state.update(tokens[begin:end].tobytes())
        found.append((end, state.digest()))
    return found
