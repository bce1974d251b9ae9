"""Where rollouts lie in the tensors of one rank: padded or packed, cut for context parallelism.

A rank holds a grid of B rows x S slots.  Padded: one rollout per row, padded on the right;
attention is causal, so no real token sees padding.  Packed: one row, rollouts end to end,
`cu_seqlens` keeps them apart.  With context parallelism each rollout (a row's, or a packed one) is
cut into 2 * cp pieces and rank r holds pieces r and 2 * cp - 1 - r, the order that Transformer
Engine expects.  Either way a rank's share is a list of runs (`Run`): consecutive positions of one
rollout in consecutive slots; tokens, labels, routes and masks are laid out by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

Span = tuple[int, int]  # begin and end (exclusive) of consecutive slots


class Run(NamedTuple):
    """Consecutive positions of one rollout in consecutive slots of one grid row."""

    rollout: int  # index into Microbatch.rollouts; larger: padding only
    row: int
    slot: int
    begin: int  # first position in the rollout
    num: int  # positions, padding at the rollout's end included


@dataclass(frozen=True, slots=True)
class Grid:
    """Layout of a rank's microbatches; only `rows` and `length` change during a run.

    >>> Grid().shape([3, 11]), Grid(packed=True).shape([3, 11])
    ((2, 11), (1, 14))
    """

    packed: bool = False
    cp_rank: int = 0
    cp_size: int = 1
    multiple_of: int = 1  # S is padded up to it (sequence parallelism)
    rows: int = 1  # lower bound of rows and slots, for peers that must agree on a shape
    length: int = 1
    shares: bool = False  # packed and cp 1: leading tokens that rollouts share are placed once

    def place(self, fed: Sequence[int]) -> tuple[list[Run], list[int]]:
        """Runs of this rank, and the padded length of each rollout over all cp ranks.

        fed: fed-in tokens of each rollout.  A rollout of padding alone may follow the others.
        """
        pieces = 2 * self.cp_size if self.cp_size > 1 else 1
        unit = pieces * self.multiple_of
        at_least = max(self.length * self.cp_size, 1)
        if self.packed:
            lengths = [_up(num, pieces) for num in fed]
            tail = _up(max(sum(lengths), at_least), unit) - sum(lengths)
            lengths += [tail] if tail else []
        else:
            lengths = [_up(max([*fed, at_least]), unit)] * max(len(fed), self.rows)
        mine = (self.cp_rank, pieces - 1 - self.cp_rank) if pieces > 1 else (0,)
        runs, slot = [], 0
        for idx, length in enumerate(lengths):
            slot = slot if self.packed else 0
            size = length // pieces
            for piece in mine:
                runs.append(Run(idx, 0 if self.packed else idx, slot, piece * size, size))
                slot += size
        return runs, lengths

    def shape(self, fed: Sequence[int]) -> tuple[int, int]:
        """(B, S) of the rollouts whose fed-in tokens are counted in `fed`."""
        _, lengths = self.place(fed)
        if self.packed:
            return 1, sum(lengths) // self.cp_size
        return len(lengths), lengths[0] // self.cp_size


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
