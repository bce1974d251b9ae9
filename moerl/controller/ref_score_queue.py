"""Groups that wait for scores of reference and teacher, when those have their own ranks.

Scores depend on the record and on the weights of reference and teachers.  So a group is scored as
soon as it is ready, while the trainer works on an earlier batch; a plan is sent when all of its
rows are scored.  Nothing is journaled: after a restart of controller or trainer the groups are
scored again, with the same results.

The step of a batch decides the version of a teacher that follows the policy.  A ready group is
scored for the step that its place in the buffer promises, once the teacher's version is written;
when it is trained in a step with another version, it is scored again and the plan waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from moerl.config.algorithms import followers_of, ref_models_of
from moerl.config.task_mixture import reward_models_of
from moerl.controller.blob_availability import BlobAvailability
from moerl.controller.context import Context
from moerl.core.errors import ProtocolError
from moerl.core.messages import Message, Ok, Plan, Scored, Stop, TakeRecords, Values
from moerl.core.types import BatchPlan, EpisodeGroup, PolicyVersion, RefScores
from moerl.data.batching import plan_batch
from moerl.data.ref_scores import check_scores
from moerl.data.teacher_versions import teacher_folder, teachers_at
from moerl.runtime.run_dir import RunDir

_VERSION_S = 0.1  # between two looks for a teacher's version that the trainer writes


class RefScoreQueue:
    """Scores of ready and planned groups, by rollout."""

    def __init__(self, context: Context, availability: BlobAvailability) -> None:
        config = context.config
        self.start = -1  # of the last request of the reference ranks
        self._config, self._buffer, self._batches = config, context.buffer, context.batches
        self._tasks, self._ref_counts, self._availability = (
            context.tasks,
            context.ref_counts,
            availability,
        )
        self._roles = ref_models_of(config) if config.ref_models.placement == "separate" else {}
        self._known: dict[str, RefScores] = {}
        self._lineage, self._step_metrics = context.lineage, context.step_metrics
        self._run = RunDir(Path(config.run.root) / config.run.name)
        self._follows = bool(followers_of(config.algorithm))
        self._reward_models = context.reward_models
        # Nothing more is evaluated, either; without reward models the last step ends it
        self.is_over = not reward_models_of(config)

    @property
    def in_use(self) -> bool:
        """Whether plans have scores of separate ranks."""
        return bool(self._roles)

    async def wait(self, step: int, timeout_s: float, is_current: Callable[[], bool]) -> float:
        """Wait until the groups of a planned step are scored; returns the seconds waited.

        Raises ProtocolError on timeout, or when the trainer that asks is not current.
        """
        begin = time.monotonic()
        while is_current():
            waited_s = time.monotonic() - begin
            if not (waiting := self.waits(step, self._batches.planned.get(step, ()))):
                return waited_s
            if waited_s > timeout_s:
                raise ProtocolError(
                    f"{len(waiting)} groups of step {step} were not scored by the reference ranks "
                    f"after {waited_s:.0f} s, see logs/ref_models.log"
                )
            await self._tasks.wait_change(min(1.0, timeout_s))
        raise ProtocolError("a newer trainer has started")

    async def pop(self, take: TakeRecords) -> Message:
        """Next groups for the reference ranks; a restarted one gets its unanswered groups again."""
        self.start, deadline = take.start, time.monotonic() + take.timeout_s
        while (is_training := self._batches.done < self._config.run.steps) or not self.is_over:
            plan = self.next(take.dp_size, take.pair_cost) if is_training else None
            if plan is not None:
                self._ref_counts.hold(plan.groups)  # its sampling masks are about to be read
                planned = {g.group_id for groups in self._batches.planned.values() for g in groups}
                ready = [group for group in plan.groups if group.group_id not in planned]
                if await self._availability.drop_lost(ready):
                    return Plan(plan)
                continue
            if (rows := self._reward_models.next()) is not None:
                return rows
            if time.monotonic() > deadline:
                return Ok()
            await self._tasks.wait_change(_VERSION_S if self._follows else min(1.0, take.timeout_s))
        return Stop(f"all {self._config.run.steps} steps are done")

    def waits(self, step: int, groups: Iterable[EpisodeGroup]) -> list[EpisodeGroup]:
        """Groups without scores by the teachers of a step; none where the trainer scores."""
        if not self._roles:
            return []
        teachers = self.teachers(step)
        return [group for group in groups if not self._is_scored(group, teachers)]

    def teachers(self, step: int) -> dict[str, PolicyVersion]:
        """Version of each teacher that follows the policy, by name, for the batch of a step."""
        if not self._follows:
            return {}
        return teachers_at(self._config.algorithm, self._lineage.begins, step)

    def next(self, dp_size: int, pair: float = 0.0) -> BatchPlan | None:
        """At most a batch of unscored groups in training order, for one version of each teacher.

        None: all are scored for which the teachers' versions are written.
        """
        if self._follows and not self._lineage.begins:
            return None  # no trainer has connected
        limit, groups = self._config.rollout.groups_per_step, list[EpisodeGroup]()
        teachers: dict[str, PolicyVersion] = {}
        for step, group in self._live():
            of_step = self.teachers(step)
            if self._is_scored(group, of_step) or not self._are_written(of_step):
                continue
            teachers = teachers if groups else of_step
            if len(groups) < limit and of_step == teachers:
                groups.append(group)
        if not groups:
            return None
        trainer = self._config.trainer
        plan = plan_batch(
            self._buffer.next_step,
            max(group.newest for group in groups),  # scores do not depend on the student's version
            groups,
            dp_size=dp_size,
            max_tokens_per_microbatch=trainer.max_tokens_per_microbatch,
            packed=trainer.packing,
            share=trainer.share_prompts,
            pair=pair,
        )
        return replace(plan, teachers=teachers)

    def add(self, scored: Scored) -> None:
        """Store scores; scores of groups that left the buffer are dropped.

        Raises RecordError when scores do not fit their rollout.
        """
        for name, seconds in scored.exchange_s.items():
            self._step_metrics.add(f"teacher/{name}/seconds", seconds)
        live = {r.rollout_id: r for _, group in self._live() for r in group.rollouts()}
        for scores in scored.scores:
            if (rollout := live.get(scores.rollout_id)) is not None:
                check_scores(scores, rollout, self._roles)
                self._known[scores.rollout_id] = scores
        self._known = {name: scores for name, scores in self._known.items() if name in live}
        self._ref_counts.hold(())
        self._tasks.notify()

    def add_values(self, values: Values) -> None:
        """Answers of a reward model.  Raises ProtocolError."""
        self._reward_models.add(values)

    def with_scores(self, plan: BatchPlan) -> BatchPlan:
        """The plan with its teachers, and its scores by row where there are reference ranks."""
        plan = replace(plan, teachers=self.teachers(plan.step))
        if not self._roles:
            return plan
        return replace(plan, ref_models=tuple(self._known[r.rollout_id] for r in plan.rollouts()))

    def _live(self) -> Iterator[tuple[int, EpisodeGroup]]:
        """Groups in training order, each with the step that trains it; expected, if not planned."""
        for step, groups in sorted(self._batches.planned.items()):
            yield from ((step, group) for group in groups)
        for place, group in enumerate(self._buffer.ready()):
            yield self._buffer.next_step + place // self._config.rollout.groups_per_step, group

    def _is_scored(self, group: EpisodeGroup, teachers: Mapping[str, PolicyVersion]) -> bool:
        every = (self._known.get(rollout.rollout_id) for rollout in group.rollouts())
        return all(scores is not None and scores.teachers == teachers for scores in every)

    def _are_written(self, teachers: Mapping[str, PolicyVersion]) -> bool:
        folders = (teacher_folder(self._run, name, one) for name, one in teachers.items())
        return all(folder.is_dir() for folder in folders)
