"""OpenAI's responses form without state: a request as chat messages, an answer as output items.

Source: OpenAI's Responses API as its Python client 2.8 reads and writes it.  Nothing is stored:
`previous_response_id` is refused, and clients send the items of a conversation again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Annotated, ClassVar, Literal

import msgspec

from moerl.agents.chat_messages import (
    ChatMessage,
    ContentPart,
    Function,
    Json,
    MessageCall,
    function_tool,
)
from moerl.agents.episode_types import TurnAnswer
from moerl.agents.gateway.answer_stream import Blocks, Change, Kind, PartialAnswer
from moerl.agents.gateway.api_errors import ApiError, unsupported
from moerl.agents.gateway.openai_requests import ChatRequest, ClientRequest

_Count = Annotated[int, msgspec.Meta(ge=1)]
_TEXTS_OF: dict[Kind, str] = {"reasoning": "reasoning_text", "text": "output_text"}
_TEXTS = frozenset({"input_text", "output_text", "text", "refusal"})


class TextPart(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    text: str = ""


class ResponsesItem(msgspec.Struct, frozen=True, kw_only=True):
    """An item of any type; fields of other types are empty."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: str | list[TextPart] = ""
    call_id: str = ""  # of function_call and function_call_output
    name: str = ""
    arguments: str = ""
    output: str | list[TextPart] = ""


