"""Evaluation on held-out prompts, on the run's engines, at exactly one version.

An evaluation runs on the least busy engine as soon as that serves a version that is due.  Weight
updates of that engine wait for it, at most `evaluation.hold_s`, while other engines and the trainer
continue; after that the evaluation is cancelled and counted, so no figure mixes versions.  At most
`evaluation.max_requests` of its episodes run at a time, next to episodes that are trained.  An
episode that fails is played once more; an episode that fails twice has no reward.  The weights
after the last step are always evaluated.

`moerl eval` evaluates once, without training: all engines share the prompts, and nothing waits.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby, islice
from math import comb
from typing import Any

import numpy as np

from moerl.config.schema import EvaluationConfig
from moerl.config.task_mixture import TaskEntry, by_label
from moerl.controller.context import Context
from moerl.controller.player import Player
from moerl.core.errors import EngineError, RecordError, ScoreError
from moerl.core.types import Finish, PolicyVersion, Prompt, SamplingParams, Score, base_role
from moerl.data.tasks import usable
from moerl.episodes.finished_episode import ENDED, FinishedEpisode
from moerl.episodes.open_episode import EnginePin, EpisodeSpec, OpenEpisode
from moerl.episodes.turn import sampling_params

log = logging.getLogger(__name__)
_Z95 = 1.96  # of a normal distribution
_SCORE_S = 600.0  # longest time for the scores of an evaluation
_ALONE_S = 1e8  # longest time for its episodes where no update waits for it: years
_TELL_S = 3.0  # between two lines of its progress
_SHOWN = 2000  # characters of a prompt, and of an answer, in the findings
_RIGHT = 1.0  # least reward of an answer that passes
Scored = list[tuple[FinishedEpisode, Score]]  # answers to one prompt


class _EvalRun:
    """The episodes of one evaluation, every turn on one engine at one version."""

    def __init__(
        self, player: Player, config: EvaluationConfig, pin: EnginePin, deadline: float
    ) -> None:
        self._player, self._config, self._pin, self._deadline = player, config, pin, deadline
        self._places = asyncio.Semaphore(config.max_requests)
        self._open: set[OpenEpisode] = set()
        self.sealed: set[str] = set()  # blobs of all episodes, also failed episodes
        self.counts = {"eval/played_again": 0.0, "eval/failed": 0.0}
        self.ended = 0  # episodes

    async def play(self, specs: Sequence[EpisodeSpec]) -> list[FinishedEpisode]:
        """The episodes that have not failed twice, in order.  Raises EngineError."""
        playing = asyncio.gather(*map(self._one, specs))
        either: tuple[asyncio.Future[Any], ...] = (playing, self._pin.broken)
        left_s = self._deadline + self._config.hold_s - time.monotonic()
        try:
            await asyncio.wait(either, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not playing.done():
                limit = f"twice evaluation.hold_s = {self._config.hold_s:g} s"
                self._pin.breaks(EngineError(f"its episodes took longer than {limit}"))
        finally:
            if not playing.done():  # nothing is played again
                self._pin.breaks(EngineError("it was stopped"))
            for episode in list(self._open):
                self._player.end(episode)
            played = await playing
        if self._pin.broken.done():
            raise self._pin.broken.result()
        found = [one for one in played if one is not None]
        self.counts["eval/failed"] = float(len(played) - len(found))
        return found

    async def _one(self, spec: EpisodeSpec) -> FinishedEpisode | None:
        async with self._places:
            for name in (spec.name, f"{spec.name}-again"):
                if time.monotonic() > self._deadline:
                    limit = f"evaluation.hold_s = {self._config.hold_s:g} s"
                    self._pin.breaks(EngineError(f"{limit} have passed"))
                if self._pin.broken.done():
                    return None
                self.counts["eval/played_again"] += name != spec.name
                played = await self._play(replace(spec, name=name))
                if not played.failure:
                    self.ended += 1
                    return played
                if played.failure != ENDED:
                    log.warning("held-out: %s: %s", name, played.detail)
            self.ended += 1
            return None

    async def _play(self, spec: EpisodeSpec) -> FinishedEpisode:
        episode = self._player.open(spec)
        self._open.add(episode)
        try:
            return await self._player.play(episode)
        finally:
            self._open.discard(episode)
            self.sealed |= episode.uris


class Evaluator:
    """One evaluation at a time; `start` spawns its loop."""

    def __init__(self, context: Context, player: Player) -> None:
        config, services = context.config, context.services
        self._config = config.evaluation
        self._entries: dict[str, TaskEntry] = by_label(config)
        self._samplings = {
            label: {
                role: sampling_of(self._config, sampling_params(sampling, services.model))
                for role, sampling in entry.samplings.items()
            }
            for label, entry in self._entries.items()
        }
        self._held_out, self._blobs = services.held_out, services.blobs
        self._scores = context.scores
        self._pool, self._step_metrics, self._tasks = (
            context.pool,
            context.step_metrics,
            context.tasks,
        )
        self._player, self._decode = player, services.decode
        self._last_step = config.run.steps
        self._parts: Sequence[_EvalRun] = ()  # of the evaluation begun last
        self._wanted = 0  # its episodes
        self._last: PolicyVersion | None = None  # version of the evaluation begun last
        self._ended: PolicyVersion | None = None  # version evaluated or cancelled last

    def start(self) -> None:
        if self._config.every:
            self._tasks.spawn(self._run())

    def is_done_with(self, version: PolicyVersion) -> bool:
        """True if it was evaluated or cancelled, or never will be evaluated."""
        return not self._config.every or (self._ended is not None and self._ended >= version)

    async def _run(self) -> None:
        await self._player.started.wait()
        while not self._tasks.stopping:
            index = self._due()
            if index is None:
                await self._tasks.wait_change(1.0)
                continue
            engine = self._pool.engines[index]
            self._last, begin = engine.version, time.monotonic()
            engine.held_until = begin + self._config.hold_s
            try:
                metrics = await self._evaluate(index, engine.version, engine.held_until)
            except (EngineError, RecordError, ScoreError) as error:
                log.warning("the evaluation of %s is cancelled: %s", self._last, error)
                self._step_metrics.add("eval/given_up")
            else:
                metrics["eval/seconds"] = time.monotonic() - begin
                self._step_metrics.evaluations.append(metrics)
            finally:
                engine.held_until = 0.0
                self._ended = self._last
                self._tasks.notify()

    def _due(self) -> int | None:
        """The engine that can evaluate now."""
        able = [
            (engine.generating, index)
            for index, engine in self._pool.engines.items()
            if self._pool.serves(index)
            and self._has_turn(engine.version.step)
            and (self._last is None or engine.version > self._last)
        ]
        return min(able)[1] if able else None

    def _has_turn(self, step: int) -> bool:
        return step % self._config.every == 0 or step == self._last_step

    async def once(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Evaluate the weights that all engines serve, while nothing else runs on them.

        Returns the metrics, and per prompt: task, index, prompt, and of each of its answers reward,
        length in tokens, and text.  Raises EngineError, RecordError or ScoreError.
        """
        await self._player.started.wait()
        begin, engines = time.monotonic(), self._pool.engines
        pins = [EnginePin(index, engine.version) for index, engine in engines.items()]
        self._tasks.spawn(self._tell())
        counts, scored = await self._answered(pins, begin + _ALONE_S)
        metrics = counts | self._figures(scored) | {"eval/seconds": time.monotonic() - begin}
        return metrics, list(map(self._found, scored))

    async def _tell(self) -> None:
        """Say now and then how far the evaluation is."""
        while not self._tasks.stopping:
            await asyncio.sleep(_TELL_S)
            done = sum(part.ended for part in self._parts)
            self._step_metrics.notices.append(f"{done} of {self._wanted} answers")

    def _found(self, answers: Scored) -> dict[str, Any]:
        prompt = answers[0][0].prompt
        texts = [self._decode(answer.turns[-1].output_ids.tolist()) for answer, _ in answers]
        return {
            "task": prompt.task,
            "index": prompt.index,
            "prompt": prompt.text[:_SHOWN],
            "rewards": [score.reward for _, score in answers],
            "lengths": [answer.num_sampled for answer, _ in answers],
            "answers": [text[:_SHOWN] for text in texts],
        }

    async def _evaluate(
        self, index: int, version: PolicyVersion, deadline: float
    ) -> dict[str, float]:
        """Raises EngineError, RecordError or ScoreError when the evaluation is not complete."""
        counts, scored = await self._answered([EnginePin(index, version)], deadline)
        return {"eval/step": float(version.step)} | counts | self._figures(scored)

    async def _answered(
        self, pins: Sequence[EnginePin], deadline: float
    ) -> tuple[dict[str, float], list[Scored]]:
        """(counts, scored answers by prompt).  pins: the engines, which take turns with prompts.

        Raises EngineError, RecordError or ScoreError.
        """
        parts = [_EvalRun(self._player, self._config, pin, deadline) for pin in pins]
        specs = self._specs(pins)
        self._parts, self._wanted = parts, len(specs)
        shares = [[spec for spec in specs if spec.pin is pin] for pin in pins]
        try:
            played = await asyncio.gather(*map(_EvalRun.play, parts, shares))
            answers = sorted(chain(*played), key=_place)
            scored = await self._scored([list(group) for _, group in groupby(answers, _place)])
        finally:
            for uri in set[str]().union(*(part.sealed for part in parts)):
                self._blobs.delete(uri)
        return {name: sum(part.counts[name] for part in parts) for name in parts[0].counts}, scored

    def _specs(self, pins: Sequence[EnginePin]) -> list[EpisodeSpec]:
        """The episodes of an evaluation; the samples of a prompt are consecutive, on one engine."""
        held_out = self._held_out
        assert held_out is not None, "evaluation.every needs prompts"
        count = self._config.prompts * len(self._entries)
        return [
            EpisodeSpec(
                name=f"eval-{pin.version}-{place}.{sample}",
                prompt=prompt,
                sampling=self._samplings[prompt.task][""],
                roles=self._samplings[prompt.task],
                prompt_ids=prompt_ids,
                max_turns=self._entries[prompt.task].turn_limit,
                held_out=True,
                pin=pin,
            )
            for place, prompt in enumerate(self._items(islice(usable(held_out.prompt), count)))
            for prompt_ids in [np.asarray(prompt.token_ids, np.int32)]
            for pin in [pins[place % len(pins)]]
            for sample in range(self._config.samples)
        ]

    def _items(self, drawn: Iterable[Prompt]) -> Iterator[Prompt]:
        """Each held-out item once, however often the prompts repeat it.

        A program or an environment object may choose its task by the number of the prompt.
        """
        seen = set[tuple[object, ...]]()
        for prompt in drawn:
            number = prompt.index if self._entries[prompt.task].kind.uses_chat else -1
            item = prompt.task, number, prompt.text, repr(prompt.answer)
            if item not in seen:
                yield prompt
            seen.add(item)

    async def _scored(self, groups: Sequence[Sequence[FinishedEpisode]]) -> list[Scored]:
        """Score groups of answers.  groups: answers to one prompt each.  Raises ScoreError."""
        try:
            async with asyncio.timeout(_SCORE_S):
                return list(await asyncio.gather(*map(self._score, groups)))
        except TimeoutError as error:
            raise ScoreError(f"its scorers took longer than {_SCORE_S:g} s") from error

    async def _score(self, answers: Sequence[FinishedEpisode]) -> Scored:
        """Score answers.  answers: to one prompt.  Raises ScoreError."""
        try:
            scores = await self._scores.score(answers)
        finally:
            for answer in answers:
                self._scores.forget(answer.episode_id)
        return list(zip(answers, scores, strict=True))

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


