"""Anthropic's messages form: a request as chat messages, an answer as content blocks and events.

Source: Anthropic's Messages API, version 2023-06-01, as its Python client 2.12 reads and writes it.
Blocks of thinking are not given back to the policy, as with clients of OpenAI's form.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import msgspec

from moerl.agents.chat_messages import (
    ChatMessage,
    ContentPart,
    Function,
    Json,
    MessageCall,
    function_tool,
    parsed_object,
)
from moerl.agents.episode_types import TurnAnswer
from moerl.agents.gateway.answer_stream import Blocks, Change, Kind, PartialAnswer
from moerl.agents.gateway.api_errors import ApiError, unsupported
from moerl.agents.gateway.openai_requests import ChatRequest, ClientRequest, StopTexts, Thinking

_Count = Annotated[int, msgspec.Meta(ge=1)]
_BLOCKS: dict[Kind, str] = {"reasoning": "thinking", "text": "text"}
_STOPS = {"length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    410: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessageBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A content block of any type; fields of other types are empty."""

    type: str
    text: str = ""
    id: str = ""  # of tool_use
    name: str = ""
    input: Json = {}
    tool_use_id: str = ""  # of tool_result
    content: str | list[ContentPart] | None = None


class BlockMessage(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant"]
    content: str | list[MessageBlock]


class BlockTool(msgspec.Struct, frozen=True, kw_only=True):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    type: str | None = None
    description: str | None = None
    input_schema: Json | None = None


class MessagesRequest(ClientRequest, frozen=True, kw_only=True):
    """The body of a request to /v1/messages."""

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "mcp_servers": ([],),
        "container": (),
        "output_format": (),
    }

    messages: Annotated[list[BlockMessage], msgspec.Meta(min_length=1)]
    max_tokens: _Count
    system: str | list[ContentPart] | None = None
    tools: list[BlockTool] | None = None
    tool_choice: Json | None = None
    stop_sequences: StopTexts | None = None
    stream: bool | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: Json | None = None

    def chat(self) -> ChatRequest:
        """The same request in OpenAI's form.  Raises ApiError."""
        found = [ChatMessage("system", self.system)] if self.system else []
        for place, message in enumerate(self.messages):
            found += _chat_messages(message, f"messages[{place}]")
        return ChatRequest(
            messages=found,
            max_tokens=self.max_tokens,
            tools=[_function(tool, f"tools[{i}]") for i, tool in enumerate(self.tools or ())],
            tool_choice=_choice(self.tool_choice),
            stop=self.stop_sequences or None,
            stream=self.stream,
            thinking=self.thinking,
            chat_template_kwargs=self.chat_template_kwargs,
        )


@dataclass(frozen=True, slots=True)
class MessagesReply:
    """An answer.  model: name that clients see."""

    answer: TurnAnswer
    model: str

    def whole(self) -> Json:
        blocks = [_block(kind, text) for kind, text in self.answer.blocks]
        blocks += map(_tool_use, self.answer.calls)
        usage = {"input_tokens": self.answer.prompt_len} | self.usage()
        return _message(self.model, blocks, usage) | self.end()

    def end(self) -> Json:
        stop_text, finish = self.answer.stop_text, self.answer.finish_reason
        reason = _STOPS.get(finish, "end_turn") if stop_text is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop_text}

    def usage(self) -> Json:
        return {"output_tokens": len(self.answer.output_ids)}


