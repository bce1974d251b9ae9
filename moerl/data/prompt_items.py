"""An item of a data set from the fields of one line: its prompt or messages, tools and answer.

Data sets of others name and nest them differently; `task.columns` says which column has which role.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, get_args

from moerl.config.schema import Column
from moerl.core.types import PromptOrigin
from moerl.data.chat_template import ARGUMENTS, Json
from moerl.data.plain_values import MEDIA, FieldError, media, plain_fields
from moerl.data.template_parts import THOUGHTS

_ROLES: tuple[Column, ...] = get_args(Column)
_ASKED: tuple[Column, ...] = ("prompt", "messages")  # a line has one of them
_NO_NAMES: Mapping[Column, str] = MappingProxyType({})
_SPEAKERS = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = ("text", "input_text", "output_text")
_MEDIA_PARTS = (*MEDIA, "image_url", "input_image", "video_url", "audio_url", "input_audio")


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of a source: plain text, or chat messages, and the inputs of its reward."""

    prompt: str
    answer: Any
    messages: tuple[Json, ...] = ()  # instead of `prompt`, as `ChatTemplate` takes them
    tools: tuple[Json, ...] = ()  # descriptions of functions, in OpenAI's form
    extra: dict[str, Any] = field(default_factory=dict)
    arguments: Json = field(default_factory=dict)  # of the chat template
    origin: PromptOrigin | None = None


def item_of(
    fields: Any, columns: Mapping[Column, str] = _NO_NAMES, origin: PromptOrigin | None = None
) -> Item:
    """The item of a line.  fields: as JSON or a table has them.  Raises FieldError."""
    if not isinstance(fields, dict):
        example = '{"prompt": "...", "answer": "..."}'
        raise FieldError("not an object", f"is not an object like {example}")
    extra = plain_fields(fields)
    values = {role: _taken(extra, role, name) for role, name in _names(columns).items()}
    found = [(role, values[role]) for role in _ASKED if values.get(role) is not None]
    if len(found) != 1:
        raise FieldError(
            "no prompt",
            'must have exactly one of "prompt" and "messages" (task.columns names another column); '
            f"it has {', '.join(map(repr, fields)) or 'no field'}",
        )
    ((role, asked),) = found
    name = columns.get(role, role)
    answer, tools = _answer(values.get("answer")), _tools(values.get("tools"))
    arguments = _arguments(values.get(ARGUMENTS), columns.get(ARGUMENTS, ARGUMENTS))
    if isinstance(asked, str) and role == "prompt":
        return Item(asked, answer, (), tools, extra, arguments, origin)
    messages = _messages(asked, name)
    if messages[-1]["role"] == "assistant":
        *messages, last = messages
        if answer is not None or not messages or last.get("tool_calls"):
            raise FieldError(
                "messages",
                f"has {name!r} that end with the assistant; leave its message out, or leave out "
                f"{columns.get('answer', 'answer')!r}, which it becomes",
            )
        answer = last["content"]
        extra |= {name: last[name] for name in THOUGHTS if last.get(name)}
    return Item("", answer, tuple(messages), tools, extra, arguments, origin)


def _names(columns: Mapping[Column, str]) -> dict[Column, str]:
    """Column of each role that a line can have; a column that is named has only that role."""
    asked = [role for role in _ASKED if role in columns] or _ASKED
    roles = [role for role in _ROLES if role in asked or role not in _ASKED]
    taken = set(columns.values())
    return {role: columns.get(role, role) for role in roles if role in columns or role not in taken}


def _taken(fields: dict[str, Any], role: str, name: str) -> Any:
    """Remove a column, or a field inside columns (`reward_model.ground_truth`), and return it.

    fields: changed.  Raises FieldError for a column that is missing though `task.columns` names it.
    """
    if name in fields or not name:
        return fields.pop(name, None)
    first, dot, rest = name.partition(".")
    inner = fields.get(first)
    if isinstance(inner, dict) and dot:
        fields[first] = inner = dict(inner)
        return _taken(inner, role, rest)
    if name == role:
        return None
    problem = f"has no {name!r}, which task.columns names; it has {sorted(fields)}"
    raise FieldError(f"no {role}", problem)


def _answer(value: Any) -> Any:
    """An answer of one message, as completions of chats have it, is its text."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        message = value[0]
        if message.get("role") == "assistant" and isinstance(message.get("content"), str):
            return message["content"]
    return value


def _messages(value: Any, name: str) -> list[Json]:
    """Messages as `ChatTemplate` takes them.  Raises FieldError."""
    if not isinstance(value, list) or not value:
        raise FieldError(
            "messages",
            f"has {name!r} that is neither text nor a list of messages such as "
            '{"role": "user", "content": "..."}: ' + _short(value),
        )
    return [_message(message, f"{name}[{place}]") for place, message in enumerate(value)]


def _message(value: Any, where: str) -> Json:
    if not isinstance(value, dict):
        raise FieldError("messages", f"has in {where} no object: {_short(value)}")
    message: Json = {key: part for key, part in value.items() if part is not None}
    if message.get("role") not in _SPEAKERS:
        roles = f"use {', '.join(_SPEAKERS)}"
        raise FieldError("messages", f"has in {where} the role {message.get('role')!r}; {roles}")
    if message["role"] == "developer":  # templates have none
        message["role"] = "system"
    if calls := message.pop("tool_calls", None):
        message["tool_calls"] = _calls(calls, where)
    elif "content" not in message:
        raise FieldError("messages", f'has in {where} neither "content" nor "tool_calls"')
    return message | {"content": _content(message.get("content", ""), f"{where}.content")}


def _content(value: Any, where: str) -> str:
    """Text, or parts of text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise FieldError("messages", f"has in {where} neither text nor parts: {_short(value)}")
    texts = []
    for part in value:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind in _MEDIA_PARTS:
            raise media(f"{where}: {kind}")
        text = part.get("text") if isinstance(part, dict) else part
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            raise FieldError("messages", f"has in {where} a part that is no text: {_short(part)}")
        texts.append(text)
    return "".join(texts)


def _calls(value: Any, where: str) -> list[Json]:
    """Calls of tools as {"function": {"name", "arguments"}, ...}; some data sets do without it."""
    calls = value if isinstance(value, list) else [value]
    found: list[Json] = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise FieldError("messages", f"has in {where}.tool_calls no name: {_short(call)}")
        rest = {} if function is call else {k: v for k, v in call.items() if v is not None}
        function = function | {"arguments": function.get("arguments", {})}
        found.append({"type": "function", **rest, "function": function})
    return found


def _tools(value: Any) -> tuple[Json, ...]:
    """Descriptions of functions, a list or its JSON text.  Raises FieldError."""
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = [None]
    tools = value or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise FieldError(
            "tools",
            'has "tools" that are no list of {"type": "function", "function": {...}}; '
            "task.columns={tools: ''} leaves the column to the reward",
        )
    return tuple(tools)


def _arguments(value: Any, name: str) -> Json:
    """Variables of the chat template, an object or its JSON text.  Raises FieldError."""
    if isinstance(value, str) and value:
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not isinstance(value or {}, dict):
        problem = f"has {name!r} that is no object of a template's variables: {_short(value)}"
        raise FieldError("template", problem)
    return {key: one for key, one in (value or {}).items() if one is not None}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
