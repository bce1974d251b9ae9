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
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from moerl.blob import BlobStore
from moerl.config import Config
from moerl.data.batching import plan_batch
from moerl.errors import ProtocolError, TrainerError
from moerl.ids import IdSet
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
    Scored,
    Scorer,
    StepDone,
    Stop,
    TakePlan,
    TakeRecords,
    VerifyUpdate,
)
from moerl.rollout.admission import Admission
from moerl.rollout.blob_holders import BlobHolders
from moerl.rollout.blob_uris import group_uris
from moerl.rollout.buffer import GroupBuffer
from moerl.rollout.episodes import Environment
from moerl.rollout.evaluation import Evaluator
from moerl.rollout.fleet import Fleet
from moerl.rollout.frozen import FrozenLine
from moerl.rollout.generate import sampling_params
from moerl.rollout.history import History
from moerl.rollout.journal import Journal
from moerl.rollout.ledger import Ledger, facts_of
from moerl.rollout.loops import Loops, look_after_memory
from moerl.rollout.past import Past
from moerl.rollout.producer import Producer, PromptSource
from moerl.rollout.roster import Roster
from moerl.rollout.samples import StepReport, samples_of
from moerl.rollout.timely import TimelyScorer
from moerl.rollout.whereabouts import Whereabouts
from moerl.types import EpisodeGroup, ModelShape, PolicyVersion
from moerl.wire import encode_value

log = logging.getLogger(__name__)


