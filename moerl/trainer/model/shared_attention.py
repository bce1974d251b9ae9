"""Attention of packed rows that share leading tokens (`moerl.data.shared_prefix`).

A shared token has one slot and one position; a row's own slots follow the tokens that it shares and
see those alone.  `seen_until` says it for all slots: q sees k if k <= q < seen_until[k].  It takes
the place of the attention mask, so it reaches a recomputed layer like the other inputs.

On a GPU one FlexAttention kernel serves the whole row and skips blocks that see nothing; which they
are follows from the largest and smallest `seen_until` of a block, without the square of slots.  On
a CPU each run of slots attends to the keys that it sees, gathered, through torch's fused kernel.
Rejected: merging prefix and own attention by their log-sum-exp (a backward pass of our own over
private kernels, and prompts inside prompts need a merge per level).

Legend: S slots, B 1, H query heads and G key/value heads on this rank, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from moerl.trainer.model.local_modules import CausalAttention

_BLOCK = 128  # slots: FlexAttention's default


class SharedAttention(CausalAttention):
    """Attention by `seen_until`, [S] i32, in place of the mask; None: rows share nothing."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *mask: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **_more: Any,
    ) -> Tensor:
        """query [S, B, H, D], key and value [S, B, G, D] -> [S, B, H * D]."""
        seen_until: Tensor | None = mask[0]
        if seen_until is None:
            return super().forward(query, key, value, packed_seq_params=packed_seq_params)
        if query.is_cuda:
            return attend_blocks(query, key, value, seen_until, self.scale, _compiled()).flatten(2)
        outputs = []
        for keys, begin, end in seen_slots(seen_until):
            k, v = (torch.cat([x[keys], x[begin:end]]) for x in (key, value))
            outputs.append(self._sdpa(query[begin:end], k, v))
        return torch.cat(outputs).flatten(2)


def seen_slots(seen_until: Tensor) -> list[tuple[Tensor, int, int]]:
    """Runs of slots, each with the earlier slots that it sees: (slots, begin, end)."""
    ends = [0, *seen_until.unique().tolist()]
    return [
        ((seen_until[:begin] > begin).nonzero()[:, 0], begin, end) for begin, end in pairwise(ends)
    ]


def attend_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen_until: Tensor,
    scale: float | None,
    attend: Any = flex_attention,
) -> Tensor:
    """FlexAttention, [S, B, H, D].  attend: `flex_attention`, compiled or not."""
    out_BHSD: Tensor = attend(
        *(x.permute(1, 2, 0, 3) for x in (query, key, value)),
        block_mask=block_mask(seen_until),
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return out_BHSD.permute(2, 0, 1, 3)


def block_mask(seen_until: Tensor) -> BlockMask:
    """The pairs of blocks that FlexAttention computes, with or without asking for each pair."""
    slots, count = len(seen_until), -(-len(seen_until) // _BLOCK)
    padded = torch.nn.functional.pad(seen_until, (0, count * _BLOCK - slots))
    by_block = padded.view(count, _BLOCK)
    begin = _BLOCK * torch.arange(count, device=seen_until.device)[:, None]
    before = begin > begin.T
    some = before & (by_block.amax(1) > begin) | (begin == begin.T)
    full = before & (by_block.amin(1) >= begin + _BLOCK)

    def sees(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < seen_until[k])

    return BlockMask.from_kv_blocks(
        *_numbered(some & ~full), *_numbered(full), _BLOCK, sees, (slots, slots)
    )


def _numbered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number of True in each row, and their columns first: [1, 1, rows] and [1, 1, rows, columns].

    A sort keeps the host from waiting for the count.
    """
    order = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], order.int()[None, None]


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)


@contextmanager
def rotary_at(rotary: torch.nn.Module, positions_S: Tensor) -> Iterator[None]:
    """Inside, slot s has the rotary embedding of position positions_S[s]."""
    vars(rotary)["forward"] = partial(_table_at, rotary, positions_S)
    try:
        yield
    finally:
        del vars(rotary)["forward"]


def _table_at(rotary: torch.nn.Module, positions_S: Tensor, length: int, **options: Any) -> Any:
    """The table of `length` >= S positions; YaRN's comes with a factor."""
    table = type(rotary).forward(rotary, length, **options)
    if isinstance(table, tuple):
        return table[0][positions_S], *table[1:]
    return table[positions_S]
