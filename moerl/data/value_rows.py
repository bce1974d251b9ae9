"""Rows of tokens for a model with a value head, as a plan that packs and passes like any other.

The value of a part of a row is the head's output at the part's last token.  A pass reads the output
that produces each sampled token, which is at the token before.  So the token behind a part counts
as sampled; behind the row stands a copy of its last token, which no other token sees.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moerl.core.messages import ValueRow
from moerl.core.types import (
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
    prompt = Prompt(number, "", (), None)
    return EpisodeGroup(number, prompt, (Episode(name, (Turn(rollout),)),))
