"""Rows of tokens for a model with a value head, as a plan that packs and passes like any other.

The value of a part of a row is the head's output at the part's last token.  A pass reads the output
that produces each sampled token, which is at the token before.  So the token behind a part counts
as sampled; behind the row stands a copy of its last token, which no other token sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from moerl.core.messages import ValueRow
from moerl.core.types import (
    Array,
    BatchPlan,
    Episode,
    EpisodeGroup,
    Finish,
    PolicyVersion,
    Prompt,
    Rollout,
    SamplingParams,
    Turn,
    VersionSpan,
)
from moerl.data.batching import plan_batch
from moerl.data.demonstrations import refused, with_texts

_NONE = PolicyVersion(0, 0)


def value_plan(
    rows: Sequence[ValueRow],
    *,
    dp_size: int,
    max_tokens_per_microbatch: int,
    step: int = 0,
    packed: bool = False,
    pair: float = 0.0,
) -> BatchPlan:
    """The plan of these rows; row number n is group n.  Arguments as of `plan_batch`."""
    return plan_batch(
        step,
        _NONE,
        [_group(number, row) for number, row in enumerate(rows)],
        dp_size=dp_size,
        max_tokens_per_microbatch=max_tokens_per_microbatch,
        packed=packed,
        pair=pair,
    )


def _group(number: int, row: ValueRow) -> EpisodeGroup:
    tokens = np.append(row.token_ids, row.token_ids[-1:]).astype(np.int32)
    mask = np.zeros(len(tokens), np.bool_)
    mask[list(row.ends)] = True
    name = f"{number}.0"
    rollout = Rollout(
        rollout_id=name,
        token_ids=tokens,
        loss_mask=mask,
        logprobs=np.zeros(len(row.ends), np.float32),
        versions=(VersionSpan(0, _NONE),),
        routing=(),
        sampling_mask=(),
        finish=Finish.STOP,
        sampling=SamplingParams(max_new_tokens=len(row.ends)),
        engine=0,
    )
    prompt = Prompt(number, (), "", None, {})
    return EpisodeGroup(number, prompt, (Episode(name, (Turn(rollout),)),))


def labelled_row(
    prompt: Prompt, encode: Callable[[str], Sequence[int]], end: Sequence[int]
) -> tuple[ValueRow, Array]:
    """A prompt with labelled steps, and the labels [parts] f32.

    encode: text -> token ids without special tokens.  end: token ids behind the last step.
    """
    ids, ends, labels = list(prompt.token_ids), list[int](), list[float]()
    steps = prompt.extra["steps"]
    for place, (text, label) in enumerate(steps):
        ids += [*encode(text), *(end if place == len(steps) - 1 else ())]
        if label is not None:
            ends.append(len(ids))
            labels.append(label)
    return ValueRow(np.array(ids, np.int32), tuple(ends)), np.array(labels, np.float32)


def learnable(value_head: str) -> Callable[[Prompt], Prompt]:
    """The check of a prompt's part that `moerl sft` learns.  value_head: `sft.value_head`."""
    return with_texts if value_head == "off" else partial(with_steps, value_head)


def with_steps(loss: str, prompt: Prompt) -> Prompt:
    """The prompt, whose steps can be learned.  Raises LineError.

    They are in its field "steps": pairs of a text and a label, a number or None.  loss: bce | mse.
    """
    steps, most = prompt.extra.get("steps"), 1.0 if loss == "bce" else math.inf
    if not (isinstance(steps, list) and steps and all(_is_step(step, most) for step in steps)):
        numbers = "in 0..1" if loss == "bce" else "that is finite"
        wanted = f"a list of [text, label] is needed, a label being null or a number {numbers}"
        raise refused(prompt, f"has the steps {steps!r}; {wanted}", "steps")
    if all(label is None for _, label in steps):
        raise refused(prompt, "has no labelled step", "steps")
    return prompt


def _is_step(step: object, most: float) -> bool:
    if not (isinstance(step, list | tuple) and len(step) == 2):
        return False
    text, label = step
    is_number = isinstance(label, bool | int | float) and math.isfinite(label)
    is_number = is_number and (most == math.inf or 0.0 <= label <= most)
    return isinstance(text, str) and bool(text) and (label is None or is_number)
