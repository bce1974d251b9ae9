"""The turns of one episode in messages: its key, its limits, and the turns that a client asks for.

It answers in the terms of a turn; the forms of HTTP are in `gateway`.  Sampling belongs to the
recipe: a client says where a turn ends, never from which distribution it is drawn.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np

from moerl.agents.chat_messages import ChatMessage, Function, Json, MessageCall
from moerl.agents.cross_loop_episode import CrossLoopEpisode
from moerl.agents.episode_types import (
    Ends,
    EpisodeLimits,
    Policy,
    Switches,
    Tell,
    TurnAnswer,
)
from moerl.agents.gateway.answer_stream import AnswerStream, PartialAnswer
from moerl.agents.gateway.api_errors import ApiError, unsupported
from moerl.agents.prompt_tokens import PromptIds
from moerl.agents.stop_texts import Stops
from moerl.agents.turn_forest import MatchedRequest, TurnForest
from moerl.core.errors import EngineError, RecordError
from moerl.core.ids import without_life
from moerl.core.types import Array, Grammar, Score
from moerl.data.chat_template import ARGUMENTS, TemplateError
from moerl.episodes.finished_episode import RecordedTurn
from moerl.episodes.open_episode import EpisodeEnded, Outcome, TurnRequest

T = TypeVar("T")
NO_MASKS = (
    "not supported, because this run records no sampling masks, and without them what a grammar "
    "allowed could not be replayed: set replay.sampling_mask=true, and sampling.top_p below 1 or "
    "sampling.top_k"
)
_NO_SWITCHES = Switches()
_MOST_STOPS = 4096  # tokens at which the engine must stop until the next request


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """Parts that the siblings of one request share."""

    prompt: PromptIds
    max_new_tokens: int
    grammar: Grammar | None
    stops: Stops
    tools: Sequence[Json]  # calls of these are parsed
    is_chat: bool
    tell: Tell | None = None
    role: str = ""  # of the policy


class ChatTurns:
    """Used from one event loop, which may be another one than the controller's."""

    def __init__(self, episode: CrossLoopEpisode, policy: Policy, limits: EpisodeLimits) -> None:
        self.name, self.limits, self._policy = episode.name, limits, policy
        self._episode, self.sampling = episode, episode.spec.sampling
        self.sampling_of = episode.spec.sampling_of  # a role of the policy
        self._stop_ids = frozenset(self.sampling.stop_token_ids)
        self.key = secrets.token_urlsafe(24)
        self.forest = TurnForest()
        # Of the chat template: of the prompt's line, then of the first request
        self._arguments: Json = dict(episode.spec.prompt.extra.get(ARGUMENTS) or {})
        self._has_begun = False  # a request has fixed them
        self.counts: Counter[str] = Counter()
        self._num_asked = 0  # turns
        self._num_sampled, self._reserved = 0, 0  # tokens that running turns may sample
        self._running: set[asyncio.Task[Any]] = set()
        self._ended = False
        self._deadline = 0.0
        self.begin()

    def begin(self) -> None:
        """The time of the episode starts now: it may have waited for a worker."""
        self._deadline = asyncio.get_running_loop().time() + self.limits.wall_s

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Json],
        ends: Ends,
        n: int = 1,
        *,
        calls: bool = True,
        tell: Tell | None = None,
        role: str = "",
        switches: Switches = _NO_SWITCHES,
    ) -> list[TurnAnswer]:
        """The next turn of a conversation; n of them are siblings.  Raises ApiError.

        calls: False shows calls as text; the prompt has the tools in any case.
        tell: receives the shown text of the answers while they are sampled.
        role: of the policy.
        switches: of the template; by default the switches of the first request.
        """
        stops = await self._stops(ends.stop)
        self._check_open(n)
        arguments = self._with_switches(switches)
        request = self.forest.match(messages, tools, arguments)
        self._check_length(len(message.text) for message in messages[request.covered :])
        prompt = self._chat_prompt(request, messages, tools, arguments)
        ends = self._with_calls(ends, tools)
        most = self._most(prompt, ends, n, role)
        shown_tools = tools if calls else ()
        plan = _Plan(
            prompt, most, ends.grammar, stops, shown_tools, is_chat=True, tell=tell, role=role
        )
        return await self._siblings([self.forest.begin(request) for _ in range(n)], plan)

    async def complete(
        self,
        prompt: str | Sequence[int],
        ends: Ends,
        n: int = 1,
        tell: Tell | None = None,
        role: str = "",
    ) -> list[TurnAnswer]:
        """Continue a text, or tokens, without a template.  Raises ApiError."""
        stops = await self._stops(ends.stop)
        self._check_open(n)
        if isinstance(prompt, str):
            request = self.forest.match_text(prompt)
            self._check_length([len(prompt) - request.covered])
            found = self._text_prompt(request, prompt)
        else:
            ids = self._known_ids(prompt)
            request = self.forest.match_tokens(ids)
            found = PromptIds(ids, request.parent.num_tokens if request.parent else 0)
        most = self._most(found, ends, n, role)
        plan = _Plan(found, most, ends.grammar, stops, (), is_chat=False, tell=tell, role=role)
        return await self._siblings([self.forest.begin(request) for _ in range(n)], plan)

    async def ask_other(self, role: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """A turn of another model, which is not trained.  role: its name.  Raises ApiError."""
        self._check_open(1)
        self._num_asked += 1
        name = await self._episode.begin("", role)
        try:
            answer = await self._until_end(call())
        except ApiError as error:
            if error.code != "episode_ended":
                self._episode.leave_out(name, "no_answer")
            raise
        self._episode.leave_out(name, "other_model")
        return answer

    async def end(self) -> None:
        """Refuse further turns, and drop running turns."""
        self._ended = True
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def outcome(
        self, failure: tuple[str, str], own: Score | None, counts: Mapping[str, float]
    ) -> Outcome:
        """The outcome.  failure: one word, empty if the episode can be trained, and a sentence.

        own: score by the episode's own program; counts: added to the turns' counts.
        """
        word, detail = failure
        counted = {name: float(count) for name, count in self.counts.items()}
        detail = f"the agent of {self.name} {detail}" if word else ""
        return Outcome(word, detail, None if word else own, {**counts, **counted})

    # --- prompts ----------------------------------------------------------------------------------
    def _with_switches(self, switches: Switches) -> Json:
        """Arguments of the template in a request.  Raises ApiError."""
        try:
            named, unknown = switches.named(self._policy.tokens.template)
        except TemplateError as error:
            message = f"{ARGUMENTS}: {error}"
            raise ApiError(400, "unsupported_parameter", message, retry=False) from error
        self.counts.update(f"not_taken/{name}" for name in unknown)
        found = self._arguments | named
        if not self._has_begun:
            self._arguments, self._has_begun = found, True
        return found

    def _chat_prompt(
        self,
        request: MatchedRequest,
        messages: Sequence[ChatMessage],
        tools: Sequence[Json],
        arguments: Json,
    ) -> PromptIds:
        tokens, parent = self._policy.tokens, request.parent
        try:
            if parent is None:
                found = tokens.whole(messages, tools, arguments)
            else:
                new = messages[request.covered :]
                found = tokens.continued(parent, self._stop_ids, new, tools, arguments)
        except TemplateError as error:
            raise ApiError(400, "invalid_messages", str(error)) from error
        self.counts["control_tokens_in_contents"] += found.cuts
        return found

    def _text_prompt(self, request: MatchedRequest, prompt: str) -> PromptIds:
        tokens, parent = self._policy.tokens, request.parent
        if parent is None:
            return PromptIds(tokens.encode(prompt))
        rest = prompt[request.covered :]
        return tokens.continued_text(parent, self._stop_ids, rest)

    def _known_ids(self, prompt: Sequence[int]) -> Array:
        size = self._policy.tokens.vocab_size
        wrong = next((token for token in prompt if not 0 <= token < size), None)
        if wrong is not None:
            raise ApiError(400, "invalid_prompt", f"token id {wrong} is not in 0..{size - 1}")
        return np.asarray(prompt, np.int32)

    # --- limits -----------------------------------------------------------------------------------
    def _check_open(self, n: int) -> None:
        if self._ended:
            raise _gone("the episode has ended")
        if asyncio.get_running_loop().time() >= self._deadline:
            raise _gone(f"the episode has used its {self.limits.wall_s:g} s")
        left = self.limits.turns - self._num_asked
        if n > left:
            raise ApiError(
                400,
                "turn_limit_exceeded",
                f"the episode has {left} of its {self.limits.turns} turns left; the request is "
                f"for {n}",
                retry=False,
            )

    def _most(self, prompt: PromptIds, ends: Ends, n: int, role: str) -> int:
        """Most tokens that each of n turns may sample.  Raises ApiError."""
        if ends.grammar is not None:
            self._check_grammars()
        return self._room(prompt, ends, n, role)

    def _room(self, prompt: PromptIds, ends: Ends, n: int, role: str) -> int:
        """Most tokens that each of n turns may sample.  Raises ApiError when there are none."""
        context, used = self.limits.context_tokens, len(prompt.ids)
        room = context - used - 1  # the engine keeps one position free
        if not used:
            raise ApiError(400, "invalid_prompt", "the prompt has no token")
        if room < 1:
            raise self._too_long(f"{used} tokens")
        left = (self.limits.sampled_tokens - self._num_sampled - self._reserved) // n
        if left < 1:
            raise ApiError(
                400,
                "token_limit_exceeded",
                f"the episode has none of its {self.limits.sampled_tokens} sampled tokens left",
                retry=False,
            )
        most = self.sampling_of(role).max_new_tokens
        return min(room, left, most, ends.max_tokens or most)

    def _check_length(self, num_chars: Iterable[int]) -> None:
        """Refuse too long a prompt untokenised: tokenising would stop all episodes meanwhile."""
        least = sum(num_chars) // self._policy.tokens.longest_token
        if least > self.limits.context_tokens:
            raise self._too_long(f"at least {least} tokens")

    def _too_long(self, found: str) -> ApiError:
        self.counts["context_ends"] += 1
        return ApiError(
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {self.limits.context_tokens} tokens. However, "
            f"your messages resulted in {found}.",
            retry=False,
        )

    def _with_calls(self, ends: Ends, tools: Sequence[Json]) -> Ends:
        """The grammar of the calls that a client forces.  Raises ApiError."""
        if ends.forces is None:
            return ends
        self._check_grammars()
        named = [tool for tool in tools if ends.forces in ("", _function_of(tool).get("name"))]
        if ends.grammar is not None or not named:
            why = "an answer can have one grammar" if named else "tools has no such function"
            raise ApiError(400, "invalid_grammar", f"tool_choice: {why}", retry=False)
        grammar = self._policy.parser.call_grammar(named)
        if grammar is None:
            raise unsupported(
                "tool_choice: this run's format of calls (task.call_format) has no grammar "
                "of its own; allowed are auto and none"
            )
        return replace(ends, grammar=grammar)

    def _check_grammars(self) -> None:
        why = self._policy.no_grammar
        if not why and not self.sampling.truncates:
            why = NO_MASKS
        if why:
            raise unsupported(f"response_format, grammars and a forced tool_choice: {why}")

    async def _stops(self, texts: tuple[str, ...]) -> Stops:
        if not texts:
            return Stops()
        sampling = self.sampling
        if sampling.ignore_eos:
            raise ApiError(400, "unsupported_parameter", "stop: this run ignores stop tokens")
        found = await asyncio.to_thread(self._policy.finder.find, texts, sampling.stop_token_ids)
        if len(found.ids) > _MOST_STOPS:
            raise ApiError(
                400,
                "unsupported_parameter",
                f"stop: {len(found.ids)} tokens can end {list(texts)}; {_MOST_STOPS} are allowed",
                retry=False,
            )
        return found

    # --- sampling ---------------------------------------------------------------------------------
    async def _siblings(self, requests: Sequence[MatchedRequest], plan: _Plan) -> list[TurnAnswer]:
        self._num_asked += len(requests)
        tokens = plan.max_new_tokens * len(requests)
        self._reserved += tokens
        try:
            async with asyncio.TaskGroup() as group:
                turns = [
                    group.create_task(self._turn(request, plan, self._stream(plan, place)))
                    for place, request in enumerate(requests)
                ]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._reserved -= tokens
        return [task.result() for task in turns]

    def _stream(self, plan: _Plan, place: int) -> AnswerStream | None:
        """Of the sibling at this place."""
        if plan.tell is None:
            return None
        parser, tokens = self._policy.parser, self._policy.tokens

        def begun(whole: str) -> tuple[str, str]:
            text = plan.stops.begun(whole)
            return parser.begun(text, plan.tools) if plan.is_chat else ("", text)

        tell = partial(plan.tell, place)
        return AnswerStream(tokens.decode, begun, self._stop_ids, len(plan.prompt.ids), tell)

    async def _turn(
        self, request: MatchedRequest, plan: _Plan, shown: AnswerStream | None
    ) -> TurnAnswer:
        wanted = self._wanted(request, plan, shown)
        try:
            turn = await self._until_end(self._episode.sample(wanted))
            return self._answer(turn, request, plan, shown)
        except EpisodeEnded as error:
            raise _gone("the episode has ended") from error
        except EngineError as error:
            raise ApiError(503, "engine_unavailable", "the engine failed: ask again") from error
        except RecordError as error:
            if plan.grammar is not None and error.reason == "request":
                message = f"the engine refuses the grammar: {error.detail}"
                raise ApiError(400, "invalid_grammar", message, retry=False) from error
            self.counts[f"refused/{error.reason}"] += 1
            raise ApiError(502, "record_refused", "the engine's record was refused") from error

    def _wanted(
        self, request: MatchedRequest, plan: _Plan, shown: AnswerStream | None
    ) -> TurnRequest:
        stops, finder = plan.stops, self._policy.finder

        async def ends(output_ids: Array) -> bool:
            return finder.ends(output_ids.tolist(), stops)

        return TurnRequest(
            prompt_ids=plan.prompt.ids,
            parent=request.parent,
            inherited=plan.prompt.inherited,
            origin=request.origin,
            role=plan.role,
            max_new_tokens=plan.max_new_tokens,
            stop_ids=tuple(sorted(stops.ids)),
            grammar=plan.grammar,
            ends=ends if stops.texts else None,
            on_tokens=None if shown is None else shown.heard,
        )

    async def _until_end(self, turn: Coroutine[Any, Any, T]) -> T:
        """Its result.  Raises ApiError when the episode ends before the turn does."""
        work = asyncio.create_task(turn)
        self._running.add(work)
        try:
            async with asyncio.timeout_at(self._deadline):
                return await work
        except TimeoutError as error:
            raise _gone(f"the episode has used its {self.limits.wall_s:g} s") from error
        except asyncio.CancelledError:
            self.counts["cancelled"] += 1
            if self._ended and not _is_cancelled():
                raise _gone("the episode has ended") from None
            raise
        finally:
            self._running.discard(work)

    def _answer(
        self, turn: RecordedTurn, request: MatchedRequest, plan: _Plan, shown: AnswerStream | None
    ) -> TurnAnswer:
        """Raises RecordError when the shown part of the answer is no beginning of it."""
        if self._ended:
            self._episode.leave_out(turn.name, "cancelled")
            raise _gone("the episode has ended")
        ids = turn.output_ids.tolist()
        is_closed = ids[-1] in self._stop_ids  # its finish does not tell
        whole = self._policy.tokens.decode(ids[:-1] if is_closed else ids)
        text, stop_text = plan.stops.cut(whole)
        reasoning, calls = "", tuple[MessageCall, ...]()
        if plan.is_chat:
            reasoning, text, found = self._policy.parser.parse(text, plan.tools)
            calls = tuple(_named(f"{turn.name}/{at}", *call) for at, call in enumerate(found))
        if shown is not None and not shown.shown.begins(PartialAnswer(0, reasoning, text)):
            self._episode.leave_out(turn.name, "refused")
            raise RecordError("stream", f"{turn.name}: its answer does not begin as it was shown")
        answer = ChatMessage("assistant", text, list(calls)) if plan.is_chat else whole
        self.forest.add(request, answer, turn)
        self._num_sampled += len(ids)
        self.counts[f"origin/{turn.origin}"] += 1
        self.counts["tool_calls"] += len(calls)
        if calls:
            self._episode.calls_tools(turn.name, tuple(call.function.name for call in calls))
        self.counts["replaced_ends"] += request.parent is not None and not turn.continues
        reason = "length" if stop_text is None and not is_closed else "stop"
        reason = "tool_calls" if calls else reason
        return TurnAnswer(turn, text, reason, reasoning, calls, stop_text)


def _function_of(tool: Json) -> Json:
    function = tool["function"]
    assert isinstance(function, dict), "checked when the request is read"
    return function


def _named(place: str, name: str, arguments: str) -> MessageCall:
    """A call with an id of its own: clients give it back, so it tells equal answers apart.

    An episode that is played again gives the same ids, since some templates write them.
    """
    digest = blake2b(without_life(place).encode(), digest_size=12).hexdigest()
    return MessageCall(Function(name, arguments), f"call_{digest}")


def _gone(message: str) -> ApiError:
    return ApiError(410, "episode_ended", message, retry=False)


def _is_cancelled() -> bool:
    """Whether the calling task itself is cancelled, not only the task that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
