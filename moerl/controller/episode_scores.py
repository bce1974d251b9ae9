"""The scores of episodes: each term of a reward is scored by its unit, and the terms are added.

Steps and turns are scored while their episode runs, an episode when it has ended, and a group when
it has closed; only a group waits for its last answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from moerl.config.reward_terms import RewardTerm
from moerl.config.task_mixture import TaskEntry
from moerl.controller.reward_models import RewardModels
from moerl.controller.scorer_queue import Answer, ScorerQueue
from moerl.controller.step_metrics import StepMetrics
from moerl.controller.task_group import TaskGroup
from moerl.core.episode_view import EpisodeView, ScoreRequest, TurnView
from moerl.core.errors import ScoreError
from moerl.core.messages import Scorers
from moerl.core.types import Array, Prompt, Score, base_role, reward_problem
from moerl.episodes.finished_episode import Decode, FinishedEpisode, RecordedTurn
from moerl.episodes.finished_episode import view_of_turn as viewed
from moerl.episodes.forks import last_token_of, step_ends
from moerl.episodes.open_episode import OpenEpisode, TurnCall
from moerl.episodes.turn import SampledTurn, TurnInFlight

Asked = asyncio.Future[list[Answer]]
_REASON = 2000  # most characters of a reason


@dataclass(frozen=True, slots=True)
class _Part:
    """A step or a turn that a request is about."""

    turn: str
    token: int  # of the turn's sampled tokens, with which it ends
    answer: Asked


@dataclass(slots=True, eq=False)
class _Episode:
    """The open questions about one episode."""

    views: dict[str, TurnView] = field(default_factory=dict)  # of ended turns, by name
    # Characters and tokens in whole steps, by term and turn
    cut: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    parts: dict[str, list[_Part]] = field(default_factory=dict)  # by term
    whole: asyncio.Task[dict[str, Answer]] | None = None  # by term
    forks: tuple[str, ...] = ()  # names of its forks, which have questions of their own

    def answers(self) -> list[asyncio.Future[Any]]:
        found: list[asyncio.Future[Any]] = [
            part.answer for parts in self.parts.values() for part in parts
        ]
        return found if self.whole is None else [*found, self.whole]


class EpisodeScores:
    """Used from the controller's event loop."""

    def __init__(
        self,
        entries: Sequence[TaskEntry],
        scorers: Scorers,
        decode: Decode,
        step_metrics: StepMetrics,
        tasks: TaskGroup,
        reward_models: RewardModels,
    ) -> None:
        self._decode = decode
        self._terms = {entry.label: entry.terms for entry in entries}
        self._roles = {entry.label: list(entry.roles) for entry in entries}
        self._episodes: dict[str, _Episode] = {}  # by name
        self._queues: dict[tuple[str, str], ScorerQueue] = {}
        for entry in entries:
            for term in entry.terms:
                if term.where != "own":
                    name = f"{entry.label}.{term.name}" if entry.label else term.name
                    self._queues[entry.label, term.name] = ScorerQueue(
                        name,
                        term,
                        entry.timeout_of(term),
                        partial(reward_models.score, term)
                        if term.where == "model"
                        else partial(scorers.score, entry.label, term.name),
                        step_metrics.scorers[name],
                        tasks,
                    )

    @property
    def is_full(self) -> bool:
        """Whether a scorer has so many requests that no further group should start."""
        return any(queue.is_full for queue in self._queues.values())

    def watches(self, task: str) -> bool:
        """Whether a scorer of this task gets requests while an episode runs."""
        return any(term.unit in ("step", "turn") for term in self._terms[task])

    # --- while an episode runs --------------------------------------------------------------------
    def sampled(self, episode: OpenEpisode, call: TurnCall) -> None:
        """Ask about the steps that are whole by now."""
        turn, prompt = call.turn, episode.spec.prompt
        for term in self._terms[prompt.task]:
            if term.unit == "step":
                text = self._decode(turn.output_ids.tolist())
                view = TurnView(turn.name, "", "", text, tuple(turn.output_ids.tolist()), "")
                self._ask_steps(episode.name, prompt, term, view, turn, is_over=False)

    def turn_ended(self, episode: OpenEpisode, turn: RecordedTurn) -> None:
        """Ask about a turn and its last steps."""
        self._ask_turn(episode.name, episode.spec.prompt, turn)

    def _ask_turn(self, name: str, prompt: Prompt, turn: RecordedTurn) -> None:
        one = self._find_episode(name)
        view = one.views[turn.name] = viewed(prompt, turn, self._decode)
        for term in self._terms[prompt.task]:
            if term.unit == "step":
                self._ask_steps(name, prompt, term, view, turn.sampled, is_over=True)
            elif term.unit == "turn":
                shown = EpisodeView(name, tuple(one.views.values())).only(term.needs)
                request = ScoreRequest(view.name, prompt, shown)
                self._ask_part(name, term, _with_ids(request, term, turn), len(view.token_ids) - 1)

    def _ask_steps(
        self,
        name: str,
        prompt: Prompt,
        term: RewardTerm,
        view: TurnView,
        turn: TurnInFlight | SampledTurn,
        *,
        is_over: bool,
    ) -> None:
        one, ids = self._find_episode(name), view.token_ids
        place, whole = (term.name, view.name), None
        begin, first = one.cut.get(place, (0, 0))
        for end, count in self._step_ends(term, view, turn, begin, first, is_over=is_over):
            turns = [other for other in one.views.values() if other.name != view.name]
            cut = replace(view, response=view.response[:end], token_ids=ids[:count])
            key = f"{view.name}:t{count}" if term.steps_by == "entropy" else f"{view.name}:{end}"
            shown = EpisodeView(name, (*turns, cut)).only(term.needs)
            request = ScoreRequest(key, prompt, shown, begin)
            if term.where == "model":
                whole = np.append(turn.prompt_ids, turn.output_ids) if whole is None else whole
                tokens = len(turn.prompt_ids) + count
                request = replace(request, token_ids=whole, end=tokens)
            self._ask_part(name, term, request, count - 1)
            begin, first = one.cut[place] = end, count

    def _step_ends(
        self,
        term: RewardTerm,
        view: TurnView,
        turn: TurnInFlight | SampledTurn,
        begin: int,
        first: int,
        *,
        is_over: bool,
    ) -> Iterator[tuple[int, int]]:
        """(characters, tokens) to the end of each whole step behind `begin` and `first`."""
        text, ids = view.response, view.token_ids
        if term.steps_by == "separator":
            for end in step_ends(text, begin, term.separator, is_over=is_over):
                token = last_token_of(ids, end, self._decode) if end < len(text) else len(ids) - 1
                yield end, token + 1
            return
        found = [piece.entropies for piece in turn.segments if piece.entropies is not None]
        entropies = np.concatenate(found) if found else np.zeros(0, np.float16)
        for count in entropy_ends(entropies, first, term, len(ids) if is_over else 0):
            yield len(self._decode(ids[:count])) if count < len(ids) else len(text), count

    def _ask_part(self, name: str, term: RewardTerm, request: ScoreRequest, token: int) -> None:
        """Request the score of a step or turn that ends with sampled token `token` of its turn."""
        answer = self._queues[request.prompt.task, term.name].put(request)
        parts = self._find_episode(name).parts.setdefault(term.name, [])
        parts.append(_Part(request.episode.turns[-1].name, token, answer))

    def _find_episode(self, name: str) -> _Episode:
        return self._episodes.setdefault(name, _Episode())

    # --- ended episodes ---------------------------------------------------------------------------
    def ended(self, episode: FinishedEpisode) -> None:
        """Ask about an episode and its forks; a second call asks nothing."""
        first, *forks = episode.answers
        self._ended(first)
        self._find_episode(episode.episode_id).forks = tuple(fork.episode_id for fork in forks)
        for fork in forks:
            self._ended(fork)

    def _ended(self, episode: FinishedEpisode) -> None:
        one = self._find_episode(episode.episode_id)
        if one.whole is not None:
            return
        if self.watches(episode.prompt.task):
            for turn in episode.turns:
                if turn.name not in one.views:  # it was not watched
                    self._ask_turn(episode.episode_id, episode.prompt, turn)
        asks: Coroutine[Any, Any, dict[str, Answer]] = self._whole(episode)
        one.whole = asyncio.get_running_loop().create_task(asks)

    async def _whole(self, episode: FinishedEpisode) -> dict[str, Answer]:
        task, found = episode.prompt.task, dict[str, Answer]()
        asked: dict[str, Asked] = {}
        try:
            terms = [term for term in self._terms[task] if term.unit == "episode"]
            for term in terms:
                if term.where == "own":
                    lacks = ScoreError(f"{episode.episode_id} brought no reward of its own")
                    found[term.name] = episode.own_score or lacks
            others = [term for term in terms if term.where != "own"]
            view = await self._view(episode) if others else EpisodeView(episode.episode_id, ())
            for term in others:
                seen = view.only(term.needs, term.roles)
                if not seen.turns:  # its roles had no turn
                    found[term.name] = Score(0.0)
                    continue
                request = ScoreRequest(view.name, episode.prompt, seen)
                request = _with_ids(request, term, episode.turns[-1])
                asked[term.name] = self._queues[task, term.name].put(request)
            for name, answer in asked.items():
                (found[name],) = await answer
            return found
        finally:
            for answer in asked.values():
                answer.cancel()

    async def _view(self, episode: FinishedEpisode) -> EpisodeView:
        """Long conversations are decoded in a thread."""
        if len(episode.turns) > 1:
            return await asyncio.to_thread(episode.view, self._decode)
        return episode.view(self._decode)

    async def score(self, episodes: Sequence[FinishedEpisode]) -> list[Score]:
        """The scores of the episodes of one group.  Raises ScoreError."""
        for episode in episodes:
            self.ended(episode)
        answers = [episode.answers for episode in episodes]
        scores = iter(await self._scores([one for some in answers for one in some]))
        found = []
        for some in answers:
            first, *forks = [next(scores) for _ in some]
            found.append(replace(first, forks=tuple(fork.reward for fork in forks)))
        return found

    async def _scores(self, episodes: Sequence[FinishedEpisode]) -> list[Score]:
        together = await self._score_groups(episodes)
        found = []
        for place, episode in enumerate(episodes):
            one = self._episodes[episode.episode_id]
            assert one.whole is not None, "it was asked above"
            terms: dict[str, Answer] = dict(await one.whole)
            terms |= {name: answers[place] for name, answers in together.items()}
            for name, parts in one.parts.items():
                terms[name] = await _sum_parts(episode, parts)
            found.append(self._sum(episode, terms))
        return found

    async def _score_groups(self, episodes: Sequence[FinishedEpisode]) -> dict[str, list[Answer]]:
        """Of the terms that score a whole group, by term."""
        prompt, asked = episodes[0].prompt, dict[str, Asked]()
        terms = [term for term in self._terms[prompt.task] if term.unit == "group"]
        if not terms:
            return {}
        views = [await self._view(episode) for episode in episodes]
        for term in terms:
            requests = [
                ScoreRequest(f"{v.name}:group", prompt, seen, group=views[0].name)
                for v in views
                for seen in [v.only(term.needs, term.roles)]
            ]
            asked[term.name] = self._queues[prompt.task, term.name].put(*requests)
        try:
            return {name: await answer for name, answer in asked.items()}
        finally:
            for answer in asked.values():
                answer.cancel()

    def forget(self, name: str) -> None:
        """An episode's scores are not wanted any more."""
        if (one := self._episodes.pop(name, None)) is not None:
            for answer in one.answers():
                answer.cancel()
            for fork in one.forks:
                self.forget(fork)

    def _sum(self, episode: FinishedEpisode, found: Mapping[str, Answer]) -> Score:
        """The weighted sum of the terms, with steps at sampled tokens.  Raises ScoreError."""
        terms, scores = self._terms[episode.prompt.task], []
        for term in terms:
            answer = found[term.name]
            if isinstance(answer, ScoreError):
                raise answer
            scores.append(spread_to_tokens(answer, episode, self._decode))
        total, known = scores[0], self._roles[episode.prompt.task]
        if len(terms) > 1 or terms[0].weight != 1.0 or terms[0].roles:
            num_sampled = sum(turn.num_sampled for turn in episode.turns)
            total = weighted(terms, scores, num_sampled, known)
        for reward in (total.reward, *total.roles.values()):
            if problem := reward_problem(reward):
                raise ScoreError(f"{episode.episode_id}: the reward {reward} {problem}")
        if strange := [role for role in total.roles if base_role(role) not in known]:
            allowed = f"task.roles has {', '.join(known) or '(none)'}"
            raise ScoreError(
                f"{episode.episode_id}: a reward of the role {strange[0]!r}; {allowed}"
            )
        return total


