"""Chat messages as clients send them: their form, and the key by which they are recognised.

The key of a message holds the fields that clients return unchanged: role, text, calls and ids.  It
leaves out reasoning, because most clients drop it.  Arguments of calls are compared as JSON,
because many clients spell them in another way.  Nothing else is normalised: a client that trims or
repairs an answer has written another message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from moerl.core.types import Prompt
from moerl.data.chat_template import Json as Json  # for the other modules of this package
from moerl.data.chat_template import parsed_arguments


class Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str | Json = ""


class MessageCall(msgspec.Struct, frozen=True):
    """A call of a tool in an assistant's message."""

    function: Function
    id: str = ""
    type: str = "function"


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str = ""


class ChatMessage(msgspec.Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        """Parts are joined; parts of other types than text are refused when a request is read."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    @property
    def key(self) -> bytes:
        calls = [
            (call.id, call.function.name, _canonical(call.function.arguments))
            for call in self.tool_calls or ()
        ]
        fields = [self.shown_role, self.text, calls, self.tool_call_id or "", self.name or ""]
        return msgspec.json.encode(fields)

    @property
    def shown_role(self) -> str:
        """Templates have no developer."""
        return "system" if self.role == "developer" else self.role

    def for_template(self) -> Json:
        """As `ChatTemplate` takes it: text in one piece."""
        found: Json = {"role": self.shown_role, "content": self.text}
        if self.tool_calls:
            found["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        if self.tool_call_id is not None:
            found["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            found["name"] = self.name
        return found


def function_tool(name: str, description: str | None, parameters: Json | None) -> Json:
    """A tool in the form of chat completions.  parameters: JSON schema; None: no arguments."""
    found: Json = {"name": name}
    if description is not None:
        found["description"] = description
    return {"type": "function", "function": found | {"parameters": parameters or {}}}


def tools_key(tools: Sequence[Json]) -> bytes:
    return msgspec.json.encode(list(tools))


def parsed_object(arguments: str | Json) -> Json | None:
    """The arguments of a call, or None where they are no JSON object."""
    found = parsed_arguments(arguments)
    return found if isinstance(found, dict) else None


def _canonical(arguments: str | Json) -> object:
    """One spelling of equal JSON; text that is no JSON stays text."""
    parsed = parsed_arguments(arguments)
    if parsed is None:
        return arguments
    return msgspec.json.encode(parsed, order="sorted").decode()


def _call_for_template(call: MessageCall) -> Json:
    function: Json = {"name": call.function.name, "arguments": call.function.arguments}
    return {"type": "function", "id": call.id, "function": function}


def first_messages(prompt: Prompt) -> tuple[list[Json], Json]:
    """Messages with which an episode begins, in OpenAI's form, and the prompt's other fields."""
    extra = dict(prompt.extra)
    messages = extra.pop("messages", None) or [{"role": "user", "content": prompt.text}]
    return list(messages), extra
