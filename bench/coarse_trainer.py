"""`moerl.trainer.main`, whose engines get weights of a few bits; for bench/coarse_engine.py.

The senders round what they pack, before its digest is taken, so an engine serves and confirms the
coarse weights, and the trainer keeps its own.
"""

from __future__ import annotations

import torch

from moerl.trainer.main import main
from moerl.weight_sync import packed_buckets
from moerl.weight_sync.packed_buckets import BucketPacker, PieceViews

BITS = 2  # of the mantissa after the leading one, as fp8's e5m2 has


def coarse(values: torch.Tensor) -> None:
    """Round fp32 values to the nearest with BITS bits, in place."""
    cut = 23 - BITS
    bits = values.view(torch.int32)
    bits.add_(1 << (cut - 1)).bitwise_and_(-1 << cut)


def _copy(self: BucketPacker, views: PieceViews) -> None:
    _exact(self, views)
    for target in views.targets:
        coarse(target)


_exact = packed_buckets.BucketPacker._copy
setattr(BucketPacker, "_copy", _copy)  # noqa: B010

if __name__ == "__main__":
    main()