async def _sum_parts(episode: FinishedEpisode, parts: Sequence[_Part]) -> Answer:
    """The score of a term from its steps' or turns' scores, at the tokens with which they end."""
    begins, steps, reasons = _begins(episode), dict[int, float](), []
    for part in parts:
        (answer,) = await part.answer
        if isinstance(answer, ScoreError):
            return answer
        if part.turn in begins:  # it was not left out meanwhile
            token = begins[part.turn] + part.token
            steps[token] = steps.get(token, 0.0) + answer.reward
            reasons += [answer.reason] if answer.reason else []
    return Score(
        sum(steps.values()), tuple(sorted(steps.items())), reason="; ".join(reasons)[:_REASON]
    )


def weighted(
    terms: Sequence[RewardTerm],
    scores: Sequence[Score],
    num_sampled: int,
    roles: Sequence[str] = (),
) -> Score:
    """The sum of several terms.  If any term has steps, a term without steps counts at the last
    token.

    roles: of the task.  A role has the sum of its own terms and of the terms without a role.
    """
    has_steps, steps = any(score.steps for score in scores), dict[int, float]()
    metrics: dict[str, float] = {}
    for term, score in zip(terms, scores, strict=True):
        whole = ((max(0, num_sampled - 1), score.reward),)
        for token, reward in score.steps or (whole if has_steps else ()):
            steps[token] = steps.get(token, 0.0) + term.weight * reward
        metrics[term.name] = score.reward
        metrics |= {f"{term.name}.{name}": value for name, value in score.metrics.items()}
    pairs = list(zip(terms, scores, strict=True))
    named = {role for score in scores for role in score.roles}
    if named or any(term.roles for term in terms):
        named.update(roles)
    return Score(
        sum(term.weight * score.reward for term, score in pairs),
        tuple(sorted(steps.items())),
        errors=sum(score.errors for score in scores),
        metrics=metrics,
        reason="; ".join(f"{term.name}: {score.reason}" for term, score in pairs if score.reason),
        answer=next((score.answer for score in scores if score.answer), ""),
        roles={role: _score_role(role, pairs) for role in sorted(named)},
    )


