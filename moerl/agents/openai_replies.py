"""Answers in OpenAI's form, whole and as streams of chunks.

A stream has one chunk for each answer: the turn is complete, and its record sealed, before a client
sees any of it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from moerl.agents.chat_messages import Json, MessageCall
from moerl.agents.open_episode import TurnAnswer

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Shown:
    """An answer, and the log-probability of each sampled token when it was asked for."""

    answer: TurnAnswer
    logprobs: list[float] | None = None


@dataclass(frozen=True, slots=True)
class OpenaiReply:
    """The answers to one request.  decode: text of tokens."""

    shown: Sequence[Shown]
    model: str
    decode: Decode

    def chat(self) -> Json:
        choices = [
            {
                "index": index,
                "message": _message(one.answer),
                "logprobs": self._token_logprobs(one),
                "finish_reason": one.answer.finish_reason,
            }
            for index, one in enumerate(self.shown)
        ]
        return self._head("chatcmpl", "chat.completion") | {
            "choices": choices,
            "usage": self.usage(),
        }

    def chat_chunks(self, *, usage: bool) -> Iterator[Json]:
        """usage: in a chunk of its own at the end."""
        head = self._head("chatcmpl", "chat.completion.chunk")
        for index, one in enumerate(self.shown):
            delta = _message(one.answer, numbered=True)
            logprobs = self._token_logprobs(one)
            first = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
            last = {"index": index, "delta": {}, "finish_reason": one.answer.finish_reason}
            yield head | {"choices": [first]}
            yield head | {"choices": [last]}
        if usage:
            yield head | {"choices": [], "usage": self.usage()}

    def completion(self) -> Json:
        choices = [
            {
                "index": index,
                "text": one.answer.text,
                "logprobs": self._legacy_logprobs(one),
                "finish_reason": one.answer.finish_reason,
            }
            for index, one in enumerate(self.shown)
        ]
        return self._head("cmpl", "text_completion") | {"choices": choices, "usage": self.usage()}

    def completion_chunks(self, *, usage: bool) -> Iterator[Json]:
        whole = self.completion()
        counted = whole.pop("usage")
        yield whole
        if usage:
            yield whole | {"choices": [], "usage": counted}

    def tokens(self) -> Json:
        choices = [
            {
                "index": index,
                "token_ids": one.answer.output_ids,
                "logprobs": one.logprobs,
                "finish_reason": one.answer.finish_reason,
            }
            for index, one in enumerate(self.shown)
        ]
        return self._head("tok", "token_completion") | {"choices": choices, "usage": self.usage()}

    def usage(self) -> Json:
        prompt = self.shown[0].answer.prompt_len
        sampled = sum(len(one.answer.output_ids) for one in self.shown)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        }

    def _head(self, prefix: str, kind: str) -> Json:
        return {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
        }

    def _token_logprobs(self, one: Shown) -> Json | None:
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
