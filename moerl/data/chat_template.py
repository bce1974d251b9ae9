"""The chat template of a tokenizer: messages -> text -> tokens.

Text of a client or a data set must not become control tokens: a tool result that holds
`<|im_end|>` would end its own message.  Such text is cut inside each control token, and the pieces
are tokenised apart.
"""

from __future__ import annotations

import copy
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from moerl.config.template_names import is_reserved, reserved_name
from moerl.core.errors import ConfigError, MoerlError
from moerl.data.template_parts import Json as Json
from moerl.data.template_parts import MessagePart, left_out, shape

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer
    from transformers import PreTrainedTokenizerBase as Tokenizer

ARGUMENTS: Final = "chat_template_kwargs"  # field of a line of data, and of a client's request
_NO_ARGUMENTS: Mapping[str, object] = MappingProxyType({})
_MOST_SHAPES = 4096  # of conversations that are remembered
# No client can guess it, and no template changes letters and digits.
_CUT = "cut" + secrets.token_hex(12)
_CALL: Json = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": "{}"}}
_PARAMETERS: Json = {"type": "object", "properties": {}}
PROBE_TOOL: Json = {
    "type": "function",
    "function": {"name": "f", "description": "f", "parameters": _PARAMETERS},
}


class TemplateError(MoerlError):
    """Messages or arguments that the chat template does not take."""


class LeftOutError(TemplateError):
    """A part of a conversation that the chat template does not write.  part: None: the tools."""

    def __init__(self, part: MessagePart | None = None) -> None:
        self.part = part
        what = "tools" if part is None else f"{part.field} of a message of role {part.role}"
        super().__init__(f"the chat template writes no {what}")


