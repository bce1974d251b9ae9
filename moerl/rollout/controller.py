"""The controller: three loops (produce, score, learn) around one bounded buffer and one version.

It sees headers only.  Routes, masks, logits and weights go point to point.  `producer` starts
requests and joins segments, `admission` checks, scores and admits groups, `fleet` knows the
engines; here the trainer's messages are answered: plans, finished steps, and what a weight update
asks of the engines.  One process, one event loop, one writer of versions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moerl.blob import BlobStore
from moerl.config import Config
from moerl.data.batching import plan_batch
from moerl.errors import MoerlError, ProtocolError, TrainerError
from moerl.protocols import (
    AbortUpdate,
    AskEngine,
    CloseUpdate,
    CommitUpdate,
    Engine,
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
    StepDone,
    Stop,
    TakePlan,
    VerifyUpdate,
    encode_value,
)
from moerl.rollout.admission import Admission, ModelFacts
from moerl.rollout.buffer import GroupBuffer
from moerl.rollout.evaluation import Evaluator
from moerl.rollout.fleet import Fleet
from moerl.rollout.history import History
from moerl.rollout.ledger import Ledger
from moerl.rollout.loops import Loops
from moerl.rollout.producer import Producer, PromptSource
from moerl.types import EpisodeGroup, PolicyVersion, SamplingParams

log = logging.getLogger(__name__)


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
        held_out: PromptSource | None = None,
        decode: Callable[[Sequence[int]], str],
        blobs: BlobStore,
        records: Path | None,
        on_step: Callable[[StepReport], None],
        on_rewind: Callable[[int], None],
    ) -> None:
        """held_out: prompts of evaluations, needed with evaluation.every.

        records: where headers of trained groups go, or None to drop them and their blobs.

        on_rewind: a restarted trainer goes on from this step; rows of later ones are void.
        """
        self.config = config
        self.decode, self.records = decode, records
        self.on_step, self.on_rewind = on_step, on_rewind
        rollout = config.rollout
        self.buffer = GroupBuffer(
            rollout.groups_per_step,
            rollout.max_lag,
            rollout.buffer_depth,
            selection=rollout.selection,
        )
        self.ledger, self._history, self._loops = Ledger(), History(), Loops()
        self.fleet = Fleet(engines, rollout, self.ledger, self._loops, self._to_come)
        self.admission = Admission(
            config,
            facts,
            scorer,
            decode,
            blobs,
            self.buffer,
            self._history,
            self.ledger,
            self._loops,
        )
        self.producer = Producer(
            config,
            sampling_of(config, facts),
            prompts,
            self.buffer,
            self.fleet,
            self._loops,
            self.ledger,
            on_finished=self.admission.finish,
            on_refused=self.admission.refuse,
        )
        self._evaluator = held_out and Evaluator(
            config.evaluation,
            sampling_of(config, facts),
            held_out,
            scorer,
            decode,
            blobs,
            self.fleet,
            self.ledger,
            self._loops,
        )
        self._blobs = blobs
        self._engines_up = asyncio.Event()
        self._planned: dict[int, list[EpisodeGroup]] = {}

    # --- life -------------------------------------------------------------------------------
    async def run(self) -> None:
        """Produce until `stop`; raises the first failure of any loop or of the trainer."""
        self.producer.start()
        if self._evaluator:
            self._evaluator.start()
        await self._loops.failure

    def engines_started(self) -> None:
        """The trainer's hello is answered from here on: it may publish and ask for plans."""
        self._engines_up.set()

    def engine_lost(self, index: int) -> None:
        self.fleet.lost(index)

    def engine_back(self, index: int, engine: Engine) -> None:
        self.fleet.back(index, engine)

    async def stop(self) -> None:
        await self._loops.stop()

    def status(self) -> dict[str, float]:
        """For the live panel, between steps; names of docs/metrics.md."""
        rollout = self.config.rollout
        siblings = rollout.group_size * rollout.oversample
        return {
            "async/buffer_depth": float(self.buffer.num_ready),
            "async/in_flight": float(self.buffer.num_started * siblings),
        } | {f"refused/{reason}": float(n) for reason, n in self.ledger.refused.items()}

    async def measure_engines(self, seconds: float) -> float:
        """Tokens/s of idle engines on fresh prompts, both replays on; nothing is kept."""
        return await self.producer.measure(seconds, self._blobs)

    def _to_come(self, version: PolicyVersion) -> int:
        """Groups that are being scored, or must still be started under this version."""
        is_current = version.incarnation == self.fleet.incarnation
        wanted = self.producer.wanted(version.step) if is_current else 0
        return self.admission.finishing + wanted

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
                await self.fleet.join_sync(message)
                return Ok()
            case OpenUpdate():
                await self.fleet.open_update(message)
                return Ok()
            case CloseUpdate():
                return await self.fleet.close_update(message)
            case (
                PrepareUpdate()
                | VerifyUpdate()
                | RelayUpdate()
                | CommitUpdate()
                | AbortUpdate()
                | AskEngine()
            ):
                return await self.fleet.session(message)
            case Failed():
                error = TrainerError(f"trainer rank {message.rank}: {message.cause}")
                log.error("%s", error)
                if not self.config.supervision.max_restarts:
                    self._loops.fail(error)
                return Ok()
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for the controller")

    async def _hello(self, message: Hello) -> Message:
        await self._engines_up.wait()
        is_first = self.fleet.incarnation is None
        self._dp_size = message.dp_size
        self.fleet.incarnation = message.version.incarnation
        self._history.begin(message.version)
        planned = [group for groups in self._planned.values() for group in groups]
        self._planned.clear()
        self.buffer.restart(message.version.step, message.consumed, planned)
        for group in self.buffer.evict(lambda group: not self._history.holds_all(group)):
            self.admission.drop_branch(group)
        if not is_first:
            self.on_rewind(message.version.step)
        self._loops.notify()
        return Ok()

    async def _take_plan(self, message: TakePlan) -> Message:
        if message.step >= self.config.run.steps:
            return Stop(f"all {self.config.run.steps} steps are done")
        if message.step != self.buffer.next_step:
            raise ProtocolError(f"plan {message.step} asked, plan {self.buffer.next_step} is next")
        begin, incarnation = time.monotonic(), self.fleet.incarnation
        while True:
            if self.fleet.incarnation != incarnation:
                raise ProtocolError("another gang has taken over")
            self._drop_stale()
            groups = self.buffer.take()
            if groups is not None:
                break
            if self.fleet.any_behind:
                return Refresh()
            waited = time.monotonic() - begin
            if waited > message.timeout_s:
                raise ProtocolError(
                    f"no batch of {self.config.rollout.groups_per_step} groups after "
                    f"{waited:.0f} s: {self.buffer.num_ready} ready, "
                    f"{self.buffer.num_started} in generation"
                )
            await self._loops.wait_change(min(1.0, message.timeout_s))
        self.admission.planned()
        self.ledger.trainer_wait_s += time.monotonic() - begin
        plan = plan_batch(
            message.step,
            PolicyVersion(self.fleet.incarnation or 0, message.step),
            groups,
            dp_size=self._dp_size,
            max_tokens_per_microbatch=self.config.trainer.max_tokens_per_microbatch,
            packed=self.config.trainer.packing,
        )
        self._planned[message.step] = groups
        self._loops.notify()
        return Plan(plan)

    def _drop_stale(self) -> None:
        for group in self.buffer.evict_stale():
            self.ledger.dropped_stale += 1
            self.admission.forget(group)

    async def _step_done(self, message: StepDone) -> Message:
        if message.version.incarnation != self.fleet.incarnation:
            raise ProtocolError(f"step {message.step} of {message.version}: that gang is gone")
        groups = self._planned.pop(message.step)
        engines = await self.fleet.statuses()
        metrics = dict(message.metrics)
        metrics |= self.ledger.row(groups, message.step, engines)
        metrics["async/buffer_depth"] = float(self.buffer.num_ready)
        self.on_step(
            StepReport(message.step, message.version, metrics, self._samples(groups, message.step))
        )
        if self.records is None:
            for group in groups:
                self.admission.forget(group)
        else:
            self.records.mkdir(parents=True, exist_ok=True)
            path = self.records / f"step-{message.step:06d}.msgpack"
            path.write_bytes(encode_value(groups))
        return Ok()

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


def sampling_of(config: Config, facts: ModelFacts) -> SamplingParams:
    """Every parameter of a request, from the settings and the model's stop tokens."""
    sampling = config.sampling
    return SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop_token_ids=facts.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
    )


def cause_of(error: BaseException) -> str:
    """One sentence for a person: our own errors as they are, others with their type."""
    return str(error) if isinstance(error, MoerlError) else f"{type(error).__name__}: {error}"
