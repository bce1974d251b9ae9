"""Produce: keep every engine busy with groups, and join what it returns into whole rollouts.

What an engine had finished of a group when it died is kept and goes on elsewhere; a weight update
that interrupts a call leaves partial rollouts, which are sent again as they are.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from moerl.blob import BlobStore
from moerl.config import Config
from moerl.errors import EngineError, RecordError, ScoreError
from moerl.rollout.buffer import GroupBuffer
from moerl.rollout.episodes import Environment, PartialEpisode
from moerl.rollout.fleet import Fleet, Member
from moerl.rollout.ledger import Ledger
from moerl.rollout.loops import Loops
from moerl.types import Prompt, SamplingParams, Segment

log = logging.getLogger(__name__)

Partials = list[PartialEpisode]


class PromptSource(Protocol):
    """An endless, deterministic stream (`moerl.data.tasks.PromptStream`)."""

    def prompt(self, index: int) -> Prompt: ...


class Producer:
    """Starts groups on engines; hands whole ones to `on_finished`, refused ones to `on_refused`."""

    def __init__(
        self,
        config: Config,
        sampling: SamplingParams,
        prompts: PromptSource,
        buffer: GroupBuffer,
        fleet: Fleet,
        loops: Loops,
        ledger: Ledger,
        *,
        blobs: BlobStore,
        environment: Environment,
        on_finished: Callable[[int, Partials], None],
        on_unscored: Callable[[int, Partials, ScoreError], None],
        on_refused: Callable[[int, Partials, RecordError], None],
    ) -> None:
        self.config, self.sampling, self.prompts = config, sampling, prompts
        self._buffer, self._fleet, self._loops = buffer, fleet, loops
        self._ledger = ledger
        self._blobs = blobs
        self._environment, self._on_unscored = environment, on_unscored
        self._on_finished, self._on_refused = on_finished, on_refused
        self.life = 0  # controllers before this one: their calls may still seal blobs
        self._orphans: dict[int, Partials] = {}  # groups whose engine died
        self._in_flight = 0  # groups in a call
        self._calls: list[dict[int, Partials]] = []  # what each call still has
        self._turn = asyncio.Lock()  # an update interrupts thousands of calls: one after another
        self._siblings = config.rollout.group_size * config.rollout.oversample

    def start(self) -> None:
        for index in self._fleet.members:
            self.add(index)

    def add(self, index: int) -> None:
        """Keep an engine that joined busy, until it leaves."""
        self._loops.spawn(self._produce(index))

    def partials(self) -> Iterator[PartialEpisode]:
        """Of the groups in generation."""
        for groups in (*self._calls, self._orphans):
            for partials in groups.values():
                yield from partials

    def wanted(self, engine_step: int) -> int:
        """Groups that an engine serving `engine_step` should still start."""
        if self._buffer.next_step >= self.config.run.steps:
            return 0
        return min(self._buffer.capacity(engine_step), self._still_needed())

    async def measure(self, seconds: float, blobs: BlobStore) -> float:
        """Tokens/s of idle engines on fresh prompts, both replays on; nothing is kept."""
        begin, tokens, index = time.monotonic(), 0, 0
        rollout = self.config.rollout

        async def once(engine: int, first: int) -> int:
            partials = [
                PartialEpisode(
                    f"measure-{first + i}-{j}",
                    self.prompts.prompt(first + i),
                    self.sampling,
                    audit=False,
                )
                for i in range(rollout.groups_per_request)
                for j in range(self._siblings)
            ]
            member = self._fleet.members[engine]
            replies = await member.engine.generate([p.request() for p in partials])
            _join(partials, replies)
            for uri in (uri for p in partials for uri in p.blob_uris()):
                blobs.delete(uri)
            return sum(p.num_sampled for p in partials)

        while (busy := [e for e in self._fleet.members if self._fleet.serves(e)]) and (
            time.monotonic() - begin < seconds
        ):
            step = rollout.groups_per_request
            calls = [once(e, index + place * step) for place, e in enumerate(busy)]
            index += len(calls) * step
            tokens += sum(await asyncio.gather(*calls))
        return tokens / (time.monotonic() - begin)

    async def _produce(self, index: int) -> None:
        member = self._fleet.members[index]
        while not (self._loops.stopping or member.leaving):
            groups = self._next_groups(index)
            if groups:
                self._in_flight += len(groups)
                member.generating += len(groups)
                self._loops.spawn(self._generate(index, groups))
                self._loops.notify()  # another engine may be the least busy one now
                await asyncio.sleep(0)  # thousands may start at once: others must get a turn
            else:
                await self._loops.wait_change(1.0)

    def _next_groups(self, index: int) -> dict[int, Partials]:
        """Groups to send to an engine now: those that a dead engine left behind come first."""
        if not self._fleet.serves(index):
            return {}
        rollout = self.config.rollout
        room = min(rollout.groups_per_request, rollout.max_groups_in_flight - self._in_flight)
        version = self._fleet.members[index].version
        left = [g for g, ps in self._orphans.items() if all(p.newest <= version for p in ps)]
        if left:
            return {group_id: self._orphans.pop(group_id) for group_id in sorted(left)[:room]}
        if not self._fleet.is_least_busy(index):
            return {}
        count = max(0, min(room, self.wanted(version.step)))
        return {(group_id := self._buffer.start()): self._partials(group_id) for _ in range(count)}

    def _still_needed(self) -> int:
        """Groups that the remaining steps can still train; the last steps start no surplus."""
        left = self.config.run.steps - self._buffer.next_step
        return max(0, left * self.config.rollout.groups_per_step - self._buffer.live)

    async def _generate(self, index: int, groups: dict[int, Partials]) -> None:
        """Generate groups in one engine call, resuming what a weight update interrupts."""
        member = self._fleet.members[index]
        left = len(groups)  # of what this call counts as in flight
        self._calls.append(groups)
        try:
            while groups:
                pending = [p for group in groups.values() for p in group if not p.finished]
                try:
                    replies = await self._ask(index, pending)
                except EngineError as error:
                    self._rescue(index, groups, error)
                    return
                self._ledger.recomputed_tokens += sum(map(_recomputed, pending, replies))
                refused = _join(pending, replies)
                for group_id in refused:
                    self._on_refused(group_id, groups.pop(group_id), refused[group_id])
                await self._converse(groups)
                for group_id in [g for g, partials in groups.items() if self._closes(partials)]:
                    self._close(group_id, groups.pop(group_id))
                self._leave(member, left - len(groups))
                left = len(groups)
                if (
                    member.leaving and self._fleet.interrupts
                ):  # what it was interrupted in goes on elsewhere
                    self._orphans |= groups
                    return
        finally:
            self._calls = [call for call in self._calls if call is not groups]
            self._leave(member, left)

    def _leave(self, member: Member, count: int) -> None:
        """Groups are no longer in a call: others may start."""
        self._in_flight -= count
        member.generating -= count
        if count:
            self._loops.notify()

    def _closes(self, partials: Partials) -> bool:
        quorum = self.config.rollout.group_quorum or len(partials)
        return sum(partial.finished for partial in partials) >= quorum

    def _close(self, group_id: int, partials: Partials) -> None:
        """A group ends with those of its siblings that are done."""
        late = [partial for partial in partials if not partial.finished]
        self._ledger.dropped_siblings += len(late)
        done = [partial for partial in partials if partial.finished]
        kept = {uri for partial in done for uri in partial.blob_uris()}
        for uri in {uri for partial in late for uri in partial.blob_uris()} - kept:
            self._blobs.delete(uri)
        self._on_finished(group_id, done)

    async def _ask(self, index: int, pending: Partials) -> Sequence[Segment | RecordError]:
        """One engine call.  Raises EngineError: it failed, was late, or answered something else."""
        limit_s = self.config.rollout.request_timeout_s
        async with self._turn:
            await asyncio.sleep(0)
            requests = [p.request() for p in pending]
        try:
            async with asyncio.timeout(limit_s):
                replies = await self._fleet.engine(index).generate(requests)
        except TimeoutError as error:
            raise EngineError(
                f"engine {index} did not answer {len(requests)} requests within "
                f"rollout.request_timeout_s = {limit_s:g} s"
            ) from error
        if len(replies) != len(requests):
            raise EngineError(f"engine {index}: {len(replies)} replies to {len(requests)} requests")
        return replies

    async def _converse(self, groups: dict[int, Partials]) -> None:
        """Where a turn ended the environment answers, or ends the episode; all at once."""

        async def answer(group_id: int, partials: Partials) -> None:
            listening = [partial for partial in partials if partial.listens]
            try:
                await asyncio.gather(*map(self._environment.answer, listening))
            except ScoreError as error:
                self._on_unscored(group_id, groups.pop(group_id), error)

        await asyncio.gather(*(answer(*item) for item in list(groups.items())))

    def _rescue(self, index: int, groups: dict[int, Partials], error: EngineError) -> None:
        """Keep what an engine had finished; another engine, or the same one later, goes on."""
        if not self.config.supervision.max_restarts:
            raise error
        log.warning("engine %d failed, %d groups go on elsewhere: %s", index, len(groups), error)
        self._orphans |= groups
        self._fleet.rest(index)

    def _partials(self, group_id: int) -> Partials:
        prompt = self.prompts.prompt(group_id)
        # blobs of an earlier try, of this controller or of one that died, may still exist
        tries = self.life, self._buffer.redone[group_id]
        return [
            PartialEpisode(
                f"{group_id}.{sibling}" + (".r{}-{}".format(*tries) if any(tries) else ""),
                prompt,
                self.sampling,
                audit=self.config.replay.audit,
                max_turns=self.config.task.max_turns,
                slice_tokens=self.config.rollout.slice_tokens,
            )
            for sibling in range(self._siblings)
        ]


def _recomputed(partial: PartialEpisode, reply: Segment | RecordError) -> int:
    return 0 if isinstance(reply, RecordError) else partial.recomputed(reply)


def _join(pending: Partials, replies: Sequence[Segment | RecordError]) -> dict[int, RecordError]:
    """Add each reply to its partial; returns the groups that hold a refused record."""
    refused: dict[int, RecordError] = {}
    for partial, reply in zip(pending, replies, strict=True):
        try:
            if isinstance(reply, RecordError):
                raise reply
            partial.add(reply)
        except RecordError as error:
            refused[partial.prompt.index] = error
    return refused
