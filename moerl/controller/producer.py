"""Sends groups to engines so that all are busy, and joins replies into whole rollouts.

Finished samples of an engine that dies are kept and its groups continue on another engine; a weight
update that interrupts a call leaves partial rollouts, which are sent again with their tokens so
far.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from moerl.controller.context import Context
from moerl.controller.engine_pool import CHUNK, EngineState, PrefixIndex
from moerl.controller.rollout_builder import (
    PartialEpisode,
    Replies,
    blob_uris,
    generate,
    sampling_params,
)
from moerl.controller.scoring_stage import ScoringStage
from moerl.errors import EngineError, RecordError, ScoreError
from moerl.types import GenerateRequest, Segment, name_rollout

log = logging.getLogger(__name__)

Partials = list[PartialEpisode]


class Producer:
    """Starts groups on engines; passes generated or refused groups to the scoring stage."""

    def __init__(self, context: Context, scoring_stage: ScoringStage) -> None:
        services = context.services
        self._config, self.prompts, self._blobs = context.config, services.prompts, services.blobs
        self._sampling = sampling_params(context.config.sampling, services.model)
        self._buffer, self._pool, self._tasks = context.buffer, context.pool, context.tasks
        self._step_metrics, self._ref_counts = context.step_metrics, context.ref_counts
        self._environment, self._scoring_stage = context.environment, scoring_stage
        self.life = 0  # number of earlier controllers; their calls may still seal blobs
        self._orphans: dict[int, Partials] = {}  # groups whose engine died
        self._prefix_index = PrefixIndex()
        self._handed: dict[int, tuple[int, Partials]] = {}  # group -> engine that has its prompt
        self._in_flight = 0  # groups in a call
        self._calls: list[dict[int, Partials]] = []  # unfinished groups of each call
        self._turn = asyncio.Lock()  # an update interrupts thousands of calls: handle one at a time
        self._siblings = context.config.rollout.group_size * context.config.rollout.oversample

    def start(self) -> None:
        for index in self._pool.members:
            self.add(index)

    def add(self, index: int) -> None:
        """Keep a new engine busy until it leaves."""
        self._tasks.spawn(self._produce(index))

    def partials(self) -> Iterator[PartialEpisode]:
        """Rollouts of the groups in generation."""
        for groups in (*self._calls, self._orphans):
            for partials in groups.values():
                yield from partials

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
            partials = [
                PartialEpisode(
                    f"measure-{first + i}-{j}",
                    self.prompts.prompt(first + i),
                    self._sampling,
                    audit=False,
                )
                for i in range(rollout.groups_per_request)
                for j in range(self._siblings)
            ]
            replies, _ = await generate(partials, self._pool.members[engine].engine.generate)
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
                self._tasks.spawn(self._generate(index, groups))
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
        if left:
            return {group_id: self._orphans.pop(group_id) for group_id in sorted(left)[:room]}
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

    async def _generate(self, index: int, groups: dict[int, Partials]) -> None:
        """Generate groups in one engine call; resume them after weight updates."""
        member = self._pool.members[index]
        for partials in groups.values():
            self._prefix_index.sent(index, member.version, partials[0].prompt.token_ids)
        left = len(groups)  # groups of this call counted as in flight
        self._calls.append(groups)
        try:
            while groups:
                try:
                    refused = await self._ask(index, groups)
                except EngineError as error:
                    self._rescue(index, groups, error)
                    return
                for group_id in refused:
                    self._scoring_stage.refuse(group_id, groups.pop(group_id), refused[group_id])
                await self._converse(groups)
                for group_id in [g for g, partials in groups.items() if self._closes(g, partials)]:
                    groups |= self._close(group_id, groups.pop(group_id))
                self._leave(member, left - len(groups))
                left = len(groups)
                if member.leaving and self._pool.interrupts:  # groups continue on another engine
                    self._orphans |= groups
                    return
        finally:
            self._calls = [call for call in self._calls if call is not groups]
            self._leave(member, left)

    def _count(self, pending: Partials, replies: Replies) -> None:
        """Call before the replies are added: recomputed tokens depend on the earlier length."""
        for partial, reply in zip(pending, replies, strict=True):
            if isinstance(reply, Segment):
                self._step_metrics.recomputed_tokens += partial.recomputed(reply)
                self._step_metrics.prompt_tokens += partial.turns[-1].num_fed
                self._step_metrics.cached_tokens += reply.cached_tokens

    def _leave(self, member: EngineState, count: int) -> None:
        """Groups have left a call: others may start."""
        self._in_flight -= count
        member.generating -= count
        if count:
            self._tasks.notify()

    def _closes(self, group_id: int, partials: Partials) -> bool:
        """True if the group may close; a group of late siblings waits for all of them."""
        quorum = self._config.rollout.group_quorum
        wanted = quorum if quorum and group_id >= 0 else len(partials)
        return sum(partial.finished for partial in partials) >= wanted

    def _close(self, group_id: int, partials: Partials) -> dict[int, Partials]:
        """Close a group with its finished siblings; returns the late ones under their new id.

        They continue in the same call.
        """
        late = [partial for partial in partials if not partial.finished]
        done = [partial for partial in partials if partial.finished]
        kept = {uri for partial in done for uri in partial.blob_uris()}
        theirs = {uri for partial in late for uri in partial.blob_uris()}
        carries = late and self._config.rollout.late_siblings == "carry"
        later = self._buffer.carry(group_id) if carries else None
        if later is None:
            self._step_metrics.dropped_siblings += len(late)
            self._ref_counts.release(theirs - kept)
        else:
            self._step_metrics.carried_siblings += len(late)
            self._ref_counts.share(theirs & kept)
        self._scoring_stage.finish(group_id, done, later)
        return {} if later is None else {later: late}

    async def _ask(self, index: int, groups: dict[int, Partials]) -> dict[int, RecordError]:
        """One engine call.  Returns the groups that hold a refused record; raises EngineError."""
        pending = [p for group in groups.values() for p in group if not p.finished]
        owners = [g for g, group in groups.items() for p in group if not p.finished]

        async def call(requests: Sequence[GenerateRequest]) -> Replies:
            limit_s, release = self._config.rollout.request_timeout_s, self._ref_counts.release
            replies = await self._pool.generate(index, requests, limit_s, release)
            self._count(pending, replies)
            return replies

        async with self._turn:
            await asyncio.sleep(0)
        replies, refused = await generate(pending, call)
        self._ref_counts.release(blob_uris(*(replies[place] for place in refused)))
        return {owners[place]: error for place, error in refused.items()}

    async def _converse(self, groups: dict[int, Partials]) -> None:
        """Get the environment's replies for ended turns, or end the episodes; all at once."""

        async def answer(group_id: int, partials: Partials) -> None:
            listening = [partial for partial in partials if partial.listens]
            try:
                await asyncio.gather(*map(self._environment.answer, listening))
            except ScoreError as error:
                self._scoring_stage.drop_unscored(group_id, groups.pop(group_id), error)

        await asyncio.gather(*(answer(*item) for item in list(groups.items())))

    def _rescue(self, index: int, groups: dict[int, Partials], error: EngineError) -> None:
        """Keep finished samples of a failed engine; its groups continue on any engine."""
        if not self._config.supervision.max_restarts:
            raise error
        log.warning("engine %d failed, %d groups continue elsewhere: %s", index, len(groups), error)
        self._orphans |= groups
        self._pool.rest(index)

    def _partials(self, group_id: int) -> Partials:
        prompt = self.prompts.prompt(group_id)
        tries = self._buffer.tries.pop(group_id, 0)
        prompt_ids = np.asarray(prompt.token_ids, np.int32)
        return [
            PartialEpisode(
                name_rollout(group_id, sibling, self.life, tries),
                prompt,
                self._sampling,
                audit=self._config.replay.audit,
                max_turns=self._config.task.max_turns,
                slice_tokens=self._config.rollout.slice_tokens,
                prompt_ids=prompt_ids,
            )
            for sibling in range(self._siblings)
        ]
