"""Sources of prompts: a registry of sources, and the endless deterministic stream over one.

A prompt is a function of (settings, seed, index) alone.  A resumed run therefore continues with
exactly the prompts that were not consumed, without a saved state of a data loader.  Rewards are in
`moerl.data.rewards`, because they run in other processes.

A new task is one source class and its line of SOURCES in `moerl.config.task_tables`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from moerl.config.functions import load_below
from moerl.config.schema import Column, TaskConfig
from moerl.config.task_tables import PACKAGE, SOURCES
from moerl.core.errors import ConfigError, ModelError
from moerl.core.types import Origin, Prompt
from moerl.data.environments import demonstration

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


_COLUMNS: tuple[Column, ...] = ("prompt", "messages", "answer")
_NO_NAMES: Mapping[Column, str] = MappingProxyType({})
_GYM_SIZE = 20_000  # items of a reasoning-gym dataset that names no size


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of a source: plain text, or chat messages, and the inputs of its reward."""

    prompt: str
    answer: Any
    messages: tuple[dict[str, str], ...] = ()  # instead of `prompt`
    extra: dict[str, Any] = field(default_factory=dict)
    origin: Origin | None = None


class Source(Protocol):
    """`size` items per epoch, or None: endless, with a different item for every index."""

    @property
    def size(self) -> int | None: ...

    def item(self, index: int) -> Item: ...


class SortDigits:
    """`4827=` -> `2478`.  A tiny model learns it from random weights, as the reward is graded."""

    size: int | None = None

    def __init__(self, task: TaskConfig, seed: int) -> None:
        self._digits, self._seed = task.digits, seed

    def item(self, index: int) -> Item:
        draw = random.Random(f"{self._seed}/{index}")
        digits = [draw.choice("0123456789") for _ in range(self._digits)]
        return Item("".join(digits) + "=", "".join(sorted(digits)))


class Products:
    """`127*348=` -> `44196`.  Half of the demonstrations call the calculator, half answer at once.

    So a supervised start has seen the tool and does not yet rely on it.
    """

    size: int | None = None

    def __init__(self, task: TaskConfig, seed: int) -> None:
        self._least, self._seed = 10 ** (task.digits - 1), seed

    def item(self, index: int) -> Item:
        draw = random.Random(f"{self._seed}/{index}")
        expression = "*".join(str(draw.randrange(self._least, 10 * self._least)) for _ in "ab")
        shown = demonstration(expression)
        turns = shown if draw.random() < 0.5 else shown[-1:]
        return Item(f"{expression}=", shown[-1], extra={"demonstration": turns})


class ReasoningGym:
    """Any dataset of the reasoning-gym package by name.

    `size` in its arguments bounds an epoch; the default is large, because some datasets make all
    items at once and one refuses a size that its rules cannot fill.

    The entry is not carried along: the reward makes it again from its seed and index, since
    entries hold tuples and other things that do not survive a message.
    """

    def __init__(self, task: TaskConfig, seed: int) -> None:
        self._seed = int(task.dataset_args.get("seed", seed))
        self._dataset = reasoning_gym_dataset(task, self._seed)
        self.size = len(self._dataset)

    def item(self, index: int) -> Item:
        entry = self._dataset[index]
        extra = {"item": index, "seed": self._seed}
        return Item(str(entry["question"]), str(entry["answer"]), extra=extra)


class Jsonl:
    """A user's file: {"prompt" or "messages", "answer", any further fields} per line."""

    def __init__(self, task: TaskConfig, seed: int) -> None:
        self._items = read_jsonl(task.path, task.columns)
        self.size = len(self._items)

    def item(self, index: int) -> Item:
        return self._items[index]


