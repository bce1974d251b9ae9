"""One group in generation on one engine: which siblings are with the engine, and what came back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from moerl.controller.blob_ref_counts import BlobRefCounts
from moerl.controller.engine_calls import EngineCalls
from moerl.controller.rollout_builder import PartialEpisode, own_uris, used_uris
from moerl.core.errors import EngineError, RecordError, ScoreError
from moerl.core.types import Segment

Arrived = Segment | RecordError | EngineError | ScoreError | None
"""Reply of the engine; None or ScoreError: of the environment, which has added its own."""


class GroupFlight:
    """Used by one event loop."""

    def __init__(
        self,
        group_id: int,
        partials: list[PartialEpisode],
        calls: EngineCalls,
        ref_counts: BlobRefCounts,
    ) -> None:
        self.group_id, self.partials, self.calls = group_id, partials, calls
        self._ref_counts = ref_counts
        self._in_flight: dict[str, tuple[PartialEpisode, int]] = {}  # with the engine's step then
        self._arrived: asyncio.Queue[tuple[str, Arrived]] = asyncio.Queue()
        self._leased: set[str] = set()

    def send(self, partials: Sequence[PartialEpisode], step: int) -> None:
        """step: of the engine's weights."""
        requests = [partial.request() for partial in partials]
        names = [request.name for request in requests]
        self._in_flight |= {n: (p, step) for n, p in zip(names, partials, strict=True)}
        self.calls.send(requests, self.arrive)

    def listen(self, partial: PartialEpisode) -> None:
        """The environment answers a turn; then `arrive` is called with the episode's id."""
        self._in_flight[partial.episode_id] = partial, partial.newest.step

    def arrive(self, name: str, reply: Arrived) -> None:
        self._arrived.put_nowait((name, reply))

    async def next(self) -> tuple[PartialEpisode, Arrived] | None:
        """The next reply; None when there is none to come."""
        while self._in_flight:
            name, reply = await self._arrived.get()
            if name in self._in_flight:
                return self._in_flight.pop(name)[0], reply
        return None

    @property
    def is_caught_up(self) -> bool:
        """True if every reply that has come was handled."""
        return self._arrived.empty()

    def cancel(self, sampled: Callable[[int], None] | None = None) -> None:
        """Abort the requests in flight; no reply to them is wanted.

        sampled: told how many tokens of it the engine had sampled.
        """
        self.calls.cancel(list(self._in_flight), sampled)
        while not self._arrived.empty():
            name, reply = self._arrived.get_nowait()
            if name in self._in_flight and isinstance(reply, Segment):
                self._ref_counts.release(own_uris(reply))
                if sampled is not None:
                    sampled(reply.num_sampled)
        self._in_flight.clear()
        self._arrived.put_nowait(("", None))  # wakes `next`
        self.settle()

    def oldest_step(self, *, runs_through_updates: bool) -> int | None:
        """Step of the oldest weights that sampled a token; None when no token is known.

        runs_through_updates: requests go on while weights change, so what is in flight may have
        tokens of the weights that it was sent to.
        """
        steps = [p.oldest.step for p in self.partials if p.num_sampled]
        if runs_through_updates:
            steps += [step for _, step in self._in_flight.values()]
        return min(steps, default=None)

    # --- rows of a prompt that siblings share -----------------------------------------------------
    def lease(self, uris: set[str]) -> None:
        """Keep these blobs until each sibling in flight has said whether it refers to them."""
        self._ref_counts.share(uris)
        self._leased |= uris
        self.settle()

    def settle(self) -> None:
        """Call after each reply: blobs to which no sibling refers are released."""
        if not self._leased or any(not p.num_sampled for p, _ in self._in_flight.values()):
            return
        self._ref_counts.release(self._leased - used_uris(self.partials))
        self._leased = set()
