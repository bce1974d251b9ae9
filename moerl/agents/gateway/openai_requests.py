"""Requests in OpenAI's form: what is read, what is refused, and what is counted and not taken.

Refused is what would change the distribution behind a record so that it cannot be replayed, or what
the policy cannot see.  Temperature and truncation are the recipe's: agents send them by habit, so
they are counted and not taken.

Grammars in requests: OpenAI's `response_format`, and the fields of SGLang beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, ClassVar, TypeVar

import msgspec

from moerl.agents.chat_messages import ChatMessage, Json
from moerl.agents.episode_types import Ends, Switches
from moerl.agents.gateway.api_errors import ApiError, unsupported
from moerl.core.types import Grammar, SamplingParams

# Each field, with the values that change nothing.
GRAMMAR_FIELDS: dict[str, tuple[object, ...]] = {
    "response_format": ({"type": "text"},),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
}
_CHARACTERS = 65536
_FORMATS = "text, json_object, json_schema and structural_tag"


def only_grammar(grammars: dict[str, Grammar | None]) -> Grammar | None:
    """The grammar of a request, by its field.  Raises ApiError."""
    given = {name: grammar for name, grammar in grammars.items() if grammar is not None}
    if len(given) > 1:
        raise _invalid(f"{' and '.join(given)}: an answer can have one grammar")
    for name, grammar in given.items():
        if len(grammar.text) > _CHARACTERS:
            raise _invalid(f"{name}: over {_CHARACTERS} characters as text")
    return next(iter(given.values()), None)


def grammar_of_format(field: Json | None) -> Grammar | None:
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
    return grammar_of_schema(schema, "response_format.json_schema.schema")


def grammar_of_schema(schema: object, field: str = "json_schema") -> Grammar:
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


_Count = Annotated[int, msgspec.Meta(ge=1)]
_Siblings = Annotated[int, msgspec.Meta(ge=1, le=128)]
_StopText = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Pattern = Annotated[str, msgspec.Meta(min_length=1)]
StopTexts = Annotated[list[_StopText], msgspec.Meta(max_length=16)]


class _ToolFunction(msgspec.Struct, frozen=True):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class ClientRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a request.  refused: fields of its form, with the values that change nothing."""

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {}


class _Ending(ClientRequest, frozen=True, kw_only=True):
    """Where a turn ends, which texts it may be, and in which form it is answered."""

    n: _Siblings | None = None
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    stop: _StopText | StopTexts | None = None
    stream: bool | None = None
    stream_options: Json | None = None
    response_format: Json | None = None
    json_schema: Json | str | None = None
    regex: _Pattern | None = None
    ebnf: _Pattern | None = None

    @property
    def ends(self) -> Ends:
        """Raises ApiError."""
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        most = self.max_completion_tokens or self.max_tokens
        return Ends(most, tuple(sorted(set(texts))), self._grammar())

    def _grammar(self) -> Grammar | None:
        schema = self.json_schema
        fields = {
            "response_format": grammar_of_format(self.response_format),
            "json_schema": None if schema is None else grammar_of_schema(schema),
            "regex": Grammar("regex", self.regex) if self.regex else None,
            "ebnf": Grammar("ebnf", self.ebnf) if self.ebnf else None,
        }
        return only_grammar(fields)

    @property
    def wants_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))


class Thinking(msgspec.Struct, frozen=True):
    """In Anthropic's form, which other services take in OpenAI's requests."""

    type: str


_THINKING = {"enabled": True, "disabled": False}


class ChatRequest(_Ending, frozen=True, kw_only=True):
    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    logprobs: bool | None = None
    chat_template_kwargs: Json | None = None
    reasoning_effort: str | None = None
    thinking: Thinking | None = None

    @property
    def switches(self) -> Switches:
        thinking = _THINKING.get(self.thinking.type) if self.thinking else None
        return Switches(self.chat_template_kwargs or {}, self.reasoning_effort or "", thinking)


class CompletionRequest(_Ending, frozen=True, kw_only=True):
    prompt: str | list[int]
    logprobs: int | None = None


class TokenRequest(_Ending, frozen=True, kw_only=True):
    """moerl's own form, for loops that hold tokens."""

    prompt_token_ids: list[int]
    logprobs: bool | None = None


Known = TypeVar("Known", bound=ClientRequest)

# Of all forms, each with the values that change nothing.
_REFUSED: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "seed": (),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "bad_words": ([],),
    **GRAMMAR_FIELDS,  # in forms that have none
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
}
_REASONS = {
    "chat_template": "it is the recipe's (task.chat_template)",
    "chat_template_kwargs": "no template is applied",
}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_IGNORED = {
    "user", "metadata", "store", "service_tier", "parallel_tool_calls", "prediction",
    "verbosity", "top_logprobs", "safety_identifier", "prompt_cache_key",
    "skip_special_tokens", "include", "truncation", "context_management",
}  # fmt: skip


def read_request(
    data: bytes, form: type[Known], sampling: SamplingParams, counts: Counter[str]
) -> Known:
    """counts: of fields that were not taken.  Raises ApiError."""
    try:
        body = msgspec.json.decode(data)
        if not isinstance(body, dict):
            raise ApiError(400, "invalid_request", "the body must be a JSON object")
        known = {field.name for field in msgspec.structs.fields(form)}
        refused = {**_REFUSED, **form.refused}
        _check_fields(body, {name: refused[name] for name in refused.keys() - known})
        request = msgspec.convert(body, form)
        if isinstance(request, ChatRequest):
            check_chat(request)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ApiError(400, "invalid_request", f"the body cannot be read: {error}") from error
    except RecursionError as error:
        raise ApiError(400, "invalid_request", "the body is nested too deeply") from error
    counts.update(_not_taken(body, form, sampling))
    return request


def _check_fields(body: Json, refused: Mapping[str, tuple[object, ...]]) -> None:
    for name, neutral in refused.items():
        if body.get(name) is not None and body[name] not in neutral:
            why = _REASONS.get(name, "what it changes could not be replayed")
            message = f"{name}: not supported, because {why}; leave it out"
            raise ApiError(400, "unsupported_parameter", message, retry=False)


def check_chat(chat: ChatRequest) -> None:
    """Raises ApiError; msgspec.ValidationError for a tool that is none."""
    forced_call(chat.tool_choice)
    for place, message in enumerate(chat.messages):
        parts = message.content if isinstance(message.content, list) else ()
        kind = next((part.type for part in parts if part.type != "text"), None)
        if kind is not None:
            raise ApiError(
                400,
                "unsupported_parameter",
                f"messages[{place}].content: a part of type {kind}; the policy reads text only",
                retry=False,
            )
    for place, tool in enumerate(chat.tools or ()):
        if tool.get("type") != "function":
            found = tool.get("type")
            raise ApiError(
                400, "invalid_request", f"tools[{place}]: type {found!r}; allowed is function"
            )
        msgspec.convert(tool.get("function"), _ToolFunction)


def _not_taken(body: Json, form: type[ClientRequest], sampling: SamplingParams) -> list[str]:
    found = []
    known: set[str] = {field.name for field in msgspec.structs.fields(form)}
    taken = {"model", *known, *_REFUSED, *form.refused}  # any name of a model is the policy
    for name, value in body.items():
        if name in _SAMPLING:
            if value is not None and value != getattr(sampling, name):
                found.append(f"not_taken/{name}")
        elif name not in taken and value is not None:
            # Other names come from outside and would grow without bound.
            found.append(f"not_taken/{name if name in _IGNORED else 'other'}")
    return found