def _place(answer: FinishedEpisode) -> int:
    return answer.prompt.index


def _metrics(scored: Sequence[Scored]) -> dict[str, float]:
    answers = [answer for answers in scored for answer, _ in answers]
    by_prompt = [[score.reward for _, score in answers] for answers in scored]
    rewards = [reward for rewards in by_prompt for reward in rewards]
    low, high = interval_95([statistics.fmean(rewards) for rewards in by_prompt])
    cut = [answer.turns[-1].finish == Finish.LENGTH for answer in answers]
    return (
        _role_metrics(scored)
        | _sample_metrics(scored, by_prompt)
        | {
            "eval/items": float(len(scored)),
            "eval/reward_mean": statistics.fmean(rewards),
            "eval/reward_se": statistics.pstdev(rewards) / len(rewards) ** 0.5,
            "eval/reward_low": low,
            "eval/reward_high": high,
            "eval/reward_best": statistics.fmean(map(max, by_prompt)),
            "eval/length_mean": statistics.fmean(answer.num_sampled for answer in answers),
            "eval/truncated_frac": statistics.fmean(cut),
        }
    )


def _role_metrics(scored: Sequence[Scored]) -> dict[str, float]:
    """Mean reward of each role that has rewards of its own."""
    found = defaultdict[str, list[float]](list)
    for _, score in (one for answers in scored for one in answers):
        for role, reward in score.roles.items():
            found[f"eval/role/{base_role(role)}"].append(reward)
    return {name: statistics.fmean(found[name]) for name in sorted(found)}


