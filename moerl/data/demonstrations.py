"""Supervised batches: the prompts of a task with their answers as if the policy had sampled them.

A demonstration is a `Rollout` without an engine: the prompt, then the answer's tokens and its end,
both of which count in the loss.  The end is the token that the template writes behind a turn, such
as <|im_end|>; without a template, the tokenizer's end token (`AnswerEnd`).  Any task with text
answers works: a JSONL file of {"prompt" or "messages", "answer"}, or sort_digits.  Where an item
has the field "demonstration", a list, it is the texts of policy and environment in turn, and takes
the answer's place: every text of the policy is learned with an end token, as one row.  The stream
is the same as in training: each step takes the next prompts, and the seed shuffles a file again in
each epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from moerl.core.errors import ConfigError, LineError
from moerl.core.types import (
    BatchPlan,
    Episode,
    EpisodeGroup,
    Finish,
    PolicyVersion,
    Prompt,
    Rollout,
    SamplingParams,
    Score,
    Turn,
    TurnEnd,
    VersionSpan,
)
from moerl.data.batching import plan_batch
from moerl.data.chat_template import ARGUMENTS, ChatTemplate
from moerl.data.prompt_files import line_error
from moerl.data.template_parts import THOUGHTS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


_NO_TEMPLATES: Mapping[str, ChatTemplate | None] = MappingProxyType({})


def demonstration_plan(
    step: int,
    prompts: Sequence[Prompt],
    encode: Callable[[str], Sequence[int]],
    end: Callable[[Prompt], Sequence[int]],
    *,
    dp_size: int,
    max_tokens_per_microbatch: int,
    pair: float = 0.0,
) -> BatchPlan:
    """The plan of one supervised step, equal on every rank.

    encode: text -> token ids without special tokens.  end: token ids behind an answer.  pair: as in
    `plan_batch`.  Raises LineError for an answer that is missing, not text, or empty.
    """
    version = PolicyVersion(0, step)
    groups = [_group(prompt, encode, end(prompt), version) for prompt in prompts]
    return plan_batch(
        step,
        version,
        groups,
        dp_size=dp_size,
        max_tokens_per_microbatch=max_tokens_per_microbatch,
        pair=pair,
    )


def with_texts(prompt: Prompt) -> Prompt:
    """The prompt, whose texts can be learned.  Raises LineError."""
    _texts(prompt)
    return prompt


class AnswerEnd:
    """Token ids behind an answer of the policy.

    Text of the template behind the end token, such as a line feed, is left out: the policy never
    samples it.
    """

    def __init__(
        self, tokenizer: Tokenizer, templates: Mapping[str, ChatTemplate | None] = _NO_TEMPLATES
    ) -> None:
        """Raises ConfigError without an end token.  templates: by label of a task."""
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                "model.path", tokenizer.name_or_path, "its tokenizer has no end token"
            )
        self._plain = (int(tokenizer.eos_token_id),)
        self._own, self._templates = ChatTemplate(tokenizer), templates
        self._found: dict[tuple[str, bytes], tuple[str, tuple[int, ...]]] = {}

    def of(self, prompt: Prompt) -> tuple[int, ...]:
        """The end of an answer to a prompt; a templated one ends with the header of an answer."""
        arguments = prompt.extra.get(ARGUMENTS) or {}
        key = prompt.task, msgspec.json.encode(arguments, order="sorted")
        if key not in self._found:
            template = self._templates.get(prompt.task) or self._own
            self._found[key] = self._around(template, arguments)
        header, end = self._found[key]
        return end if header and prompt.text.endswith(header) else self._plain

    def _around(
        self, template: ChatTemplate, arguments: Mapping[str, object]
    ) -> tuple[str, tuple[int, ...]]:
        """(text that opens an answer, tokens that end it)."""
        tokenizer = template.tokenizer
        if not tokenizer.chat_template:
            return "", self._plain
        header, behind = _around_answer(tokenizer, {**template.arguments, **arguments})
        ids = tokenizer.encode(behind, add_special_tokens=False)
        ends = [place for place, token in enumerate(ids) if token in tokenizer.added_tokens_decoder]
        return header, tuple(ids[: ends[0] + 1]) if ends else self._plain


def _around_answer(tokenizer: Tokenizer, arguments: Mapping[str, object]) -> tuple[str, str]:
    """Text that the template writes before an answer and behind it; empty where it refuses one."""
    mark, asked = "ANSWER", [{"role": "user", "content": "QUESTION"}]

    render: Callable[..., object] = tokenizer.apply_chat_template

    def written(messages: list[dict[str, str]], *, begins: bool) -> str:
        return str(render(messages, tokenize=False, add_generation_prompt=begins, **arguments))

    try:
        question = written(asked, begins=False)
        header = written(asked, begins=True).removeprefix(question)
        whole = written([*asked, {"role": "assistant", "content": mark}], begins=False)
    except Exception:  # a template raises whatever its author chose
        return "", ""
    _, found, behind = whole.rpartition(mark)
    return (header, behind) if found else ("", "")


def _group(
    prompt: Prompt,
    encode: Callable[[str], Sequence[int]],
    end: Sequence[int],
    version: PolicyVersion,
) -> EpisodeGroup:
    tokens, is_learned = list(prompt.token_ids), [False] * len(prompt.token_ids)
    ends: list[TurnEnd] = []
    for place, text in enumerate(_texts(prompt)):
        by_policy = place % 2 == 0
        ids = [*encode(text), *end] if by_policy else encode(text)
        tokens += ids
        is_learned += [by_policy] * len(ids)
        if by_policy:
            ends.append(TurnEnd(sum(is_learned), Finish.STOP))
    name = f"{prompt.index}.0"
    rollout = Rollout(
        rollout_id=name,
        token_ids=np.array(tokens, np.int32),
        loss_mask=np.array(is_learned),
        logprobs=np.zeros(sum(is_learned), np.float32),  # not sampled; no ratio is taken
        versions=(VersionSpan(0, version),),
        routing=(),
        sampling_mask=(),
        finish=Finish.STOP,
        sampling=SamplingParams(max_new_tokens=sum(is_learned)),
        engine=0,
        turn_ends=tuple(ends) if len(ends) > 1 else (),
    )
    return EpisodeGroup(prompt.index, prompt, (Episode(name, (Turn(rollout),), Score(1.0)),))


def _texts(prompt: Prompt) -> Sequence[str]:
    """Texts of policy and environment in turn, the policy first and last."""
    if "demonstration" not in prompt.extra:
        if not isinstance(prompt.answer, str) or not prompt.answer:
            problem = f"has the answer {prompt.answer!r}; sft needs a text to learn"
            raise refused(prompt, problem, "no answer")
        if thought := next((name for name in THOUGHTS if prompt.extra.get(name)), ""):
            problem = (
                f"has {thought!r} beside its answer; sft learns the content alone: write both into "
                "it as the policy samples them"
            )
            raise refused(prompt, problem, "reasoning")
        return [prompt.answer]
    texts = prompt.extra["demonstration"]
    valid = isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)
    if not valid or len(texts) % 2 == 0:
        problem = (
            f"has the demonstration {texts!r}; a list of texts that the policy begins and ends"
        )
        raise refused(prompt, problem, "demonstration")
    return list(texts)


def refused(prompt: Prompt, problem: str, kind: str) -> LineError:
    """Why a prompt cannot be learned."""
    if prompt.origin:
        return line_error(prompt.origin, problem, kind)
    return LineError("task.path", prompt.text, f"{prompt.name} {problem}", kind)
