"""An open episode, used from another event loop than the controller's: one hop per turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from moerl.config.task_programs import POLICY
from moerl.core.types import Array, LeftOut
from moerl.episodes.finished_episode import RecordedTurn
from moerl.episodes.open_episode import EpisodeSpec, OpenEpisode, TurnRequest

T = TypeVar("T")


async def run_on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on another loop and return its result; cancelling the caller cancels `work`."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


class CrossLoopEpisode:
    """`OpenEpisode` for the loop of its client."""

    def __init__(self, episode: OpenEpisode, loop: asyncio.AbstractEventLoop) -> None:
        """Wrap an episode of another loop.  loop: of the episode."""
        self._episode, self._loop = episode, loop

    @property
    def name(self) -> str:
        return self._episode.name

    @property
    def spec(self) -> EpisodeSpec:
        return self._episode.spec

    async def sample(self, wanted: TurnRequest) -> RecordedTurn:
        """As `OpenEpisode.sample`; `ends` and `on_tokens` are called on the client's loop."""
        here = asyncio.get_running_loop()
        if wanted.ends is not None:
            wanted = replace(wanted, ends=_asked_on(here, wanted.ends))
        if wanted.on_tokens is not None:
            wanted = replace(wanted, on_tokens=called_here(wanted.on_tokens))
        found: list[RecordedTurn] = []

        async def sampled() -> RecordedTurn:
            found.append(await self._episode.sample(wanted))
            return found[0]

        def drop() -> None:
            for turn in found:  # it ended in the moment in which its client left
                self._episode.leave_out(turn.name, "cancelled")

        try:
            return await run_on(self._loop, sampled())
        except asyncio.CancelledError:
            self._loop.call_soon_threadsafe(drop)
            raise

    async def begin(self, parent: str, role: str = POLICY) -> str:
        """As `OpenEpisode.begin`."""

        async def begun() -> str:
            return self._episode.begin(parent, role)

        return await run_on(self._loop, begun())

    def calls_tools(self, name: str, tools: tuple[str, ...]) -> None:
        """As `OpenEpisode.calls_tools`, soon."""
        self._loop.call_soon_threadsafe(self._episode.calls_tools, name, tools)

    def leave_out(self, name: str, why: LeftOut) -> None:
        """As `OpenEpisode.leave_out`, soon."""
        self._loop.call_soon_threadsafe(self._episode.leave_out, name, why)


def _asked_on(
    loop: asyncio.AbstractEventLoop, ends: Callable[[Array], Awaitable[bool]]
) -> Callable[[Array], Awaitable[bool]]:
    async def answer(output_ids: Array) -> bool:
        return await ends(output_ids)

    return lambda output_ids: run_on(loop, answer(output_ids))


def called_here(hear: Callable[[T], None]) -> Callable[[T], None]:
    """`hear` for callers on other loops: it is called on the running one."""
    loop = asyncio.get_running_loop()

    def told(value: T) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(hear, value)

    return told
