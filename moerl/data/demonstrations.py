"""Supervised batches: the prompts of a task with their answers as if the policy had sampled them.

A demonstration is a `Rollout` without an engine: the prompt, then the answer's tokens and the end
token, both of which count in the loss.  Any task with text answers works: a JSONL file of
{"prompt" or "messages", "answer"}, or sort_digits.  Where an item has the field "demonstration", a
list, it is the texts of policy and environment in turn, and takes the answer's place: every text of
the policy is learned with an end token, as one row.  The stream is the same as in training: each
step takes the next prompts, and the seed shuffles a file again in each epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from moerl.core.errors import LineError
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
from moerl.data.prompt_files import line_error


def demonstration_plan(
    step: int,
    prompts: Sequence[Prompt],
    encode: Callable[[str], Sequence[int]],
    eos: int,
    *,
    dp_size: int,
    max_tokens_per_microbatch: int,
    pair: float = 0.0,
) -> BatchPlan:
    """The plan of one supervised step, equal on every rank.

    encode: text -> token ids without special tokens.  pair: as in `plan_batch`.  Raises LineError
    for an answer that is missing, not text, or empty.
    """
    version = PolicyVersion(0, step)
    groups = [_group(prompt, encode, eos, version) for prompt in prompts]
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


def _group(
    prompt: Prompt, encode: Callable[[str], Sequence[int]], eos: int, version: PolicyVersion
) -> EpisodeGroup:
    tokens, is_learned = list(prompt.token_ids), [False] * len(prompt.token_ids)
    ends: list[TurnEnd] = []
    for place, text in enumerate(_texts(prompt)):
        by_policy = place % 2 == 0
        ids = [*encode(text), eos] if by_policy else encode(text)
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
            raise _refused(prompt, problem, "no answer")
        return [prompt.answer]
    texts = prompt.extra["demonstration"]
    valid = isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)
    if not valid or len(texts) % 2 == 0:
        problem = (
            f"has the demonstration {texts!r}; a list of texts that the policy begins and ends"
        )
        raise _refused(prompt, problem, "demonstration")
    return list(texts)


def _refused(prompt: Prompt, problem: str, kind: str) -> LineError:
    if prompt.origin:
        return line_error(prompt.origin, problem, kind)
    return LineError("task.path", prompt.text, f"{prompt.name} {problem}", kind)
