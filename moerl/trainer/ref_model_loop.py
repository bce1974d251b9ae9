"""Models that only score, on ranks of their own: take records, score them, report, until the end.

They are a second torchrun job with its own layout (`ref_models.parallel`).  It asks the controller
for groups that are finished and not scored, those to be trained first at the front, so that the
next batch is scored when the trainer asks for it.  It holds no state: after a restart it asks for
the groups that are still missing.

The version of a teacher that follows the policy comes with the groups.  All ranks take it from the
run's folder before they score, so a batch has one version, and a restarted job has a whole one.

Models, packing and the replay of sampling masks are shared with the trainer
(`moerl.trainer.learner.ref_model`), so both give equal numbers.  Each set of scores carries the
digest of its record (`moerl.data.ref_scores`).
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch.distributed as dist

from moerl.algorithms.device_copies import to_host
from moerl.config.schema import Config
from moerl.config.task_mixture import reward_models_of
from moerl.core.errors import TrainerError
from moerl.core.messages import (
    Message,
    Ok,
    Plan,
    Scored,
    Stop,
    TakeRecords,
    ValueRows,
    Values,
)
from moerl.core.rpc import RpcClient
from moerl.core.serialization import decode, encode
from moerl.core.types import Array, BatchPlan, PolicyVersion, RefScores
from moerl.data.batching import pair_cost
from moerl.data.packing import by_row
from moerl.data.ref_scores import basis_of, record_digest
from moerl.data.teacher_versions import teacher_folder
from moerl.data.value_rows import value_plan
from moerl.distributed.object_collectives import broadcast_value, gather_values
from moerl.runtime.trace import Tracer
from moerl.trainer.hf_io.hf_folder import HfFolder
from moerl.trainer.learner.ref_model import RewardModel, open_ref_models
from moerl.trainer.model.parallel import Parallel
from moerl.trainer.passes.schedule import Batches
from moerl.trainer.train_loop import REPLY_SLACK_S, RankContext

_ASK_S = 20.0  # longest wait for records in one request


def own_layout(config: Config) -> Config:
    """The configuration with which the reference ranks build and pack."""
    return replace(config, trainer=replace(config.trainer, parallel=config.ref_models.parallel))


class RefModelLoop:
    """One rank of the reference models."""

    def __init__(self, config: Config, context: RankContext, parallel: Parallel) -> None:
        """Load the models.  config: `own_layout`.  Raises ConfigError for an unusable model."""
        self.config, self.context, self.parallel = config, context, parallel
        self.tracer = Tracer(context.run.trace, f"ref_models-{parallel.rank}")
        spec = HfFolder(config.model.path).spec
        self.pair_cost = pair_cost(spec)
        with self.tracer.span("load"):
            self.policies = open_ref_models(config, spec.vocab_size, parallel)
            self.reward_models = {
                folder: RewardModel(folder, config, parallel) for folder in reward_models_of(config)
            }
        self.basis = basis_of(config)
        self.client: RpcClient | None = None
        if parallel.is_first:
            self.client = RpcClient(
                context.controller, context.keys, timeout_s=config.trainer.step_timeout_s
            )

    def run(self) -> None:
        """Score until the controller stops the run."""
        while (wanted := self._take_records()) is not None:
            found: Scored | Values
            if isinstance(wanted, ValueRows):
                with self.tracer.span("values", rows=len(wanted.rows)):
                    found = self.values(wanted)
            else:
                with self.tracer.span("score", step=wanted.step, groups=len(wanted.groups)):
                    exchange_s = self._take_teachers(wanted)
                    scores = [] if exchange_s is None else self.score(wanted)
                    found = Scored(tuple(scores), exchange_s or {})
            if self.client is not None:
                self.client.expect(found, Ok)
        dist.barrier(self.parallel.control)

    def score(self, plan: BatchPlan) -> list[RefScores]:
        """Collective: one set of scores per row of the plan, on the first rank."""
        batches = Batches(plan, self.config, self.parallel, self.context.blobs)
        mine = {
            role: by_row(plan, self.parallel.dp_rank, to_host(policy.logprobs(batches)))
            for role, policy in self.policies.items()
        }
        every = gather_values(mine, dict[str, dict[int, Array]], self.parallel.control)
        if not every:
            return []
        found = {
            role: {idx: values for part in every for idx, values in part[role].items()}
            for role in self.policies
        }
        return [
            RefScores(
                rollout.rollout_id,
                record_digest(rollout, self.basis),
                {role: values[idx] for role, values in found.items()},
                {name: self._version(name) for name in plan.teachers},
            )
            for idx, rollout in enumerate(plan.rollouts())
        ]

    def _take_teachers(self, plan: BatchPlan) -> dict[str, float] | None:
        """Exchange the teachers of which the plan wants another version; seconds by name.

        None: a folder is gone, as its version is no longer wanted.  Raises ModelError.
        """
        if not plan.teachers:
            return {}
        old = [name for name, one in plan.teachers.items() if one != self.policies[name].version]
        folders = {n: teacher_folder(self.context.run, n, plan.teachers[n]) for n in old}
        there = self.parallel.is_first and all(folder.is_dir() for folder in folders.values())
        if not broadcast_value(there, bool, self.parallel.control):
            return None
        seconds = {}
        for name, folder in folders.items():
            begin, version = time.perf_counter(), plan.teachers[name]
            with self.tracer.span("take teacher", teacher=name, version=str(version)):
                self.policies[name].take(version, folder)
            seconds[name] = time.perf_counter() - begin
        return seconds

    def _version(self, name: str) -> PolicyVersion:
        version = self.policies[name].version
        assert version is not None, f"{name} has taken a version"
        return version

    def values(self, wanted: ValueRows) -> Values:
        """Collective: the values of a reward model, on the first rank."""
        trainer = self.config.trainer
        plan = value_plan(
            wanted.rows,
            dp_size=self.parallel.dp_size,
            max_tokens_per_microbatch=trainer.max_tokens_per_microbatch,
            packed=trainer.packing,
            pair=self.pair_cost,
        )
        batches = Batches(plan, self.config, self.parallel, self.context.blobs, with_masks=False)
        values = to_host(self.reward_models[wanted.folder].values(batches))
        mine = by_row(plan, self.parallel.dp_rank, values)
        every = gather_values(mine, dict[int, Array], self.parallel.control) or []
        by_group = {plan.rows[idx].group: of for part in every for idx, of in part.items()}
        return Values(wanted.number, tuple(by_group[group] for group in sorted(by_group)))

    def _take_records(self) -> BatchPlan | ValueRows | None:
        """Records or rows on every rank, or None when the run is over."""
        while isinstance(message := self._request(), Ok):
            pass
        if isinstance(message, Stop):
            return None
        if isinstance(message, ValueRows):
            return message
        if not isinstance(message, Plan):
            raise TrainerError(f"TakeRecords was answered with {type(message).__name__}")
        return message.plan

    def _request(self) -> Message:
        """The controller's reply to TakeRecords, on every rank."""
        data: bytes | None = None
        with self.tracer.span("wait"):
            if self.client is not None:
                start, dp_size = self.context.incarnation, self.parallel.dp_size
                request = TakeRecords(start, dp_size, _ASK_S, self.pair_cost)
                # the controller may be restarted meanwhile, and engines start slowly
                limit_s = self.config.trainer.step_timeout_s + REPLY_SLACK_S
                data = encode(self.client.request(request, limit_s))
            return decode(broadcast_value(data, bytes, self.parallel.control))
