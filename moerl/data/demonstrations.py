"""Supervised batches: the prompts of a task with their answers as if the policy had sampled them.

A demonstration is a `Rollout` without an engine: the prompt, then the answer's tokens and the end
token, both of which count in the loss.  Any task with text answers works: a JSONL file of
{"prompt" or "messages", "answer"}, or sort_digits.  The stream is that of training: step s takes
the next `batch` prompts, and the seed shuffles a file again in each epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from moerl.data.batching import plan_batch
from moerl.errors import ConfigError
from moerl.types import (
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
    VersionSpan,
)


class Prompts(Protocol):
    """`moerl.data.prompt_mixture.PromptMixture`."""

    def prompt(self, index: int) -> Prompt: ...


def demonstration_plan(
    step: int,
    batch: int,
    prompts: Prompts,
    encode: Callable[[str], Sequence[int]],
    eos: int,
    *,
    dp_size: int,
    max_tokens_per_microbatch: int,
) -> BatchPlan:
    """The plan of one supervised step, equal on every rank.

    encode: text -> token ids without special tokens.  Raises ConfigError for an answer that is
    missing, not text, or empty.
    """
    version = PolicyVersion(0, step)
    groups = [
        _group(prompts.prompt(index), encode, eos, version)
        for index in range(step * batch, (step + 1) * batch)
    ]
    return plan_batch(
        step,
        version,
        groups,
        dp_size=dp_size,
        max_tokens_per_microbatch=max_tokens_per_microbatch,
    )


def _group(
    prompt: Prompt, encode: Callable[[str], Sequence[int]], eos: int, version: PolicyVersion
) -> EpisodeGroup:
    if not isinstance(prompt.answer, str) or not prompt.answer:
        raise ConfigError(
            "task.path", prompt.text, f"its answer is {prompt.answer!r}; sft needs a text to learn"
        )
    answer = [*encode(prompt.answer), eos]
    tokens = np.array([*prompt.token_ids, *answer], np.int32)
    name = f"{prompt.index}.0"
    rollout = Rollout(
        rollout_id=name,
        token_ids=tokens,
        loss_mask=np.arange(len(tokens)) >= len(prompt.token_ids),
        logprobs=np.zeros(len(answer), np.float32),  # not sampled; no ratio is taken
        versions=(VersionSpan(0, version),),
        routing=(),
        sampling_mask=(),
        finish=Finish.STOP,
        sampling=SamplingParams(max_new_tokens=len(answer)),
        engine=0,
    )
    return EpisodeGroup(prompt.index, prompt, (Episode(name, (Turn(rollout),), Score(1.0)),))
