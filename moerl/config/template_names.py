"""Settings of a chat template: its file, and the variables that it may be given."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from moerl.config.rules import Rows

# Of `apply_chat_template` and of a template's surroundings; `documents` is an argument like others.
_TAKEN = frozenset(
    {"messages", "conversation", "tools", "chat_template", "add_generation_prompt"}
    | {"continue_final_message", "tokenize", "padding", "truncation", "max_length", "self"}
    | {"return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
    | {"raise_exception", "strftime_now"}
)


def reserved_name(names: Iterable[str]) -> str:
    """The first reserved one, such as `messages` or `bos_token`; empty: there is none."""
    return next((name for name in names if is_reserved(name)), "")


def is_reserved(name: str) -> bool:
    return name in _TAKEN or name.endswith("_token")


def template_problems(section: str, chosen: bool | str, arguments: Mapping[str, object]) -> Rows:
    """Faults that show without the template's text."""
    if isinstance(chosen, str) and chosen and not Path(chosen).expanduser().is_file():
        allowed = "true, false or a file of a Jinja template is needed"
        yield f"{section}.chat_template", chosen, allowed
    if name := reserved_name(arguments):
        allowed = "moerl sets it; name a variable of the template"
        yield f"{section}.template_arguments.{name}", arguments[name], allowed


def template_words(chosen: bool | str, arguments: Mapping[str, object]) -> str:
    """Such as `the model's, enable_thinking=false`."""
    name = chosen if isinstance(chosen, str) and chosen else "the model's"
    return f"{name}, {arguments_words(arguments)}" if arguments else name


def arguments_words(arguments: Mapping[str, object]) -> str:
    """Such as `enable_thinking=false`."""
    return ", ".join(f"{key}={json.dumps(one, default=str)}" for key, one in arguments.items())
