"""The train loop: take a plan, train it, publish the weights, report the step, repeat.

Every rank runs this loop.  Rank 0 talks to the controller and broadcasts each plan as bytes.
After an optimizer step the trainer copies its weights (the weight snapshot), and background threads
publish them while the next step trains (`moerl.weight_sync.publisher`).  The next snapshot waits
for these threads, so at most one publish is in flight.

The trainer reports a step before it writes the checkpoint.  A crash in between repeats one step;
with the other order a checkpoint could contain a step that has no row in metrics.jsonl.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from moerl.config.algorithms import followers_of
from moerl.config.clusters import moved_parts, takes_turns
from moerl.config.schema import Config
from moerl.config.transport_rules import first_group, transport_environment
from moerl.core.errors import (
    BlobError,
    MoerlError,
    NonRetryableError,
    TrainerError,
    cause_of,
)
from moerl.core.ids import IdSet
from moerl.core.messages import (
    BadStep,
    Failed,
    Hello,
    Message,
    Notice,
    Ok,
    Plan,
    Refresh,
    Refused,
    SamePlan,
    SetEngines,
    StepDone,
    Stop,
    TakePlan,
)
from moerl.core.rpc import Keys, RpcClient
from moerl.core.serialization import decode
from moerl.core.types import BatchPlan, PolicyVersion
from moerl.data.teacher_versions import teacher_folder
from moerl.distributed.object_collectives import broadcast_value
from moerl.records.blob_store import BlobStore, ReadAhead
from moerl.records.remote_blobs import cluster_reader
from moerl.runtime.beside import LineWriter
from moerl.runtime.disk_wait import DiskPatience
from moerl.runtime.run_dir import RunDir, next_incarnation
from moerl.runtime.trace import Tracer
from moerl.trainer.checkpoints import checkpoint
from moerl.trainer.checkpoints.checkpoint_files import newest_checkpoint
from moerl.trainer.checkpoints.checkpoint_writer import CheckpointWriter
from moerl.trainer.hf_io.content_digest import weights_digest
from moerl.trainer.hf_io.hf_folder import HfFolder
from moerl.trainer.hf_io.hf_shards import HfShards, RankGroup, every_rank
from moerl.trainer.learner.critic import Critic
from moerl.trainer.learner.parked import PARTS, Parked, Part
from moerl.trainer.learner.step import Learner
from moerl.trainer.model.parallel import Parallel
from moerl.trainer.passes import probe
from moerl.trainer.policy_model import load_policy, save_live_adapters
from moerl.trainer.teacher_writer import TeacherSource, TeacherWriter
from moerl.weight_sync.publisher import SyncContext, WeightPublisher, open_publisher

log = logging.getLogger(__name__)

REPLY_SLACK_S = 30.0  # added to the deadline that the controller gets
_NOTICE_S = 10.0  # longest wait of a sentence for the controller
_PARKED: dict[str, Part] = {
    "gradients": "gradients",
    "optimizer": "optimizer",
    "trainer_weights": "weights",
}
_FAREWELL_S, _DAMAGE_S = 2.0, 20.0  # longest wait of a failing rank for the controller's reply


@dataclass(frozen=True, slots=True)
class RankContext:
    """Endpoints and starting point of this trainer, from the launcher; equal on all ranks."""

    run: RunDir
    controller: str  # tcp://HOST:PORT
    keys: Keys
    incarnation: int
    blobs: BlobStore
    checkpoint: Path | None  # the trainer resumes from it
    reset_optimizer: bool = False  # load only weights and schedule position of the checkpoint
    is_rerun: bool = False  # no engine takes weights (`moerl rerun`)


class TrainLoop:
    """One rank of the trainer."""

    def __init__(
        self,
        config: Config,
        context: RankContext,
        parallel: Parallel,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """Build the model, the learner and the publisher of this rank.

        on_failure: called when the publishing thread fails; it ends the process.
        """
        self.config, self.context, self.parallel = config, context, parallel
        self.tracer = Tracer(context.run.trace, f"trainer-{parallel.rank}")
        _seed(config.run.seed)
        self.source = HfFolder(config.model.path)
        self.model = load_policy(config, self.source, parallel, resumes=bool(context.checkpoint))
        self.records = ReadAhead(context.blobs)
        self.ahead: BatchPlan | None = None  # the next step's plan, if it came with this one
        is_gae = config.algorithm.advantage == "gae"
        critic = Critic(config, parallel, self.records) if is_gae else None
        self.learner = Learner(self.model, parallel, config, self.records, critic)
        self.learner.before_update = self._before_update
        self.learner.bad.report = self._report_bad
        self.version = PolicyVersion(context.incarnation, 0)
        # the first version of each trainer that contributed to these weights
        self.begins: tuple[PolicyVersion, ...] = (self.version,)
        self.consumed = IdSet()  # ids of the trained groups
        self.saved_step = self.hf_step = -1  # of the newest checkpoint, of the weights in hf/
        self.handed: dict[str, float] = {}  # metrics of the last hand-over
        # half of it, as for the journal: peers and the controller wait no longer
        self.patience = DiskPatience(config.trainer.step_timeout_s / 2, self._tell)
        self.expert_load = LineWriter(context.run.expert_load, self._tell)
        writes = context.run, config.checkpoint, parallel, self.tracer, context.incarnation
        self.writer = CheckpointWriter(*writes, self.patience)
        self.client = self._open_client() if parallel.is_first else None
        self.publisher: WeightPublisher | None = None
        if config.engine.count and not context.is_rerun:
            self.publisher = open_publisher(config, self._sync_context(on_failure))
        self.teachers = self._open_teachers(on_failure)
        self.parked = Parked(self.learner, parallel.device) if takes_turns(config.cluster) else None

    def _open_client(self) -> RpcClient:
        timeout_s = self.config.trainer.step_timeout_s
        return RpcClient(self.context.controller, self.context.keys, timeout_s=timeout_s)

    def _open_teachers(self, on_failure: Callable[[BaseException], None]) -> TeacherWriter | None:
        """The writer of teachers that follow the policy.  A rerun has no separate ones."""
        config, context = self.config, self.context
        is_away = context.is_rerun and config.ref_models.placement == "separate"
        if is_away or not followers_of(config.algorithm):
            return None
        source = TeacherSource(self.model, self.source.path)
        own = self.parallel, self.tracer, on_failure, self.patience
        return TeacherWriter(config, context.run, source, *own)

    def run(self) -> None:
        """Train until the controller stops the run, then save the checkpoint and the HF folder."""
        self._resume()
        self._hello()
        # Engines start with the model folder, version 0.0.  Any other version is published before
        # the first plan; otherwise engines would sample from weights outside of this history.
        if self.config.checkpoint.keep_versions:
            self._keep_version()
        if self.parked is not None:  # the engines have slept, and may have no weights
            self._hand_over(self.parked)
        elif self.version != PolicyVersion(0, 0):
            self._publish()
            self._settle()
            self._serve_late()
        elif self.publisher is not None:
            self.publisher.rehearse(self.version)
        if self.teachers is not None:
            if self.version.step:
                self.teachers.resume(self.begins, self.version.step)
            self.teachers.publish(self.begins, self.version.step)
        # Later collections skip the objects that exist by now, of which torch and Megatron make so
        # many that a full one stops this rank, and those that wait for it, for 150 ms.
        gc.collect()
        gc.freeze()
        while (plan := self._take_plan()) is not None:
            self._train(plan)
        self._settle()
        self._save()
        self.writer.finish()
        if self.teachers is not None:
            self.teachers.wait()
        dist.barrier(self.parallel.control)

    def _save(self) -> None:
        """Save the checkpoint and the HF folder of the last step unless they are saved."""
        is_due = self.saved_step != self.version.step
        hf_is_due = self.config.checkpoint.hf != "off" and self.hf_step != self.version.step
        if self.parked is not None and (is_due or hf_is_due):
            self.parked.back()
        if is_due:
            self._checkpoint()
        if hf_is_due and self.hf_step != self.version.step:  # the checkpoint may have saved it
            self._save_hf()

    def _resume(self) -> None:
        if self.context.checkpoint is None:
            return
        with self.tracer.span("load"):
            progress = checkpoint.load_newest(
                self.context.run,
                self.context.checkpoint,
                self.learner,
                self.parallel,
                reset_optimizer=self.context.reset_optimizer,
            )
        self.consumed = IdSet(progress.consumed)
        self.saved_step = progress.version.step
        self.version = PolicyVersion(self.context.incarnation, progress.version.step)
        self.begins = (*progress.begins, self.version)

    def _hello(self) -> None:
        data: bytes | None = None
        weights = self._weights_digest()
        if self.client is not None:
            hello = Hello(
                world_size=self.parallel.world_size,
                dp_size=self.parallel.dp_size,
                version=self.version,
                consumed=self.consumed.parts,
                begins=self.begins,
                pair_cost=self.learner.pair_cost,
                weights=weights,
            )
            data = self.client.request_encoded(hello)
        self._set_engines(self._shared(data))

    def _set_engines(self, message: Message) -> None:
        if isinstance(message, SetEngines) and self.publisher is not None:
            self.publisher.set_engines(message.engines)

    def _take_plan(self) -> BatchPlan | None:
        """Take the next plan on every rank; None at the end of the run.  Raises TrainerError."""
        while isinstance(message := self._ask_plan(), Refresh | SetEngines | Ok):
            self._set_engines(message)
            if isinstance(message, Refresh) and self.parked is not None:
                self._hand_over(self.parked)
            elif isinstance(message, Refresh):
                self._settle()
                self._publish()
                self._settle()
                self._serve_late()
        if isinstance(message, Stop):
            return None
        if not isinstance(message, Plan | SamePlan):
            raise TrainerError(f"the controller answered TakePlan with {type(message).__name__}")
        plan = message.plan if isinstance(message, Plan) else self.ahead
        self.ahead = message.ahead
        if plan is None:
            raise TrainerError(f"the plan of step {self.version.step} did not come ahead")
        if plan.version != self.version or plan.step != self.version.step:
            raise TrainerError(
                f"plan of step {plan.step} starts from {plan.version}, "
                f"the trainer is at {self.version}"
            )
        return plan

    def _ask_plan(self) -> Message:
        """The controller's reply to TakePlan, on every rank."""
        data: bytes | None = None
        with self.tracer.span("wait", step=self.version.step):
            if self.client is not None:
                limit_s, step = self.config.trainer.step_timeout_s, self.version.step
                came_ahead = self.ahead is not None and self.ahead.step == step
                data = self.client.request_encoded(
                    TakePlan(step, limit_s, self.version.incarnation, came_ahead),
                    limit_s + REPLY_SLACK_S,
                )
            return self._shared(data)

    def _shared(self, data: bytes | None) -> Message:
        """Broadcast rank 0's encoded reply and decode it.  Raises TrainerError for a refusal."""
        reply = decode(broadcast_value(data, bytes, self.parallel.control))
        if isinstance(reply, Refused):
            raise TrainerError(f"the controller refused at step {self.version.step}: {reply.cause}")
        return reply

    def _train(self, plan: BatchPlan) -> None:
        if self.parked is not None:
            with self.tracer.span("unpark", step=plan.step):
                self.parked.back()
        with self.tracer.span("data", step=plan.step):
            self.records.use()
        if (ahead := self.ahead) is not None:
            self.records.begin(lambda records: self.learner.read_ahead(ahead, records))
        metrics = self._probe(plan) | self._take_teachers(plan)
        with self.tracer.span("step", step=plan.step):
            metrics |= self.learner.step(plan)
        metrics["perf/ahead_reads"] = float(self.records.drop())
        self._note_load(plan.step)
        self.version = PolicyVersion(self.version.incarnation, plan.step + 1)
        self.consumed.update(group.group_id for group in plan.groups)
        weights = self._weights_digest()
        is_last = self.version.step == self.config.run.steps
        if self.parked is not None:
            metrics |= self.handed
        elif not is_last or self.config.evaluation.every:
            metrics |= self._publish()
        if self.teachers is not None and self.version.step < self.config.run.steps:
            self.teachers.publish(self.begins, self.version.step)
        metrics |= self.writer.metrics()
        if self.config.checkpoint.keep_versions:
            self._keep_version()
        if self.client is not None:
            self.client.expect(StepDone(plan.step, self.version, metrics, "", weights), Ok)
        every = self.config.checkpoint.every
        if every and self.version.step % every == 0:
            self._checkpoint()
        if self.parked is not None:
            if is_last:  # it has the memory now
                self._save()
            self._hand_over(self.parked)

    def _hand_over(self, parked: Parked) -> None:
        """End a turn: leave the memory to the engines, which take the new weights first."""
        moves = {_PARKED.get(name) for name in moved_parts(self.config)}
        with self.tracer.span("hand over", version=str(self.version)):
            self._before_update()  # a checkpoint or an earlier snapshot may read the parts
            parked.out(part for part in PARTS if part in moves and part != "weights")
            parked.back(["weights"])
            self._publish()
            self.handed = self.publisher.wait() if self.publisher is not None else {}
            self._before_update()
            parked.out(part for part in PARTS if part in moves)
            dist.barrier(self.parallel.control)

    def _take_teachers(self, plan: BatchPlan) -> dict[str, float]:
        """Metrics of the teachers that follow the policy; those on these ranks take a version."""
        if self.teachers is None:
            return {}
        metrics = self.teachers.metrics(plan.teachers, plan.step)
        if self.config.ref_models.placement == "trainer":
            run, wanted = self.context.run, max(v.step for v in plan.teachers.values())
            with self.tracer.span("take teachers", step=plan.step):
                self.teachers.wait(wanted + 1)
                metrics |= self.learner.take_teachers(plan.teachers, partial(teacher_folder, run))
        return metrics

    def _weights_digest(self) -> str:
        """Digest of the live weights of all ranks, for the stream; "" without a stream."""
        if not self.config.stream.keep_steps:
            return ""
        with self.tracer.span("digest weights", version=str(self.version)):
            return weights_digest(self._sent(), self.parallel.control)

    def _probe(self, plan: BatchPlan) -> dict[str, float]:
        """Compare records and model on a sample, under the weights at the start of the step."""
        if not probe.due(self.config, plan.step):
            return {}
        with self.tracer.span("probe", step=plan.step):
            return probe.probe(self.model, plan, self.config, self.parallel, self.context.blobs)

    def _note_load(self, step: int) -> None:
        """Write the load of each expert in probed steps and in the last step, for the report."""
        last = step == self.config.run.steps - 1
        if self.client is None or not self.learner.load.numel():
            return
        if not (last or probe.due(self.config, step)):
            return
        counts = self.learner.load.long().tolist()
        self.expert_load.write(
            [{"step": step, "layers": self.model.spec.moe_layers, "counts": counts}]
        )

    def _report_bad(self, bad: BadStep) -> None:
        """Let the controller keep the records; without an answer the trainer goes on."""
        log.error("%s", bad.text)
        if self.client is not None:
            with contextlib.suppress(MoerlError):
                self.client.expect(bad, Ok)

    def _publish(self) -> dict[str, float]:
        """Copy the weights and start to publish them; returns metrics of the previous publish."""
        if self.publisher is None:
            return {}
        with self.tracer.span("snapshot", version=str(self.version)):
            return self.publisher.publish(self.version)

    def _before_update(self) -> None:
        """Wait until weights and optimizer state may change."""
        self.writer.before_update()
        if self.publisher is not None:
            self.publisher.before_update()
        if self.teachers is not None:
            self.teachers.before_update()

    def _settle(self) -> None:
        """Wait until no publish is in flight."""
        if self.publisher is not None:
            self.publisher.wait()
        dist.barrier(self.parallel.control)

    def _serve_late(self) -> None:
        """After `_settle`: let engines that are behind catch up until the next publish."""
        if self.publisher is not None:
            self.publisher.resume()

    def _keep_version(self) -> None:
        with self.tracer.span("save hf", version=str(self.version)):
            self.save_model(self.context.run.versions / str(self.version))
            self._save_adapter(self.context.run.adapter.with_name(str(self.version)))

    def _save_hf(self) -> None:
        with self.tracer.span("save hf", step=self.version.step):
            self.save_model(self.context.run.hf)
            self._save_adapter(self.context.run.adapter, self.context.run.served_adapter)
        self.hf_step = self.version.step

    def _save_adapter(self, folder: Path, served: Path | None = None) -> None:
        if self.model.adapters:
            lora, base = self.config.lora, self.source.path
            save_live_adapters(
                folder,
                self.model,
                lora,
                self.parallel,
                base,
                served=served,
                patience=self.patience,
            )

    def save_model(self, folder: Path) -> None:
        """Save the live weights as a model folder; collective."""
        parallel = self.parallel
        held = every_rank(self.model.spec, parallel.sizes, parallel.platform.layers)
        ranks = RankGroup(parallel.rank, parallel.control)
        # merging writes tensors that a publish of W0 to engines with adapters may still read
        self.learner.before_update()
        with self.model.merged():
            shards = HfShards(lambda: self.model.tensors, held, ranks, self.source.path)
            shards.save(folder, self.patience)

    def _tell(self, text: str) -> None:
        """Show a sentence on the console.  In any thread: sockets belong to one."""
        log.warning("%s", text)
        context = self.context
        client = RpcClient(context.controller, context.keys, timeout_s=_NOTICE_S)
        with contextlib.closing(client), contextlib.suppress(MoerlError):
            client.expect(Notice(text), Ok)

    def _sent(self) -> dict[str, torch.Tensor]:
        """Tensors of a publish: the live weights and, if configured, the adapter factors."""
        factors = self.model.factors() if self.config.lora.sends_factors else {}
        return self.model.tensors | factors

    def _checkpoint(self) -> None:
        if self.teachers is not None:
            self.teachers.wait(self.version.step)
        progress = checkpoint.Progress(
            version=self.version,
            consumed=self.consumed.parts,
            begins=self.begins,
        )
        with self.tracer.span("checkpoint", step=self.version.step):
            checkpoint.save(self.writer, self.learner, progress, self.parallel)
        self.saved_step = self.version.step
        if self.config.checkpoint.hf == "every":
            self._save_hf()

    def _sync_context(self, on_failure: Callable[[BaseException], None]) -> SyncContext:
        config, context, parallel = self.config, self.context, self.parallel
        return SyncContext(
            rank=parallel.rank,
            world_size=parallel.world_size,
            control=parallel.control,
            spec=self.model.spec,
            layout=parallel.sizes,
            layer_spec=parallel.platform.layers,
            live=self._sent,
            # A publish has its own connections: sockets belong to one thread, and plans never wait.
            connect=lambda: RpcClient(
                context.controller, context.keys, timeout_s=config.sync.timeout_s
            ),
            keys=context.keys,
            tracer=self.tracer,
            on_failure=on_failure,
        )


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def report_failure(context: RankContext, error: BaseException, job: str) -> None:
    """Report the failure of this rank to the controller, if the controller can be reached."""
    blob = error.uri if isinstance(error, BlobError) else ""
    failed = Failed(
        int(os.environ.get("RANK", "0")),
        cause_of(error),
        job,
        context.incarnation,
        blob,
        ends_run=isinstance(error, NonRetryableError),
    )
    # A damaged blob would end the next trainer too, so wait until a restarting controller answers.
    limit_s = _DAMAGE_S if blob else _FAREWELL_S
    with contextlib.suppress(MoerlError):
        RpcClient(context.controller, context.keys, timeout_s=limit_s).request(failed)


