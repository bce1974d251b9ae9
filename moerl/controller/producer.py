"""Starts groups and closes them: every sibling is an episode that the player plays.

A group starts when the buffer has room for it on some engine.  The first turns of its siblings go
to one engine in one message.  The group closes when its episodes have ended, or a quorum of them.
An episode that fails ends its siblings, and the group is replaced; where only its program or worker
has died, the group is played again.  A refused record costs its episode only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from moerl.config.task_mixture import by_label
from moerl.controller.buffer import fewest_siblings
from moerl.controller.context import Context
from moerl.controller.engine_choice import EngineChoice
from moerl.controller.group_in_flight import GroupInFlight
from moerl.controller.player import Player
from moerl.controller.scoring_stage import ScoringStage
from moerl.core.errors import LineError, ScoreError
from moerl.core.ids import group_of, name_rollout
from moerl.core.types import GraphTurn, Prompt
from moerl.data.tasks import MOST_BAD
from moerl.episodes.finished_episode import BLOCKED, ENDED, LOST, FinishedEpisode, sealed_uris
from moerl.episodes.open_episode import EnginePin, EpisodeSpec, Home, OpenEpisode
from moerl.episodes.turn import sampling_params

log = logging.getLogger(__name__)

_STARTS_AT_ONCE = 4  # groups that start before other tasks run
_AT_ONCE = 16  # groups that are measured in one message


class Producer:
    """Starts groups; passes groups that have ended to the scoring stage."""

    def __init__(
        self,
        context: Context,
        player: Player,
        engines: EngineChoice,
        scoring_stage: ScoringStage,
    ) -> None:
        services, rollout = context.services, context.config.rollout
        self._config, self.prompts, self._blobs = context.config, services.prompts, services.blobs
        self._entries = by_label(context.config)
        kinds = {label: entry.kind for label, entry in self._entries.items()}
        self._speak_messages = {label for label in kinds if kinds[label].uses_chat}
        self._samplings = {
            label: {
                role: sampling_params(sampling, services.model)
                for role, sampling in entry.samplings.items()
            }
            for label, entry in self._entries.items()
        }
        self._buffer, self._pool, self._tasks = context.buffer, context.pool, context.tasks
        self._step_metrics, self._ref_counts = context.step_metrics, context.ref_counts
        self._player, self._engines, self._scoring_stage = player, engines, scoring_stage
        self._journal, self._turn_log = services.journal, services.journal.turns
        self._bad_prompts = 0  # in a row
        self._groups: dict[int, GroupInFlight] = {}
        self._siblings = rollout.group_size * rollout.oversample
        self.life = 0  # number of earlier controllers; their calls may still seal blobs

    def start(self) -> None:
        self._tasks.spawn(self._player.router.run())
        self._tasks.spawn(self._produce())

    def remove(self, index: int) -> None:
        """An engine has left."""
        self._engines.forget(index)

    def episodes(self) -> Iterator[OpenEpisode]:
        """Episodes of the groups in flight, running or ended."""
        for group in self._groups.values():
            yield from group.episodes

    def open_episodes(self) -> dict[str, float]:
        """Episodes of tasks with an agent by their state, as docs/metrics.md names them."""
        if not self._speak_messages:
            return {}
        groups = [g for g in self._groups.values() if self._speaks_messages(g)]
        running = [episode for group in groups for episode in group.running]
        queued = self._player.router.waiting
        engine = sum(any(call.engine for call in episode.calls) for episode in running)
        queue = sum(
            episode.name in queued and not any(call.engine for call in episode.calls)
            for episode in running
        )
        return {
            "agent/open/engine": float(engine),
            "agent/open/queue": float(queue),
            "agent/open/program": float(len(running) - engine - queue),
            "agent/open/siblings": float(sum(len(group.ended) for group in groups)),
        }

    def wanted(self, engine_step: int) -> int:
        """Groups that an engine serving `engine_step` should still start."""
        if self._buffer.next_step >= self._config.run.steps:
            return 0
        return min(self._buffer.capacity(engine_step), self._still_needed())

    async def measure(self, seconds: float) -> float:
        """Tokens/s of idle engines on fresh prompts, with both replays; the results are dropped."""
        begin, tokens, index = time.monotonic(), 0, 0

        async def once(engine: int, first: int) -> int:
            pin = EnginePin(engine, self._pool.engines[engine].version)
            playing = (
                self._player.play(self._player.open(spec), one_turn=True)
                for prompt in self._usable(range(first, first + _AT_ONCE))
                for spec in self._specs(_numbered(prompt.index, self._siblings), prompt, pin=pin)
            )
            ended = await asyncio.gather(*playing)
            for uri in sealed_uris(ended):
                self._blobs.delete(uri)
            return sum(episode.num_sampled for episode in ended)

        while (busy := [e for e in self._pool.engines if self._pool.serves(e)]) and (
            time.monotonic() - begin < seconds
        ):
            calls = [once(e, index + place * _AT_ONCE) for place, e in enumerate(busy)]
            index += len(calls) * _AT_ONCE
            tokens += sum(await asyncio.gather(*calls))
        return tokens / (time.monotonic() - begin)

    def _usable(self, numbers: Iterable[int]) -> Iterator[Prompt]:
        for number in numbers:
            with contextlib.suppress(LineError):
                yield self.prompts.prompt(number)

    def cancel_stale(self) -> None:
        """Stop playing groups, or siblings, with tokens too old for the next step to come."""
        rollout, step = self._config.rollout, self._buffer.next_step
        limit = rollout.max_lag if rollout.cancel_lag < 0 else rollout.cancel_lag
        through = rollout.in_flight_mode in ("in_place", "retract")
        for group in self._groups.values():
            stale = group.older_than(step - limit, runs_through_updates=through)
            if not stale or group.is_stale:
                continue
            ended = group.running
            untrainable = group.older_than(step - rollout.max_lag, runs_through_updates=through)
            if self._goes_on_without(group, {*untrainable, *(e for e in ended if e in stale)}):
                ended = [episode for episode in ended if episode in stale]
                self._step_metrics.add("async/dropped_stale_siblings", len(ended))
                for episode in ended:
                    group.drop(episode)
            else:
                group.is_stale = True
            for episode in ended:
                episode.count_lost = partial(self._step_metrics.add, "async/cancelled_tokens")
            self._end(ended)

    def _goes_on_without(self, group: GroupInFlight, stale: Collection[OpenEpisode]) -> bool:
        """Whether enough siblings are not stale.

        Stale siblings that have ended are scored with the others, for the baseline; the buffer
        drops them.
        """
        rollout = self._config.rollout
        quorum = rollout.group_quorum if group.group_id >= 0 else 0
        fewest = quorum or fewest_siblings(group.group_id)
        return rollout.stale_siblings == "drop" and len(group.episodes) - len(stale) >= fewest

    # --- start ------------------------------------------------------------------------------------
    async def _produce(self) -> None:
        await self._player.start()
        while not self._tasks.stopping:
            for _ in range(_STARTS_AT_ONCE):
                if not self._start_group():
                    await self._tasks.wait_change(1.0)
                    break
            else:
                await asyncio.sleep(0)  # thousands may start at once: let other tasks run

    def _start_group(self) -> bool:
        """False: no engine may begin a group now."""
        if len(self._groups) >= self._config.rollout.max_groups_in_flight:
            return False
        if self._scoring_stage.scores.is_full:
            return False
        index = self._engines.for_group(self.wanted)
        if index is None:
            return False
        group_id = self._buffer.start()
        tries = self._buffer.tries.pop(group_id, 0)
        try:
            prompt = self.prompts.prompt(group_id)
        except LineError as error:
            self._set_aside(group_id, error)
            return True
        self._bad_prompts = 0
        home = self._engines.settle(index, prompt.token_ids)
        names = [name_rollout(group_id, i, self.life, tries) for i in range(self._siblings)]
        specs = self._specs(names, prompt, home)
        group = GroupInFlight(group_id, prompt, home, list(map(self._player.open, specs)))
        self._groups[group_id] = group
        for episode in group.episodes:
            self._tasks.spawn(self._play(group, episode))
        return True

    def _set_aside(self, group_id: int, error: LineError) -> None:
        """Replace an unusable line by the next.  Raises LineError after many in a row."""
        self._bad_prompts += 1
        if self._bad_prompts >= MOST_BAD:
            raise error
        log.warning("prompt %d is set aside: %s", group_id, error)
        self._step_metrics.add("async/bad_prompts")
        self._journal.dropped(group_id)
        self._buffer.discard(group_id)

    def _still_needed(self) -> int:
        """Groups that the remaining steps can still train; the last steps start no surplus."""
        left = self._config.run.steps - self._buffer.next_step
        return max(0, left * self._config.rollout.groups_per_step - self._buffer.live)

    def _specs(
        self,
        names: Sequence[str],
        prompt: Prompt,
        home: Home | None = None,
        pin: EnginePin | None = None,
    ) -> list[EpisodeSpec]:
        entry, rollout = self._entries[prompt.task], self._config.rollout
        scores = self._scoring_stage.scores
        first = EpisodeSpec(
            name="",
            prompt=prompt,
            sampling=self._samplings[prompt.task][""],
            roles=self._samplings[prompt.task],
            prompt_ids=np.asarray(prompt.token_ids, np.int32),
            max_turns=1 if pin is not None else entry.turn_limit,
            audit=self._config.replay.audit and pin is None,
            slice_tokens=0 if pin is not None else rollout.slice_tokens,
            home=home,
            pin=pin,
            watch=scores if pin is None and scores.watches(prompt.task) else None,
        )
        return [replace(first, name=name) for name in names]

    # --- play and close ---------------------------------------------------------------------------
    async def _play(self, group: GroupInFlight, episode: OpenEpisode) -> None:
        ended = await self._player.play(episode)
        while await self._plays_again(group, episode, ended):
            self._forget_turns(ended)
            ended.on_retired("played_again")
            name, uris = self._next_try(ended), frozenset(episode.uris)
            other = self._player.open(replace(episode.spec, name=name, inherited=uris))
            group.exchange(episode, other)
            episode = other
            ended = await self._player.play(episode)
        self._count(group, ended)
        self._has_ended(group, ended)
        await asyncio.sleep(0)  # replies of one message end several siblings: close with all
        self._close_if_due(group)

    async def _plays_again(
        self, group: GroupInFlight, episode: OpenEpisode, ended: FinishedEpisode
    ) -> bool:
        if ended.refused is None:
            return False
        waited = await self._scoring_stage.wait_for_room(ended.refused)
        if not group.goes_on or group.is_dropped(episode.name):
            return False
        if not waited:
            self._scoring_stage.refuse_one(group.group_id, ended.episode_id, ended.refused)
        return True

    def _next_try(self, ended: FinishedEpisode) -> str:
        group_id, sibling = group_of(ended.episode_id), int(ended.episode_id.split(".")[1])
        return name_rollout(group_id, sibling, self.life, self._buffer.new_try())

    def _count(self, group: GroupInFlight, ended: FinishedEpisode) -> None:
        if given_up := int(ended.counts.get("forks_given_up", 0)):
            self._step_metrics.forked(given_up=given_up)
        if not self._speaks_messages(group):
            return
        is_stale = group.is_stale or group.is_dropped(ended.episode_id)
        is_stale = is_stale and ended.failure == ENDED
        graph = [_stale(turn) if is_stale else turn for turn in ended.graph]
        self._step_metrics.episode_played(ended.counts, ended.failure, graph)

    def _speaks_messages(self, group: GroupInFlight) -> bool:
        return group.prompt.task in self._speak_messages

    def _has_ended(self, group: GroupInFlight, ended: FinishedEpisode) -> None:
        if is_dropped := group.is_dropped(ended.episode_id):
            self._step_metrics.add("async/cancelled_tokens", ended.num_sampled)
            group.dropped_ended(ended.episode_id)
        if group.is_closed:
            group.drop_late(ended, self._ref_counts)
            self._forget_turns(ended)
            ended.on_retired("dropped")
            return
        if not is_dropped:
            group.ended[ended.episode_id] = ended
        group.settle(self._ref_counts)
        if is_dropped:
            self._forget_turns(ended)
            ended.on_retired("dropped")
            return
        if not ended.failure:
            self._scoring_stage.scores.ended(ended)
        elif ended.failure != ENDED:
            self._end(group.running)

    def _forget_turns(self, ended: FinishedEpisode) -> None:
        self._scoring_stage.scores.forget(ended.episode_id)
        self._ref_counts.release(self._turn_log.end([ended.episode_id]))

    def _end(self, episodes: Sequence[OpenEpisode]) -> None:
        for episode in episodes:
            self._player.end(episode)

    def _close_if_due(self, group: GroupInFlight) -> None:
        if group.is_closed or self._tasks.stopping:
            return
        if group.is_stale or group.failed:
            if not (group.running or group.waits_for_dropped):
                self._remove(group)
                self._give_up(group)
            return
        quorum = self._config.rollout.group_quorum
        wanted = quorum if quorum and group.group_id >= 0 else len(group.episodes)
        if len(group.ended) >= wanted:
            self._close(group)

    def _close(self, group: GroupInFlight) -> None:
        """Close a group with its ended siblings; late siblings continue under another id."""
        group_id, ended, late = group.group_id, group.finished, group.running
        carries = late and self._config.rollout.late_siblings == "carry"
        later = self._buffer.carry(group_id) if carries else None
        if later is not None:
            self._step_metrics.add("async/carried_siblings", len(late))
            group.carry(later, self._ref_counts)
            self._groups[later] = self._groups.pop(group_id)
        else:
            self._step_metrics.add("async/dropped_siblings", len(late))
            group.close(self._ref_counts)
            self._end(late)
            self._remove(group)
        self._scoring_stage.finish(group_id, ended, later)
        self._tasks.notify()

    def _give_up(self, group: GroupInFlight) -> None:
        """A group whose siblings have ended cannot be trained."""
        group_id, ended, failed = group.group_id, group.finished, group.failed
        if group.is_stale:
            self._step_metrics.add("async/cancelled_groups")
            self._step_metrics.add("async/cancelled_tokens", sum(one.num_sampled for one in ended))
            self._ref_counts.release(sealed_uris(ended))
            self._scoring_stage.cancelled(group_id, ended)
            return
        reasons = {one.failure for one in failed}
        own = next((one for one in failed if one.failure not in (LOST, BLOCKED)), failed[0])
        name = group.prompt.name
        error = ScoreError(own.detail if name in own.detail else f"{own.detail}; {name}")
        if reasons <= {LOST, BLOCKED}:
            self._scoring_stage.play_again(group_id, ended, error, counts=LOST in reasons)
        else:
            self._scoring_stage.drop_unscored(group_id, ended, error)

    def _remove(self, group: GroupInFlight) -> None:
        """It has no running episode that is wanted."""
        group.is_closed = True
        group.release()
        del self._groups[group.group_id]
        self._engines.leave(group.home)
        self._tasks.notify()


def _numbered(index: int, count: int) -> list[str]:
    return [f"measure-{index}-{sibling}" for sibling in range(count)]


def _stale(turn: GraphTurn) -> GraphTurn:
    return replace(turn, left_out="stale") if turn.left_out == "ended" else turn
