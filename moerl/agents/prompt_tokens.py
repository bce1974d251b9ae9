"""From messages to tokens: text that the policy has sampled is never tokenised again.

The prompt of a turn without a parent is the conversation as the model's chat template writes it.
The prompt of any other turn is the tokens of its parent and a suffix.  The suffix is found without
knowledge of the template: it writes a conversation of a question, an answer MARK and the new
messages, and the suffix is the text after MARK.  It begins with the token that closes an answer.
If the policy has sampled that token, it is not written a second time; if the answer was cut by its
length, it is added as context.

Not every template can be used so: some leave out a tool result behind an answer without its call,
or write it in another way.  Each role is tried when the template is loaded, and messages of a role
that fails are refused there.

Rendering a dummy conversation and keeping its end is an idea of miles' and slime's token-in,
token-out sessions, which need code for each family.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from moerl.agents.chat_messages import ChatMessage, Function, Json, MessageCall
from moerl.core.errors import ConfigError
from moerl.core.types import Array
from moerl.data.chat_template import PROBE_TOOL, ChatTemplate, TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

# No client can guess them, and no template changes letters and digits.
_MARK = "answer" + secrets.token_hex(12)
_PROBE = "probe" + secrets.token_hex(12)
_NONE: Json = {}
_CALL = MessageCall(Function("f", "{}"), "c1")


@dataclass(frozen=True, slots=True, eq=False)
class PromptIds:
    """Tokens of a prompt; the first `inherited` are the parent's.  cuts: control tokens."""

    ids: Array  # i32
    inherited: int = 0
    cuts: int = 0


class Conversation(Protocol):
    """A turn, or its row."""

    @property
    def token_ids(self) -> Array: ...


class PromptTokens:
    """Tokenizer and chat template of the policy."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None = None) -> None:
        """Raises ConfigError when the template cannot be used for turns that follow another."""
        self._tokenizer = tokenizer
        self.template = template = template or ChatTemplate(tokenizer)
        if not template.tokenizer.chat_template:
            raise ConfigError(*template.source, "its tokenizer has no template")
        self._roles = frozenset(
            role for role in ("user", "tool", "system") if self._writes_behind_answers(role)
        )
        if "user" not in self._roles:
            raise ConfigError(
                *template.source,
                "its chat template does not write the text of an answer and of a user's message "
                "behind it",
            )

    @cached_property
    def longest_token(self) -> int:
        """No token stands for more characters."""
        return max(map(len, self._tokenizer.get_vocab()))

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    def token_texts(self) -> list[str]:
        """Text of each token of the vocabulary."""
        raw = self._tokenizer.convert_ids_to_tokens(list(range(self.vocab_size)))
        texts = self._tokenizer.batch_decode([[index] for index in range(self.vocab_size)])
        return [
            " " + text if str(token).startswith("\u2581") else str(text)
            for token, text in zip(raw, texts, strict=True)
        ]

    def whole(
        self, messages: Sequence[ChatMessage], tools: Sequence[Json], arguments: Json = _NONE
    ) -> PromptIds:
        """Prompt of a turn without a parent.  arguments: of the template.  Raises TemplateError."""
        shown = [message.for_template() for message in messages]
        return self._encoded(self.template.render_whole(shown, tools, arguments)[0])

    def continued(
        self,
        parent: Conversation,
        stop_ids: frozenset[int],
        new: Sequence[ChatMessage],
        tools: Sequence[Json],
        arguments: Json = _NONE,
    ) -> PromptIds:
        """Prompt of a turn after `parent`.  stop_ids: tokens that end an answer.

        arguments: of the template, as of the parent.  Raises TemplateError.
        """
        suffix = self._encoded(self._suffix_text(new, tools, arguments))
        ids, rest = parent.token_ids, suffix.ids
        if ends_with_stop(parent, stop_ids):
            if len(rest) and rest[0] == ids[-1]:
                rest = rest[1:]
            else:  # the template closes answers with another token
                ids = ids[:-1]
        return PromptIds(np.concatenate([ids, rest]), len(ids), suffix.cuts)

    def continued_text(
        self, parent: Conversation, stop_ids: frozenset[int], text: str
    ) -> PromptIds:
        """Prompt of a turn that continues `parent` with text, without a template."""
        ids = parent.token_ids
        if ends_with_stop(parent, stop_ids):
            ids = ids[:-1]
        return PromptIds(np.concatenate([ids, self.encode(text)]), len(ids))

    def encode(self, text: str) -> Array:
        """Control tokens in the text are control tokens."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _writes_behind_answers(self, role: Literal["user", "tool", "system"]) -> bool:
        """Whether the suffix for a message of this role equals the template's own text."""
        call = [_CALL] if role == "tool" else None
        probe = ChatMessage(role, _PROBE, tool_call_id=_CALL.id if call else None)
        answer = ChatMessage("assistant", "" if call else "!", call)
        try:
            suffix = self._rest([probe], [PROBE_TOOL])
            whole = self._render([ChatMessage("user", "?"), answer, probe], [PROBE_TOOL])
        except TemplateError:
            return False
        return _PROBE in suffix and whole.endswith(suffix)

    def _suffix_text(
        self, new: Sequence[ChatMessage], tools: Sequence[Json], arguments: Json = _NONE
    ) -> str:
        known = {"assistant", *self._roles}
        role = next((one.role for one in new if one.shown_role not in known), None)
        if role is not None:
            raise TemplateError(
                f"the model's chat template cannot write a message of role {role} behind an answer"
            )
        return self._rest(new, tools, arguments)

    def _rest(
        self, new: Sequence[ChatMessage], tools: Sequence[Json], arguments: Json = _NONE
    ) -> str:
        begin = [ChatMessage("user", "?"), ChatMessage("assistant", _MARK)]
        _, mark, suffix = self._render([*begin, *new], tools, arguments).rpartition(_MARK)
        if not mark:
            raise TemplateError("the model's chat template does not write the text of an answer")
        return suffix

    def _render(
        self, messages: Sequence[ChatMessage], tools: Sequence[Json], arguments: Json = _NONE
    ) -> str:
        shown = [message.for_template() for message in messages]
        return self.template.render(shown, tools, arguments)

    def _encoded(self, text: str) -> PromptIds:
        ids, cuts = self.template.encode(text)
        return PromptIds(np.asarray(ids, np.int32), cuts=cuts)


def ends_with_stop(turn: Conversation, stop_ids: frozenset[int]) -> bool:
    """Whether the policy ended its answer with a stop token.

    Its finish does not tell: the engine looks at the length first.
    """
    return int(turn.token_ids[-1]) in stop_ids