class MessagesEvents:
    """The events of one answer."""

    def __init__(self, model: str) -> None:
        self._model, self._blocks = model, Blocks()

    def more(self, _place: int, partial: PartialAnswer) -> Iterator[Json]:
        if not self._blocks.is_begun:
            usage: Json = {"input_tokens": partial.prompt_len, "output_tokens": 0}
            yield {"type": "message_start", "message": _message(self._model, [], usage)}
        yield from map(self._changed, self._blocks.grow(partial))

    def end(self, reply: MessagesReply) -> Iterator[Json]:
        answer = reply.answer
        yield from self.more(0, answer.shown)
        yield from map(self._changed, self._blocks.end(is_empty=answer.is_empty))
        for place, call in enumerate(answer.calls, self._blocks.place):
            block = _tool_use(call)
            contents = msgspec.json.encode(block["input"]).decode()
            yield _event("start", place, {"content_block": block | {"input": {}}})
            delta = {"type": "input_json_delta", "partial_json": contents}
            yield _event("delta", place, {"delta": delta})
            yield _event("stop", place)
        yield {"type": "message_delta", "delta": reply.end(), "usage": reply.usage()}
        yield {"type": "message_stop"}

    def _changed(self, change: Change) -> Json:
        event, kind, text = change
        fields: dict[str, Json] = {
            "start": {"content_block": _block(kind, "")},
            "delta": {"delta": {"type": f"{_BLOCKS[kind]}_delta", _BLOCKS[kind]: text}},
        }
        return _event(event, self._blocks.place, fields.get(event))


def _event(event: str, place: int, fields: Json | None = None) -> Json:
    return {"type": f"content_block_{event}", "index": place} | (fields or {})


def error_body(error: ApiError) -> Json:
    """An error in this form; `message` begins with our code, which the form has no field for."""
    kind = _ERRORS.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": f"{error.code}: {error.message}"}}


# --- requests ------------------------------------------------------------------------------------
def _chat_messages(message: BlockMessage, where: str) -> list[ChatMessage]:
    if isinstance(message.content, str):
        return [ChatMessage(message.role, message.content)]
    known = _USER if message.role == "user" else _ASSISTANT
    for place, block in enumerate(message.content):
        if block.type not in known:
            allowed = ", ".join(sorted(known))
            raise unsupported(
                f"{where}.content[{place}]: a block of type {block.type}; the policy reads text "
                f"only: allowed for {message.role} are {allowed}"
            )
    text = [ContentPart("text", block.text) for block in message.content if block.type == "text"]
    if message.role == "assistant":
        calls = [_call(block) for block in message.content if block.type == "tool_use"]
        return [ChatMessage("assistant", text, calls or None)]
    results = [
        ChatMessage("tool", block.content, tool_call_id=block.tool_use_id)
        for block in message.content
        if block.type == "tool_result"
    ]
    return results + ([ChatMessage("user", text)] if text else [])


_USER = frozenset({"text", "tool_result"})
_ASSISTANT = frozenset({"text", "tool_use", "thinking", "redacted_thinking"})
_AS_TEXT = "_text"  # input of a call whose arguments are no JSON object


def _call(block: MessageBlock) -> MessageCall:
    arguments = block.input.get(_AS_TEXT) if len(block.input) == 1 else None
    return MessageCall(
        Function(block.name, arguments if isinstance(arguments, str) else block.input), block.id
    )


def _function(tool: BlockTool, where: str) -> Json:
    if tool.type not in (None, "custom"):
        raise unsupported(f"{where}: type {tool.type!r} runs at its provider; allowed is custom")
    return function_tool(tool.name, tool.description, tool.input_schema)


def _choice(choice: Json | None) -> str | Json | None:
    """In OpenAI's form, whose checks refuse others; a tool is named as in its responses."""
    kind = (choice or {"type": "auto"}).get("type")
    return {"auto": "auto", "none": "none", "any": "required"}.get(str(kind), choice)


# --- answers -------------------------------------------------------------------------------------
def _block(kind: Kind, text: str) -> Json:
    more: Json = {"signature": ""} if kind == "reasoning" else {}
    return {"type": _BLOCKS[kind], _BLOCKS[kind]: text} | more


def _tool_use(call: MessageCall) -> Json:
    given = parsed_object(call.function.arguments)
    if given is None:
        given = {_AS_TEXT: call.function.arguments}
    return {"type": "tool_use", "id": call.id, "name": call.function.name, "input": given}


def _message(model: str, content: Sequence[Json], usage: Json) -> Json:
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }
