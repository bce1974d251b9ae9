"""The chat template of a tokenizer: messages -> text -> tokens.

Text of a client or a data set must not become control tokens: a tool result that holds
`<|im_end|>` would end its own message.  Such text is cut inside each control token, and the pieces
are tokenised apart.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from moerl.core.errors import MoerlError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer
    from transformers import PreTrainedTokenizerBase as Tokenizer

Json = dict[str, object]
# No client can guess it, and no template changes letters and digits.
_CUT = "cut" + secrets.token_hex(12)
_CALL: Json = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": "{}"}}
_PARAMETERS: Json = {"type": "object", "properties": {}}
PROBE_TOOL: Json = {
    "type": "function",
    "function": {"name": "f", "description": "f", "parameters": _PARAMETERS},
}


class TemplateError(MoerlError):
    """Messages that the model's chat template does not take."""


class ChatTemplate:
    """Tokenizer and chat template of the policy; the template may be missing until it is used."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.values()
        self.control_ids = {
            number: token.content
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.special
        }
        self._special = _one_of([*self.control_ids.values()])
        self._added = _one_of([token.content for token in added])

    def render(self, messages: Sequence[Json], tools: Sequence[Json] = ()) -> str:
        """Text of a conversation, for `encode` only: the control tokens of contents are cut.

        messages: in OpenAI's form, contents as text.  Raises TemplateError, which names the
        message.
        """
        texts_only = any(message.get("tool_calls") for message in messages) and self._texts_only
        try:
            return self._render(messages, tools, text_arguments=texts_only)
        except TemplateError as error:
            where = self._refused(messages, tools, texts_only, str(error))
            said = "the model's chat template refuses"
            raise TemplateError(f"{said} {where}: {without_cuts(str(error))}") from error

    @cached_property
    def longest(self) -> int:
        """Characters of the longest token; n characters are at least n / longest tokens."""
        return max(map(len, self._tokenizer.get_vocab()))

    @cached_property
    def opens_answers(self) -> bool:
        """Whether the text of a conversation ends where an answer begins."""
        asked: list[Json] = [{"role": "user", "content": "?"}]
        answer: Json = {"role": "assistant", "content": _CUT}
        try:
            opened = self._render(asked, (), text_arguments=False)
            closed = self._render(asked, (), text_arguments=False, opens=False)
            whole = self._render([*asked, answer], (), text_arguments=False, opens=False)
        except TemplateError:
            return True  # a line that it takes will show it
        behind = whole[len(opened) :].lstrip()
        return opened != closed or (whole.startswith(opened) and behind.startswith(_CUT))

    @cached_property
    def writes_tools(self) -> bool:
        """Whether the text of a conversation tells of a tool."""
        asked: list[Json] = [{"role": "user", "content": "?"}]
        try:
            told = self._render(asked, [PROBE_TOOL], text_arguments=False)
            return told != self._render(asked, (), text_arguments=False)
        except TemplateError:
            return True  # a line that it takes will show it

    def encode(self, text: str) -> tuple[list[int], int]:
        """(tokens, number of cuts) of a rendered text."""
        pieces = text.split(_CUT)
        ids = [
            token
            for piece in pieces
            for token in self._tokenizer.encode(piece, add_special_tokens=False)
        ]
        return ids, len(pieces) - 1

    def encode_plain(self, text: str, *, begin: bool) -> Sequence[int]:
        """Tokens of a text without a template; control tokens in it are text.

        begin: add what the tokenizer puts before and behind a text.
        """
        if self._special is None or not self._special.search(text):
            ids: Sequence[int] = self._tokenizer.encode(text, add_special_tokens=begin)
        else:
            ids = self._literal.encode(text, add_special_tokens=begin).ids
        return ids

    @cached_property
    def _literal(self) -> RustTokenizer:
        """A copy without control tokens: to switch the shared one would fail in another thread."""
        from tokenizers import Tokenizer as RustTokenizer

        copy = RustTokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
        copy.encode_special_tokens = True
        copy.no_truncation()
        copy.no_padding()
        return copy

    def kept_as_text(self, text: str, ids: Sequence[int]) -> bool:
        """Whether a text holds the spelling of a control token that its tokens do not have."""
        spelled = Counter(self._special.findall(text) if self._special else ())
        if not spelled:
            return False
        return bool(spelled - Counter(self.control_ids.get(token) for token in ids))

    @cached_property
    def _texts_only(self) -> bool:
        """Whether the template takes arguments of calls as text only."""

        def takes(*, text_arguments: bool) -> bool:
            asked: list[Json] = [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            ]
            try:
                self._render(asked, [PROBE_TOOL], text_arguments=text_arguments)
            except TemplateError:
                return False
            return True

        return not takes(text_arguments=False) and takes(text_arguments=True)

    def _refused(
        self, messages: Sequence[Json], tools: Sequence[Json], texts_only: bool, error: str
    ) -> str:
        """The first message at which the template ends with this error."""

        def fails(count: int, tools: Sequence[Json]) -> bool:
            try:
                self._render(messages[:count], tools, text_arguments=texts_only)
            except TemplateError as other:
                return str(other) == error
            return False

        if tools and not fails(len(messages), ()):
            return "the tools"
        for place, message in enumerate(messages):
            if fails(place + 1, tools):
                return f"messages[{place}] (role {message.get('role')}, {', '.join(message)})"
        return "these messages"

    def _render(
        self,
        messages: Sequence[Json],
        tools: Sequence[Json],
        *,
        text_arguments: bool,
        opens: bool = True,
    ) -> str:
        """opens: an answer begins behind the last message.

        Raises TemplateError with the words of the template.
        """
        import jinja2  # the plain wheel is without it

        shown = [
            _map_texts(
                _with_arguments(message, as_text=text_arguments),
                self._cut_added if message.get("role") == "tool" else self._cut_special,
            )
            for message in messages
        ]
        described = [_map_texts(tool, self._cut_special) for tool in tools]
        render: Callable[..., object] = self._tokenizer.apply_chat_template
        try:
            text = render(
                shown,
                tools=described or None,
                tokenize=False,
                add_generation_prompt=opens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise TemplateError(f"{type(error).__name__}: {error}") from error
        return str(text)

    def _cut_special(self, text: str) -> str:
        return _cut(text, self._special)

    def _cut_added(self, text: str) -> str:
        """Tool results: marks that are no control tokens, such as `<tool_call>`, are cut, too."""
        return _cut(text, self._added)


def without_cuts(text: str) -> str:
    """A rendered text as it is shown."""
    return text.replace(_CUT, "")


def parsed_arguments(arguments: object) -> object:
    """Arguments of a call that are JSON text, parsed; None where the text is no JSON."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return None


def _with_arguments(message: Json, *, as_text: bool) -> Json:
    """Arguments of calls as an object where they are one, or as text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return message | {"tool_calls": [_call(call, as_text=as_text) for call in calls]}


def _call(call: Json, *, as_text: bool) -> Json:
    function = call.get("function")
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    arguments = function["arguments"]
    parsed = parsed_arguments(arguments)
    if as_text and not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    elif isinstance(parsed, dict) and not as_text:
        arguments = parsed
    return call | {"function": function | {"arguments": arguments}}


def _one_of(tokens: Sequence[str]) -> re.Pattern[str] | None:
    """A single letter has no other spelling, and some vocabularies add runs of spaces."""
    longest_first = sorted((t for t in tokens if len(t.strip()) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _cut(text: str, tokens: re.Pattern[str] | None) -> str:
    """Until no piece holds a token: the rest of one may hold another."""
    while tokens is not None and (found := tokens.search(text)):
        token = found.group()
        text = text.replace(token, token[0] + _CUT + token[1:])
    return text


def _map_texts(value: object, change: Callable[[str], str]) -> object:
    """Every text inside a JSON value changed, keys of objects included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_texts(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): _map_texts(item, change) for key, item in value.items()}
    return value
