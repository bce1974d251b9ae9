"""Evaluation on held-out prompts, on the run's engines, at exactly one version.

An evaluation runs on the least busy engine as soon as that serves a version that is due.  Weight
updates of that engine wait for it, at most `evaluation.hold_s`, while other engines and the trainer
continue; after that the evaluation is cancelled and counted, so no figure mixes versions.  At most
`evaluation.max_requests` of its requests, or episodes of agents, run at a time, next to training
requests.  The weights after the last step are always evaluated.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from itertools import groupby

from moerl.config.schema import EvaluationConfig
from moerl.config.task_mixture import TaskEntry, by_label
from moerl.controller.context import Context
from moerl.controller.generated import Generated
from moerl.controller.held_out_episodes import HeldOutEpisodes, HeldOutPrompt, RunningAgents
from moerl.controller.pooled_turns import EnginePin
from moerl.controller.rollout_builder import (
    PartialEpisode,
    Replies,
    blob_uris,
    generate,
    sampling_params,
)
from moerl.core.errors import EngineError, RecordError, ScoreError
from moerl.core.types import (
    Episode,
    Finish,
    GenerateRequest,
    PolicyVersion,
    SamplingParams,
    Segment,
)

log = logging.getLogger(__name__)
_Z95 = 1.96  # of a normal distribution
Scored = list[tuple[Generated, float]]  # answers to one prompt, with their rewards


class Evaluator:
    """One evaluation at a time; `start` spawns its loop."""

    def __init__(self, context: Context, agents: RunningAgents | None) -> None:
        config, services = context.config, context.services
        self._config = config.evaluation
        self._entries: dict[str, TaskEntry] = by_label(config)
        self._sampling = {
            label: sampling_of(self._config, sampling_params(entry.sampling, services.model))
            for label, entry in self._entries.items()
        }
        self._held_out, self._blobs = services.held_out, services.blobs
        self._scorer, self._decode = services.scorer, services.decode
        self._pool, self._step_metrics, self._tasks = (
            context.pool,
            context.step_metrics,
            context.tasks,
        )
        self._environment, self._agents = context.environment, agents
        self._last_step = config.run.steps
        self._last: PolicyVersion | None = None  # version of the evaluation begun last
        self._ended: PolicyVersion | None = None  # version evaluated or cancelled last

    def start(self) -> None:
        if self._config.every:
            self._tasks.spawn(self._run())

    def is_done_with(self, version: PolicyVersion) -> bool:
        """True if it was evaluated or cancelled, or never will be evaluated."""
        return not self._config.every or (self._ended is not None and self._ended >= version)

    async def _run(self) -> None:
        if self._agents is not None:
            await self._agents.started.wait()
        while not self._tasks.stopping:
            index = self._due()
            if index is None:
                await self._tasks.wait_change(1.0)
                continue
            member = self._pool.members[index]
            self._last, begin = member.version, time.monotonic()
            member.held_until = begin + self._config.hold_s
            try:
                metrics = await self._evaluate(index, member.version, member.held_until)
            except (EngineError, RecordError, ScoreError) as error:
                log.warning("the evaluation of %s is cancelled: %s", self._last, error)
                self._step_metrics.evaluations_given_up += 1
            else:
                metrics["eval/seconds"] = time.monotonic() - begin
                self._step_metrics.evaluations.append(metrics)
            finally:
                member.held_until = 0.0
                self._ended = self._last
                self._tasks.notify()

    def _due(self) -> int | None:
        """The engine that can evaluate now."""
        able = [
            (member.generating, index)
            for index, member in self._pool.members.items()
            if self._pool.serves(index)
            and self._has_turn(member.version.step)
            and (self._last is None or member.version > self._last)
        ]
        return min(able)[1] if able else None

    def _has_turn(self, step: int) -> bool:
        return step % self._config.every == 0 or step == self._last_step

    async def _evaluate(
        self, index: int, version: PolicyVersion, deadline: float
    ) -> dict[str, float]:
        """Raises EngineError, RecordError or ScoreError when the evaluation is not complete."""
        asked, sealed = self._asked(version), set[str]()
        plays = {label for label, entry in self._entries.items() if entry.agent.plays}
        counts: dict[str, float] = {}
        try:
            texts = [one for one in asked if one.prompt.task not in plays]
            answers: list[Generated] = [
                *await self._answer(index, version, texts, deadline, sealed)
            ]
            if self._agents is not None:
                pin = EnginePin(index, version)
                episodes = HeldOutEpisodes(self._agents, self._config, pin, deadline, sealed)
                answers += await episodes.play([one for one in asked if one.prompt.task in plays])
                counts = episodes.counts
            by_prompt = groupby(answers, key=lambda answer: answer.prompt.index)
            scored = [await self._score(list(group)) for _, group in by_prompt]
        finally:
            for uri in sealed:
                self._blobs.delete(uri)
        return {"eval/step": float(version.step)} | counts | self._figures(scored)

    def _asked(self, version: PolicyVersion) -> list[HeldOutPrompt]:
        """The answers that an evaluation wants, those to one prompt in a row."""
        held_out = self._held_out
        assert held_out is not None, "evaluation.every needs prompts"
        count, samples = self._config.prompts * len(self._entries), self._config.samples
        return [
            HeldOutPrompt(f"eval-{version}-{place}.{sample}", prompt, self._sampling[prompt.task])
            for place, prompt in enumerate(map(held_out.prompt, range(count)))
            for sample in range(samples)
        ]

    async def _answer(
        self,
        index: int,
        version: PolicyVersion,
        asked: Sequence[HeldOutPrompt],
        deadline: float,
        sealed: set[str],
    ) -> list[PartialEpisode]:
        """The answers of tasks without an agent; sealed: receives the blobs of all replies."""
        partials = [
            PartialEpisode(
                one.name,
                one.prompt,
                one.sampling,
                audit=False,
                max_turns=self._entries[one.prompt.task].max_turns,
            )
            for one in asked
        ]
        for begin in range(0, len(partials), self._config.max_requests):
            batch = partials[begin : begin + self._config.max_requests]
            if time.monotonic() > deadline:
                raise EngineError(f"evaluation.hold_s = {self._config.hold_s:g} s have passed")
            await self._ask(index, version, batch, sealed)
        return partials

    async def _ask(
        self,
        index: int,
        version: PolicyVersion,
        partials: Sequence[PartialEpisode],
        sealed: set[str],
    ) -> None:
        """sealed: receives the blobs of all replies, good or not."""

        def call(requests: Sequence[GenerateRequest]) -> Awaitable[Replies]:
            # an update interrupts it after hold_s; a call to a hanging engine ends then too
            return self._pool.generate(index, requests, 2 * self._config.hold_s)

        while pending := [partial for partial in partials if not partial.finished]:
            replies, refused = await generate(pending, call)
            sealed.update(blob_uris(*replies))
            for error in refused.values():
                raise error
            segments = [reply for reply in replies if isinstance(reply, Segment)]
            versions = {piece.version for segment in segments for piece in segment.pieces}
            if versions != {version} or not all(p.turns[-1].finished for p in pending):
                raise EngineError(f"engine {index} took an update while it was evaluated")
            listening = [partial for partial in pending if partial.listens]
            await asyncio.gather(*map(self._environment.answer, listening))

    async def _score(self, answers: Sequence[Generated]) -> Scored:
        """answers: to one prompt.  Raises RecordError, ScoreError."""
        scores = [answer.own_score for answer in answers if answer.own_score is not None]
        if len(scores) < len(answers):
            episodes = [
                Episode(one.episode_id, one.nodes("join"), graph=one.graph) for one in answers
            ]
            responses = [answer.texts(self._decode) for answer in answers]
            scores = await self._scorer.score(answers[0].prompt, episodes, responses)
        return [(one, score.reward) for one, score in zip(answers, scores, strict=True)]

    def _figures(self, scored: Sequence[Scored]) -> dict[str, float]:
        """Over all answers, and of each task of a mixture.  Raises ScoreError."""
        by_task: dict[str, list[Scored]] = {label: [] for label in self._entries}
        for answers in scored:
            by_task[answers[0][0].prompt.task].append(answers)
        for label, mine in by_task.items():
            if not mine:
                which = f" of {label}" if label else ""
                raise ScoreError(f"each held-out episode{which} has failed twice")
        metrics = _metrics(scored)
        for label, mine in by_task.items() if by_task.keys() != {""} else ():
            metrics |= {f"{name}/{label}": value for name, value in _metrics(mine).items()}
        return metrics


def _metrics(scored: Sequence[Scored]) -> dict[str, float]:
    answers = [answer for answers in scored for answer, _ in answers]
    by_prompt = [[reward for _, reward in answers] for answers in scored]
    rewards = [reward for rewards in by_prompt for reward in rewards]
    low, high = interval_95([statistics.fmean(rewards) for rewards in by_prompt])
    cut = [answer.turns[-1].finish == Finish.LENGTH for answer in answers]
    return {
        "eval/reward_mean": statistics.fmean(rewards),
        "eval/reward_se": statistics.pstdev(rewards) / len(rewards) ** 0.5,
        "eval/reward_low": low,
        "eval/reward_high": high,
        "eval/reward_best": statistics.fmean(map(max, by_prompt)),
        "eval/length_mean": statistics.fmean(answer.num_sampled for answer in answers),
        "eval/truncated_frac": statistics.fmean(cut),
    }


def interval_95(means: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean reward, from the mean of each prompt: its answers are correlated.

    Rewards in [0, 1] get Wilson's interval (JASA 22, 1927), which has a width when all answers are
    right, too; partial credit varies less than the coin that it assumes, so it is never too narrow.
    Other rewards get 1.96 standard errors on both sides.
    """
    count, mean = len(means), statistics.fmean(means)
    if not all(0.0 <= value <= 1.0 for value in means):
        reach = _Z95 * statistics.pstdev(means) / count**0.5
        return mean - reach, mean + reach
    shrink = 1.0 + _Z95**2 / count
    middle = (mean + _Z95**2 / (2 * count)) / shrink
    reach = _Z95 / shrink * (mean * (1 - mean) / count + (_Z95 / (2 * count)) ** 2) ** 0.5
    return max(0.0, middle - reach), min(1.0, middle + reach)


def sampling_of(config: EvaluationConfig, training: SamplingParams) -> SamplingParams:
    """Training's limits with the evaluation's own distribution; temperature 0 is greedy."""
    if config.temperature == 0.0:
        return replace(training, temperature=1.0, top_p=1.0, top_k=1, min_p=0.0)
    plain = replace(training, temperature=config.temperature, min_p=0.0)
    return replace(plain, top_p=config.top_p, top_k=config.top_k)
