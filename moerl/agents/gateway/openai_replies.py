"""Answers in OpenAI's form, whole and as streams of chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from moerl.agents.chat_messages import Json, MessageCall
from moerl.agents.episode_types import TurnAnswer
from moerl.agents.gateway.answer_stream import Kind, PartialAnswer

Decode = Callable[[Sequence[int]], str]
_FIELDS: dict[Kind, str] = {"reasoning": "reasoning_content", "text": "content"}


@dataclass(frozen=True, slots=True)
class Shown:
    """An answer, and the log-probability of each sampled token if requested."""

    answer: TurnAnswer
    logprobs: list[float] | None = None


@dataclass(frozen=True, slots=True)
class OpenaiReply:
    """The answers to one request.  decode: text of tokens."""

    shown: Sequence[Shown]
    model: str
    decode: Decode

    def chat(self) -> Json:
        choices = self._choices(lambda one: {"message": _message(one.answer)}, self.token_logprobs)
        return self._whole("chatcmpl", "chat.completion", choices)

    def completion(self) -> Json:
        return self._whole("cmpl", "text_completion", self.completion_choices())

    def completion_choices(self) -> list[Json]:
        return self._choices(lambda one: {"text": one.answer.text}, self._legacy_logprobs)

    def tokens(self) -> Json:
        choices = self._choices(
            lambda one: {"token_ids": one.answer.output_ids}, lambda one: one.logprobs
        )
        return self._whole("tok", "token_completion", choices)

    def _choices(
        self, content: Callable[[Shown], Json], logprobs: Callable[[Shown], object]
    ) -> list[Json]:
        return [
            {"index": index}
            | content(one)
            | {"logprobs": logprobs(one), "finish_reason": one.answer.finish_reason}
            for index, one in enumerate(self.shown)
        ]

    def _whole(self, prefix: str, kind: str, choices: list[Json]) -> Json:
        return _head(prefix, kind, self.model) | {"choices": choices, "usage": self.usage()}

    def usage(self) -> Json:
        prompt = self.shown[0].answer.prompt_len
        sampled = sum(len(one.answer.output_ids) for one in self.shown)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        }

    def token_logprobs(self, one: Shown) -> Json | None:
        if one.logprobs is None:
            return None
        texts = [self.decode([token]) for token in one.answer.output_ids]
        entries = [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in zip(texts, one.logprobs, strict=True)
        ]
        return {"content": entries, "refusal": None}

    def _legacy_logprobs(self, one: Shown) -> Json | None:
        if one.logprobs is None:
            return None
        texts = [self.decode([token]) for token in one.answer.output_ids]
        return {"tokens": texts, "token_logprobs": one.logprobs, "top_logprobs": None}


class ChatEvents:
    """The chunks of a chat completion."""

    def __init__(self, model: str, *, usage: bool) -> None:
        """usage: in a chunk of its own at the end."""
        self._head = _head("chatcmpl", "chat.completion.chunk", model)
        self._usage = usage
        self._shown: dict[int, PartialAnswer] = {}

    def more(self, place: int, partial: PartialAnswer) -> Iterator[Json]:
        before = self._shown.get(place)
        role: Json = {} if before else {"role": "assistant"}
        yield self._chunk(place, role | _grown(before or PartialAnswer(0), partial))
        self._shown[place] = partial

    def end(self, reply: OpenaiReply) -> Iterator[Json]:
        for place, one in enumerate(reply.shown):
            message = _message(one.answer, numbered=True)
            if before := self._shown.get(place):
                calls = {"tool_calls": message["tool_calls"]} if one.answer.calls else {}
                message = calls | _grown(before, one.answer.shown)
            if message:
                yield self._chunk(place, message, reply.token_logprobs(one))
            last = {"index": place, "delta": {}, "finish_reason": one.answer.finish_reason}
            yield self._head | {"choices": [last]}
        if self._usage:
            yield self._head | {"choices": [], "usage": reply.usage()}

    def _chunk(self, place: int, delta: Json, logprobs: Json | None = None) -> Json:
        choice = {"index": place, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        return self._head | {"choices": [choice]}


class CompletionEvents:
    """The chunks of a text completion."""

    def __init__(self, model: str, *, usage: bool) -> None:
        self._head = _head("cmpl", "text_completion", model)
        self._usage = usage
        self._shown: dict[int, str] = {}

    def more(self, place: int, partial: PartialAnswer) -> Iterator[Json]:
        text = partial.text[len(self._shown.get(place, "")) :]
        choice = {"index": place, "text": text, "logprobs": None, "finish_reason": None}
        yield self._head | {"choices": [choice]}
        self._shown[place] = partial.text

    def end(self, reply: OpenaiReply) -> Iterator[Json]:
        choices = reply.completion_choices()
        for place, choice in enumerate(choices):
            choice["text"] = str(choice["text"])[len(self._shown.get(place, "")) :]
        yield self._head | {"choices": choices}
        if self._usage:
            yield self._head | {"choices": [], "usage": reply.usage()}


def _head(prefix: str, kind: str, model: str) -> Json:
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def _grown(before: PartialAnswer, now: PartialAnswer) -> Json:
    """The text of `now` behind that of `before`, by field."""
    return {_FIELDS[kind]: text for kind, text in now.beyond(before).items()}


def _message(answer: TurnAnswer, *, numbered: bool = False) -> Json:
    """numbered: calls of a stream have an index, by which clients join their parts."""
    message: Json = {"role": "assistant", "content": answer.text or None}
    if not answer.calls and not answer.text:
        message["content"] = ""
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            ({"index": index} if numbered else {}) | _call(call)
            for index, call in enumerate(answer.calls)
        ]
    return message


def _call(call: MessageCall) -> Json:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": "function", "function": function}
