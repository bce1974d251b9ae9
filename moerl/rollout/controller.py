"""The controller: three loops (produce, score, learn) around one bounded buffer and one version.

It sees headers only.  Routes, masks, logits and weights go point to point; the controller starts
requests, joins segments, admits scored groups, plans steps, and passes the control messages of a
weight update on to the engines.  One process, one event loop, one writer of versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from moerl.blob import BlobStore
from moerl.config import Config
from moerl.data.batching import plan_batch
from moerl.errors import (
    ConfigError,
    EngineError,
    MoerlError,
    ProtocolError,
    RecordError,
    ScoreError,
    TrainerError,
)
from moerl.protocols import (
    AbortUpdate,
    AskEngine,
    CloseUpdate,
    CommitUpdate,
    Engine,
    EngineHolds,
    EngineStatus,
    Failed,
    Hello,
    JoinSync,
    Message,
    Ok,
    OpenUpdate,
    Plan,
    PrepareUpdate,
    Refresh,
    RelayUpdate,
    Scorer,
    SessionMessage,
    StepDone,
    Stop,
    TakePlan,
    UpdateClosed,
    VerifyUpdate,
    encode_value,
)
from moerl.rollout.assemble import PartialRollout, blob_uris
from moerl.rollout.buffer import GroupBuffer
from moerl.rollout.history import History
from moerl.rollout.ledger import Ledger
from moerl.types import (
    Episode,
    EpisodeGroup,
    PolicyVersion,
    Prompt,
    SamplingParams,
    Score,
    Turn,
    check,
)

log = logging.getLogger(__name__)

_MAX_ATTEMPTS = 3  # times one group may be refused before the run stops
_ENGINE_PAUSE_S = 2.0  # before an engine that failed a call and did not die is used again
_MAX_SCORE_ERRORS = 32  # scoring failures in a row before the run stops, whatever the policy


class PromptSource(Protocol):
    """An endless, deterministic stream (`moerl.data.tasks.PromptStream`)."""

    def prompt(self, index: int) -> Prompt: ...


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the door check needs to know of the model."""

    vocab_size: int
    num_moe_layers: int
    top_k_experts: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StepReport:
    """One finished optimizer step, for metrics.jsonl, the panel and the report."""

    step: int
    version: PolicyVersion
    metrics: dict[str, float]
    samples: list[dict[str, object]]


