"""Keeps agents playing: each sibling of a group is an episode, scheduled without the others.

A group closes when its episodes have ended.  One that fails ends its siblings, and the group is
replaced; where what played it has died, the group is played again.

Groups of tasks without an agent, in a mixture, are generated as `Producer` does, on the engine with
the fewest requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from moerl.controller.agent_episodes import ENDED, LOST, PlayedEpisode
from moerl.controller.context import Context
from moerl.controller.generated import Sealed
from moerl.controller.held_out_episodes import RunningAgents
from moerl.controller.producer import Partials, Producer
from moerl.controller.rollout_builder import sealed_uris
from moerl.controller.scoring_stage import ScoringStage
from moerl.core.errors import ScoreError
from moerl.core.ids import name_rollout
from moerl.core.types import GraphTurn, Prompt

log = logging.getLogger(__name__)


class AgentProducer(Producer):
    """Starts groups of episodes; passes played groups to the scoring stage."""

    def __init__(
        self, context: Context, scoring_stage: ScoringStage, agents: RunningAgents
    ) -> None:
        super().__init__(context, scoring_stage)
        self._agents, self._runner, self._turns = agents, agents.runner, agents.turns
        self._playing: dict[int, list[str]] = {}  # episodes by group
        self._ended: set[str] = set()  # episodes of these that have ended
        self._stale: set[int] = set()  # groups that are being cancelled
        entries = self._tasks_by_label.values()
        self._is_mixed = not all(entry.agent.plays for entry in entries)

    def start(self) -> None:
        super().start()
        self._tasks.spawn(self._run())

    def add(self, index: int) -> None:
        """A new engine is used as soon as it serves."""
        if self._is_mixed:
            super().add(index)
        self._tasks.notify()

    def partials(self) -> Iterator[Sealed]:
        yield from super().partials()
        yield from self._turns.episodes.values()

    def open_episodes(self) -> dict[str, float]:
        """Each open episode once."""
        opened = {name for names in self._playing.values() for name in names} - self._ended
        engine = opened & self._turns.sampling
        queue = (opened & self._turns.queued) - engine
        return {
            "agent/open/engine": float(len(engine)),
            "agent/open/queue": float(len(queue)),
            "agent/open/program": float(len(opened) - len(engine) - len(queue)),
            "agent/open/siblings": float(len(self._ended)),
        }

    def cancel_stale(self) -> None:
        """End groups with tokens that are too old for the next step to come."""
        super().cancel_stale()
        rollout, step = self._config.rollout, self._buffer.next_step
        limit = rollout.max_lag if rollout.cancel_lag < 0 else rollout.cancel_lag
        through = rollout.in_flight_mode in ("in_place", "retract")
        for group_id, names in self._playing.items():
            turns = [self._turns.episodes[name] for name in names if name in self._turns.episodes]
            known = [one.oldest_step(runs_through_updates=through) for one in turns]
            steps = [found for found in known if found is not None]
            if steps and step - min(steps) > limit and group_id not in self._stale:
                self._stale.add(group_id)
                self._end(names)

    async def _run(self) -> None:
        await self._runner.start(self._turns)
        self._agents.started.set()
        while not self._tasks.stopping:
            if not self._may_start():
                await self._tasks.wait_change(1.0)
                continue
            self._start_group(self._buffer.start())
            await asyncio.sleep(0)

    def _start_group(self, group_id: int) -> None:
        task = self.prompts.prompt(group_id).task
        if self._tasks_by_label[task].agent.plays:
            self._in_flight += 1
            self._tasks.spawn(self._play_group(group_id))
        else:
            self._handed[group_id] = self._calmest(), self._partials(group_id)
            self._tasks.notify()

    def _calmest(self) -> int:
        """The engine of the next group without an agent: of the newest ones, the least busy."""
        members = self._pool.members
        waiting = Counter(home for home, _ in self._handed.values())
        serving = [index for index in members if self._pool.serves(index)]
        newest = max(members[index].version for index in serving)
        able = [index for index in serving if members[index].version == newest]
        return min(able, key=lambda index: members[index].generating + waiting[index])

    def _start(self, index: int, count: int) -> dict[int, Partials]:
        """Engines take the groups that `_start_group` hands them, and start none."""
        return {}

    def _may_start(self) -> bool:
        members = self._pool.members
        steps = [members[index].version.step for index in members if self._pool.serves(index)]
        begun = self._in_flight + len(self._handed) + len(self._orphans)
        room = self._config.rollout.max_groups_in_flight - begun
        return bool(steps) and min(room, self.wanted(max(steps))) > 0

    async def _play_group(self, group_id: int) -> None:
        prompt, tries = self.prompts.prompt(group_id), self._buffer.tries.pop(group_id, 0)
        names = [name_rollout(group_id, i, self.life, tries) for i in range(self._siblings)]
        self._playing[group_id] = names
        try:
            playing = (self._play(group_id, name, prompt, names) for name in names)
            played = await asyncio.gather(*playing)
        finally:
            del self._playing[group_id]
            self._ended.difference_update(names)
            for name in names:
                self._turns.episodes.pop(name, None)
            self._in_flight -= 1
            self._tasks.notify()
        self._close_group(group_id, played)

    async def _play(
        self, group_id: int, name: str, prompt: Prompt, names: Sequence[str]
    ) -> PlayedEpisode:
        played = await self._runner.play(name, prompt)
        self._ended.add(name)
        is_stale = group_id in self._stale and played.failure == ENDED
        graph = [_stale(turn) if is_stale else turn for turn in played.graph]
        self._step_metrics.episode_played(played.counts, played.failure, graph)
        if played.failure not in ("", ENDED):
            self._end(names)
        return played

    def _end(self, names: Sequence[str]) -> None:
        for name in names:
            self._runner.end(name)

    def _close_group(self, group_id: int, played: Sequence[PlayedEpisode]) -> None:
        failed = [one for one in played if one.failure not in ("", ENDED)]
        if group_id in self._stale:
            self._stale.discard(group_id)
            self._step_metrics.cancelled_groups += 1
            self._step_metrics.cancelled_tokens += sum(one.num_sampled for one in played)
            self._ref_counts.release(sealed_uris(played))
            self._scoring_stage.cancelled(group_id, played)
        elif failed:
            first = failed[0]
            error = ScoreError(f"the agent of {first.episode_id} {first.detail}")
            if any(one.failure == LOST for one in failed):
                self._scoring_stage.play_again(group_id, played, error)
            else:
                self._scoring_stage.drop_unscored(group_id, played, error)
        else:
            self._scoring_stage.finish(group_id, played)


def _stale(turn: GraphTurn) -> GraphTurn:
    return replace(turn, left_out="stale") if turn.left_out == "ended" else turn
