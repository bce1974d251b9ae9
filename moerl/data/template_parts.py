"""Parts of messages that a chat template leaves out, found without knowledge of the template.

Each part gets a mark, and the template writes the marked conversation: a part whose mark is not in
the text is left out.  A template may leave out names and thinking (templates of reasoning models
often write only the thinking behind the last question).  A content or a call would be lost without
a word.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Json = dict[str, object]
_MARK = "part" + secrets.token_hex(12)
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_LINKS = ("role", "type", "id", "tool_call_id")  # templates may check their form


@dataclass(frozen=True, slots=True)
class MessagePart:
    """A field of messages[place].  is_needed: a conversation without it is another one."""

    place: int
    role: str
    field: str
    is_needed: bool

    def __str__(self) -> str:
        return f"messages[{self.place}].{self.field}"


def left_out(
    messages: Sequence[Json], written: Callable[[list[Json]], str]
) -> tuple[MessagePart, ...]:
    """Parts that a template leaves out.  written: its text of a conversation."""
    parts: list[MessagePart] = []
    asked = [at for at, message in enumerate(messages) if message.get("role") == "user"]
    marked: list[Json] = []
    for place, message in enumerate(messages):
        changed = dict(message)
        for field, value in _marked(message, len(parts)):
            changed[field] = value
            # Text next to calls may be thinking: gpt-oss writes it into its channel of analysis
            is_thought = place < max(asked, default=0) and bool(message.get("tool_calls"))
            is_needed = field == "tool_calls" or (field == "content" and not is_thought)
            parts.append(MessagePart(place, str(message.get("role")), field, is_needed))
        marked.append(changed)
    text = written(marked)
    return tuple(part for number, part in enumerate(parts) if _mark(number) not in text)


def shape(messages: Sequence[Json]) -> tuple[object, ...]:
    """Equal for conversations of which a template leaves out the same parts."""
    return tuple(
        (message.get("role"), *(field for field, _ in _marked(message, 0))) for message in messages
    )


def _mark(number: int) -> str:
    return f"{_MARK}x{number}x"


def _marked(message: Json, first: int) -> Iterator[tuple[str, object]]:
    """(field, its value with a mark) of each part; their marks are numbered from `first`."""
    for field, value in message.items():
        if isinstance(value, str) and value.strip() and field not in _LINKS:
            yield field, value + _mark(first)
        elif field == "tool_calls" and isinstance(value, list) and value:
            yield field, [_with_name(call, _mark(first)) for call in value]
        else:
            continue
        first += 1


def _with_name(call: object, mark: str) -> object:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        return call
    return call | {"function": function | {"name": f"{function.get('name')}{mark}"}}