class ResponsesTool(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    name: str = ""
    description: str | None = None
    parameters: Json | None = None


class Reasoning(msgspec.Struct, frozen=True):
    effort: str | None = None


class ResponsesRequest(ClientRequest, frozen=True, kw_only=True):
    """The body of a request to /v1/responses."""

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "previous_response_id": (),
        "conversation": (),
        "background": (False,),
        "prompt": (),
        "text": ({}, {"format": {"type": "text"}}),
    }

    input: str | list[ResponsesItem]
    instructions: str | None = None
    max_output_tokens: _Count | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | Json | None = None
    stream: bool | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: Json | None = None

    def chat(self) -> ChatRequest:
        """The same request in OpenAI's chat form.  Raises ApiError."""
        found = [ChatMessage("system", self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            found.append(ChatMessage("user", self.input))
        else:
            found += _chat_messages(self.input)
        if not found:
            raise ApiError(400, "invalid_messages", "input: there is no message in it")
        return ChatRequest(
            messages=found,
            max_tokens=self.max_output_tokens,
            tools=[_function(tool, f"tools[{i}]") for i, tool in enumerate(self.tools or ())],
            tool_choice=self.tool_choice,
            stream=self.stream,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            chat_template_kwargs=self.chat_template_kwargs,
        )


@dataclass(frozen=True, slots=True)
class ResponsesReply:
    """An answer to `asked`.  model: name that clients see."""

    answer: TurnAnswer
    model: str
    asked: ResponsesRequest

    def whole(self) -> Json:
        items = [_item(kind, text, self.status) for kind, text in self.answer.blocks]
        items += map(_function_call, self.answer.calls)
        return _head(self.asked, self.model) | {"output": items} | self.end()

    def end(self) -> Json:
        """The fields that are known when the answer is complete."""
        cut = {"reason": "max_output_tokens"} if self.status == "incomplete" else None
        return {"status": self.status, "incomplete_details": cut, "usage": self._usage()}

    @property
    def status(self) -> str:
        return "incomplete" if self.answer.finish_reason == "length" else "completed"

    def _usage(self) -> Json:
        prompt, sampled = self.answer.prompt_len, len(self.answer.output_ids)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        }


class ResponsesEvents:
    """The events of one answer to `asked`."""

    def __init__(self, model: str, asked: ResponsesRequest) -> None:
        self._head, self._blocks = _head(asked, model), Blocks()
        self._name = ""  # of the open item
        self._items: list[Json] = []  # that are done
        self._numbers = count()

    def more(self, _place: int, partial: PartialAnswer) -> Iterator[Json]:
        yield from map(self._numbered, self._grown(partial))

    def end(self, reply: ResponsesReply) -> Iterator[Json]:
        yield from map(self._numbered, self._rest(reply))

    def _numbered(self, event: Json) -> Json:
        return event | {"sequence_number": next(self._numbers)}

    def _grown(self, partial: PartialAnswer) -> Iterator[Json]:
        if not self._blocks.is_begun:
            for state in ("created", "in_progress"):
                yield {"type": f"response.{state}", "response": self._head}
        for change in self._blocks.grow(partial):
            yield from self._changed(change, "completed")

    def _rest(self, reply: ResponsesReply) -> Iterator[Json]:
        answer = reply.answer
        yield from self._grown(answer.shown)
        for change in self._blocks.end(is_empty=answer.is_empty):
            yield from self._changed(change, reply.status)
        yield from chain.from_iterable(map(self._call, answer.calls))
        whole = self._head | {"output": self._items} | reply.end()
        yield {"type": f"response.{reply.status}", "response": whole}

    def _changed(self, change: Change, status: str) -> Iterator[Json]:
        """status: of a block that stops."""
        event, kind, text = change
        if event == "start":
            item = _item(kind, "", "in_progress")
            self._name = str(item["id"])
            yield self._item("added", item | {"content": []})
        here = {"item_id": self._name, "output_index": len(self._items), "content_index": 0}
        logprobs: Json = {"logprobs": []} if kind == "text" else {}
        if event == "start":
            yield here | {"type": "response.content_part.added", "part": _part(kind, "")}
        elif event == "delta":
            yield here | {"type": f"response.{_TEXTS_OF[kind]}.delta", "delta": text} | logprobs
        else:
            yield here | {"type": f"response.{_TEXTS_OF[kind]}.done", "text": text} | logprobs
            yield here | {"type": "response.content_part.done", "part": _part(kind, text)}
            yield self._done(_item(kind, text, status) | {"id": self._name})

    def _call(self, call: MessageCall) -> Iterator[Json]:
        item = _function_call(call)
        here = {"item_id": item["id"], "output_index": len(self._items)}
        kind, arguments = "response.function_call_arguments", item["arguments"]
        yield self._item("added", item | {"arguments": ""})
        yield here | {"type": f"{kind}.delta", "delta": arguments}
        yield here | {"type": f"{kind}.done", "arguments": arguments, "name": item["name"]}
        yield self._done(item)

    def _done(self, item: Json) -> Json:
        event = self._item("done", item)
        self._items.append(item)
        return event

    def _item(self, event: str, item: Json) -> Json:
        kind = f"response.output_item.{event}"
        return {"type": kind, "output_index": len(self._items), "item": item}


def error_event(error: ApiError) -> Json:
    """A failure in a stream that has begun."""
    found = {"code": error.code, "message": error.message, "param": None}
    return {"type": "error", "sequence_number": 0} | found


# --- requests ------------------------------------------------------------------------------------
def _chat_messages(items: Sequence[ResponsesItem]) -> list[ChatMessage]:
    """Text and calls of an assistant that follow each other are one message."""
    found: list[ChatMessage] = []
    for place, item in enumerate(items):
        where = f"input[{place}]"
        if item.type == "reasoning":
            continue
        if item.type == "function_call_output":
            text = _parts(item.output, where)
            found.append(ChatMessage("tool", text, tool_call_id=item.call_id))
        elif item.type == "function_call":
            call = MessageCall(Function(item.name, item.arguments), item.call_id)
            _to_assistant(found, [], [call])
        elif item.type != "message":
            allowed = "message, function_call, function_call_output, reasoning"
            raise unsupported(f"{where}: type {item.type!r}; allowed are {allowed}")
        elif item.role == "assistant":
            _to_assistant(found, _parts(item.content, where), [])
        else:
            found.append(ChatMessage(item.role, _parts(item.content, where)))
    return found


def _to_assistant(
    found: list[ChatMessage], text: list[ContentPart], calls: list[MessageCall]
) -> None:
    last = found[-1] if found and found[-1].role == "assistant" else None
    if last is None:
        found.append(ChatMessage("assistant", text, calls or None))
        return
    before = last.content if isinstance(last.content, list) else []
    found[-1] = ChatMessage("assistant", before + text, [*(last.tool_calls or ()), *calls] or None)


def _parts(content: str | list[TextPart], where: str) -> list[ContentPart]:
    if isinstance(content, str):
        return [ContentPart("text", content)]
    kind = next((part.type for part in content if part.type not in _TEXTS), None)
    if kind is not None:
        raise unsupported(f"{where}.content: a part of type {kind}; the policy reads text only")
    return [ContentPart("text", part.text) for part in content]


def _function(tool: ResponsesTool, where: str) -> Json:
    if tool.type != "function":
        raise unsupported(f"{where}: type {tool.type!r} runs at its provider; allowed is function")
    return function_tool(tool.name, tool.description, tool.parameters)


# --- answers -------------------------------------------------------------------------------------
def _name(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def _head(asked: ResponsesRequest, model: str) -> Json:
    """A response that has just begun."""
    return {
        "id": _name("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "status": "in_progress",
        "incomplete_details": None,
        "error": None,
        "output": [],
        "instructions": asked.instructions,
        "tools": asked.tools or [],
        "tool_choice": asked.tool_choice or "auto",
        "parallel_tool_calls": True,
        "usage": None,
    }


def _item(kind: Kind, text: str, status: str) -> Json:
    content = [_part(kind, text)]
    if kind == "reasoning":
        return {"type": "reasoning", "id": _name("rs"), "summary": [], "content": content}
    item: Json = {"type": "message", "id": _name("msg"), "role": "assistant"}
    return item | {"status": status, "content": content}


def _part(kind: Kind, text: str) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _function_call(call: MessageCall) -> Json:
    arguments = call.function.arguments
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return {
        "type": "function_call",
        "id": _name("fc"),
        "call_id": call.id,
        "name": call.function.name,
        "arguments": arguments,
        "status": "completed",
    }
