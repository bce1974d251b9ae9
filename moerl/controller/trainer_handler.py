"""Answers the trainer's messages: hello, plans, finished steps, and weight updates of engines.

The trainer asks for a plan and publishes its weights after each step.  A message that an earlier
controller answered is sent again after its death, and gets the same answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from moerl.controller.blob_availability import BlobAvailability
from moerl.controller.context import Context
from moerl.controller.evaluation import Evaluator
from moerl.controller.journal.recovered_state import RecoveredState
from moerl.controller.journal.write_retry import WriteRetry
from moerl.controller.producer import Producer
from moerl.controller.ref_score_queue import RefScoreQueue
from moerl.controller.scoring_stage import ScoringStage
from moerl.controller.step_metrics import StepReport, batch_metrics, samples_of
from moerl.core.errors import JournalError, ProtocolError, TrainerError
from moerl.core.ids import IdSet
from moerl.core.messages import (
    AbortUpdate,
    AskEngine,
    BadStep,
    CommitUpdate,
    Failed,
    Hello,
    Message,
    Notice,
    Ok,
    Plan,
    PrepareUpdate,
    Refresh,
    RelayUpdate,
    SamePlan,
    Scored,
    SetEngines,
    StepDone,
    Stop,
    TakePlan,
    TakeRecords,
    Values,
    VerifyUpdate,
    WriteUpdate,
)
from moerl.core.types import BatchPlan, EpisodeGroup, PolicyVersion
from moerl.data.batching import plan_batch
from moerl.records.stream_files import write_groups
from moerl.runtime.beside import Beside

log = logging.getLogger(__name__)


class TrainerHandler:
    """Serves one trainer, which may restart, and the ranks of reference and teacher."""

    def __init__(
        self,
        context: Context,
        scoring_stage: ScoringStage,
        producer: Producer,
        evaluator: Evaluator,
        availability: BlobAvailability,
        ref_models: RefScoreQueue,
    ) -> None:
        self._config, self._services = context.config, context.services
        self._pool, self._sync_targets = context.pool, context.sync_targets
        self._buffer, self._batches = context.buffer, context.batches
        self._writes = WriteRetry(context.step_metrics)
        self._journal, self._lineage = context.services.journal, context.lineage
        self._stream = context.services.stream
        self._ref_counts, self._step_metrics, self._tasks = (
            context.ref_counts,
            context.step_metrics,
            context.tasks,
        )
        self._scoring_stage, self._producer, self._evaluator = scoring_stage, producer, evaluator
        self._availability, self._ref_models = availability, ref_models
        self._memory_turns = context.memory_turns
        self._keeping = Beside("the records of a bad step", self._step_metrics.notices.append)
        self._sampling = Beside("the text of sample rollouts", self._step_metrics.notices.append)
        self.engines_up = asyncio.Event()  # set when the trainer's hello may be answered
        self.failure = ""  # last error reported by a rank of the trainer
        self._dp_size, self._pair_cost = 0, 0.0
        self._ahead: list[EpisodeGroup] = []  # of the plan that the trainer was given ahead
        self._ages_s: dict[int, list[float]] = {}  # in the buffer, by planned step
        self._rows = self._config.run.steps  # rows of metrics when all steps are done

    def restore(self, recovered: RecoveredState) -> None:
        """Restore the state of an earlier controller."""
        state = recovered.controller_state
        self._dp_size, self._pair_cost = state.dp_size, state.pair_cost

    async def handle(self, message: Message) -> Message:
        """Answer one message of the trainer.  Raises MoerlError; the server replies Refused."""
        match message:
            case Hello():
                return await self._hello(message)
            case TakePlan():
                return await self._take_plan(message)
            case StepDone():
                return await self._step_done(message)
            case (
                PrepareUpdate()
                | WriteUpdate()
                | VerifyUpdate()
                | RelayUpdate()
                | CommitUpdate()
                | AbortUpdate()
                | AskEngine()
            ):
                if self._memory_turns is not None and isinstance(message, PrepareUpdate):
                    await self._memory_turns.hand(message.engine)
                return await self._pool.session(message, self._to_come)
            case TakeRecords():
                return await self._ref_models.pop(message)
            case Scored():
                self._ref_models.add(message)
                return Ok()
            case Values():
                self._ref_models.add_values(message)
                return Ok()
            case Failed():
                return self._failed(message)
            case Notice():
                self._step_metrics.notices.append(message.text)
                return Ok()
            case BadStep():
                await asyncio.to_thread(self._keep, message)
                return Ok()
            case _:
                raise ProtocolError(f"{type(message).__name__} is not a message for the controller")

    def _keep(self, bad: BadStep) -> None:
        """Keep the groups of a step that is not finite, and say so."""
        groups = self._batches.planned.get(bad.step, [])
        wanted = set(bad.rollouts)
        found = [g for g in groups if wanted & {r.rollout_id for r in g.rollouts()}] or groups
        name = f"{self._pool.incarnation}.{bad.step:06d}.{bad.number}.step"
        path = self._services.bad_steps / name

        def write() -> None:
            write_groups(path, found, self._services.blobs.read)

        kept = f"; for `moerl mismatch --records`: {path}" if self._keeping.call(write) else ""
        self._step_metrics.notices.append(f"{bad.text}{kept}")

    def _failed(self, failed: Failed) -> Ok:
        error = TrainerError(f"{failed.job} rank {failed.rank}: {failed.cause}")
        is_newest = failed.incarnation in (-1, self._pool.incarnation)
        if failed.job == "trainer" and is_newest:
            self.failure = str(error)
        log.error("%s", error)
        if failed.blob:
            self._availability.report(failed.blob)
        is_final = failed.ends_run and is_newest
        if is_final or not self._config.supervision.max_restarts:
            self._tasks.fail(error)
        return Ok()

    def _to_come(self, version: PolicyVersion) -> int:
        """Groups that are being scored or must still be started under this version."""
        is_current = version.incarnation == self._pool.incarnation
        wanted = self._producer.wanted(version.step) if is_current else 0
        return self._scoring_stage.finishing + wanted

    # --- hello ----------------------------------------------------------------------------------
    async def _hello(self, hello: Hello) -> Message:
        await self.engines_up.wait()
        consumed = IdSet(hello.consumed)

        def begin() -> None:
            self._pool.expect_no_newer(hello.version.incarnation)
            begins = self._lineage.joined(hello.begins)
            self._journal.began(begins, hello.dp_size, consumed.parts, hello.pair_cost)
            self._services.on_rewind(hello.version.step)
            if self._stream is not None:
                self._stream.began(replace(hello, begins=begins))

        await self._writes.until_done(f"the start from {hello.version}", begin, self._limit_s)
        self._dp_size, self._pair_cost = hello.dp_size, hello.pair_cost
        self._ahead, self._ages_s = [], {}
        self._rows = self._config.run.steps
        self._pool.incarnation = hello.version.incarnation
        if self._memory_turns is not None:
            self._memory_turns.trainer_is_up()
        self._lineage.restore(self._lineage.joined(hello.begins))
        again, spent = self._batches.restart(hello.version.step, consumed)
        spent += self._buffer.restart(hello.version.step, hello.consumed, again)
        self._let_go(spent)
        self.drop_branch()
        self._tasks.notify()
        return self._sync_targets.begin() or Ok()

    @property
    def _limit_s(self) -> float:
        """How long a message waits for the disk; the trainer waits longer for its answer."""
        return self._config.trainer.step_timeout_s / 2

    def drop_branch(self) -> None:
        """Drop ready groups with tokens of weights outside the trainer's history."""
        strange = self._buffer.evict(lambda group: not self._lineage.knows_trainer(group))
        self._journal.left(group.group_id for group in strange)
        for group in strange:
            self._step_metrics.add("refused/lineage")
            self._ref_counts.forget(group)
        branch = self._buffer.evict(lambda group: not self._lineage.in_lineage(group))
        self._journal.left(group.group_id for group in branch)
        for group in branch:
            self._scoring_stage.drop_branch(group)

    # --- plans ----------------------------------------------------------------------------------
    async def _take_plan(self, take: TakePlan) -> Message:
        self._pool.expect_no_newer(take.incarnation)
        self._sync_targets.acknowledge()
        self._tasks.notify()
        if take.step >= self._config.run.steps:
            return await self._end(take)
        self._pool.expect_trainer()
        if news := self._sync_targets.pending_update():
            return news
        while True:
            # a step that is planned already: the reply was lost with an earlier controller
            is_planned = take.step in self._batches.planned
            if not is_planned and (other := await self._collect(take)):
                return other
            if plan := await self._scored_plan(take):
                if self._memory_turns is not None:
                    await self._memory_turns.close()
                return plan
            self._pool.expect_no_newer(take.incarnation)

    async def _collect(self, take: TakePlan) -> SetEngines | Refresh | Ok | None:
        """Plan a step when its batch is complete; or return the message to which the trainer must
        react first.

        Ok: ask again, answers take longer than one message may.  Raises ProtocolError on timeout
        without progress, or when a newer trainer has started.
        """
        if take.step != self._buffer.next_step:
            raise ProtocolError(f"plan {take.step} asked, plan {self._buffer.next_step} is next")
        begin, incarnation = time.monotonic(), self._pool.incarnation
        while self._turn_goes_on(take.step) or not await self._plan_next(take.step, incarnation):
            await self._open_turn()
            if news := self._sync_targets.pending_update():
                return news
            if self._pool.any_behind:
                return Refresh()
            waited_s = time.monotonic() - begin
            if waited_s > take.timeout_s / 2 and self._pool.idle_s < take.timeout_s / 2:
                self._step_metrics.add("async/trainer_wait_s", waited_s)
                return Ok()
            self._expect_in_time(waited_s, take.timeout_s)
            await self._tasks.wait_change(min(1.0, take.timeout_s))
        self._step_metrics.add("async/trainer_wait_s", time.monotonic() - begin)
        return None

    def _turn_goes_on(self, step: int) -> bool:
        left, ready = self._config.run.steps - step, self._buffer.num_ready
        return self._memory_turns is not None and self._memory_turns.goes_on(ready, left)

    async def _open_turn(self) -> None:
        if self._memory_turns is not None:
            await self._memory_turns.open()

    async def _plan_next(self, step: int, incarnation: int | None) -> bool:
        """Plan the next step's groups, none stale and all records readable; False: not yet."""
        while True:
            if self._pool.incarnation != incarnation:
                raise ProtocolError("a newer trainer has started")
            if step in self._batches.planned:
                return True
            if not self._drop_stale():
                return False
            if not (due := self._buffer.due()):
                return False
            is_whole = await self._availability.are_whole(due)
            if not is_whole or self._pool.incarnation != incarnation:
                continue
            try:
                self._batches.plan(step, due)
            except JournalError as error:  # the groups stay in the buffer
                self._writes.failed(f"the plan of step {step}", error)
                return False
            self._buffer.pop()
            self._ages_s[step] = self._buffer.ages_s
            self._producer.cancel_stale()
            self._scoring_stage.planned()
            self._tasks.notify()
            return True

    def _expect_in_time(self, waited_s: float, timeout_s: float) -> None:
        """Raises ProtocolError after the timeout, with the state of groups and engines."""
        if waited_s > timeout_s:
            failed = self._step_metrics.last_failed_write
            raise ProtocolError(
                f"no batch of {self._config.rollout.groups_per_step} groups after "
                f"{waited_s:.0f} s: {self._buffer.num_ready} ready, {self._buffer.num_started} "
                f"in generation, {self._scoring_stage.finishing} being scored; "
                f"{self._pool.describe()}" + (f"; {failed}" if failed else "")
            )

    def _drop_stale(self) -> bool:
        """Drop ready groups, or siblings, that are too old; False: the disk is full."""
        if self._config.rollout.stale_siblings == "drop" and not self._drop_stale_siblings():
            return False
        stale = self._buffer.evict_stale()
        self._journal.left(group.group_id for group in stale)
        for group in stale:
            self._step_metrics.add("async/dropped_stale_groups")
            self._ref_counts.forget(group)
        return True

    def _drop_stale_siblings(self) -> bool:
        for group, part in self._buffer.with_stale_siblings():
            try:
                self._journal.admitted(part)
            except JournalError as error:
                self._writes.failed(f"group {group.group_id} without its stale siblings", error)
                return False
            self._buffer.exchange(part)
            dropped = len(group.episodes) - len(part.episodes)
            self._step_metrics.add("async/dropped_stale_siblings", dropped)
            self._ref_counts.forget(group, part)
        return True

    async def _scored_plan(self, take: TakePlan) -> Plan | SamePlan | None:
        """The plan of a complete step, after reference ranks have scored all its groups, and the
        next one if it is complete too.

        None when a damaged record was found meanwhile: the step must be planned again.
        """
        incarnation, groups = self._pool.incarnation, self._batches.planned[take.step]

        def is_current() -> bool:
            return self._pool.incarnation == incarnation

        waited_s = await self._ref_models.wait(take.step, take.timeout_s, is_current)
        self._step_metrics.add("ref_models/wait_s", waited_s)
        self._step_metrics.add("async/trainer_wait_s", waited_s)
        came_ahead = take.came_ahead and groups is self._ahead
        plan = None if came_ahead else await self._plan(take.step, groups)
        ahead = await self._plan_ahead(take.step + 1)
        if self._ref_models.in_use:  # another controller might get other scores
            await self._seal(take.step)
        if self._batches.planned.get(take.step) is not groups:
            return None
        if came_ahead:
            return SamePlan(ahead)
        return None if plan is None else Plan(plan, ahead)

    async def _seal(self, step: int) -> None:
        """Wait until the stream has the file of a planned step."""
        stream = self._stream
        if stream is None:
            return
        groups = self._batches.planned.get(step)  # None: a record was found damaged meanwhile
        if groups and not stream.is_prepared(step):  # an earlier controller made the same plan
            await self._plan(step, groups)
        try:
            await stream.sealed(step)
        except OSError as error:
            what = f"the records of step {step}"
            self._writes.failed(what, error)
            await self._writes.until_done(what, lambda: stream.write_again(step), self._limit_s)

    async def _plan_ahead(self, step: int) -> BatchPlan | None:
        """The plan of the step after the current plan, if it needs no waiting.

        Capacity and staleness count from the next step to be planned, so planning early changes
        neither; the freshest groups are chosen when they are trained.
        """
        self._ahead = []
        if step >= self._config.run.steps or self._config.rollout.selection == "freshest":
            return None
        if step not in self._batches.planned:
            incarnation, is_next = self._pool.incarnation, step == self._buffer.next_step
            if not is_next or not await self._plan_next(step, incarnation):
                return None
        groups = self._batches.planned.get(step, [])
        if not groups or self._ref_models.waits(step, groups):
            return None
        plan = await self._plan(step, groups)
        self._ahead = groups if plan is not None else []
        return plan

    async def _plan(self, step: int, groups: list[EpisodeGroup]) -> BatchPlan | None:
        """Build a plan; in a thread, because packing thousands of rollouts would block the loop.

        None when these are not the groups of the step any more.
        """
        plan = await asyncio.to_thread(
            plan_batch,
            step,
            PolicyVersion(self._pool.incarnation or 0, step),
            groups,
            dp_size=self._dp_size,
            max_tokens_per_microbatch=self._config.trainer.max_tokens_per_microbatch,
            packed=self._config.trainer.packing,
            share=self._config.trainer.share_prompts,
            pair=self._pair_cost,
        )
        if self._batches.planned.get(step) is not groups:
            return None
        plan = self._ref_models.with_scores(plan)
        if self._stream is not None and plan is not None:
            self._stream.prepare(plan)
        return plan

    async def _end(self, take: TakePlan) -> Message:
        """Stop the run; evaluations in no step's row, such as the last, get their own row."""
        config, stop = self._config, Stop(f"all {self._config.run.steps} steps are done")
        if self._pool.incarnation is None:
            return stop
        last, begin = PolicyVersion(self._pool.incarnation, config.run.steps), time.monotonic()
        limit_s = min(take.timeout_s, config.evaluation.hold_s + config.sync.timeout_s)
        await self._open_turn()
        while not self._evaluator.is_done_with(last) and time.monotonic() - begin < limit_s:
            if self._pool.any_behind:
                return Refresh()
            await self._tasks.wait_change(1.0)
        while self._step_metrics.evaluations:
            found = self._step_metrics.evaluations[0]
            version = PolicyVersion(self._pool.incarnation, int(found["eval/step"]))
            await self._add_row(StepReport(self._rows, version, found, []))
            self._step_metrics.evaluations.popleft()
            self._rows += 1
        self._ref_models.is_over = True
        return stop

    # --- finished steps -------------------------------------------------------------------------
    async def _step_done(self, done: StepDone) -> Message:
        planned = tuple(self._batches.planned.get(done.step, ()))
        found, samples = await asyncio.to_thread(self._described, planned, done.step)
        engines = await self._pool.statuses()  # no other message is handled in between
        self._pool.expect_trainer()
        if done.version.incarnation != self._pool.incarnation:
            raise ProtocolError(f"step {done.step} of {done.version}: that trainer was replaced")
        if done.step < self._batches.done:
            return Ok()  # already handled: the reply was lost with an earlier controller
        groups = self._batches.planned.get(done.step)
        if groups is None:
            raise ProtocolError(f"step {done.step} is not planned: a record of it is damaged")
        self._step_metrics.add("journal/failed_writes", self._journal.take_failed())
        line = None
        if self._stream is not None and not self._stream.has(done.version):
            await self._seal(done.step)
            line = await self._stream.done(done, groups)
        metrics = dict(done.metrics) | ({} if self._stream is None else self._stream.metrics(line))
        metrics |= found | self._step_metrics.row(engines, self._ages_s.pop(done.step, []))
        metrics |= {} if self._memory_turns is None else self._memory_turns.row()
        metrics["async/buffer_depth"] = float(self._buffer.num_ready + self._batches.num_ahead)
        metrics["async/engines"] = self._pool.num_serving
        await self._add_row(StepReport(done.step, done.version, metrics, samples))
        gone: list[EpisodeGroup] = []

        def finish() -> None:
            nonlocal line
            self._expect_same(done.version)
            if self._stream is not None and line is not None:
                self._stream.add(line)
                line = None
            gone.extend(self._batches.finish(done.step))

        await self._writes.until_done(f"the end of step {done.step}", finish, self._limit_s)
        await asyncio.to_thread(self._let_go, gone)
        await asyncio.to_thread(self._journal.sweep)
        return Ok()

    def _described(
        self, groups: Sequence[EpisodeGroup], step: int
    ) -> tuple[dict[str, float], list[dict[str, object]]]:
        """Metrics and shown samples of a batch.  In a thread: text of a long row takes a while."""
        if not groups:
            return {}, []
        samples: list[dict[str, object]] = []

        def describe() -> None:
            samples.extend(samples_of(self._config, groups, step, self._services.decode))

        self._sampling.call(describe)
        return batch_metrics(groups, step), samples

    async def _add_row(self, report: StepReport) -> None:
        """Append a row to metrics.jsonl.  Raises ProtocolError when the trainer was replaced."""

        def add() -> None:
            self._expect_same(report.version)
            self._services.on_step(report)

        await self._writes.until_done(f"the row of step {report.step}", add, self._limit_s)

    def _expect_same(self, version: PolicyVersion) -> None:
        if version.incarnation != self._pool.incarnation:
            raise ProtocolError(f"{version}: that trainer was replaced")

    def _let_go(self, groups: Iterable[EpisodeGroup]) -> None:
        """Release trained groups.  Thread-safe."""
        for group in groups:
            self._ref_counts.forget(group)
