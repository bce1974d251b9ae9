"""Leading tokens that rows of training share: they are forwarded once (`trainer.share_prompts`).

Siblings of a group share their prompt, branches of an episode their first turns.  In the order of a
depth-first walk a row shares leading tokens with the row before it, and keeps the slots of those
tokens; its own slots hold the rest.  One number per row therefore describes the whole tree.

Tokens alone do not suffice: the recorded routes of shared tokens must be the same, too.  Records
are compared by the digests in their references, so a plan knows the shared tokens and no record is
read.  Rows with the same prompt and other routes stay apart.

Example: prompt [5, 9, 4] with the answers [7, 2] and [3, 8], whose prompt has the same routes: the
first row holds the fed-in tokens 5 9 4 7, the second shares three and holds 3.  The slot of 4
produces 7 and 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moerl.core.errors import ConfigError
from moerl.core.types import Array, EpisodeGroup, Rollout, RoutingBlob
from moerl.data.grid import Run
from moerl.layout import ModelSpec


def shared_in_order(rows: Sequence[Rollout]) -> list[int]:
    """Of each row: fed-in tokens that it shares with the row before it.  Rows in slot order."""
    return [0, *map(shared_tokens, rows, rows[1:])][: len(rows)]


def shared_tokens(before: Rollout, row: Rollout) -> int:
    """Number of leading fed-in tokens that are the same in two rows, with the same routes."""
    num = min(before.num_tokens, row.num_tokens) - 1
    other = before.token_ids[:num] != row.token_ids[:num]
    tokens = int(other.argmax()) if other.any() else num
    if not (before.routing or row.routing):
        return tokens
    routed = 0
    for one, other in zip(before.routing, row.routing, strict=False):
        if _content(one) != _content(other):
            break
        routed = one.row_end
    return min(tokens, routed)


def walk_order(row: Rollout) -> tuple[tuple[str, ...], bytes]:
    """A sort key that puts rows with the same leading records, then tokens, side by side."""
    return tuple(part.ids.digest for part in row.routing), row.token_ids.astype(">i4").tobytes()


def count_apart(group: EpisodeGroup) -> int:
    """Number of prompts that are forwarded once more, because their routes differ."""
    known: dict[bytes, list[Rollout]] = {}
    for row in group.rollouts():
        kinds = known.setdefault(row.token_ids[: row.prompt_len].tobytes(), [])
        # an engine host stores the rows of a prompt once without its last token
        if not any(shared_tokens(kind, row) >= row.prompt_len - 1 for kind in kinds):
            kinds.append(row)
    return sum(len(kinds) - 1 for kinds in known.values())


def place_shared(
    runs: Sequence[Run], shared: Sequence[int], slots: int
) -> tuple[list[Run], list[Run], Array]:
    """Runs of rows that hold their own tokens alone, in one grid row.

    runs: of the own tokens, counted from 0; runs beyond `shared` are padding.
    Returns the runs with positions in the rows; for each row the runs of all its positions; and
    [slots] i32: the first later slot that does not see a slot.  The slot q sees the slot k if
    k <= q < seen_until[k].
    """
    seen_until = np.full(slots, slots, np.int32)
    own, every, path = [], [], list[Run]()
    for run in runs:
        begin = shared[run.rollout] if run.rollout < len(shared) else 0
        kept = []
        for part in path:
            num = min(max(begin - part.begin, 0), part.num)
            seen_until[part.slot + num : part.slot + part.num] = run.slot
            kept += [part._replace(rollout=run.rollout, num=num)] if num else []
        own.append(run._replace(begin=begin))
        path = [*kept, own[-1]]
        every += path
    return own, every, seen_until


def check_shared(spec: ModelSpec) -> None:
    """Refuse a model whose rows cannot share tokens.  Raises ConfigError."""
    other = {
        "multi-head latent attention": bool(spec.kv_lora),
        "sparse attention": bool(spec.index_topk),
        "a gated delta net": bool(spec.linear_layers),
        "attention sinks": spec.sinks,
        "layers without a rotary embedding": bool(spec.nope_layers),
    }
    for kind, has in other.items():
        if has:
            raise ConfigError(
                "trainer.share_prompts",
                True,
                f"a model of this run ({spec.family}) has {kind}; ordinary attention with a rotary "
                "embedding in every layer is needed: use false",
            )


def _content(part: RoutingBlob) -> tuple[object, ...]:
    ids = part.ids
    return ids.digest, ids.dtype, ids.shape, part.row_begin, part.row_end, part.layers
