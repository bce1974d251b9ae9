"""`moerl data RECIPE`: the prompts of a recipe as a run would see them; starts no engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from moerl.config.template_names import arguments_words
from moerl.core.errors import ConfigError, printable
from moerl.core.types import Prompt
from moerl.launch.arguments import Overrides, Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from moerl.data.prompt_checks import LineCheck
    from moerl.data.tasks import PromptStream

_SHOWN = 3  # prompts, and responses
_TOKENS, _TEXT = 60, 1000  # of a prompt that are shown
_RANGES = 40  # of lines that cannot be used, by kind


def data(
    recipe: Recipe,
    overrides: Overrides = None,
    response: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Show what the reward gives this response; up to three. Default: the answer, and "
            "nothing.",
        ),
    ] = None,
) -> None:
    """Read all prompts of a recipe: counts, lengths, duplicates, lines that cannot be used.

    Shows the first three prompts as text and as tokens, the answer, and what the reward gives some
    responses. Control tokens are in [[ ]]. No engine is started and nothing is written; the exit
    status is 1 when a run would refuse the lines.

    Examples:

      moerl data quickstart task.name=jsonl task.path=prompts.jsonl task.reward=exact_match
      moerl data quickstart task.name=hf_dataset task.path=train.parquet \\
        'task.columns={answer: reward_model.ground_truth}' task.reward=math_verify --response 42
    """
    from moerl.config import load_config, resolve
    from moerl.config.checks import check
    from moerl.config.engine_context import check_context
    from moerl.launch.line_checks import line_checks, model_tokenizer
    from moerl.launch.reward_trial import try_rewards
    from moerl.layout import model_spec
    from moerl.planning.estimates import model_shapes

    if len(response or ()) > _SHOWN:
        raise ConfigError("--response", response, f"give at most {_SHOWN}")
    config = resolve(load_config(recipe, list(overrides or [])))
    check(config, starts=False)
    max_positions = model_spec(model_shapes(config)).max_positions
    refusals = []
    with model_tokenizer(config) as tokenizer:
        if tokenizer is None:
            typer.echo("tokens are not counted: the model's folder has no tokenizer")
        lines = line_checks(config, tokenizer, max_positions)
        for one in lines.checks:
            for text in _of_task(one, tokenizer, response):
                typer.echo(printable(text))
            try:
                one.refuse()
                try_rewards([one])
            except ConfigError as error:
                refusals.append(error)
        for line in lines.overlaps():
            typer.echo(printable(line))
    for refusal in refusals:
        typer.echo(f"a run would refuse this: {printable(refusal)}")
    check_context(config, max_positions)
    raise typer.Exit(bool(refusals))


def _of_task(
    one: LineCheck, tokenizer: Tokenizer | None, responses: Sequence[str] | None
) -> Iterator[str]:
    task = one.task
    yield f"{task.label or task.name}: {task.path or 'prompts are made, not read'}"
    if one.lines:
        yield from _counts(one, has_tokens=tokenizer is not None)
    prompts = list(islice(one.prompts(), _SHOWN))
    if words := one.stream.template_words:
        yield f"  template    {words}"
    if one.stream.left_out:
        yield f"  left out    by the template: {', '.join(sorted(one.stream.left_out))}"
    for prompt, rewards in zip(prompts, _rewards(one, prompts, responses), strict=True):
        yield ""
        yield prompt.name
        yield from _prompt(prompt, one.stream, tokenizer)
        yield f"  answer   {_cut(repr(prompt.answer), _TEXT)}"
        yield from rewards
    yield ""


def _counts(one: LineCheck, *, has_tokens: bool) -> Iterator[str]:
    def tell(read: int) -> None:
        typer.echo(f"moerl: {read:,} of {one.lines:,} lines", err=True)

    one.go_on(one.lines, float("inf"), tell)
    for path, count in Counter(one.stream.origin(n).path for n in range(one.lines)).items():
        yield f"  file        {path}: {count:,}"
    usable = one.lines - one.unusable
    yield f"  lines       {one.lines:,}; {usable:,} can be used"
    if has_tokens and usable:
        cumulated = np.cumsum(one.lengths)
        least, half, most = (
            int(np.searchsorted(cumulated, rank)) for rank in (1, (usable + 1) // 2, usable)
        )
        yield f"  tokens      {least} to {most:,} in a prompt, half of them at most {half:,}"
    yield f"  duplicates  {one.duplicates():,}"
    if one.control:
        yield f"  control     {one.control:,} with names of control tokens, which stay text"
    if one.unanswered:
        yield f"  no answer   {one.unanswered:,}: {one.gets_none()}"
    for kind, places in one.places.items():
        yield f"  unusable    {len(places):,}, {kind}: {_ranges(one.stream, places)}"
        yield f"              {one.named[kind][0].allowed}"


def _ranges(stream: PromptStream, places: Sequence[int]) -> str:
    """Numbers of lines, "3, 7-9", file by file."""
    found: list[list[str | int]] = []  # path, unit, first, last
    for place in places:
        origin = stream.origin(place)
        if (
            found
            and found[-1][:2] == [origin.path, origin.unit]
            and found[-1][3] == origin.line - 1
        ):
            found[-1][3] = origin.line
        elif len(found) == _RANGES:
            return f"{_named(found)} and others"
        else:
            found.append([origin.path, origin.unit, origin.line, origin.line])
    return _named(found)


def _named(ranges: Sequence[Sequence[str | int]]) -> str:
    texts, path = [], ""
    for file, unit, first, last in ranges:
        start = f"{file} {unit} " if file != path else ""
        path = str(file)
        texts.append(start + (str(first) if first == last else f"{first}-{last}"))
    return ", ".join(texts)


def _prompt(prompt: Prompt, stream: PromptStream, tokenizer: Tokenizer | None) -> Iterator[str]:
    yield f"  text     {_cut(repr(prompt.text), _TEXT)}"
    if arguments := prompt.extra.get("chat_template_kwargs"):
        yield f"  its own  {arguments_words(arguments)}"
    if tokenizer is None or stream.template is None:
        return
    control = stream.template.control_ids
    shown = [
        f"[[{control[token]}]]" if token in control else repr(tokenizer.decode([token]))[1:-1]
        for token in prompt.token_ids
    ]
    if len(shown) > _TOKENS:
        shown = [*shown[: _TOKENS // 2], "...", *shown[-_TOKENS // 2 :]]
    yield f"  tokens   {len(prompt.token_ids)}: {'|'.join(shown)}"


def _rewards(
    one: LineCheck, prompts: Sequence[Prompt], responses: Sequence[str] | None
) -> Iterator[list[str]]:
    """Lines about the rewards of responses to each prompt.  responses: None: `samples`."""
    from moerl.launch.reward_trial import RewardTrial, samples

    functions = [term for term in one.task.terms if term.where == "function"]
    if not functions:
        yield from [["  reward   not a function: the run asks for it"]] * len(prompts)
        return
    try:
        trial = RewardTrial(one, one.task.only_with(functions[0]))
    except ConfigError as error:
        yield from [[f"  reward   not called on this machine: {error}"]] * len(prompts)
        return
    with closing(trial):
        for prompt in prompts:
            texts = responses or samples(prompt)
            yield [
                f"  reward   {_cut(repr(text), 60)} -> {trial.said(prompt, text)}" for text in texts
            ]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"
