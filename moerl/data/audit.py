"""Cut an interrupted rollout into its segments, each with exactly the routes it was sampled under.

A resumed call prefills the prefix again, under other weights, and routes it anew: no single set of
rows fits two segments.  Training uses the rows that produced each token's log-probability; with
`replay.audit` the engine host also keeps the re-prefilled rows, and then each segment can be scored
against its own version's weights as if it were a rollout of its own.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from moerl.errors import RecordError
from moerl.types import Rollout, VersionSpan


def split_segments(rollout: Rollout) -> list[Rollout]:
    """One rollout per engine call: what came before is its prompt, its own tokens are sampled.

    Routing of segment i > 0 is audit rows 0 .. b_i and then the segment's own rows from b_i on;
    the first segment takes every part that begins inside the prompt.
    Raises RecordError `audit_rows` when a resumed segment has no audit rows of the right length.
    """
    prompt_len, total = rollout.prompt_len, rollout.num_sampled
    # A part that ends before the row of the last prompt token holds prompt rows only.
    lead = sum(part.row_end <= prompt_len - 1 for part in rollout.routing)
    owns = (rollout.routing[: lead + 1], *((part,) for part in rollout.routing[lead + 1 :]))
    begins = [0, *(part.row_begin for part in rollout.routing[lead + 1 :])]
    if [part.row_end for part in rollout.audit_rows] != begins[1:]:
        raise RecordError(
            "audit_rows",
            f"{rollout.rollout_id}: audit rows end at "
            f"{[part.row_end for part in rollout.audit_rows]}, segments begin at {begins[1:]}",
        )
    # The row of a partial's last token is produced by the resumed call: first = begin + 1 - prompt.
    firsts = [0] + [begin + 1 - prompt_len for begin in begins[1:]]
    versions = rollout.version_of_tokens()
    result = []
    for idx, (first, end) in enumerate(pairwise([*firsts, total])):
        length = prompt_len + end
        prefix = rollout.audit_rows[idx - 1 : idx] if idx else ()
        result.append(
            replace(
                rollout,
                rollout_id=f"{rollout.rollout_id}/{idx}",
                token_ids=rollout.token_ids[:length],
                loss_mask=np.arange(length) >= prompt_len + first,
                logprobs=rollout.logprobs[first:end],
                versions=(VersionSpan(0, versions[first]),),
                routing=(*prefix, *owns[idx]),
                sampling_mask=tuple(
                    replace(part, first=part.first - first)
                    for part in rollout.sampling_mask
                    if first <= part.first < end
                ),
                audit_rows=(),
            )
        )
    return result
