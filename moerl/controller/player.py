"""From the settings of an episode to its record: the only way to play episodes.

Training, evaluation and the measurement of idle engines use it.
"""

from __future__ import annotations

import asyncio
from functools import partial

from moerl.config.task_mixture import by_label
from moerl.controller.context import Context
from moerl.controller.turn_router import TurnRouter
from moerl.episodes.environment import Environment, EnvironmentRunner, SingleTurn, TextReplies
from moerl.episodes.finished_episode import FinishedEpisode
from moerl.episodes.forks import fork_answer
from moerl.episodes.open_episode import EpisodeRunner, EpisodeSpec, OpenEpisode


class Player:
    """Used from the controller's event loop."""

    def __init__(self, context: Context, router: TurnRouter) -> None:
        services = context.services
        self._scorer, self._decode, self._encode = services.scorer, services.decode, services.encode
        self._entries = by_label(context.config)
        self._wall_limits = {name: entry.wall_limit_s for name, entry in self._entries.items()}
        self._context_tokens = services.model.context_tokens
        self.router = router
        self.episodes: dict[str, OpenEpisode] = {}  # by name
        forks = context.config.rollout.forks
        fork = partial(fork_answer, settings=forks, decode=services.decode)
        self._texts = EnvironmentRunner(
            self._environment, self._wall_s, fork if forks.pivots else None
        )
        self._runners: dict[str, EpisodeRunner] = {
            label: services.agents[label] if entry.kind.uses_chat else self._texts
            for label, entry in self._entries.items()
        }
        self.started = asyncio.Event()

    async def start(self) -> None:
        """Start the runners.  Call once, first."""
        for runner in self._runners.values():
            await runner.start()
        self.started.set()

    async def close(self) -> None:
        """End everything that runners have started."""
        await asyncio.gather(*(runner.close() for runner in self._runners.values()))

    def open(self, spec: EpisodeSpec) -> OpenEpisode:
        """An episode that `play` plays."""
        episode = self.episodes[spec.name] = OpenEpisode(spec, self.router)
        return episode

    async def play(self, episode: OpenEpisode, *, one_turn: bool = False) -> FinishedEpisode:
        """The episode's end.  one_turn: its prompt is answered once, whatever its task is."""
        spec = episode.spec
        runner = self._texts if one_turn else self._runners[spec.prompt.task]
        try:
            return episode.finish(await runner.run(episode))
        finally:
            episode.end()
            del self.episodes[spec.name]

    def end(self, episode: OpenEpisode) -> None:
        """End an episode: `play` returns soon."""
        runner = self._runners[episode.spec.prompt.task]
        if runner is self._texts:
            episode.end()
        else:  # its program has to end before its turns do, or it would see an error
            runner.end(episode.name)

    def _environment(self, spec: EpisodeSpec) -> Environment:
        if spec.max_turns == 1:
            return SingleTurn(spec)
        task = self._entries[spec.prompt.task]
        context = task.context_tokens or self._context_tokens
        return TextReplies(
            spec,
            self._scorer,
            self._decode,
            self._encode,
            context,
            task.sampled_limit,
            task.score_timeout_s,
        )

    def _wall_s(self, spec: EpisodeSpec) -> float:
        return self._wall_limits[spec.prompt.task]
