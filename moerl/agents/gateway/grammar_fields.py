"""Grammars in requests: OpenAI's `response_format`, and the fields of SGLang beside it."""

from __future__ import annotations

import msgspec

from moerl.agents.chat_messages import Json
from moerl.agents.gateway.api_errors import ApiError, unsupported
from moerl.core.types import Grammar

# Each field, with the values that change nothing.
FIELDS: dict[str, tuple[object, ...]] = {
    "response_format": ({"type": "text"},),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
}
_CHARACTERS = 65536
_FORMATS = "text, json_object, json_schema and structural_tag"


def one_of(grammars: dict[str, Grammar | None]) -> Grammar | None:
    """The grammar of a request, by its field.  Raises ApiError."""
    given = {name: grammar for name, grammar in grammars.items() if grammar is not None}
    if len(given) > 1:
        raise _invalid(f"{' and '.join(given)}: an answer can have one grammar")
    for name, grammar in given.items():
        if len(grammar.text) > _CHARACTERS:
            raise _invalid(f"{name}: over {_CHARACTERS} characters as text")
    return next(iter(given.values()), None)


def of_format(field: Json | None) -> Grammar | None:
    """Raises ApiError."""
    kind = "text" if field is None else field.get("type")
    if field is None or kind == "text":
        return None
    if kind == "structural_tag":  # SGLang's own
        return Grammar("structural_tag", _written(field))
    if kind == "json_object":
        return Grammar("json_schema", '{"type":"object"}')
    if kind != "json_schema":
        raise _invalid(f"response_format.type: {kind!r}; allowed are {_FORMATS}")
    described = field.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    return of_schema(schema, "response_format.json_schema.schema")


def of_schema(schema: object, field: str = "json_schema") -> Grammar:
    """A grammar of a JSON schema.  schema: an object, or its text.  Raises ApiError."""
    if isinstance(schema, str):
        return Grammar("json_schema", schema)
    if not isinstance(schema, dict):
        raise _invalid(f"{field}: {schema!r} is no schema; want an object")
    return Grammar("json_schema", _written(schema))


def forced_call(tool_choice: str | Json | None) -> str | None:
    """The function that must be called, empty for any, None for none.  Raises ApiError."""
    if tool_choice in (None, "auto", "none"):
        return None
    if tool_choice == "required":
        return ""
    choice = tool_choice if isinstance(tool_choice, dict) else {}
    function = choice.get("function", choice)  # OpenAI's responses have the name outside
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise unsupported(
            "tool_choice: allowed are auto, none, required and "
            '{"type": "function", "function": {"name": NAME}}'
        )
    return name


def _written(value: Json) -> str:
    return msgspec.json.encode(value).decode()


def _invalid(message: str) -> ApiError:
    return ApiError(400, "invalid_grammar", message, retry=False)
