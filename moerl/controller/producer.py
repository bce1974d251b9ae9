"""Sends groups to engines so that all are busy, and joins replies into whole rollouts.

Each rollout is handled when its own reply comes.  Finished samples of an engine that dies are kept
and its groups continue on another engine; a weight update that interrupts requests leaves partial
rollouts, which are sent again with their tokens so far.  A refused record costs its rollout only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from moerl.config.task_mixture import by_label
from moerl.controller.context import Context
from moerl.controller.engine_pool import CHUNK, EnginePhase, EngineState, PrefixIndex
from moerl.controller.generated import Sealed
from moerl.controller.group_flight import Arrived, GroupFlight
from moerl.controller.rollout_builder import (
    PartialEpisode,
    blob_uris,
    generate,
    own_uris,
    prompt_uris,
    sampling_params,
    sealed_uris,
)
from moerl.controller.scoring_stage import ScoringStage
from moerl.core.errors import EngineError, RecordError, ScoreError
from moerl.core.ids import group_of, name_rollout
from moerl.core.types import Segment

log = logging.getLogger(__name__)

Partials = list[PartialEpisode]


class Producer:
    """Starts groups on engines; passes generated or refused groups to the scoring stage."""

    def __init__(self, context: Context, scoring_stage: ScoringStage) -> None:
        services = context.services
        self._config, self.prompts, self._blobs = context.config, services.prompts, services.blobs
        self._tasks_by_label = by_label(context.config)
        self._sampling = {
            label: sampling_params(entry.sampling, services.model)
            for label, entry in self._tasks_by_label.items()
        }
        self._buffer, self._pool, self._tasks = context.buffer, context.pool, context.tasks
        self._step_metrics, self._ref_counts = context.step_metrics, context.ref_counts
        self._environment, self._scoring_stage = context.environment, scoring_stage
        self.life = 0  # number of earlier controllers; their calls may still seal blobs
        self._orphans: dict[int, Partials] = {}  # groups whose engine died
        self._prefix_index = PrefixIndex()
        self._handed: dict[int, tuple[int, Partials]] = {}  # group -> engine that has its prompt
        self._in_flight = 0  # groups in generation
        self._flights: list[GroupFlight] = []
        self._siblings = context.config.rollout.group_size * context.config.rollout.oversample

    def start(self) -> None:
        for index in self._pool.members:
            self.add(index)

    def add(self, index: int) -> None:
        """Keep a new engine busy until it leaves."""
        self._tasks.spawn(self._produce(index))

    def partials(self) -> Iterator[Sealed]:
        """Episodes of the groups in generation."""
        for partials in (*(flight.partials for flight in self._flights), *self._orphans.values()):
            yield from partials

    def open_episodes(self) -> dict[str, float]:
        """Episodes of agents by what they wait for, as docs/metrics.md names them."""
        return {}

    def wanted(self, engine_step: int) -> int:
        """Groups that an engine serving `engine_step` should still start."""
        if self._buffer.next_step >= self._config.run.steps:
            return 0
        return min(self._buffer.capacity(engine_step), self._still_needed())

    async def measure(self, seconds: float) -> float:
        """Tokens/s of idle engines on fresh prompts, with both replays; the results are dropped."""
        begin, tokens, index = time.monotonic(), 0, 0
        rollout = self._config.rollout

        async def once(engine: int, first: int) -> int:
            prompts = [self.prompts.prompt(first + i) for i in range(rollout.groups_per_request)]
            partials = [
                PartialEpisode(
                    f"measure-{prompt.index}-{j}", prompt, self._sampling[prompt.task], audit=False
                )
                for prompt in prompts
                for j in range(self._siblings)
            ]
            replies, _ = await generate(partials, self._pool.members[engine].calls.ask)
            for uri in blob_uris(*replies):
                self._blobs.delete(uri)
            return sum(p.num_sampled for p in partials)

        while (busy := [e for e in self._pool.members if self._pool.serves(e)]) and (
            time.monotonic() - begin < seconds
        ):
            step = rollout.groups_per_request
            calls = [once(e, index + place * step) for place, e in enumerate(busy)]
            index += len(calls) * step
            tokens += sum(await asyncio.gather(*calls))
        return tokens / (time.monotonic() - begin)

    async def _produce(self, index: int) -> None:
        member = self._pool.members[index]
        while not (self._tasks.stopping or member.leaving):
            groups = self._next_groups(index)
            if groups:
                self._in_flight += len(groups)
                member.generating += len(groups)
                for group_id, partials in groups.items():
                    self._tasks.spawn(self._generate(index, group_id, partials))
                self._tasks.notify()  # another engine may be the least busy one now
                await asyncio.sleep(0)  # thousands may start at once: let other tasks run
            else:
                await self._tasks.wait_change(1.0)
        self._prefix_index.forget(index)

    def _next_groups(self, index: int) -> dict[int, Partials]:
        """Groups to send to an engine now; groups of dead engines come first."""
        if not self._pool.serves(index):
            return {}
        rollout = self._config.rollout
        room = min(rollout.groups_per_request, rollout.max_groups_in_flight - self._in_flight)
        members = self._pool.members
        version = members[index].version
        left = [g for g, ps in self._orphans.items() if all(p.newest <= version for p in ps)]
        if count := min(room, self._pool.share(index, len(left))):
            return {group_id: self._orphans.pop(group_id) for group_id in sorted(left)[:count]}
        mine = [
            group_id
            for group_id, (home, _) in self._handed.items()
            if home == index or home not in members or not self._pool.serves(home)
        ]
        if mine:
            return {group_id: self._handed.pop(group_id)[1] for group_id in sorted(mine)[:room]}
        wanted = self.wanted(version.step)
        if min(room, wanted) <= 0:  # checked first, because computing a share visits all engines
            return {}
        return self._start(index, min(room, self._pool.share(index, wanted)))

    def _start(self, index: int, count: int) -> dict[int, Partials]:
        """Start groups; those whose prompt is cached elsewhere are handed to that engine."""
        groups: dict[int, Partials] = {}
        for _ in range(count):
            group_id = self._buffer.start()
            partials = self._partials(group_id)
            home = self._home(index, partials[0].prompt.token_ids)
            if home == index:
                groups[group_id] = partials
            else:
                self._handed[group_id] = home, partials
                self._step_metrics.routed_groups += 1
        if len(groups) < count:
            self._tasks.notify()
        return groups

    def _home(self, index: int, prompt: Sequence[int]) -> int:
        """The engine with the longest cached prefix; `index` if there is none or it is too busy."""
        rollout, members = self._config.rollout, self._pool.members
        slack = rollout.prefix_slack
        if slack < 0 or len(members) == 1 or rollout.fixed_lag >= 0:  # no prefix routing
            return index
        waiting = Counter(home for home, _ in self._handed.values())
        best, home = max(len(prompt) // 2, CHUNK - 1), index
        for other in (index, *members):  # `index` first, so that it wins ties
            member = members[other]
            busier = member.generating + waiting[other] - members[index].generating
            if not self._pool.serves(other) or member.version < members[index].version:
                continue
            known = self._prefix_index.length(other, member.version, prompt)
            if known > best and busier <= slack:
                best, home = known, other
        return home

    def _still_needed(self) -> int:
        """Groups that the remaining steps can still train; the last steps start no surplus."""
        left = self._config.run.steps - self._buffer.next_step
        return max(0, left * self._config.rollout.groups_per_step - self._buffer.live)

    async def _generate(self, index: int, group_id: int, partials: Partials) -> None:
        """Generate a group on one engine; requests that an update interrupts are resumed there."""
        member = self._pool.members[index]
        self._prefix_index.sent(index, member.version, partials[0].prompt.token_ids)
        flight = GroupFlight(group_id, partials, member.calls, self._ref_counts)
        self._flights.append(flight)
        try:
            self._send(member, flight, [partial for partial in partials if not partial.finished])
            while (arrived := await flight.next()) is not None:
                self._handle(member, flight, *arrived)
                if flight.is_caught_up and self._closes(flight):
                    self._close(flight)
        except ScoreError as error:
            flight.cancel()
            self._scoring_stage.drop_unscored(flight.group_id, flight.partials, error)
            flight.partials = []
        finally:
            self._flights.remove(flight)
            self._leave(member)
        if any(not partial.finished for partial in flight.partials):  # it continues on any engine
            self._orphans[flight.group_id] = flight.partials
            self._tasks.notify()

    def _send(self, member: EngineState, flight: GroupFlight, partials: Partials) -> None:
        """Ask for the next tokens, unless the group continues elsewhere."""
        is_up = member.phase == EnginePhase.UP and member.calls is flight.calls
        if is_up and not (member.leaving and self._pool.interrupts):
            flight.send(partials, member.version.step)

    def _handle(
        self, member: EngineState, flight: GroupFlight, partial: PartialEpisode, reply: Arrived
    ) -> None:
        """A reply of the engine to one rollout, or of the environment."""
        if isinstance(reply, ScoreError):
            raise reply
        if isinstance(reply, EngineError):
            self._rescue(member, reply)
            return
        if isinstance(reply, Segment):
            self._count(partial, reply)
            try:
                partial.add(reply)
            except RecordError as error:
                self._ref_counts.release(own_uris(reply))
                reply = error
        flight.settle()
        if isinstance(reply, RecordError):
            self._replace(member, flight, partial, reply)
        elif partial.listens:
            self._converse(flight, partial)
        elif not partial.finished:
            self._send(member, flight, [partial])

    def _replace(
        self, member: EngineState, flight: GroupFlight, partial: PartialEpisode, error: RecordError
    ) -> None:
        """A record was refused: its rollout is generated again, its siblings are not."""
        self._scoring_stage.refuse_one(flight.group_id, partial.episode_id, error)
        _, sibling = partial.episode_id.split(".")[:2]
        group_id = group_of(partial.episode_id)
        name = name_rollout(group_id, int(sibling), self.life, self._buffer.new_try())
        other = partial.again(name)
        flight.partials[flight.partials.index(partial)] = other
        self._send(member, flight, [other])

    def _count(self, partial: PartialEpisode, reply: Segment) -> None:
        """Call before the reply is added: recomputed tokens depend on the earlier length."""
        self._step_metrics.recomputed_tokens += partial.recomputed(reply)
        self._step_metrics.prompt_tokens += partial.turns[-1].num_fed
        self._step_metrics.cached_tokens += reply.cached_tokens

    def _leave(self, member: EngineState) -> None:
        """A group has left its engine: others may start."""
        self._in_flight -= 1
        member.generating -= 1
        self._tasks.notify()

    def _closes(self, flight: GroupFlight) -> bool:
        """True if the group may close; a group of late siblings waits for all of them."""
        quorum = self._config.rollout.group_quorum
        wanted = quorum if quorum and flight.group_id >= 0 else len(flight.partials)
        return 0 < wanted <= sum(partial.finished for partial in flight.partials)

    def _close(self, flight: GroupFlight) -> None:
        """Close a group with its finished siblings; late ones continue under another id."""
        group_id, partials = flight.group_id, flight.partials
        late = [partial for partial in partials if not partial.finished]
        done = [partial for partial in partials if partial.finished]
        kept, theirs = sealed_uris(done), sealed_uris(late)
        carries = late and self._config.rollout.late_siblings == "carry"
        later = self._buffer.carry(group_id) if carries else None
        if later is None:
            flight.partials = []
            flight.cancel()
            self._step_metrics.dropped_siblings += len(late)
            self._ref_counts.release(theirs - kept)
        else:
            self._step_metrics.carried_siblings += len(late)
            self._ref_counts.share(theirs & kept)
            flight.group_id, flight.partials = later, late
            flight.lease(prompt_uris(done) - theirs)
        self._scoring_stage.finish(group_id, done, later)

    def _converse(self, flight: GroupFlight, partial: PartialEpisode) -> None:
        """Get the environment's reply to an ended turn, or end the episode."""
        flight.listen(partial)

        async def answer() -> None:
            told: Arrived = None
            try:
                await self._environment.answer(partial)
            except ScoreError as error:
                told = error
            flight.arrive(partial.episode_id, told)

        self._tasks.spawn(answer())

    def _rescue(self, member: EngineState, error: EngineError) -> None:
        """A request failed with its engine: its group continues on any engine."""
        if not self._config.supervision.max_restarts:
            raise error
        for index, other in self._pool.members.items():
            if other is member and member.phase == EnginePhase.UP:
                log.warning("engine %d failed, its groups continue elsewhere: %s", index, error)
                self._pool.rest(index)

    def cancel_stale(self) -> None:
        """Stop generating groups with tokens that are too old for the next step to come."""
        rollout, step = self._config.rollout, self._buffer.next_step
        limit = rollout.max_lag if rollout.cancel_lag < 0 else rollout.cancel_lag
        through = rollout.in_flight_mode in ("in_place", "retract")
        for flight in list(self._flights):
            oldest = flight.oldest_step(runs_through_updates=through)
            if oldest is not None and step - oldest > limit:
                self._cancel(flight)

    def _cancel(self, flight: GroupFlight) -> None:
        metrics = self._step_metrics
        metrics.cancelled_groups += 1
        metrics.cancelled_tokens += sum(partial.num_sampled for partial in flight.partials)

        def count(tokens: int) -> None:
            self._step_metrics.cancelled_tokens += tokens

        flight.cancel(count)
        self._ref_counts.release(sealed_uris(flight.partials))
        self._scoring_stage.cancelled(flight.group_id, flight.partials)
        flight.partials = []

    def _partials(self, group_id: int) -> Partials:
        prompt = self.prompts.prompt(group_id)
        tries = self._buffer.tries.pop(group_id, 0)
        prompt_ids = np.asarray(prompt.token_ids, np.int32)
        return [
            PartialEpisode(
                name_rollout(group_id, sibling, self.life, tries),
                prompt,
                self._sampling[prompt.task],
                audit=self._config.replay.audit,
                max_turns=self._tasks_by_label[prompt.task].max_turns,
                slice_tokens=self._config.rollout.slice_tokens,
                prompt_ids=prompt_ids,
            )
            for sibling in range(self._siblings)
        ]
