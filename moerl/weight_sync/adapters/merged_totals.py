"""Digests of merged weights of engine ranks, computed from the trainer's own weights.

An engine computes W0 + s B A from factors that it received and a W0 that it loaded.  The trainer
trains on the same sum, so each rank digests the pieces of its live weights that it would have sent
without adapters, and says the sum per engine rank.  Engine ranks digest the same pieces of the
merged weights (`engine_adapters`) before they write them.  All weights count, also
those without factors: an engine that loaded another model is found, too.  With adapter slots
weights stay W0 on both sides, so these digests say that W0 is the same.
"""

from __future__ import annotations

import threading
import time

from moerl.core.types import PolicyVersion
from moerl.weight_sync.packed_buckets import BucketKey, BucketPacker
from moerl.weight_sync.snapshot import WeightSnapshot
from moerl.weight_sync.transfer_plan import SenderPlan

_LATE_S = 600.0  # for a bucket that another thread packs; none does


class MergedTotals:
    """Of one rank and one plan of whole weights; used by the threads of all engines with it."""

    def __init__(self, sender_plan: SenderPlan, snapshot: WeightSnapshot) -> None:
        self._packer = BucketPacker(sender_plan, snapshot)
        self._packer.join()
        self._known: tuple[PolicyVersion | None, dict[int, int]] = (None, {})
        self._lock = threading.Lock()

    def total(self, dst: int, version: PolicyVersion) -> int:
        """Sum over the pieces for an engine rank; the snapshot holds `version`."""
        with self._lock:
            if self._known[0] != version:
                regions = self._packer.plan.regions
                counts = {region.dst: len(region.buckets) for region in regions}
                self._known = (
                    version,
                    {to: self._sum(to, count, version) for to, count in counts.items()},
                )
            return self._known[1].get(dst, 0)  # a rank that sends it no weight has none to digest

    def _sum(self, dst: int, num_buckets: int, version: PolicyVersion) -> int:
        total, late = 0, time.monotonic() + _LATE_S
        for number in range(num_buckets):
            packed = self._packer.take(BucketKey(dst, number), version, late)
            total += packed.found.total
            self._packer.give_back(packed)
        return total % 2**64