# --- start on nodes of its own --------------------------------------------------------------------
def read_endpoints(run: RunDir, config: Config) -> tuple[RankContext, str]:
    """Read the endpoints folder; returns a context and the name of the folder's opening.

    The context has no incarnation and no checkpoint yet; `join_run` sets them.
    Raises TrainerError if the folder names no controller within trainer.step_timeout_s.
    """
    controller, token, start = run.endpoints.read(config.trainer.step_timeout_s)
    keys, blobs = Keys.read(run.endpoints.keys), cluster_reader(config, run, token)
    return RankContext(run, controller, keys, -1, blobs, None), start


def join_run(context: RankContext, parallel: Parallel) -> RankContext:
    """Set the next incarnation of the trainer and the newest checkpoint; collective.

    On its own nodes, torchrun restarts all ranks with the first command line when a rank ends or a
    node returns, so each start of the trainer looks up both.
    """
    mine: tuple[int, str] | None = None
    if parallel.is_first:
        found = newest_checkpoint(context.run)
        mine = next_incarnation(context.run, resume=True), str(found) if found else ""
    incarnation, checkpoint = broadcast_value(mine, tuple[int, str], parallel.control)
    newest = Path(checkpoint) if checkpoint else None
    return replace(context, incarnation=incarnation, checkpoint=newest)


def bind(config: Config) -> None:
    """Make collectives of this process use the cluster's interface, NCCL and UCX settings."""
    os.environ |= transport_environment(config, first_group(config, "trainer"))