def _score_role(role: str, pairs: Sequence[tuple[RewardTerm, Score]]) -> float:
    return sum(
        term.weight * (score.reward if term.roles else score.reward_of(role))
        for term, score in pairs
        if not term.roles or base_role(role) in term.roles
    )


def entropy_ends(entropies: Array, first: int, term: RewardTerm, length: int) -> list[int]:
    """Tokens of a turn before the end of each whole step behind `first` (PRPO).

    A token whose entropy is at least `term.entropy` begins a step, unless the step before it would
    have fewer than `term.step_tokens` tokens.  length: of the turn, if it is over; then the rest is
    a step, too.
    """
    found: list[int] = []
    for token in np.flatnonzero(entropies >= term.entropy).tolist():
        if token >= (found[-1] if found else first) + term.step_tokens:
            found.append(token)
    end = found[-1] if found else first
    return [*found, length] if length and end < length else found


def _with_ids(request: ScoreRequest, term: RewardTerm, turn: RecordedTurn) -> ScoreRequest:
    """The question with the conversation to the end of a turn, for a reward model."""
    if term.where != "model":
        return request
    return replace(request, token_ids=turn.token_ids, end=turn.num_tokens)


def spread_to_tokens(score: Score, episode: FinishedEpisode, decode: Decode) -> Score:
    """Process rewards at sampled tokens instead of turns and characters of the last response.

    A turn's reward is at its last token, a step's at the token with its last character; rewards at
    one token are added.  Raises ScoreError for turns whose rows are not in the order of time.
    """
    if not score.text_steps and not score.turns:
        return score
    begins, last = _begins(episode), episode.turns[-1]
    found: dict[int, float] = {}
    for turn, reward in zip(episode.turns if score.turns else (), score.turns, strict=True):
        found[begins[turn.name] + turn.num_sampled - 1] = reward
    for end, reward in score.text_steps:
        token = begins[last.name] + last_token_of(last.output_ids.tolist(), end, decode)
        found[token] = found.get(token, 0.0) + reward
    return replace(score, steps=tuple(sorted(found.items())), text_steps=(), turns=())


def _begins(episode: FinishedEpisode) -> dict[str, int]:
    """Sampled tokens of an episode before each turn, by its name.  Raises ScoreError."""
    if not episode.rows_in_order:
        raise ScoreError(f"{episode.episode_id} has turns side by side, and rewards of its steps")
    begins, at = {}, 0
    for turn in episode.turns:
        begins[turn.name] = at
        at += turn.num_sampled
    return begins
