"""OpenAI's responses form without state: a request as chat messages, an answer as output items.

Source: OpenAI's Responses API as its Python client 2.8 reads and writes it.  Nothing is stored:
`previous_response_id` is refused, and clients send the items of a conversation again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import msgspec

from moerl.agents.api_errors import ApiError, unsupported
from moerl.agents.chat_messages import (
    ChatMessage,
    ContentPart,
    Function,
    Json,
    MessageCall,
    function_tool,
)
from moerl.agents.open_episode import TurnAnswer
from moerl.agents.openai_requests import ChatRequest, ClientRequest

_Count = Annotated[int, msgspec.Meta(ge=1)]
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
        )


@dataclass(frozen=True, slots=True)
class ResponsesReply:
    """An answer to `asked`.  model: name that clients see."""

    answer: TurnAnswer
    model: str
    asked: ResponsesRequest

    def whole(self) -> Json:
        return self._response(self._items(), self._status())

    def events(self) -> Iterator[Json]:
        """One delta for each item: the turn is complete before a client sees any of it."""
        items = self._items()
        whole = self._response(items, self._status())
        begun = whole | {"output": [], "status": "in_progress", "usage": None}
        events: list[Json] = [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        ]
        for place, item in enumerate(items):
            events += _item_events(item, place)
        last = "completed" if whole["status"] == "completed" else "incomplete"
        events.append({"type": f"response.{last}", "response": whole})
        for number, event in enumerate(events):
            yield event | {"sequence_number": number}

    def _status(self) -> str:
        return "incomplete" if self.answer.finish_reason == "length" else "completed"

    def _items(self) -> list[Json]:
        answer = self.answer
        items: list[Json] = []
        if answer.reasoning:
            text = {"type": "reasoning_text", "text": answer.reasoning}
            items.append({"type": "reasoning", "id": _name("rs"), "summary": [], "content": [text]})
        if answer.text or not answer.calls:
            items.append(_message(answer.text, self._status()))
        return items + [_function_call(call) for call in answer.calls]

    def _response(self, output: Sequence[Json], status: str) -> Json:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": _name("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": self.model,
            "status": status,
            "incomplete_details": cut,
            "error": None,
            "output": output,
            "instructions": self.asked.instructions,
            "tools": self.asked.tools or [],
            "tool_choice": self.asked.tool_choice or "auto",
            "parallel_tool_calls": True,
            "usage": self._usage(),
        }

    def _usage(self) -> Json:
        prompt, sampled = self.answer.prompt_len, len(self.answer.output_ids)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        }


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


def _message(text: str, status: str) -> Json:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "type": "message",
        "id": _name("msg"),
        "role": "assistant",
        "status": status,
        "content": [part],
    }


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


def _item_events(item: Json, place: int) -> Iterator[Json]:
    here = {"item_id": item["id"], "output_index": place}
    empty: Json = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    begun = item | empty
    yield {"type": "response.output_item.added", "output_index": place, "item": begun}
    if item["type"] == "function_call":
        kind, arguments = "response.function_call_arguments", item["arguments"]
        yield here | {"type": f"{kind}.delta", "delta": arguments}
        yield here | {"type": f"{kind}.done", "arguments": arguments, "name": item["name"]}
    elif item["type"] == "message":
        yield from _text_events(item, here | {"content_index": 0})
    yield {"type": "response.output_item.done", "output_index": place, "item": item}


def _text_events(item: Json, here: Json) -> Iterator[Json]:
    content = item["content"]
    assert isinstance(content, list)
    part = content[0]
    yield here | {"type": "response.content_part.added", "part": part | {"text": ""}}
    text = {"delta": part["text"], "logprobs": []}
    yield here | {"type": "response.output_text.delta"} | text
    yield here | {"type": "response.output_text.done", "text": part["text"], "logprobs": []}
    yield here | {"type": "response.content_part.done", "part": part}