class Controller:
    """Plain class; `moerl.launch` puts it on an actor."""

    def __init__(
        self,
        config: Config,
        *,
        facts: ModelFacts,
        engines: Sequence[Engine],
        scorer: Scorer,
        prompts: PromptSource,
        decode: Callable[[Sequence[int]], str],
        blobs: BlobStore,
        records: Path | None,
        on_step: Callable[[StepReport], None],
        on_rewind: Callable[[int], None],
    ) -> None:
        """records: where headers of trained groups go, or None to drop them and their blobs.

        on_rewind: a restarted trainer goes on from this step; rows of later ones are void.
        """
        self.config, self.facts = config, facts
        self.engines, self.scorer = list(engines), scorer
        self.prompts, self.decode, self.blobs = prompts, decode, blobs
        self.records, self.on_step, self.on_rewind = records, on_step, on_rewind
        rollout = config.rollout
        self.buffer = GroupBuffer(
            rollout.groups_per_step,
            rollout.max_lag,
            rollout.buffer_depth,
            selection=rollout.selection,
        )
        self.ledger = Ledger()
        self.sampling = SamplingParams(
            max_new_tokens=config.sampling.max_new_tokens,
            temperature=config.sampling.temperature,
            top_p=config.sampling.top_p,
            top_k=config.sampling.top_k,
            min_p=config.sampling.min_p,
            stop_token_ids=facts.stop_token_ids,
            ignore_eos=config.sampling.ignore_eos,
        )
        self._versions = [PolicyVersion(0, 0)] * len(engines)
        self._incarnation: int | None = None  # unknown until the trainer says hello
        self._history = History()
        self._down: set[int] = set()  # engines that get no requests
        self._lost: set[int] = set()  # of them, those whose process is being started again
        self._stale: set[int] = set()  # engines that came back and were not published to yet
        self._suspended: set[int] = set()  # of those down, the ones that a commit brings back
        self._orphans: dict[int, list[PartialRollout]] = {}  # groups whose engine died
        self._engines_up = asyncio.Event()
        self._planned: dict[int, list[EpisodeGroup]] = {}
        self._in_flight = 0
        self._generating = [0] * len(engines)  # groups in a call, by engine
        self._draining = [False] * len(engines)
        self._finishing = 0  # groups being scored
        self._dropped = 0  # groups of equal rewards since the last plan
        self._score_errors = 0  # in a row
        self._attempts: dict[int, int] = {}
        self._stopping = False
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # --- life -------------------------------------------------------------------------------
    async def run(self) -> None:
        """Produce until `stop`; raises the first failure of any loop or of the trainer."""
        for index in range(len(self.engines)):
            self._spawn(self._produce(index))
        await self._failure

    def engines_started(self) -> None:
        """The trainer's hello is answered from here on: it may publish and ask for plans."""
        self._engines_up.set()

    def engine_lost(self, index: int) -> None:
        """The engine died and is started again: nothing is sent to it until `engine_back`."""
        self._down.add(index)
        self._lost.add(index)
        self._stale.discard(index)

    def engine_back(self, index: int, engine: Engine) -> None:
        """The engine serves the model folder; it gets requests once it was published to."""
        self.engines[index] = engine
        self._versions[index] = PolicyVersion(0, 0)
        self._draining[index] = False
        self._down.discard(index)
        self._lost.discard(index)
        self._suspended.discard(index)
        self._stale.add(index)
        self.ledger.engine_restarts += 1
        self._notify()

    async def stop(self) -> None:
        self._stopping = True
        if not self._failure.done():
            self._failure.set_result(None)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def status(self) -> dict[str, float]:
        """For the live panel, between steps; names of docs/metrics.md."""
        return {
            "async/buffer_depth": float(self.buffer.num_ready),
            "async/in_flight": float(self.buffer.num_started * self.config.rollout.group_size),
        } | {f"refused/{reason}": float(n) for reason, n in self.ledger.refused.items()}

    async def measure_engines(self, seconds: float) -> float:
        """Tokens/s of idle engines on fresh prompts, both replays on; nothing is kept."""
        begin, tokens, index = time.monotonic(), 0, 0

        async def once(engine: int, first: int) -> int:
            partials = [
                PartialRollout(
                    f"measure-{first + i}-{j}",
                    self.prompts.prompt(first + i),
                    self.sampling,
                    audit=False,
                )
                for i in range(self.config.rollout.groups_per_request)
                for j in range(self.config.rollout.group_size)
            ]
            replies = await self.engines[engine].generate([p.request() for p in partials])
            self._join(partials, replies)
            for uri in (uri for p in partials for uri in p.blob_uris()):
                self.blobs.delete(uri)
            return sum(p.num_sampled for p in partials)

        while time.monotonic() - begin < seconds:
            step = self.config.rollout.groups_per_request
            calls = [once(e, index + e * step) for e in range(len(self.engines))]
            index += len(calls) * step
            tokens += sum(await asyncio.gather(*calls))
        return tokens / (time.monotonic() - begin)

    def _spawn(self, work: Awaitable[None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                log.exception("controller loop failed")
                self._fail(error)

        task = asyncio.get_running_loop().create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    def _notify(self) -> None:
        """Wake everybody who waits for a change: each wait holds the event it began with."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_change(self, timeout_s: float) -> None:
        event = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await event.wait()

    # --- produce ----------------------------------------------------------------------------
    async def _produce(self, index: int) -> None:
        while not self._stopping:
            groups = self._next_groups(index)
            if groups:
                self._in_flight += len(groups)
                self._generating[index] += len(groups)
                self._spawn(self._generate(index, groups))
            else:
                await self._wait_change(1.0)

    def _next_groups(self, index: int) -> dict[int, list[PartialRollout]]:
        """Groups to send to an engine now: those that a dead engine left behind come first."""
        if not self._serves(index):
            return {}
        rollout = self.config.rollout
        room = min(rollout.groups_per_request, rollout.max_groups_in_flight - self._in_flight)
        version = self._versions[index]
        left = [g for g, ps in self._orphans.items() if all(p.newest <= version for p in ps)]
        if left:
            return {group_id: self._orphans.pop(group_id) for group_id in sorted(left)[:room]}
        count = max(0, min(room, self._wanted(version.step)))
        return {(group_id := self.buffer.start()): self._partials(group_id) for _ in range(count)}

    def _serves(self, index: int) -> bool:
        """Whether an engine may be sent requests: it is up, and on weights of this history."""
        if index in self._down or self._draining[index]:
            return False
        return self._versions[index].incarnation == self._incarnation

    def _wanted(self, engine_step: int) -> int:
        """Groups that an engine serving `engine_step` should still start."""
        if self.buffer.next_step >= self.config.run.steps:
            return 0
        return min(self.buffer.capacity(engine_step), self._still_needed())

    def _still_needed(self) -> int:
        """Groups that the remaining steps can still train; the last steps start no surplus."""
        left = self.config.run.steps - self.buffer.next_step
        return max(0, left * self.config.rollout.groups_per_step - self.buffer.live)

    async def _generate(self, index: int, groups: dict[int, list[PartialRollout]]) -> None:
        """Generate groups in one engine call, resuming what a weight update interrupts."""
        count = len(groups)
        try:
            while groups:
                pending = [p for group in groups.values() for p in group if not p.finished]
                try:
                    replies = await self.engines[index].generate([p.request() for p in pending])
                except EngineError as error:
                    self._rescue(index, groups, error)
                    return
                refused = self._join(pending, replies)
                for group_id in refused:
                    await self._refuse(group_id, groups.pop(group_id), refused[group_id])
                for group_id in [g for g, ps in groups.items() if all(p.finished for p in ps)]:
                    self._spawn(self._finish(group_id, groups.pop(group_id)))
        finally:
            self._in_flight -= count
            self._generating[index] -= count
            self._notify()

    def _rescue(
        self, index: int, groups: dict[int, list[PartialRollout]], error: EngineError
    ) -> None:
        """Keep what an engine had finished; another engine, or the same one later, goes on."""
        if not self.config.supervision.max_restarts:
            raise error
        log.warning("engine %d failed, %d groups go on elsewhere: %s", index, len(groups), error)
        self._orphans |= groups
        self._down.add(index)
        self._spawn(self._try_again(index))

    async def _try_again(self, index: int) -> None:
        """An engine that failed one call without dying is used again after a while."""
        await asyncio.sleep(_ENGINE_PAUSE_S)
        if index not in self._lost | self._suspended:
            self._down.discard(index)
            self._notify()

    def _partials(self, group_id: int) -> list[PartialRollout]:
        prompt = self.prompts.prompt(group_id)
        redone = self.buffer.redone[group_id]  # blobs of an earlier try may still exist
        return [
            PartialRollout(
                f"{group_id}.{sibling}" + (f".r{redone}" if redone else ""),
                prompt,
                self.sampling,
                audit=self.config.replay.audit,
            )
            for sibling in range(self.config.rollout.group_size)
        ]

    @staticmethod
    def _join(pending: list[PartialRollout], replies: Sequence[object]) -> dict[int, RecordError]:
        """Add each reply to its partial; returns the groups that hold a refused record."""
        refused: dict[int, RecordError] = {}
        for partial, reply in zip(pending, replies, strict=True):
            try:
                if isinstance(reply, RecordError):
                    raise reply
                partial.add(reply)  # type: ignore[arg-type]
            except RecordError as error:
                refused[partial.prompt.index] = error
        return refused

    # --- score and admit ----------------------------------------------------------------------
    async def _finish(self, group_id: int, partials: list[PartialRollout]) -> None:
        self._finishing += 1
        try:
            await self._check_and_score(group_id, partials)
        finally:
            self._finishing -= 1
            self._notify()

    async def _check_and_score(self, group_id: int, partials: list[PartialRollout]) -> None:
        try:
            rollouts = [p.rollout() for p in partials]
            for rollout in rollouts:
                check(
                    rollout,
                    vocab_size=self.facts.vocab_size,
                    num_moe_layers=self.facts.num_moe_layers
                    if self.config.replay.routing != "off"
                    else 0,
                    top_k_experts=self.facts.top_k_experts,
                )
        except RecordError as error:
            await self._refuse(group_id, partials, error)
            return
        prompt = partials[0].prompt
        episodes = [
            Episode(f"{group_id}.{i}", (Turn(rollout),)) for i, rollout in enumerate(rollouts)
        ]
        texts = [self.decode(r.token_ids[r.prompt_len :].tolist()) for r in rollouts]
        try:
            scores = await self.scorer.score(prompt, episodes, texts)
        except ScoreError as error:
            self._drop_unscored(group_id, partials, error)
            return
        self._score_errors = 0
        if self._drops_equal(scores):
            self._discard(group_id, partials)
            return
        scored = tuple(
            Episode(episode.episode_id, episode.turns, score)
            for episode, score in zip(episodes, scores, strict=True)
        )
        self._attempts.pop(group_id, None)
        group = EpisodeGroup(group_id, prompt, scored)
        if self._history.holds_all(group):
            self.buffer.admit(group)
        else:
            self._drop_branch(group)
            self.buffer.abandon(group_id)

    def _drop_unscored(
        self, group_id: int, partials: list[PartialRollout], error: ScoreError
    ) -> None:
        """Another group takes its place, if so configured and if scoring works at all."""
        self._score_errors += 1
        task = self.config.task
        if task.on_score_error == "stop" or self._score_errors >= _MAX_SCORE_ERRORS:
            raise ConfigError("task.reward", task.reward or task.name, str(error)) from error
        self.ledger.score_failures += 1
        log.warning("group %d is dropped: %s", group_id, error)
        self._discard(group_id, partials)

    def _drops_equal(self, scores: Sequence[Score]) -> bool:
        """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): equal rewards teach nothing.

        Bounded, so that a task that is solved, or hopeless, goes on instead of starving.
        """
        rollout = self.config.rollout
        if not rollout.drop_zero_variance or len({score.reward for score in scores}) > 1:
            return False
        if self._dropped >= rollout.max_drop_batches * rollout.groups_per_step:
            return False
        self._dropped += 1
        self.ledger.dropped_zero_variance += 1
        return True

    def _discard(self, group_id: int, partials: list[PartialRollout]) -> None:
        for partial in partials:
            for uri in partial.blob_uris():
                self.blobs.delete(uri)
        self._attempts.pop(group_id, None)
        self.buffer.discard(group_id)

    async def _refuse(
        self, group_id: int, partials: list[PartialRollout], error: RecordError
    ) -> None:
        """Count the refusal and generate the group again; three times in a row ends the run."""
        self.ledger.refused[error.reason] += 1
        log.warning("group %d: %s", group_id, error)
        for partial in partials:
            for uri in partial.blob_uris():
                self.blobs.delete(uri)
        self._attempts[group_id] = self._attempts.get(group_id, 0) + 1
        if self._attempts[group_id] >= _MAX_ATTEMPTS:
            raise EngineError(f"group {group_id} was refused {_MAX_ATTEMPTS} times; last: {error}")
        self.buffer.abandon(group_id)
        self._notify()

    # --- learn: the trainer's messages ----------------------------------------------------------
    async def handle(self, message: Message) -> Message:
        """Answer one message of the trainer.  Raises MoerlError; the server replies Refused."""
        match message:
            case Hello():
                return await self._hello(message)
            case TakePlan():
                return await self._take_plan(message)
            case StepDone():
                return await self._step_done(message)
            case JoinSync():
                await self._up(message.engine).join_sync(message)
                return Ok()
            case OpenUpdate():
                await self._settle(message.engine)
                await self._up(message.engine).open_update(message)
                return Ok()
            case CloseUpdate():
                return await self._close_update(message)
            case (
                PrepareUpdate()
                | VerifyUpdate()
                | RelayUpdate()
                | CommitUpdate()
                | AbortUpdate()
                | AskEngine()
            ):
                return await self._session(message)
            case Failed():
                error = TrainerError(f"trainer rank {message.rank}: {message.cause}")
                log.error("%s", error)
                if not self.config.supervision.max_restarts:
                    self._fail(error)
                return Ok()
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for the controller")

    async def _hello(self, message: Hello) -> Message:
        await self._engines_up.wait()
        is_first = self._incarnation is None
        self._dp_size = message.dp_size
        self._incarnation = message.version.incarnation
        self._history.begin(message.version)
        planned = [group for groups in self._planned.values() for group in groups]
        self._planned.clear()
        self.buffer.restart(message.version.step, message.consumed, planned)
        for group in self.buffer.evict(lambda group: not self._history.holds_all(group)):
            self._drop_branch(group)
        if not is_first:
            self.on_rewind(message.version.step)
        self._notify()
        return Ok()

    def _drop_branch(self, group: EpisodeGroup) -> None:
        """Some of its tokens are of weights that a restarted trainer gave up."""
        self.ledger.dropped_branch += 1
        self._forget(group)

    async def _take_plan(self, message: TakePlan) -> Message:
        if message.step >= self.config.run.steps:
            return Stop(f"all {self.config.run.steps} steps are done")
        if message.step != self.buffer.next_step:
            raise ProtocolError(f"plan {message.step} asked, plan {self.buffer.next_step} is next")
        begin, incarnation = time.monotonic(), self._incarnation
        while True:
            if self._incarnation != incarnation:
                raise ProtocolError("another gang has taken over")
            self._drop_stale()
            groups = self.buffer.take()
            if groups is not None:
                break
            if self._stale:
                return Refresh()
            waited = time.monotonic() - begin
            if waited > message.timeout_s:
                raise ProtocolError(
                    f"no batch of {self.config.rollout.groups_per_step} groups after "
                    f"{waited:.0f} s: {self.buffer.num_ready} ready, "
                    f"{self.buffer.num_started} in generation"
                )
            await self._wait_change(min(1.0, message.timeout_s))
        self._dropped = 0
        self.ledger.trainer_wait_s += time.monotonic() - begin
        plan = plan_batch(
            message.step,
            PolicyVersion(self._incarnation or 0, message.step),
            groups,
            dp_size=self._dp_size,
            max_tokens_per_microbatch=self.config.trainer.max_tokens_per_microbatch,
            packed=self.config.trainer.packing,
        )
        self._planned[message.step] = groups
        self._notify()
        return Plan(plan)

    def _drop_stale(self) -> None:
        for group in self.buffer.evict_stale():
            self.ledger.dropped_stale += 1
            self._forget(group)

    async def _step_done(self, message: StepDone) -> Message:
        if message.version.incarnation != self._incarnation:
            raise ProtocolError(f"step {message.step} of {message.version}: that gang is gone")
        groups = self._planned.pop(message.step)
        engines = await self._statuses()
        metrics = dict(message.metrics)
        metrics |= self.ledger.row(groups, message.step, engines)
        metrics["async/buffer_depth"] = float(self.buffer.num_ready)
        self.on_step(
            StepReport(message.step, message.version, metrics, self._samples(groups, message.step))
        )
        if self.records is None:
            for group in groups:
                self._forget(group)
        else:
            self.records.mkdir(parents=True, exist_ok=True)
            path = self.records / f"step-{message.step:06d}.msgpack"
            path.write_bytes(encode_value(groups))
        return Ok()

    async def _settle(self, index: int) -> None:
        """Before an update: with `drain` no request is cut, with a fixed lag none is left to start.

        Raises EngineError after rollout.request_timeout_s.
        """
        rollout = self.config.rollout
        if rollout.in_flight_mode != "drain" or index in self._down:
            return
        exact = rollout.fixed_lag >= 0

        def unsettled() -> int:
            if not exact:
                return self._generating[index]
            here = self._versions[index].incarnation == self._incarnation
            wanted = self._wanted(self._versions[index].step) if here else 0
            return self._generating[index] + self._finishing + wanted

        self._draining[index] = not exact
        begin = time.monotonic()
        while unsettled():
            if time.monotonic() - begin > rollout.request_timeout_s:
                raise EngineError(
                    f"engine {index}: {unsettled()} groups did not finish within "
                    f"rollout.request_timeout_s = {rollout.request_timeout_s:g} s before an update"
                )
            await self._wait_change(1.0)

    async def _statuses(self) -> list[EngineStatus]:
        """Of the engines that answer."""
        found = []
        for index in set(range(len(self.engines))) - self._lost:
            with contextlib.suppress(EngineError):
                found.append(await self.engines[index].status())
        return found

    def _up(self, index: int) -> Engine:
        """The engine, for an update.  Raises EngineError while it is started again."""
        if index in self._lost:
            raise EngineError(f"engine {index} is being started again")
        return self.engines[index]

    async def _session(self, message: SessionMessage) -> Message:
        """Pass a step of a publish session on; the engine itself says whether it is still fit."""
        index = message.engine
        try:
            if isinstance(message, CommitUpdate):
                await self._settle(index)
            reply = await self._up(index).session(message)
        except EngineError as error:
            self._draining[index] = False
            await self._ask_fitness(index)
            raise EngineError(f"engine {index}: {error}") from error
        if isinstance(message, CommitUpdate) and isinstance(reply, UpdateClosed):
            self._versions[index] = message.version
            self._draining[index] = False
            for engines in (self._down, self._suspended, self._stale):
                engines.discard(index)
            self.ledger.update_closed(reply)
            self._notify()
        return reply

    async def _ask_fitness(self, index: int) -> None:
        """An engine that suspended itself gets no requests until a commit brings it back."""
        if index in self._lost:
            return
        with contextlib.suppress(EngineError):
            holds = await self.engines[index].session(AskEngine(index))
            if isinstance(holds, EngineHolds) and holds.cause and index not in self._suspended:
                log.warning("engine %d is left out until it is refreshed: %s", index, holds.cause)
                self.ledger.engines_suspended += 1
                self._suspended.add(index)
                self._down.add(index)

    async def _close_update(self, message: CloseUpdate) -> Message:
        closed = await self._up(message.engine).close_update(message)
        self._draining[message.engine] = False
        self._stale.discard(message.engine)
        self._versions[message.engine] = message.version
        self.ledger.update_closed(closed)
        self._notify()
        return closed

    def _forget(self, group: EpisodeGroup) -> None:
        for rollout in group.rollouts():
            for uri in blob_uris(rollout):
                self.blobs.delete(uri)

    def _samples(self, groups: list[EpisodeGroup], step: int) -> list[dict[str, object]]:
        """Text and reward of one rollout per step, as long as the report has room for it."""
        every = max(1, self.config.run.steps // max(1, self.config.observe.sample_rollouts))
        if not self.config.observe.sample_rollouts or step % every:
            return []
        group = groups[0]
        episode = group.episodes[0]  # not the best one: the report shows what is typical
        rollout = episode.turns[-1].rollout
        return [
            {
                "step": step,
                "version": str(rollout.versions[-1].version),
                "lag": step - rollout.oldest.step,
                "prompt": group.prompt.text,
                "response": self.decode(rollout.token_ids[rollout.prompt_len :].tolist()),
                "reward": episode.score.reward if episode.score else None,
                "group_mean": float(
                    np.mean([e.score.reward for e in group.episodes if e.score is not None])
                ),
            }
        ]


def cause_of(error: BaseException) -> str:
    """One sentence for a person: our own errors as they are, others with their type."""
    return str(error) if isinstance(error, MoerlError) else f"{type(error).__name__}: {error}"
