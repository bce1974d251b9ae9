"""Anthropic's messages form as another spelling of chat completions.

A request becomes the same messages that OpenAI's form has, so that recognition, prompts and records
do not know which form a client spoke:

    tool_use of an assistant    a call of its message
    tool_result of a user       a message of role tool, before the user's own text
    thinking                    left out, as reasoning is
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

import msgspec

from moerl.agents.api_errors import ApiError
from moerl.agents.chat_messages import ChatMessage, Function, Json, MessageCall
from moerl.agents.open_episode import Ends, TurnAnswer
from moerl.agents.openai_requests import decode_body, not_taken, refuse_fields, unreadable
from moerl.types import SamplingParams

_NotEmpty = Annotated[str, msgspec.Meta(min_length=1)]
_StopText = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_IGNORED = {"metadata", "service_tier", "thinking", "output_config", "context_management", "betas"}
_REFUSED: Mapping[str, tuple[object, ...]] = {"container": (), "mcp_servers": ([],)}


class Block(msgspec.Struct, frozen=True):
    """A part of a message, or of a tool's result; which fields it has depends on its type."""

    type: str
    text: str = ""
    id: str = ""
    name: str = ""
    input: Json = {}
    tool_use_id: str = ""
    content: str | list[Block] | None = None


class Message(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class _Tool(msgspec.Struct, frozen=True):
    name: _NotEmpty
    input_schema: Json
    description: str | None = None
    type: Literal["custom"] | None = None

    def schema(self) -> Json:
        """As OpenAI's form has it."""
        function: Json = {"name": self.name, "parameters": self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


class _ToolChoice(msgspec.Struct, frozen=True):
    type: Literal["auto", "none"]


class MessagesRequest(msgspec.Struct, frozen=True, kw_only=True):
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    system: str | list[Block] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    stop_sequences: Annotated[list[_StopText], msgspec.Meta(max_length=16)] | None = None
    stream: bool | None = None

    @property
    def ends(self) -> Ends:
        return Ends(self.max_tokens, tuple(sorted(set(self.stop_sequences or ()))))

    @property
    def takes_calls(self) -> bool:
        return self.tool_choice is None or self.tool_choice.type != "none"

    def schemas(self) -> list[Json]:
        return [tool.schema() for tool in self.tools or ()]

    def chat_messages(self) -> list[ChatMessage]:
        """Raises ApiError for what the policy cannot read."""
        found = []
        if self.system:
            found.append(ChatMessage("system", _text(self.system, "system")))
        for place, message in enumerate(self.messages):
            found += _chat_messages(message, f"messages[{place}].content")
        return found


def read_messages(data: bytes, sampling: SamplingParams, counts: Counter[str]) -> MessagesRequest:
    """counts: of fields that were not taken.  Raises ApiError."""
    with unreadable():
        body = decode_body(data)
        refuse_fields(body, _REFUSED, "the policy has no tools but those of the client")
        request = msgspec.convert(body, MessagesRequest)
    counts.update(not_taken(body, MessagesRequest, sampling, _IGNORED))
    return request


def _chat_messages(message: Message, field: str) -> list[ChatMessage]:
    if isinstance(message.content, str):
        return [ChatMessage(message.role, message.content)]
    if message.role == "assistant":
        return [_answer(message.content, field)]
    found, texts = list[ChatMessage](), list[Block]()
    for block in message.content:
        if block.type == "tool_result":
            text = _text(block.content or "", field)
            found.append(ChatMessage("tool", text, tool_call_id=block.tool_use_id))
        else:
            texts.append(block)
    if texts or not found:
        found.append(ChatMessage("user", _text(texts, field)))
    return found


def _answer(blocks: list[Block], field: str) -> ChatMessage:
    """An assistant's message; reasoning is left out."""
    calls = [
        MessageCall(Function(block.name, block.input), block.id)
        for block in blocks
        if block.type == "tool_use"
    ]
    others = [
        block for block in blocks if block.type not in ("tool_use", "thinking", "redacted_thinking")
    ]
    return ChatMessage("assistant", _text(others, field), calls)


def _text(content: str | list[Block], field: str) -> str:
    if isinstance(content, str):
        return content
    kind = next((block.type for block in content if block.type != "text"), None)
    if kind is not None:
        raise ApiError(
            400,
            "unsupported_parameter",
            f"{field}: a block of type {kind}; the policy reads text and results of tools only",
            retry=False,
        )
    return "".join(block.text for block in content)


# --- answers -------------------------------------------------------------------------------------
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def reply(answer: TurnAnswer, model: str) -> Json:
    """A whole message."""
    return _head(answer, model) | {
        "content": _blocks(answer),
        "stop_reason": _STOPS[answer.finish_reason],
        "stop_sequence": None,
        "usage": _usage(answer, len(answer.output_ids)),
    }


def events(answer: TurnAnswer, model: str) -> Iterator[Json]:
    """The same as a stream, one delta for each block."""
    start = _head(answer, model) | {
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(answer, 0),
    }
    yield {"type": "message_start", "message": start}
    for index, block in enumerate(_blocks(answer)):
        empty, delta = _in_parts(block)
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {"stop_reason": _STOPS[answer.finish_reason], "stop_sequence": None}
    usage = {"output_tokens": len(answer.output_ids)}
    yield {"type": "message_delta", "delta": ended, "usage": usage}
    yield {"type": "message_stop"}


def error_body(error: ApiError) -> Json:
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
    kind = "api_error" if error.status >= 500 else "invalid_request_error"
    message = error.message
    if error.code == "context_length_exceeded":  # the words on which agents shorten their history
        message = f"prompt is too long: {message}"
    shown = {"type": kinds.get(error.status, kind), "message": message, "code": error.code}
    return {"type": "error", "error": shown}


def _head(answer: TurnAnswer, model: str) -> Json:
    name = f"msg_{secrets.token_hex(12)}"
    return {"id": name, "type": "message", "role": "assistant", "model": model}


def _usage(answer: TurnAnswer, sampled: int) -> Json:
    return {"input_tokens": answer.prompt_len, "output_tokens": sampled}


def _blocks(answer: TurnAnswer) -> list[Json]:
    found: list[Json] = []
    if answer.reasoning:
        found.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.text:
        found.append({"type": "text", "text": answer.text})
    for call in answer.calls:
        name, given = call.function.name, _input(call)
        found.append({"type": "tool_use", "id": call.id, "name": name, "input": given})
    return found


def _input(call: MessageCall) -> object:
    """Arguments of a parsed call are JSON."""
    arguments = call.function.arguments
    return msgspec.json.decode(arguments) if isinstance(arguments, str) else arguments


def _in_parts(block: Json) -> tuple[Json, Json]:
    """A block without its contents, and the delta that brings them."""
    if block["type"] == "text":
        return block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
    if block["type"] == "thinking":
        delta = {"type": "thinking_delta", "thinking": block["thinking"]}
        return block | {"thinking": ""}, delta
    text = msgspec.json.encode(block["input"]).decode()
    return block | {"input": {}}, {"type": "input_json_delta", "partial_json": text}