class PromptStream:
    """Endless prompts by index; the seed shuffles a finite source again in each epoch."""

    def __init__(self, task: TaskConfig, tokenizer: Tokenizer, seed: int) -> None:
        """Raises ConfigError for every fault that shows before the first prompt is drawn."""
        if task.chat_template and not tokenizer.chat_template:
            raise ConfigError("task.chat_template", True, "the model's tokenizer has no template")
        self._task, self._tokenizer, self._seed = task, tokenizer, seed
        self._source: Source = load_below(PACKAGE, SOURCES[task.name].factory)(task, seed)
        self._order: tuple[int, np.ndarray] | None = None  # epoch and its permutation
        if SOURCES[task.name].files:  # a bad line must not end the run in its tenth hour
            for place in range(self._source.size or 0):
                self._make(place, self._source.item(place))

    def prompt(self, index: int) -> Prompt:
        """Prompt number `index`.  Raises ConfigError when it is empty or too long."""
        return self._make(index, self._source.item(self._place(index)))

    def _make(self, index: int, item: Item) -> Prompt:
        text = self._text(item)
        templated = bool(item.messages) or self._task.chat_template
        ids = self._tokenizer.encode(text, add_special_tokens=not templated)
        name = str(item.origin or f"prompt {index}")
        if not ids:
            raise ConfigError("task.name", self._task.name, f"{name} has no token")
        if len(ids) > self._task.max_prompt_tokens:
            raise ConfigError(
                "task.max_prompt_tokens",
                self._task.max_prompt_tokens,
                f"{name} has {len(ids)} tokens; raise the limit or shorten the prompt",
            )
        extra = dict(item.extra)
        if self._task.kind.speaks_messages:
            extra.pop("demonstration", None)  # it holds the answer, and agents see `extra`
            if item.messages or self._task.system:  # the agent writes its own conversation
                extra["messages"] = self._messages(item)
        return Prompt(index, tuple(ids), text, item.answer, extra, origin=item.origin)

    def _place(self, index: int) -> int:
        size = self._source.size
        if size is None:
            return index
        epoch, place = divmod(index, size)
        if not self._task.shuffle:
            return place
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([self._seed, epoch]).permutation(size)
        return int(self._order[1][place])

    def _text(self, item: Item) -> str:
        speaks_messages = self._task.kind.speaks_messages
        if not item.messages and (speaks_messages or not self._task.chat_template):
            return item.prompt
        if speaks_messages:  # the template is applied to each turn's messages
            return "\n".join(message["content"] for message in item.messages)
        if not self._tokenizer.chat_template:
            raise ConfigError(
                "task.path",
                self._task.path,
                f"{item.origin} has messages; the tokenizer has no template",
            )
        return str(
            self._tokenizer.apply_chat_template(
                self._messages(item), tokenize=False, add_generation_prompt=True
            )
        )

    def _messages(self, item: Item) -> list[dict[str, str]]:
        """Of the item, behind a system message."""
        messages = list(item.messages) or [{"role": "user", "content": item.prompt}]
        if self._task.system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._task.system})
        return messages


def reasoning_gym_dataset(task: TaskConfig, seed: int) -> Any:
    """The named dataset.  Raises ConfigError: not installed, unknown name, bad arguments."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            "task.name", "reasoning_gym", "the package reasoning-gym is not installed"
        ) from error
    if task.dataset not in DATASETS:
        near = get_close_matches(task.dataset, DATASETS)
        hint = f"; close names are {', '.join(near)}" if near else ""
        raise ConfigError(
            "task.dataset", task.dataset, f"it must be a dataset of reasoning-gym{hint}"
        )
    try:
        return reasoning_gym.create_dataset(
            task.dataset, **({"seed": seed, "size": _GYM_SIZE} | task.dataset_args)
        )
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError("task.dataset_args", task.dataset_args, str(error)) from error


def read_jsonl(path: str, columns: Mapping[Column, str] = _NO_NAMES) -> list[Item]:
    """All items of a prompt file.  Raises ConfigError naming the file and the first bad line."""
    try:
        # split at line feeds only: JSON strings may hold other line ends, U+2028 for example
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "task.path", path, f"a readable UTF-8 file is wanted ({error})"
        ) from error
    items = [
        _jsonl_item(Origin(path, number), line, columns)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not items:
        raise ConfigError("task.path", path, "the file holds no prompt")
    return items


def _jsonl_item(origin: Origin, line: str, columns: Mapping[Column, str]) -> Item:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        problem = f"line {origin.line} is not JSON: {error}"
        raise ConfigError("task.path", origin.path, problem) from error
    return item_of(origin, fields, columns)


def item_of(origin: Origin, fields: Any, columns: Mapping[Column, str]) -> Item:
    """An item from the fields of one line or row.  Raises ConfigError that names it."""

    def refuse(problem: str) -> ConfigError:
        return ConfigError("task.path", origin.path, f"{origin.unit} {origin.line} {problem}")

    if not isinstance(fields, dict):
        raise refuse('is not an object like {"prompt": "...", "answer": "..."}')
    if missing := sorted(set(columns.values()) - fields.keys()):
        raise refuse(f"has no {missing[0]!r}, which task.columns names; it has {sorted(fields)}")
    own = [columns.get(name, name) for name in _COLUMNS]
    prompt, messages, answer = (fields.pop(name, None) for name in own)
    if (prompt is None) == (messages is None):
        raise refuse('must have exactly one of "prompt" and "messages" (task.columns renames)')
    if messages is None and not isinstance(prompt, str):
        raise refuse(f'has a "prompt" that is not text: {prompt!r}')
    if messages is not None and not _are_messages(messages):
        raise refuse('has "messages" that are not a list of {"role": text, "content": text}')
    return Item(prompt or "", answer, tuple(messages or ()), fields, origin)


def _are_messages(messages: object) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in messages
        )
    )


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a local model folder; nothing is downloaded.  Raises ModelError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ModelError(f"model.path {folder} has no usable tokenizer: {first}") from error
