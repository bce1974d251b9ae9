"""How the counts of a step become metrics; docs/metrics.md defines each name.

Whoever counts adds to a name, and the row of a step has what was added since the row before.  Only
names with a further rule are listed here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

# fmt: off
COUNTERS = (  # 0 in a row without an addition; any other name is absent from it
    "async/bad_prompts", "async/cancelled_groups", "async/cancelled_tokens",
    "async/carried_siblings", "async/copied_groups", "async/dropped_branch_groups",
    "async/dropped_lost_groups", "async/dropped_siblings", "async/dropped_stale_groups",
    "async/dropped_stale_siblings", "async/dropped_zero_variance_groups", "async/engine_restarts",
    "async/engines_excluded", "async/engines_suspended", "async/interrupts",
    "async/recomputed_tokens", "async/routed_groups", "async/stalled_requests",
    "async/trainer_wait_s", "journal/adopted_groups", "journal/failed_writes",
    "journal/lost_groups", "sample/context_ends", "scorer/failed",
)
# fmt: on
TOTALS = "refused/"  # added from the start of the process on
RATIOS = {  # two sums, which no row has; absent without an addition to the second
    "async/cached_frac": ("cached_tokens", "prompt_tokens"),
    "fork/cached_frac": ("fork_cached", "fork_fed"),
    "indexer/replay_cover_frac": ("indexer_rows", "fed_index_rows"),
    "keep/bytes_per_token": ("mask_bytes", "masked"),
    "keep/cover_frac": ("masked", "sampled_truncated"),
    "keep/logprob_bytes_per_token": ("support_bytes", "supported"),
    "keep/singleton_frac": ("kept_singleton", "masked"),
    "keep/size_mean": ("kept", "masked"),
    "loss/entropy": ("entropy", "sampled"),
    "loss/entropy_full": ("entropy_full", "sampled_full"),
    "routing/replay_cover_frac": ("replayed_rows", "fed_rows"),
}
LAGS = {  # bins of the version lag: first and last
    "lag_0": (0, 0),
    "lag_1": (1, 1),
    "lag_2_3": (2, 3),
    "lag_4_7": (4, 7),
    "lag_8": (8, sys.maxsize),
}


def row_of(counts: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step from its counts by name."""
    named = {name: count for name, count in counts.items() if "/" in name}
    return dict.fromkeys(COUNTERS, 0.0) | named | ratios(counts)


def ratios(counts: Mapping[str, float]) -> dict[str, float]:
    """The ratios whose divisor is there."""
    found = {name: pair for name, pair in RATIOS.items() if pair[1] in counts}
    return {name: counts.get(a, 0.0) / max(1.0, counts[b]) for name, (a, b) in found.items()}