class Controller:
    """Plain class; `moerl.launch` puts it on an actor."""

    def __init__(
        self,
        config: Config,
        *,
        model: ModelShape,
        engines: Mapping[int, Engine],
        sizes: Mapping[int, int],
        scorer: Scorer,
        prompts: PromptSource,
        held_out: PromptSource | None = None,
        decode: Callable[[Sequence[int]], str],
        encode: Callable[[str], list[int]],
        blobs: BlobStore,
        journal: Journal,
        records: Path | None,
        saved_steps: Callable[[], int],
        on_step: Callable[[StepReport], None],
        on_rewind: Callable[[int], None],
        gang_lives: bool = False,
        fleet_changed: bool = False,
    ) -> None:
        """sizes: tensor-parallel ranks of each engine.

        held_out: prompts of evaluations, needed with evaluation.every.

        records: where headers of trained groups go, or None to drop them and their blobs.

        saved_steps: optimizer steps inside the newest checkpoint, the one a restart begins with.
        on_rewind: the run goes on from this step; rows of later ones are void.
        gang_lives: a controller died beside its trainer and engines; `rejoin` comes before `run`.
        fleet_changed: engines have joined or left since this start of the run.
        """
        self.config = config
        self.decode, self.records, self.saved_steps = decode, records, saved_steps
        self.on_step, self.on_rewind = on_step, on_rewind
        rollout = config.rollout
        self.buffer = GroupBuffer(
            rollout.groups_per_step,
            rollout.max_lag,
            rollout.buffer_depth,
            selection=rollout.selection,
        )
        holders, scorer = BlobHolders(blobs), TimelyScorer(scorer, config.task.score_timeout_s)
        ledger, history, loops = Ledger(), History(), Loops()
        self.ledger, self._history, self._loops = ledger, history, loops
        self.fleet = Fleet(engines, rollout, self.ledger, self._loops, self._to_come)
        self._roster = Roster(config.engine, sizes, changed=fleet_changed and gang_lives)
        self.admission = Admission(
            config, model, scorer, decode, holders, self.buffer, history, journal, ledger, loops
        )
        environment = Environment(scorer, decode, encode)
        sampling = sampling_params(config.sampling, model)
        self.producer = Producer(
            config,
            sampling,
            prompts,
            self.buffer,
            self.fleet,
            self._loops,
            self.ledger,
            holders=holders,
            environment=environment,
            on_finished=self.admission.finish,
            on_unscored=self.admission.drop_unscored,
            on_refused=self.admission.refuse,
        )
        self._whereabouts = Whereabouts(
            blobs,
            self.buffer,
            self.producer,
            self.admission,
            journal,
            self.ledger,
            self._loops,
            patience_s=config.sync.timeout_s,
        )
        self._evaluator = (
            None
            if held_out is None
            else Evaluator(
                config.evaluation,
                sampling,
                held_out,
                scorer,
                decode,
                blobs,
                self.fleet,
                self.ledger,
                self._loops,
                environment,
                config.task.max_turns,
                config.run.steps,
            )
        )
        self._blobs, self._holders, self._journal = blobs, holders, journal
        self._engines_up = asyncio.Event()
        self._planned: dict[int, list[EpisodeGroup]] = {}
        self._trained: dict[int, EpisodeGroup] = {}  # legal under the newest checkpoint, not in it
        self._done = self._dp_size = 0
        self.failure = ""  # what a rank of the trainer said last, when it ended
        self._rows = config.run.steps  # of metrics, when all steps are done
        self._go_on_from(journal.load(), gang_lives)
        self._frozen = FrozenLine(
            config, self.buffer, self._planned, self._loops, self.admission, self._whereabouts
        )
        self._ages_s: list[float] = []  # of the groups planned last, in the buffer

    # --- life -------------------------------------------------------------------------------
    def _go_on_from(self, past: Past, gang_lives: bool) -> None:
        """Take over what the journal holds.

        Beside a living gang plans stay planned.  A journal that lost anything cannot say what that
        gang has trained: it is refused until it started again from its checkpoint.
        """
        facts = past.facts
        for version in facts.begins:
            self._history.begin(version)
        planned = {group.group_id for groups in past.planned.values() for group in groups}
        self._planned = past.planned
        self._trained = {group.group_id: group for group in past.trained}
        self._done, self._dp_size = facts.done, facts.dp_size
        self.buffer.restore(
            max([facts.done, *(step + 1 for step in past.planned)]),
            past.consumed | planned,
            past.dropped,
            past.ready,
        )
        self.producer.life = facts.lives - 1
        adopted = [*past.ready, *past.trained, *(g for gs in past.planned.values() for g in gs)]
        holders = Counter(uri for group in adopted for uri in group_uris(group))
        self._holders.share((holders - Counter(set(holders))).elements())
        self.ledger.journal_adopted, self.ledger.journal_lost = len(adopted), past.lost
        if self.records is None:
            self._blobs.sweep(uri for group in adopted for uri in group_uris(group))
        if gang_lives and past.is_whole and facts.begins:
            self.fleet.incarnation = facts.begins[-1].incarnation
            self.on_rewind(facts.done)
        log.info("%d groups are taken over, %d were lost", len(adopted), past.lost)

    async def rejoin(self, lost: Collection[int]) -> None:
        """Ask the engines what they serve, and end what the controller before had asked of them.

        lost: those that are being started again.
        """
        kept = sorted(group_uris(*self._trainable())) if self.records is None else None
        await self.fleet.look(lost, not self._done, kept)

    async def run(self) -> None:
        """Produce until `stop`; raises the first failure of any loop or of the trainer."""
        self._loops.spawn(look_after_memory())
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

    def engine_joins(self, index: int, engine: Engine, tp: int) -> None:
        """A started engine: it gets requests as soon as it serves the newest weights."""
        is_new_run = self._done == 0 and not self.fleet.incarnation
        self.fleet.join(index, engine, is_new_run=is_new_run)
        self._roster.join(index, tp)
        self.producer.add(index)
        log.info("engine %d (tp %d) has joined", index, tp)

    async def records_leave(self, node: str) -> None:
        """Returns when no group that may be trained has records on the node of an engine."""
        await self._whereabouts.leave(node, self._trainable)

    def _trainable(self) -> Iterator[EpisodeGroup]:
        """Groups that are ready, planned, or could be trained again."""
        yield from self.buffer.ready()
        for groups in self._planned.values():
            yield from groups
        yield from self._trained.values()

    async def engine_leaves(self, index: int) -> None:
        """Returns when nothing runs on the engine and nothing is published to it."""
        await self.fleet.drain(index)
        self._roster.leave(index)
        while not self._roster.is_free(index):
            await self._loops.wait_change(1.0)
        self.fleet.remove(index)
        log.info("engine %d has left", index)

    async def stop(self) -> None:
        await self._loops.stop()
        self._journal.close()

    def status(self) -> dict[str, float]:
        """For the live panel, between steps; names of docs/metrics.md."""
        rollout = self.config.rollout
        siblings = rollout.group_size * rollout.oversample
        return {
            "async/buffer_depth": float(self.buffer.num_ready),
            "async/engines": self.fleet.num_serving,
            "async/in_flight": float(self.buffer.num_started * siblings),
            "trainer/incarnation": float(
                -1 if self.fleet.incarnation is None else self.fleet.incarnation
            ),
            "frozen/start": float(self._frozen.start),
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
            case TakeRecords():
                return await self._frozen.take(message, lambda: self._done >= self.config.run.steps)
            case Scored():
                self._frozen.add(message)
                return Ok()
            case Failed():
                error = TrainerError(f"{message.gang} rank {message.rank}: {message.cause}")
                is_newest = message.incarnation in (-1, self.fleet.incarnation)
                if message.gang == "trainer" and is_newest:
                    self.failure = str(error)
                log.error("%s", error)
                if not self.config.supervision.max_restarts:
                    self._loops.fail(error)
                return Ok()
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for the controller")

    async def _hello(self, message: Hello) -> Message:
        await self._engines_up.wait()
        self.fleet.expect_no_newer(message.version.incarnation)
        consumed = IdSet(message.consumed)
        self._journal.began(message.version, message.dp_size, consumed.parts)
        self._dp_size, self._done = message.dp_size, message.version.step
        self._rows = self.config.run.steps
        self.fleet.incarnation = message.version.incarnation
        self._history.begin(message.version)
        again = [group for groups in self._planned.values() for group in groups]
        again += [group for group_id, group in self._trained.items() if group_id not in consumed]
        spent = [group for group_id, group in self._trained.items() if group_id in consumed]
        self._planned.clear()
        self._trained.clear()
        spent += self.buffer.restart(message.version.step, message.consumed, again)
        self._let_go(spent)
        branch = self.buffer.evict(lambda group: not self._history.holds_all(group))
        self._journal.left(group.group_id for group in branch)
        for group in branch:
            self.admission.drop_branch(group)
        self.on_rewind(message.version.step)
        self._loops.notify()
        return self._roster.begin() or Ok()

    async def _take_plan(self, message: TakePlan) -> Message:
        self.fleet.expect_no_newer(message.incarnation)
        self._roster.asked()
        self._loops.notify()
        if message.step >= self.config.run.steps:
            return await self._end(message)
        self.fleet.expect_gang()
        if news := self._roster.news():
            return news
        if message.step in self._planned:  # the reply was lost with a controller
            return await self._scored_plan(message)
        if message.step != self.buffer.next_step:
            raise ProtocolError(f"plan {message.step} asked, plan {self.buffer.next_step} is next")
        begin, incarnation = time.monotonic(), self.fleet.incarnation
        while True:
            if self.fleet.incarnation != incarnation:
                raise ProtocolError("another gang has taken over")
            self._drop_stale()
            if due := self.buffer.due():
                is_whole = await self._whereabouts.are_whole(due)
                same_gang = self.fleet.incarnation == incarnation
                groups = self.buffer.take() if is_whole and same_gang else None
                if groups is not None:
                    break
                continue
            if news := self._roster.news():
                return news
            if self.fleet.any_behind:
                return Refresh()
            waited = time.monotonic() - begin
            if waited > message.timeout_s:
                raise ProtocolError(
                    f"no batch of {self.config.rollout.groups_per_step} groups after "
                    f"{waited:.0f} s: {self.buffer.num_ready} ready, {self.buffer.num_started} "
                    f"in generation, {self.admission.finishing} being scored; "
                    f"{self.fleet.describe()}"
                )
            await self._loops.wait_change(min(1.0, message.timeout_s))
        self.admission.planned()
        self.ledger.trainer_wait_s += time.monotonic() - begin
        self._planned[message.step], self._ages_s = groups, self.buffer.ages_s
        self._journal.planned(message.step, [group.group_id for group in groups])
        self._loops.notify()
        return await self._scored_plan(message)

    async def _scored_plan(self, message: TakePlan) -> Plan:
        """The plan of a step that has its groups, once frozen ranks have scored all of them."""
        incarnation = self.fleet.incarnation

        def is_current() -> bool:
            return self.fleet.incarnation == incarnation and message.step in self._planned

        waited_s = await self._frozen.wait(message.step, message.timeout_s, is_current)
        self.ledger.frozen_wait_s += waited_s
        self.ledger.trainer_wait_s += waited_s
        return await self._plan(message.step)

    async def _end(self, message: TakePlan) -> Message:
        """Stop; evaluations that no step's row holds, that of the last weights, get their own."""
        steps, stop = self.config.run.steps, Stop(f"all {self.config.run.steps} steps are done")
        if self._evaluator is None or self.fleet.incarnation is None:
            return stop
        last, begin = PolicyVersion(self.fleet.incarnation, steps), time.monotonic()
        limit_s = min(message.timeout_s, self.config.evaluation.hold_s + self.config.sync.timeout_s)
        while not self._evaluator.is_done_with(last) and time.monotonic() - begin < limit_s:
            if self.fleet.any_behind:
                return Refresh()
            await self._loops.wait_change(1.0)
        while self.ledger.evaluations:
            found = self.ledger.evaluations.popleft()
            version = PolicyVersion(self.fleet.incarnation, int(found["eval/step"]))
            self.on_step(StepReport(self._rows, version, found, []))
            self._rows += 1
        return stop

    async def _plan(self, step: int) -> Plan:
        """On a thread: bins of thousands of rollouts take longer than the loop may stand still."""
        plan = await asyncio.to_thread(
            plan_batch,
            step,
            PolicyVersion(self.fleet.incarnation or 0, step),
            self._planned[step],
            dp_size=self._dp_size,
            max_tokens_per_microbatch=self.config.trainer.max_tokens_per_microbatch,
            packed=self.config.trainer.packing,
        )
        return Plan(self._frozen.with_scores(plan))

    def _drop_stale(self) -> None:
        stale = self.buffer.evict_stale()
        self._journal.left(group.group_id for group in stale)
        for group in stale:
            self.ledger.dropped_stale += 1
            self.admission.forget(group)

    async def _step_done(self, message: StepDone) -> Message:
        found = await asyncio.to_thread(
            facts_of, tuple(self._planned.get(message.step, ())), message.step
        )
        engines = await self.fleet.statuses()  # from here on nothing else gets between
        self.fleet.expect_gang()
        if message.version.incarnation != self.fleet.incarnation:
            raise ProtocolError(f"step {message.step} of {message.version}: that gang is gone")
        if message.step < self._done:
            return Ok()  # said before: the reply was lost with a controller
        groups = self._planned[message.step]
        metrics = dict(message.metrics)
        metrics |= found | self.ledger.row(engines, self._ages_s)
        metrics["async/buffer_depth"] = float(self.buffer.num_ready)
        metrics["async/engines"] = self.fleet.num_serving
        samples = samples_of(self.config, groups, message.step, self.decode)
        self.on_step(StepReport(message.step, message.version, metrics, samples))
        if self.records is not None:
            self.records.mkdir(parents=True, exist_ok=True)
            path = self.records / f"step-{message.step:06d}.msgpack"
            path.write_bytes(encode_value(groups))
        gone = self._finish_step(message.step)
        await asyncio.to_thread(self._let_go, gone)
        await asyncio.to_thread(self._journal.sweep)
        return Ok()

    def _finish_step(self, step: int) -> list[EpisodeGroup]:
        """Its groups are consumed; those that a restart could train again are kept until saved.

        Returns those of no more use.
        """
        saved, groups = self.saved_steps(), self._planned[step]
        kept = [group for group in groups if group.newest.step <= saved]
        self._journal.done(step, [group.group_id for group in kept])
        del self._planned[step]
        self._done = step + 1
        self._trained |= {group.group_id: group for group in kept}
        gone = [group for group in groups if group.group_id not in self._trained]
        for group_id in self._journal.saved(saved):
            if group := self._trained.pop(group_id, None):
                gone.append(group)
        return gone

    def _let_go(self, groups: Iterable[EpisodeGroup]) -> None:
        """Trained groups leave; kept records keep their blobs.  Any thread."""
        if self.records is None:
            for group in groups:
                self.admission.forget(group)