class ChatTemplate:
    """Tokenizer and chat template of the policy; the template may be missing until it is used."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chosen: bool | str = True,
        arguments: Mapping[str, object] = _NO_ARGUMENTS,
        section: str = "task",
    ) -> None:
        """Load the template: the tokenizer's, or the file `chosen`.  Raises ConfigError.

        section: of these settings.  arguments: variables of the template in each conversation.
        """
        self._file: tuple[str, object] | None = None
        if isinstance(chosen, str) and chosen:
            self._file = f"{section}.chat_template", chosen
            tokenizer = _with_file(tokenizer, *self._file)
        self.tokenizer = self._tokenizer = tokenizer
        self._shapes: dict[tuple[object, ...], tuple[MessagePart, ...]] = {}
        try:
            self.arguments = self.checked(arguments)
        except TemplateError as error:
            raise ConfigError(f"{section}.template_arguments", arguments, str(error)) from error
        added = tokenizer.added_tokens_decoder.values()
        self.control_ids = {
            number: token.content
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.special
        }
        self._special = _one_of([*self.control_ids.values()])
        self._added = _one_of([token.content for token in added])

    @property
    def source(self) -> tuple[str, object]:
        """(setting, value) that the template is from."""
        return self._file or ("model.path", self._tokenizer.name_or_path)

    def render(
        self,
        messages: Sequence[Json],
        tools: Sequence[Json] = (),
        arguments: Mapping[str, object] = _NO_ARGUMENTS,
    ) -> str:
        """Text of a conversation, for `encode` only: the control tokens of contents are cut.

        messages: in OpenAI's form, contents as text.  arguments: override the common arguments.
        Raises TemplateError, which names the message.
        """
        texts_only = any(message.get("tool_calls") for message in messages) and self._texts_only
        try:
            return self._render(messages, tools, arguments, text_arguments=texts_only)
        except TemplateError as error:
            where = self._refused(messages, tools, arguments, texts_only, str(error))
            said = "the model's chat template refuses"
            raise TemplateError(f"{said} {where}: {without_cuts(str(error))}") from error

    def render_whole(
        self,
        messages: Sequence[Json],
        tools: Sequence[Json] = (),
        arguments: Mapping[str, object] = _NO_ARGUMENTS,
    ) -> tuple[str, tuple[MessagePart, ...]]:
        """As `render`, with the parts that the template leaves out by its right.

        Raises TemplateError; LeftOutError for tools, or a part, that are needed and left out.
        """
        text = self.render(messages, tools, arguments)
        # It may want a system message for the tools
        is_lost = tools and not self.writes_tools
        if is_lost and text == self.render(messages, (), arguments):
            raise LeftOutError
        key = (shape(messages), bool(tools), msgspec.json.encode(arguments, order="sorted"))
        if key not in self._shapes:
            if len(self._shapes) == _MOST_SHAPES:
                self._shapes.clear()
            self._shapes[key] = self._left_out(messages, tools, arguments)
        found = self._shapes[key]
        if (part := next((one for one in found if one.is_needed), None)) is not None:
            raise LeftOutError(part)
        return text, found

    def _left_out(
        self, messages: Sequence[Json], tools: Sequence[Json], arguments: Mapping[str, object]
    ) -> tuple[MessagePart, ...]:
        try:
            return left_out(messages, lambda marked: self.render(marked, tools, arguments))
        except TemplateError:
            return ()  # it reads a part more closely than a mark allows

    def checked(self, arguments: Mapping[str, object]) -> Json:
        """Arguments without nulls.  Raises TemplateError if a name is reserved or unused."""
        given = {name: value for name, value in arguments.items() if value is not None}
        if name := reserved_name(given):
            raise TemplateError(f"{name} is set by moerl and cannot be an argument of the template")
        if given and self.reads is not None and (unknown := given.keys() - self.reads):
            reads = ", ".join(sorted(self.reads)) or "none"
            names = ", ".join(sorted(unknown))
            raise TemplateError(f"the chat template reads no {names}; its variables: {reads}")
        return given

    @cached_property
    def reads(self) -> frozenset[str] | None:
        """Variables of the template that arguments can set; None: not known."""
        template = self._tokenizer.chat_template
        texts = template.values() if isinstance(template, dict) else [template]
        try:
            names = set().union(*(_variables(text) for text in texts if text))
        except (ImportError, AttributeError):  # of another transformers
            return None
        return frozenset(name for name in names if not is_reserved(name))

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
            opened = self._render(asked, ())
            closed = self._render(asked, (), opens=False)
            whole = self._render([*asked, answer], (), opens=False)
        except TemplateError:
            return True  # a line that it takes will show it
        behind = whole[len(opened) :].lstrip()
        return opened != closed or (whole.startswith(opened) and behind.startswith(_CUT))

    @cached_property
    def writes_tools(self) -> bool:
        """Whether the text of a conversation tells of a tool."""
        asked: list[Json] = [{"role": "user", "content": "?"}]
        try:
            return self._render(asked, [PROBE_TOOL]) != self._render(asked, ())
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

        begin: add the tokenizer's own tokens before and behind a text.
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
        self,
        messages: Sequence[Json],
        tools: Sequence[Json],
        arguments: Mapping[str, object],
        texts_only: bool,
        error: str,
    ) -> str:
        """The first message at which the template ends with this error."""

        def fails(count: int, tools: Sequence[Json]) -> bool:
            try:
                self._render(messages[:count], tools, arguments, text_arguments=texts_only)
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
        arguments: Mapping[str, object] = _NO_ARGUMENTS,
        *,
        text_arguments: bool = False,
        opens: bool = True,
    ) -> str:
        """Raises TemplateError with the template's message.  opens: an answer follows."""
        import jinja2  # the plain wheel is without it

        shown = [
            _map_texts(
                _with_arguments(message, as_text=text_arguments),
                self._cut_added if message.get("role") == "tool" else self._cut_special,
            )
            for message in messages
        ]
        described = [_map_texts(tool, self._cut_special) for tool in tools]
        switches = {**self.arguments, **arguments}
        switches = {name: _map_texts(one, self._cut_special) for name, one in switches.items()}
        render: Callable[..., object] = self._tokenizer.apply_chat_template
        try:
            text = render(
                shown,
                tools=described or None,
                tokenize=False,
                add_generation_prompt=opens,
                **switches,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise TemplateError(f"{type(error).__name__}: {error}") from error
        return str(text)

    def _cut_special(self, text: str) -> str:
        return _cut(text, self._special)

    def _cut_added(self, text: str) -> str:
        """Tool results: marks that are no control tokens, such as `<tool_call>`, are cut, too."""
        return _cut(text, self._added)


def _with_file(tokenizer: Tokenizer, field: str, file: object) -> Tokenizer:
    """The tokenizer with the template of a file.  Raises ConfigError."""
    import jinja2

    other = copy.copy(tokenizer)  # both share the vocabulary
    try:
        other.chat_template = Path(str(file)).expanduser().read_text(encoding="utf-8")
        _variables(other.chat_template)
    except (OSError, UnicodeDecodeError, jinja2.TemplateSyntaxError) as error:
        raise ConfigError(field, file, f"it is no readable Jinja template: {error}") from error
    return other


def _variables(template: str) -> set[str]:
    """Variables that a template reads and does not set itself, but as a default."""
    from jinja2 import meta, nodes
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(template).environment  # knows the tags of templates
    parsed = environment.parse(template)
    loops = parsed.find_all(nodes.For)  # jinja does not see that they set a name before it is read
    own = {one.name for loop in loops for one in loop.find_all(nodes.Name) if one.ctx == "store"}
    return set(meta.find_undeclared_variables(parsed)) - own


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
