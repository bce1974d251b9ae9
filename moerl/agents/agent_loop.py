"""Runners of episodes on an event loop of their own: programs and environments.

The loop is a thread of the controller's process: rendering and tokenising do not stop the
controller's loop, although they share its interpreter.  Turns are sampled through the controller's
engines, on its loop.

    controller loop                     agent loop
    run ---------------------------->   open episode, start its program or environment
    OpenEpisode <--- turn requests --   ChatTurns <--- program or environment
    Outcome <------------------------   it ends, end episode
"""

from __future__ import annotations

import asyncio
import threading

from moerl.agents.chat_turns import NO_MASKS
from moerl.agents.cross_loop_episode import CrossLoopEpisode, run_on
from moerl.config.task_programs import AgentConfig
from moerl.episodes.open_episode import OpenEpisode, Outcome


def no_grammar(agent: AgentConfig, *, masks: bool) -> str:
    """Why a run refuses grammars.  masks: the engines' masks are replayed."""
    if not agent.grammars:
        return "not supported, because task.agent.grammars is false"
    return "" if masks else NO_MASKS


class EpisodeTable:
    """The episodes that run; used from the agent loop."""

    def __init__(self) -> None:
        self._ends: dict[str, asyncio.Event] = {}  # set: the episode is to end
        self._playing: set[asyncio.Task[Outcome]] = set()

    async def start(self) -> None:
        """Before the first episode."""

    async def stop(self) -> None:
        """After the last episode."""

    async def play_one(self, episode: CrossLoopEpisode, end: asyncio.Event) -> Outcome:
        """One episode to its end, or until `end` is set."""
        raise NotImplementedError

    async def play(self, episode: CrossLoopEpisode) -> Outcome:
        end = self._ends[episode.name] = asyncio.Event()
        work = asyncio.ensure_future(self.play_one(episode, end))
        self._playing.add(work)
        try:
            return await work
        finally:
            self._playing.discard(work)
            del self._ends[episode.name]

    def end(self, name: str) -> None:
        if name in self._ends:
            self._ends[name].set()

    async def close(self) -> None:
        for task in self._playing:
            task.cancel()
        await asyncio.gather(*self._playing, return_exceptions=True)
        await self.stop()


class AgentRunner:
    """The `EpisodeRunner` protocol; used from the controller's event loop."""

    def __init__(self, table: EpisodeTable) -> None:
        self._table = table
        self._there: _AgentLoop | None = None
        self._closed = False

    async def start(self) -> None:
        self._there = _AgentLoop()
        await run_on(self._there.loop, self._table.start())

    async def run(self, episode: OpenEpisode) -> Outcome:
        if self._closed:  # a group that began while this was closed is cancelled like those before
            raise asyncio.CancelledError
        assert self._there is not None, "start comes first"
        far = CrossLoopEpisode(episode, asyncio.get_running_loop())
        return await run_on(self._there.loop, self._table.play(far))

    def end(self, name: str) -> None:
        if self._closed:
            return
        assert self._there is not None, "start comes first"
        self._there.loop.call_soon_threadsafe(self._table.end, name)

    async def close(self) -> None:
        there, self._there, self._closed = self._there, None, True
        if there is not None:
            await run_on(there.loop, self._table.close())
            await there.stop()


class _AgentLoop:
    """The thread of a table."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="agents", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        await asyncio.to_thread(self._thread.join)
        self.loop.close()
