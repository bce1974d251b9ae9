"""The stateless part of OpenAI's Responses form as another spelling of chat completions.

A client sends all items each time, as with chat completions.  Items become the same messages, so
that recognition, prompts and records do not know which form a client spoke:

    an assistant's message and the function_calls behind it    one message with its calls
    function_call_output                                       a message of role tool
    reasoning                                                  left out

What refers to something that a server keeps (earlier responses, items, conversations) is refused.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from moerl.agents.api_errors import ApiError
from moerl.agents.chat_messages import ChatMessage, Function, Json, MessageCall
from moerl.agents.open_episode import Ends, TurnAnswer
from moerl.agents.openai_requests import decode_body, not_taken, refuse_fields, unreadable
from moerl.types import SamplingParams

_NotEmpty = Annotated[str, msgspec.Meta(min_length=1)]
_TEXTS = ("input_text", "output_text", "text")
_REFUSED: Mapping[str, tuple[object, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "max_tool_calls": (),
}
_IGNORED = {
    "include", "metadata", "parallel_tool_calls", "prompt_cache_key", "reasoning",
    "safety_identifier", "service_tier", "store", "stream_options", "top_logprobs", "truncation",
    "user",
}  # fmt: skip


class Part(msgspec.Struct, frozen=True):
    type: str
    text: str = ""


class Item(msgspec.Struct, frozen=True):
    """Which fields it has depends on its type."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[Part] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | list[Part] = ""


class _Tool(msgspec.Struct, frozen=True):
    type: Literal["function"]
    name: _NotEmpty
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None

    def schema(self) -> Json:
        """As chat completions have it."""
        fields = {name: getattr(self, name) for name in ("description", "parameters", "strict")}
        given = {name: value for name, value in fields.items() if value is not None}
        return {"type": "function", "function": {"name": self.name} | given}


class _Format(msgspec.Struct, frozen=True):
    type: Literal["text"] = "text"


class _TextSettings(msgspec.Struct, frozen=True):
    format: _Format | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    input: _NotEmpty | Annotated[list[Item], msgspec.Meta(min_length=1)]
    instructions: str | None = None
    tools: list[_Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    text: _TextSettings | None = None
    stream: bool | None = None

    @property
    def ends(self) -> Ends:
        return Ends(self.max_output_tokens)

    def schemas(self) -> list[Json]:
        return [tool.schema() for tool in self.tools or ()]

    def chat_messages(self) -> list[ChatMessage]:
        """Raises ApiError for what the policy cannot read."""
        found = [ChatMessage("system", self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            return [*found, ChatMessage("user", self.input)]
        continues = False  # the last message is an answer that more calls belong to
        for place, item in enumerate(self.input):
            field = f"input[{place}]"
            if item.type == "reasoning":
                continue
            if item.type == "function_call":
                call = MessageCall(Function(item.name, item.arguments), item.call_id)
                last = found.pop() if continues else ChatMessage("assistant", "")
                calls = [*(last.tool_calls or []), call]
                found.append(msgspec.structs.replace(last, tool_calls=calls))
            else:
                found.append(_message(item, field))
            continues = found[-1].role == "assistant"
        return found


def read_responses(data: bytes, sampling: SamplingParams, counts: Counter[str]) -> ResponsesRequest:
    """counts: of fields that were not taken.  Raises ApiError."""
    with unreadable():
        body = decode_body(data)
        refuse_fields(body, _REFUSED, "the gateway keeps nothing between requests")
        request = msgspec.convert(body, ResponsesRequest)
    counts.update(not_taken(body, ResponsesRequest, sampling, _IGNORED))
    return request


def _message(item: Item, field: str) -> ChatMessage:
    if item.type == "function_call_output":
        return ChatMessage("tool", _text(item.output, f"{field}.output"), tool_call_id=item.call_id)
    if item.type != "message" or item.role is None:
        raise _unreadable(field, f"an item of type {item.type}")
    return ChatMessage(item.role, _text(item.content or "", f"{field}.content"))


def _text(content: str | Sequence[Part], field: str) -> str:
    if isinstance(content, str):
        return content
    kind = next((part.type for part in content if part.type not in _TEXTS), None)
    if kind is not None:
        raise _unreadable(field, f"a part of type {kind}")
    return "".join(part.text for part in content)


def _unreadable(field: str, what: str) -> ApiError:
    message = f"{field}: {what}; the policy reads text, calls of functions and their results only"
    return ApiError(400, "unsupported_parameter", message, retry=False)


# --- answers -------------------------------------------------------------------------------------
def reply(answer: TurnAnswer, model: str) -> Json:
    """A whole response."""
    return _whole(answer, model, _items(answer))


def events(answer: TurnAnswer, model: str) -> Iterator[Json]:
    """The same as a stream, one delta for each item."""
    items = _items(answer)
    whole = _whole(answer, model, items)
    begun = whole | {"status": "in_progress", "incomplete_details": None, "output": []}
    shown = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(items):
        shown += _of_item(item, index)
    shown.append({"type": f"response.{whole['status']}", "response": whole})
    for number, event in enumerate(shown):
        yield event | {"sequence_number": number}


def _whole(answer: TurnAnswer, model: str, items: Sequence[Json]) -> Json:
    is_cut = answer.finish_reason == "length"
    return _head(model) | {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": items,
        "usage": _usage(answer),
    }


def _head(model: str) -> Json:
    return {
        "id": _name("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
    }


def _usage(answer: TurnAnswer) -> Json:
    prompt, sampled = answer.prompt_len, len(answer.output_ids)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + sampled,
    }


def _items(answer: TurnAnswer) -> list[Json]:
    """Reasoning, text and calls."""
    items: list[Json] = []
    if answer.reasoning:
        part = {"type": "reasoning_text", "text": answer.reasoning}
        items.append({"type": "reasoning", "id": _name("rs"), "summary": [], "content": [part]})
    if answer.text or not answer.calls:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        items.append(
            {
                "type": "message",
                "id": _name("msg"),
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    return items + [_call(call) for call in answer.calls]


def _call(call: MessageCall) -> Json:
    arguments = call.function.arguments
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return {
        "type": "function_call",
        "id": _name("fc"),
        "call_id": call.id,
        "name": call.function.name,
        "arguments": text,
        "status": "completed",
    }


def _of_item(item: Json, index: int) -> list[Json]:
    """The events that show one item."""
    place: Json = {"output_index": index, "item_id": item["id"]}
    empty = item | {"status": "in_progress"}
    between: list[Json] = []
    if item["type"] == "message":
        empty |= {"content": []}
        between = _of_text(item, place | {"content_index": 0})
    elif item["type"] == "function_call":
        empty |= {"arguments": ""}
        kind, text = "response.function_call_arguments", item["arguments"]
        between = [
            place | {"type": f"{kind}.delta", "delta": text},
            place | {"type": f"{kind}.done", "arguments": text, "name": item["name"]},
        ]
    return [
        {"type": "response.output_item.added", "output_index": index, "item": empty},
        *between,
        {"type": "response.output_item.done", "output_index": index, "item": item},
    ]


def _of_text(item: Json, place: Json) -> list[Json]:
    assert isinstance(item["content"], list)
    (part,) = item["content"]
    text, empty = part["text"], part | {"text": ""}
    return [
        place | {"type": "response.content_part.added", "part": empty},
        place | {"type": "response.output_text.delta", "delta": text, "logprobs": []},
        place | {"type": "response.output_text.done", "text": text, "logprobs": []},
        place | {"type": "response.content_part.done", "part": part},
    ]


def _name(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