def _sample_metrics(
    scored: Sequence[Scored], by_prompt: Sequence[Sequence[float]]
) -> dict[str, float]:
    """pass@k of 1, 2, 4, ... answers, and the reward of each prompt's most frequent answer."""
    most = min(map(len, by_prompt))
    found = {
        f"eval/pass_at_{k}": statistics.fmean(pass_at(k, rewards) for rewards in by_prompt)
        for k in (2**power for power in range(most.bit_length()))
    }
    if most > 1:
        found["eval/majority"] = statistics.fmean(map(_majority, scored))
    return found


def pass_at(k: int, rewards: Sequence[float]) -> float:
    """Unbiased probability that k of these answers have a right answer (arXiv 2107.03374 eq. 1)."""
    wrong = sum(reward < _RIGHT for reward in rewards)
    return 1.0 - comb(wrong, k) / comb(len(rewards), k)


def _majority(answers: Scored) -> float:
    """Mean reward of the most frequent extracted answer, or last turn; of equals, the first."""
    said = [score.answer or one.turns[-1].output_ids.tobytes() for one, score in answers]
    ((chosen, _),) = Counter(said).most_common(1)
    pairs = zip(said, answers, strict=True)
    return statistics.fmean(score.reward for one, (_, score) in pairs if one == chosen)


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
