"""Sources of prompts: a registry of sources, and the endless deterministic stream over one.

A prompt is a function of (settings, seed, index) alone.  A resumed run therefore continues with
exactly the prompts that were not consumed, without a saved state of a data loader.  Rewards are in
`moerl.data.rewards`, because they run in other processes.

A new task is one source class and its line of SOURCES in `moerl.config.task_tables`.

The prompts of a run with several tasks: prompt index -> (task, place in that task's stream).

Both are functions of (settings, seed, index) alone, as in `moerl.data.tasks`, so a resume needs no
state and nothing depends on which groups were dropped, or in which order they were trained.

The order of tasks is the chairman assignment of R. Tijdeman (Discrete Mathematics 32, 1980): after
any number n of prompts, a task of share p has had n p of them, give or take less than one.  It
repeats after as many prompts as the whole-numbered weights add up to, so one table holds it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import xxhash

from moerl.config.functions import load_below
from moerl.config.schema import TaskConfig
from moerl.config.task_mixture import TaskEntry, naming, whole_weights
from moerl.config.task_tables import PACKAGE, REWARDS, SOURCES
from moerl.config.template_names import template_words
from moerl.core.errors import ConfigError, LineError, ModelError, nearest
from moerl.core.types import Array, Prompt, PromptOrigin
from moerl.data.chat_template import (
    ARGUMENTS,
    ChatTemplate,
    Json,
    LeftOutError,
    TemplateError,
    without_cuts,
)
from moerl.data.environments import demonstration
from moerl.data.plain_values import FieldError
from moerl.data.prompt_files import PromptFiles, line_error
from moerl.data.prompt_items import Item
from moerl.data.template_parts import MessagePart

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


OVERLONG = "too long"  # kind of a LineError
_GYM_SIZE = 20_000  # items of a reasoning-gym dataset that names no size


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


class PromptStream:
    """Endless prompts by index; the seed shuffles a finite source again in each epoch."""

    def __init__(
        self, task: TaskConfig, tokenizer: Tokenizer | None, seed: int, room: int = 0
    ) -> None:
        """Raises ConfigError for every fault of the settings and of the files as a whole.

        tokenizer: None: each prompt has one token.  room: longest prompt in tokens; 0 = not known.
        """
        self.template: ChatTemplate | None = None
        if tokenizer:
            self.template = ChatTemplate(tokenizer, task.chat_template, task.template_arguments)
            if task.chat_template and not self.template.tokenizer.chat_template:
                problem = "the model's tokenizer has no template"
                raise ConfigError("task.chat_template", task.chat_template, problem)
        self._task, self._seed = task, seed
        self._most = min(task.max_prompt_tokens, room or task.max_prompt_tokens)
        self._uses_template = False
        self.left_out: set[str] = set()  # parts of messages that the template may leave out
        functions = [term.function for term in task.terms]
        self._needs_answer = task.environment == "check_digits" or any(
            function in REWARDS for function in functions
        )
        self._trl = any(function.startswith("trl:") for function in functions)
        self._source: Source = load_below(PACKAGE, SOURCES[task.name].factory)(task, seed)
        self._order: tuple[int, np.ndarray] | None = None  # epoch and its permutation
        self._bad: dict[int, LineError] = {}  # bad lines that were drawn, by place

    @property
    def template_words(self) -> str:
        """Template and arguments of the prompts so far; empty: they needed none."""
        task = self._task
        return template_words(task.chat_template, task.template_arguments) * self._uses_template

    @property
    def num_lines(self) -> int:
        """0: the prompts come from no file."""
        return (self._source.size or 0) if SOURCES[self._task.name].files else 0

    def prompt(self, index: int) -> Prompt:
        """Prompt number `index`.

        Raises LineError for a prompt that cannot be used, and ConfigError when more lines than
        task.max_bad_lines are bad.
        """
        place = self._place(index)
        try:
            return self._make(index, self._source.item(place))
        except LineError as error:
            is_skipped = error.kind == OVERLONG and self._task.overlong == "skip"
            if self.num_lines and not is_skipped:
                self._bad.setdefault(place, error)
                check_bad_lines(self._task, len(self._bad), list(self._bad.values()))
            raise

    def origin(self, place: int) -> PromptOrigin:
        """Of a line of the files."""
        assert isinstance(self._source, PromptFiles), "only files have lines"
        return self._source.origin(place)

    def line(self, place: int) -> Prompt:
        """The prompt of a line of the files.  Raises LineError."""
        return self._make(place, self._source.item(place))

    def _make(self, index: int, item: Item) -> Prompt:
        messages = self._messages(item)
        try:
            text, ids, length = self._encoded(item, messages)
        except FieldError as error:
            raise self._refused(item, index, str(error), error.kind) from error
        if length > self._most:
            why = "raise the limit or shorten the prompt"
            if self._most < self._task.max_prompt_tokens:
                why = f"the engines leave {self._most} beside sampling.max_new_tokens"
            size = length if ids else f"at least {length:,}"
            raise LineError(
                "task.max_prompt_tokens",
                self._task.max_prompt_tokens,
                f"{item.origin or f'prompt {index}'} has {size} tokens; {why}",
                OVERLONG,
            )
        if not ids:
            raise self._refused(item, index, "has no token", "no token")
        if self._needs_answer and item.origin and item.answer in (None, ""):
            name = self._task.columns.get("answer", "answer")
            problem = f"has no {name!r}, which task.reward = {self._task.reward} needs"
            raise self._refused(item, index, f"{problem} (task.columns names another)", "no answer")
        extra = dict(item.extra)
        if item.arguments:
            extra[ARGUMENTS] = item.arguments  # the template is applied to turns and answers, too
        if self._task.kind.uses_chat:
            extra.pop("demonstration", None)  # it holds the answer, and agents see `extra`
            if item.tools:
                extra["tools"] = list(item.tools)
            if item.messages or self._task.system or "messages" in extra:
                extra["messages"] = messages  # the agent writes its own conversation
        elif item.messages and self._trl:
            extra["messages"] = messages  # a conversation is scored as one
        return Prompt(index, tuple(ids), text, item.answer, extra, origin=item.origin)

    def _refused(self, item: Item, index: int, problem: str, kind: str) -> LineError:
        if item.origin:
            return line_error(item.origin, problem, kind)
        return LineError("task.name", self._task.name, f"prompt {index} {problem}", kind)

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

    def _encoded(self, item: Item, messages: Sequence[Json]) -> tuple[str, Sequence[int], int]:
        """(text, its tokens, tokens of the first request).  Raises FieldError.

        A text that is too long for any tokenizer has none: its tokens take 400 bytes each.
        """
        text = "\n".join(str(message["content"]) for message in item.messages) or item.prompt
        if self.template is None:
            return text, [0], 1
        if len(text) > self._most < (least := len(text) // self.template.longest):
            return text, (), least
        has_template = bool(self.template.tokenizer.chat_template)
        if self._task.kind.uses_chat:  # the template is applied to each turn's messages
            begin = not (item.messages or self._task.chat_template)
            ids = self.template.encode_plain(text, begin=begin)
            if not has_template:  # its agent is refused
                return text, ids, len(ids)
            shown = self._shown(self.template, messages, item)
            return text, ids, len(self.template.encode(shown)[0])
        if item.messages or self._task.chat_template:
            if not has_template:
                raise FieldError("template", "has messages; the tokenizer has no template")
            shown = self._shown(self.template, messages, item)
            ids, _ = self.template.encode(shown)
            return without_cuts(shown), ids, len(ids)
        for name, value in (("tools", item.tools), (ARGUMENTS, item.arguments)):
            if value:
                raise FieldError(name, f'has "{name}", which need task.chat_template=true')
        ids = self.template.encode_plain(item.prompt, begin=True)
        return item.prompt, ids, len(ids)

    def _shown(self, template: ChatTemplate, messages: Sequence[Json], item: Item) -> str:
        """A conversation that ends where an answer begins.

        Raises FieldError, and ConfigError for a template that opens no answer.
        """
        if not template.opens_answers:
            raise ConfigError(
                *template.source,
                "its chat template ignores add_generation_prompt, so the policy would go on with "
                "the user's message; use a template that opens an answer",
            )
        self._uses_template = True
        try:
            arguments = template.checked(item.arguments)
        except TemplateError as error:
            name = self._task.columns.get(ARGUMENTS, ARGUMENTS)
            raise FieldError("template", f"cannot be used: {name}: {error}") from error
        try:
            shown, left_out = template.render_whole(messages, item.tools, arguments)
        except LeftOutError as error:
            raise self._lost(error.part, len(messages) - len(item.messages)) from error
        except TemplateError as error:
            raise FieldError("template", f"cannot be used: {error}") from error
        self.left_out.update(f"{part.field} of role {part.role}" for part in left_out)
        return shown

    def _lost(self, part: MessagePart | None, before: int) -> FieldError:
        """The error of a part that is left out.  before: messages absent from the line."""
        if part is None:
            name = self._task.columns.get("tools", "tools")
            problem = f"has {name!r}, and the model's chat template writes no tools; "
            way = "task.columns={tools: ''} leaves the column to the reward"
            return FieldError("tools", problem + way)
        name = self._task.columns.get("messages", "messages")
        where = f"{name}[{part.place - before}].{part.field}"
        way = "use a template that does (task.chat_template), or leave the field out"
        problem = f"has {where!r}, which the chat template does not write; {way}"
        return FieldError("left out", problem)

    def _messages(self, item: Item) -> list[Json]:
        """Of the item, behind a system message."""
        messages = list(item.messages) or [{"role": "user", "content": item.prompt}]
        if self._task.system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._task.system})
        return messages


def check_bad_lines(task: TaskConfig, count: int, named: Sequence[LineError]) -> None:
    """Raises ConfigError that names some of `count` bad lines when those are too many."""
    if count <= task.max_bad_lines:
        return
    first, *more = named
    others = [f"{error.allowed} ({error.value})" for error in more[:2]]
    total = [f"{count} lines are bad, task.max_bad_lines = {task.max_bad_lines}"] * (count > 1)
    raise ConfigError(first.field, first.value, "; ".join([first.allowed, *others, *total]))


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
        hint = nearest(task.dataset, DATASETS)
        raise ConfigError(
            "task.dataset", task.dataset, f"it must be a dataset of reasoning-gym{hint}"
        )
    try:
        return reasoning_gym.create_dataset(
            task.dataset, **({"seed": seed, "size": _GYM_SIZE} | task.dataset_args)
        )
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError("task.dataset_args", task.dataset_args, str(error)) from error


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


MOST_BAD = 1000  # prompts in a row that cannot be used: then a setting is wrong


class PromptMixture:
    """An endless stream of prompts over one task or several."""

    def __init__(
        self,
        entries: Sequence[TaskEntry],
        tokenizer: Tokenizer | None,
        seed: int,
        longest: int = 0,
    ) -> None:
        """Raises ConfigError for every fault of the settings and of the files as a whole.

        longest: tokens of the longest sequence that the engines take; 0 = not known.
        """
        self._entries = tuple(entries)
        self._order = TaskOrder(whole_weights(entries))
        self._streams: list[PromptStream] = []
        for entry in entries:
            with naming(entry):
                own_seed, room = task_seed(seed, entry.label), room_of(entry, longest)
                self._streams.append(PromptStream(entry, tokenizer, own_seed, room))

    @property
    def streams(self) -> Sequence[tuple[TaskEntry, PromptStream]]:
        """Each task with its own prompts."""
        return list(zip(self._entries, self._streams, strict=True))

    def prompt(self, index: int) -> Prompt:
        """Prompt number `index`.  Raises LineError: unusable; ConfigError: too many are."""
        task, place = self._order.place(index)
        entry = self._entries[task]
        with naming(entry):
            found = self._streams[task].prompt(place)
        return replace(found, index=index, task=entry.label)


def usable(prompt: Callable[[int], Prompt]) -> Iterator[Prompt]:
    """The usable prompts of a stream in order.

    Raises ConfigError as `prompt` does, and LineError when many in a row cannot be used.
    """
    in_a_row = 0
    for index in count():
        try:
            found = prompt(index)
        except LineError:
            in_a_row += 1
            if in_a_row >= MOST_BAD:
                raise
        else:
            in_a_row = 0
            yield found


class TaskOrder:
    """Which task each prompt is of, for whole weights without a common divisor."""

    def __init__(self, weights: Sequence[int]) -> None:
        self._weights = tuple(weights)
        self._tasks = chairmen(weights)  # of one period
        self._before = np.zeros(len(self._tasks), np.int64)  # earlier prompts of the same task
        for task in range(len(weights)):
            mine = self._tasks == task
            self._before[mine] = np.arange(np.count_nonzero(mine))

    def place(self, index: int) -> tuple[int, int]:
        """(task, number of earlier prompts of that task) of prompt `index`."""
        period, at = divmod(index, len(self._tasks))
        task = int(self._tasks[at])
        return task, period * self._weights[task] + int(self._before[at])


def chairmen(weights: Sequence[int]) -> Array:
    """The order of one period: task numbers, each as often as its weight.

    Of the tasks whose share has come due, the first to be late is next.
    """
    period, slack = sum(weights), max(1, 2 * len(weights) - 2)
    given = np.zeros(len(weights), np.int64)
    share = np.asarray(weights, np.int64)
    order = np.zeros(period, np.int64)
    for at in range(period):
        owed = share * (at + 1) - period * given  # in units of 1 / period prompts
        due = owed * slack >= period if len(weights) > 1 else np.ones(1, np.bool_)
        late = (period * (slack - 1) - owed * slack) / share
        order[at] = np.argmin(np.where(due, late, np.inf))
        given[order[at]] += 1
    return order


def room_of(entry: TaskEntry, longest: int) -> int:
    """Tokens that a sequence of `longest` tokens leaves for a prompt; 0 = not known.

    Turns of agents sample fewer tokens where the context ends.
    """
    if not longest:
        return 0
    sampled = 1 if entry.kind.uses_chat else entry.sampling.max_new_tokens
    return max(1, longest - sampled)


def task_seed(seed: int, label: str) -> int:
    """Seed of a task's own stream: adding or reordering tasks does not change it."""
    return xxhash.xxh32_intdigest(f"{seed}/{label}".encode()) if label else seed
