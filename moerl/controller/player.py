"""From the settings of an episode to its record: the only way to play episodes.

Training, evaluation and the measurement of idle engines use it.

Environments that speak tokens, and the loop that plays an episode with one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from moerl.config.task_mixture import by_label
from moerl.controller.context import Context
from moerl.controller.turn_router import TurnRouter
from moerl.core.errors import RecordError, ScoreError
from moerl.core.messages import Scorers
from moerl.core.types import Array
from moerl.episodes.finished_episode import ENDED, REFUSED, FinishedEpisode, RecordedTurn
from moerl.episodes.forks import fork_answer
from moerl.episodes.open_episode import (
    EpisodeEnded,
    EpisodeRunner,
    EpisodeSpec,
    OpenEpisode,
    Outcome,
    TurnRequest,
)

_REPLY_S = 720.0  # for a restart of the scorer, and for the replies of thousands of episodes


class Environment(Protocol):
    """The world of one episode, in tokens."""

    @property
    def counts(self) -> Mapping[str, float]:
        """Events of the episode."""
        ...

    async def reset(self) -> Array:
        """[P] i32: the first prompt."""
        ...

    async def step(self, turns: Sequence[RecordedTurn]) -> Array | None:
        """Tokens that the policy reads next, behind its last turn; None: the episode is over.

        turns: all so far.  Raises ScoreError.
        """
        ...


class SingleTurn:
    """A prompt that is answered once."""

    def __init__(self, spec: EpisodeSpec) -> None:
        self._prompt_ids = spec.prompt_ids
        self.counts: Mapping[str, float] = {}

    async def reset(self) -> Array:
        return self._prompt_ids

    async def step(self, turns: Sequence[RecordedTurn]) -> Array | None:
        return None


class TextReplies(SingleTurn):
    """Replies of `task.environment`, a function of texts in the scorer's processes."""

    def __init__(
        self,
        spec: EpisodeSpec,
        scorer: Scorers,
        decode: Callable[[Sequence[int]], str],
        encode: Callable[[str], list[int]],
        context_tokens: int,
        sampled_tokens: int = 0,
        timeout_s: float = 0.0,
    ) -> None:
        """Begin the episode; context_tokens: longest sequence of the engines; 0 = not known.

        sampled_tokens: most of the whole episode; 0 = no limit.  timeout_s: of a reply.
        """
        super().__init__(spec)
        self._spec, self._scorer, self._decode, self._encode = spec, scorer, decode, encode
        self._context, self._most = context_tokens, sampled_tokens
        self._limit_s = timeout_s + _REPLY_S

    async def step(self, turns: Sequence[RecordedTurn]) -> Array | None:
        if len(turns) == self._spec.max_turns:
            return None
        sampled = sum(len(turn.output_ids) for turn in turns)
        answer = self._spec.sampling_of(self._spec.role_in_turn(len(turns))).max_new_tokens
        if self._most and sampled + answer > self._most:
            self.counts = {"limits_reached": 1.0}
            return None
        texts = [self._decode(turn.output_ids.tolist()) for turn in turns]
        text = await self._reply(texts)
        token_ids = self._encode(text) if text else []
        needed = turns[-1].num_tokens + len(token_ids) + answer
        if token_ids and self._context and needed > self._context:
            self.counts = {"context_ends": 1.0}
            return None
        return np.asarray(token_ids, np.int32) if token_ids else None

    async def _reply(self, texts: list[str]) -> str:
        """The scorer limits its own time; it cannot detect its death."""
        prompt = self._spec.prompt
        try:
            async with asyncio.timeout(self._limit_s):
                return await self._scorer.reply(prompt, texts)
        except TimeoutError as error:
            raise ScoreError(f"{prompt.name}: no reply within {self._limit_s:g} s") from error


class EnvironmentRunner:
    """An `EpisodeRunner` on the controller's own loop."""

    def __init__(
        self,
        make: Callable[[EpisodeSpec], Environment],
        wall_s: Callable[[EpisodeSpec], float] = lambda spec: 0.0,
        fork: Callable[[OpenEpisode], Awaitable[Mapping[str, float]]] | None = None,
    ) -> None:
        """Set the limits.  wall_s: seconds of an episode; 0 = no limit.

        fork: continues the answer of a trained episode in other ways; returns counts.
        """
        self._make, self._wall_s, self._fork = make, wall_s, fork

    async def start(self) -> None: ...

    async def run(self, episode: OpenEpisode) -> Outcome:
        environment, wall_s = self._make(episode.spec), self._wall_s(episode.spec)
        counts: Mapping[str, float] = {}
        try:
            async with asyncio.timeout(wall_s or None):
                await self._converse(episode, environment)
                if self._fork is not None and episode.spec.pin is None:
                    counts = await self._fork(episode)
        except TimeoutError:
            return Outcome("timeout", f"took longer than task.wall_s = {wall_s:g}")
        except EpisodeEnded:
            return Outcome(ENDED, "was ended")
        except RecordError as error:
            return Outcome(REFUSED, str(error), refused=error)
        except ScoreError as error:
            return Outcome("environment", str(error))
        return Outcome(counts={**environment.counts, **counts})

    async def _converse(self, episode: OpenEpisode, environment: Environment) -> None:
        role_in = episode.spec.role_in_turn
        turn = await episode.sample(TurnRequest(await environment.reset(), role=role_in(0)))
        while (said := await environment.step(episode.turns)) is not None:
            prompt_ids = np.concatenate([turn.token_ids, said])
            role = role_in(len(episode.turns))
            turn = await episode.sample(TurnRequest(prompt_ids, turn, turn.num_tokens, role=role))

    def end(self, name: str) -> None:
        """`OpenEpisode.end` is enough."""

    async def close(self) -> None: ...


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
