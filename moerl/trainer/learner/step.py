"""Trains one batch of rollouts: forward passes without gradient, then the optimizer steps.

A batch gives one optimizer step, or `trainer.minibatches` steps (`moerl.data.batching`); each step
has the global denominators of its own groups.  Loss inputs that need a model, such as the proximal
policy, come from forward passes before the first step (`moerl.trainer.passes.proximal`).

The loss of an optimizer step is the plain sum of weight x token loss over all ranks and
microbatches, and the weights depend on the plan alone.  Megatron's schedule would divide by a token
count; its finaliser is called without a count, so gradients stay sums and do not depend on the
split.

The last stage has masks and losses; the stage that owns a layer has its routes.  Counts are summed
over the whole trainer, and each token and each row counts once.

Legend: N sampled tokens of a microbatch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from moerl.algorithms.advantages import advantage_metrics, plan_advantages
from moerl.algorithms.aggregation import plan_weights
from moerl.algorithms.device_copies import upload
from moerl.algorithms.fork_advantages import plan_vine
from moerl.algorithms.loss import loss_metrics, policy_loss
from moerl.algorithms.preference import plan_pairs
from moerl.algorithms.registry import choose
from moerl.algorithms.tokens import Sequences, Tokens
from moerl.config.algorithms import (
    OBJECTIVES,
    base_is_reference,
    borrows_policy,
    exact_distillation,
    followers_of,
    teachers_of,
)
from moerl.config.schema import Config
from moerl.config.task_mixture import by_label
from moerl.core.errors import TrainerError
from moerl.core.types import Array, BatchPlan, PolicyVersion
from moerl.data.batching import Minibatch, pair_cost, split_plan
from moerl.data.packing import LossInputs, Microbatch
from moerl.data.ref_scores import check_teachers, received
from moerl.data.shared_prefix import count_apart
from moerl.records.blob_store import RecordReads
from moerl.trainer.learner.bad_steps import BadSteps, bad_gradients
from moerl.trainer.learner.optimizer import (
    NotFiniteError,
    connect,
    gather_parameters,
    make_optimizer,
    make_schedule,
    router_grad_norm,
    take_step,
)
from moerl.trainer.learner.ref_model import BorrowedPolicy, RefModel, open_ref_models
from moerl.trainer.learner.step_sums import SampledScores, StepSums, describe, load_metrics, no_loss
from moerl.trainer.model.gpt import Chunk, Model, wrap
from moerl.trainer.model.parallel import Parallel
from moerl.trainer.model.replay import Mode
from moerl.trainer.passes import forward, probe, proximal
from moerl.trainer.passes.over_support import (
    TeacherSupport,
    support_terms,
    teacher_supports,
    wanted_entries,
)
from moerl.trainer.passes.proximal import ReferenceLogprobs
from moerl.trainer.passes.router_losses import NAMES, RouterLosses
from moerl.trainer.passes.schedule import (
    Batches,
    ForwardStep,
    LoadRoutes,
    LossOf,
    ScheduledPass,
    next_pass,
    no_tokens,
    run_pass,
    score,
)

if TYPE_CHECKING:
    from moerl.trainer.learner.critic import Critic

Advantages = Sequence[float | Array]  # by row of a plan


@dataclass(slots=True)
class _Times:
    """Seconds spent in each part of a batch."""

    score: float = 0.0
    pack: float = 0.0
    forward_backward: float = 0.0
    optimizer: float = 0.0


class Learner:
    """Model, optimizer and learning-rate schedule of one rank; `step` trains one plan."""

    def __init__(
        self,
        model: Model,
        parallel: Parallel,
        config: Config,
        store: RecordReads,
        critic: Critic | None = None,
    ) -> None:
        """Wrap the model, and make its optimizer and reference models.

        critic: computes the advantages and trains with the policy (`moerl.trainer.learner.critic`).
        """
        self.critic = critic
        self.bad = BadSteps(config.trainer.skip_bad_steps, parallel)
        if critic is not None:
            critic.bad = self.bad
        self.before_update: Callable[[], None] = lambda: None  # called before weights change
        self.load = torch.zeros(0, 0)  # load of the experts in the last step, see `StepSums.load`
        self.changed_frac = 0.0  # share of adapted weights that the last optimizer step changed
        self.model, self.parallel, self.config, self.store = model, parallel, config, store
        # import a user's objective now: if it is missing, the start fails and not the first step
        choose("algorithm.objective", config.algorithm.objective, OBJECTIVES)
        self.pair_cost = pair_cost(model.spec)
        self._roles = {label: entry.roles for label, entry in by_label(config).items()}
        optimizer = config.trainer.optimizer
        self.ddp: list[DistributedDataParallel] = wrap(model, config.trainer, parallel.platform)
        self.optimizer: MegatronOptimizer = make_optimizer(self.ddp, config.trainer)
        self.schedule = make_schedule(self.optimizer, optimizer, config.run.steps)
        self.ref_models: dict[str, RefModel] = {}  # by role; empty where other ranks have them
        if config.ref_models.placement == "trainer":
            self.ref_models = open_ref_models(config, model.spec.vocab_size, parallel)
        self.borrowed = self._borrowed()
        routers_move = bool(model.spec.moe_layers) and not model.adapters
        self.watches_routers = routers_move and not optimizer.distributed
        self.router_losses = None
        if model.config.moe_z_loss_coeff or model.config.moe_aux_loss_coeff:
            self.router_losses = RouterLosses(model, parallel)
        connect(model, self.ddp, self.optimizer)

    def _borrowed(self) -> dict[str, BorrowedPolicy]:
        """Reference and teachers, by name, that are the policy with other factors or none."""
        config = self.config
        names = ["reference"] if base_is_reference(config) else []
        names += [t.name for t in teachers_of(config.algorithm) if borrows_policy(config, t)]
        own = self.model, config, self.parallel
        return {name: BorrowedPolicy(*own, lambda: self.before_update()) for name in names}

    def step(self, plan: BatchPlan) -> dict[str, float]:
        """Train one plan; returns the metrics of the step, which are equal on all ranks.

        Raises RecordError for a record that breaks replay, ConfigError if the groups do not divide
        into minibatches, and NonRetryableError if the loss or the gradient is not finite in more
        than `trainer.skip_bad_steps` batches in a row; that optimizer step is not taken.
        """
        begin, times = time.perf_counter(), _Times()
        parts = self._parts(plan)
        known = self._score_without_grad(plan, parts)
        advantages, metrics = self._advantages(plan, parts, known)
        times.score = time.perf_counter() - begin
        self.schedule.step(1)  # before the updates, so the first batch has the first warm-up rate
        total, norms, routers = StepSums(), list[float](), list[float]()
        self.changed_frac = 0.0
        for part, scores in zip(parts, known, strict=True):
            given = part, part.of(advantages), scores
            sums = self._accumulate(*given, times)
            router = [router_grad_norm(self.model, self.parallel)] if self.watches_routers else []
            if taken := self._update(part, sums, times, partial(self._seek, *given)):
                norms, routers = norms + taken, routers + router
            total += sums
        gather_parameters(self.ddp)
        metrics |= self._performance(total, times, time.perf_counter() - begin)
        metrics |= self._metrics(total, len(parts)) | advantage_metrics(advantages)
        if self.config.trainer.share_prompts:
            metrics["routing/prompts_apart"] = float(sum(map(count_apart, plan.groups)))
        if norms:
            metrics["loss/grad_norm"] = max(norms)
        if self.model.adapters:
            metrics["lora/changed_frac"] = self.changed_frac
        if "reference" in self.borrowed:
            metrics["lora/base_swap_s"] = self.borrowed["reference"].swap_s
        if routers:
            metrics["loss/grad_norm_router"] = max(routers)
        metrics |= {} if self.critic is None else self.critic.update(parts)
        return metrics | self.bad.end()

    def take_teachers(
        self, teachers: Mapping[str, PolicyVersion], folder: Callable[[str, PolicyVersion], Path]
    ) -> dict[str, float]:
        """Give the teachers on these ranks their versions for the next step; returns metrics.

        folder: of a teacher's version.  Raises ModelError.
        """
        metrics = {}
        for name, version in teachers.items():
            teacher, begin = self._teacher(name), time.perf_counter()
            if teacher.version != version:
                teacher.take(version, folder(name, version))
                metrics[f"teacher/{name}/seconds"] = time.perf_counter() - begin
        return metrics

    def _teacher(self, name: str) -> RefModel | BorrowedPolicy:
        return self.ref_models[name] if name in self.ref_models else self.borrowed[name]

    def read_ahead(self, plan: BatchPlan, records: RecordReads) -> None:
        """Read the records of the first microbatch of each optimizer step of a plan.

        Thread-safe: this neither computes with the model nor changes it.
        Raises RecordError and BlobError, as `step` does.
        """
        replay = self.model.replay if self.config.replay.routing == "R3" else None
        for part in self._parts(plan):
            batches = Batches(part.plan, self.config, self.parallel, records)
            batches.pack(0, replay.layers if replay is not None else ())

    def _parts(self, plan: BatchPlan) -> tuple[Minibatch, ...]:
        trainer, seed = self.config.trainer, self.config.run.seed
        return split_plan(plan, trainer, seed=seed, pair=self.pair_cost)

    def gradients(self, plan: BatchPlan) -> StepSums:
        """Accumulate the gradients of a plan without an update; returns the joined sums."""
        part = Minibatch.whole(plan)
        (known,) = self._score_without_grad(plan, [part])
        advantages, _ = self._advantages(plan, [part], [known])
        return self._accumulate(part, advantages, known, _Times())

    def _score_without_grad(
        self, plan: BatchPlan, minibatches: Sequence[Minibatch]
    ) -> list[ReferenceLogprobs]:
        """Run the forward passes over the whole batch that precede its first optimizer step.

        Scores of separate reference ranks come with the plan.  Returns one entry per minibatch.
        """
        config, known, read = self.config, [], []
        came, followers = dict[str, list[Array]](), followers_of(config.algorithm)
        if config.ref_models.placement == "separate":
            came = received(plan, config)
        elif followers or plan.teachers:
            check_teachers(plan, config)
            for name in followers:
                if (taken := self._teacher(name).version) != plan.teachers[name]:
                    raise TrainerError(f"{plan.teachers[name]} of {name} is wanted, it has {taken}")
        for part in minibatches:
            batches = Batches(part.plan, config, self.parallel, self.store)
            scores = self._scores_here(batches)
            for role, values in came.items():
                scores.logprobs[role] = batches.by_microbatch(part.of(values))
            known.append(scores)
            read.append(batches)
        for role, borrowed in self.borrowed.items():
            every = borrowed.each(read, partial(self._scored, role))
            for scores, found in zip(known, every, strict=True):
                self._keep(scores, role, found)
        for scores, batches in zip(known, read, strict=True):
            scores.mix(config.algorithm, batches)
        if "m2" in config.algorithm.corrections:
            limit = config.algorithm.m2_limit
            proximal.bound_second_moment(minibatches, known, limit, self.parallel, self.store)
        return known

    def _scores_here(self, batches: Batches) -> ReferenceLogprobs:
        """Scores of the policy before its update, if needed, and of models on these ranks."""
        scores = ReferenceLogprobs()
        if proximal.is_needed(self.config):
            scores = proximal.proximal_pass(self.model, self.config, batches)
        for role, policy in self.ref_models.items():
            if self._is_exact_teacher(role):
                support = teacher_supports(policy.model, self.config.algorithm, batches)
                scores.supports[role] = support
            else:
                scores.logprobs[role] = policy.logprobs(batches)
        return scores

    def _is_exact_teacher(self, role: str) -> bool:
        return role != "reference" and exact_distillation(self.config.algorithm)

    def _scored(
        self, role: str, model: Model, batches: Batches
    ) -> dict[int, Tensor] | dict[int, TeacherSupport]:
        """By microbatch: log-probabilities, or those over a support of exact distillation."""
        if self._is_exact_teacher(role):
            return teacher_supports(model, self.config.algorithm, batches)
        return score(model, batches, Mode.OFF)

    def _keep(self, scores: ReferenceLogprobs, role: str, found: Any) -> None:
        into = scores.supports if self._is_exact_teacher(role) else scores.logprobs
        into[role] = found

    def _advantages(
        self,
        plan: BatchPlan,
        minibatches: Sequence[Minibatch],
        references: Sequence[ReferenceLogprobs],
    ) -> tuple[Advantages, dict[str, float]]:
        """(advantages by row of the whole plan, their metrics)."""
        algorithm, drift = self.config.algorithm, None
        if algorithm.advantage == "online_dpo" or algorithm.reward_kl_coef:
            drift = proximal.over_reference(minibatches, references, self.parallel)
        if self.critic is not None:
            return self.critic.advantages(plan, drift), {}
        if algorithm.advantage == "online_dpo":
            assert drift is not None, "online_dpo compares gains over the reference"
            return plan_pairs(algorithm, plan, [float(gain.sum()) for gain in drift])
        if algorithm.advantage == "vine":
            return plan_vine(plan), {}
        return plan_advantages(algorithm, plan, drift, self._roles), {}

    def _accumulate(
        self, part: Minibatch, advantages: Advantages, reference: ReferenceLogprobs, times: _Times
    ) -> StepSums:
        """Run forward and backward of this rank's microbatches; returns the joined sums."""
        begin, sums = time.perf_counter(), self._no_sums()
        for ddp in self.ddp:
            ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        every = self.config.observe.full_entropy
        wide = every > 0 and part.plan.step % every == 0
        step = partial(self._forward_step, sums, reference, wide)
        pack_s = self._pass(part, advantages, reference, step)
        sums.count_scored()
        if self.router_losses is not None:
            sums.counts |= self.router_losses.values
        joined = sums.join(self.parallel.control)
        times.pack += pack_s
        times.forward_backward += time.perf_counter() - begin - pack_s
        return joined

    def _pass(
        self,
        part: Minibatch,
        advantages: Advantages,
        reference: ReferenceLogprobs,
        step: ForwardStep,
    ) -> float:
        """One pass of the policy over a part; returns the seconds that it waited for packing."""
        weights = plan_weights(self.config.algorithm, part.plan, self._roles)
        loss = LossInputs(advantages, weights)
        batches = Batches(part.plan, self.config, self.parallel, self.store, loss=loss)
        run_pass(self.model, self.ddp, batches, step, load=self._routes(part.plan, reference))
        return batches.pack_s

    def _no_sums(self) -> StepSums:
        spec = self.model.spec
        return StepSums(
            loss=no_loss(self.parallel.device),
            load=torch.zeros(len(spec.moe_layers), spec.experts, dtype=torch.float64),
        )

    def _routes(self, plan: BatchPlan, reference: ReferenceLogprobs) -> LoadRoutes | None:
        if self.model.replay is None:
            return None
        load = proximal.recorded_routes(self.model, self.parallel)
        if reference.routes is not None:
            load = proximal.own_routes(self.model, self.parallel, reference.routes)
        if self.router_losses is None:
            return load
        self.router_losses.begin(plan)
        prepare = self.router_losses.prepare

        def load_both(batch: Microbatch, microbatch: int, chunk: Chunk) -> None:
            load.load(batch, microbatch, chunk)
            prepare(batch, microbatch, chunk)

        return replace(load, load=load_both)

    def _update(
        self,
        part: Minibatch,
        sums: StepSums,
        times: _Times,
        seek: Callable[[], Sequence[int]],
    ) -> list[float]:
        """Take one optimizer step; returns the gradient norm before clipping.

        seek: the microbatches whose gradient is not finite.  [], and no step, where loss or
        gradient is not finite.
        """
        loss = loss_metrics(self.config.algorithm, sums.loss).get("loss/total", 0.0)
        if not math.isfinite(loss):
            self.bad.skip(part.plan, f"the loss is {loss}", sums.bad_losses())
            return []
        begin = time.perf_counter()
        self.before_update()
        try:
            norms = take_step(self.optimizer, self.bad.agree)
        except NotFiniteError as error:
            self.bad.skip(part.plan, str(error), seek())
            return []
        if self.model.adapters:
            gather_parameters(self.ddp)
            self.changed_frac = self.model.merge().share(self.parallel.control)
        times.optimizer += time.perf_counter() - begin
        return norms

    def _seek(
        self, part: Minibatch, advantages: Advantages, reference: ReferenceLogprobs
    ) -> list[int]:
        self.optimizer.zero_grad()  # its step has put the sums where the backward pass adds
        step = partial(self._forward_step, self._no_sums(), reference, False)
        run = partial(self._pass, part, advantages, reference)
        return bad_gradients(self.model, self.ddp, step, run)

    def _forward_step(
        self,
        sums: StepSums,
        reference: ReferenceLogprobs,
        wide: bool,
        scheduled_passes: Iterator[ScheduledPass],
        ddp: DistributedDataParallel,
    ) -> tuple[Tensor, LossOf]:
        """Run one forward call of Megatron's schedule; returns the output and its loss function.

        wide: also compute the entropy over the whole vocabulary.
        """
        scheduled = next_pass(scheduled_passes)
        mode = Mode.OFF if self.model.replay is None else Mode.REPLAY
        output = forward.run_to_head(
            self.model, scheduled.chunk, ddp, scheduled.batch, scheduled.microbatch, mode
        )
        self._count_routes(sums, scheduled)
        return output, partial(self._loss, scheduled, reference, wide, sums)

    def _loss(
        self,
        scheduled: ScheduledPass,
        reference: ReferenceLogprobs,
        wide: bool,
        sums: StepSums,
        hidden: Tensor,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        batch = scheduled.batch
        algorithm = self.config.algorithm
        teacher = reference.support(scheduled.microbatch, batch.held)
        wanted = wanted_entries(batch, teacher)
        scores = forward.sampled_logprobs(
            self.model, hidden, batch, self.parallel, full_entropy=wide, support=wanted
        )
        logprob_N, device = scores.logprob, scores.logprob.device
        tokens = Tokens(
            logprob_N,
            upload(batch.old_logprob, device),
            upload(batch.advantage, device),
            Sequences(upload(batch.seq, device), max(len(batch.rollouts), 1)),
            upload(batch.lag, device),
            entropy=scores.entropy,
            m2_bound=reference.m2_bound,
            **reference.tokens(scheduled.microbatch),
            **support_terms(algorithm, batch, scores, teacher, self.parallel),
        )
        result = policy_loss(algorithm, tokens, upload(batch.weight, device))
        sums.losses.append((scheduled.microbatch, result.loss.detach()))
        if self.parallel.tp_rank == 0:
            sums.count_held(batch)
            if self.parallel.cp_rank == 0:
                sums.loss += result.sums
                # weights at the start of the batch: later steps would count their own progress
                sums.scored.append(SampledScores.of(batch, tokens.prox, scores))
        return result.loss, no_tokens(device), {}

    def _count_routes(self, sums: StepSums, scheduled: ScheduledPass) -> None:
        chunk, batch = scheduled.chunk, scheduled.batch
        if self.model.replay is not None:
            routed = batch.num_fed_in(forward.routed_slots(batch, self.parallel))
            sums.counts["fed_rows"] += routed * len(self.model.replay.chunks[chunk.index])
        if chunk.index == len(self.model.chunks) - 1:  # reads of all chunks
            sums.counts["replayed_rows"] += batch.read.routing_rows
            sums.counts["routing_bytes"] += batch.read.routing
            sums.count_experts(self.model.spec.moe_layers, batch.read.experts)
        if self.model.indexers is not None and self.parallel.tp_rank == 0:  # ranks read the same
            layers = self.model.indexers.chunks[chunk.index]
            sums.counts["fed_index_rows"] += batch.num_fed * len(layers)
            if chunk.index == len(self.model.chunks) - 1:
                sums.counts["indexer_rows"] += batch.read.indexer_rows
                sums.counts["indexer_bytes"] += batch.read.indexer

    def _metrics(self, total: StepSums, num_steps: int) -> dict[str, float]:
        metrics = loss_metrics(self.config.algorithm, total.loss, num_steps)
        metrics |= total.mismatch.metrics()
        metrics |= describe(total, shares=self.config.trainer.share_prompts)
        if self.router_losses is not None:
            metrics |= {f"loss/{name}": total.counts[name] / num_steps for name in NAMES}
        if self.model.replay is not None:
            metrics |= probe.exact_metrics(total.exact, self.config)
            metrics |= load_metrics(total.load, self.model.spec.moe_layers)
            self.load = total.load
        return metrics | {"loss/lr": float(self.optimizer.param_groups[0]["lr"])}

    def _performance(self, total: StepSums, times: _Times, step_s: float) -> dict[str, float]:
        return {
            "perf/step_s": step_s,
            "perf/score_s": times.score,
            "perf/pack_s": times.pack,
            "perf/forward_backward_s": times.forward_backward,
            "perf/optimizer_s": times.optimizer,
            "perf/train_tokens_per_s": (total.counts["fed"] + total.counts["shared"]) / step_s,
        }
