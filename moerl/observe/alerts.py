"""Alerts: conditions of an unhealthy run, computed from each row of metrics and the rows before.

An alert is 1 when its condition holds, 0 when it does not, and absent when the row lacks the
metrics for it.  The console and the report show the alerts that are 1.  An alert warns; it never
stops the run.  The probe computes the alerts that need the model (`moerl.trainer.passes.probe`).

docs/metrics.md gives the source of each limit.  The quickstart raises none in a healthy run.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from moerl.config.schema import Config

_BIN = "lag_0"  # no stale token, and none behind an update of its row
_SE = 4.0
_SE_FLOOR = 1e-5  # a standard error of fp32 on both sides is smaller than rounding
_EXTREME_FRAC, _EXTREME_TOKENS = 3e-4, 3  # the second: one token of a small batch is no alert
_ESS_FRAC = 0.3  # of sequences (arXiv 2602.17616)
_NORM_RATIO, _NORM_ROWS, _NORM_WARM = 5.0, 100, 10
_SILENT_FRAC, _SILENT_ROWS = 0.9, 20
_SCORE_FAIL_FRAC = 0.01


class Alerts:
    """Reads every row once, in order.  A restart of the controller clears the medians."""

    def __init__(self, config: Config) -> None:
        rollout = config.rollout
        self._max_lag = rollout.max_lag
        self._episodes = rollout.groups_per_step * rollout.group_size
        self._norms: deque[float] = deque(maxlen=_NORM_ROWS)
        self._silent: deque[bool] = deque(maxlen=_SILENT_ROWS)

    def look(self, row: Mapping[str, float]) -> dict[str, float]:
        """`alert/*` of one step (docs/metrics.md)."""
        found = _replayed(row) | _policies(row) | self._history(row)
        if "async/lag_max" in row:
            found["stale"] = row["async/lag_max"] > self._max_lag
        if "loss/grad_norm_router" in row:
            moves = row.get("loss/grad_norm", 0.0) > 0
            found["router_detached"] = moves and row["loss/grad_norm_router"] == 0
        if "lora/changed_frac" in row:
            moves = row.get("loss/grad_norm", 0.0) > 0 and row.get("loss/lr", 0.0) > 0
            found["lora_rounded_away"] = moves and row["lora/changed_frac"] == 0
        if "scorer/failed" in row:
            found["scorer"] = row["scorer/failed"] > _SCORE_FAIL_FRAC * self._episodes
        return {f"alert/{name}": float(holds) for name, holds in found.items()}

    def _history(self, row: Mapping[str, float]) -> dict[str, bool]:
        found = {}
        norm, silent = row.get("loss/grad_norm"), row.get("reward/zero_var_frac")
        if norm is not None:
            if len(self._norms) >= _NORM_WARM:
                found["grad_norm"] = norm > _NORM_RATIO * statistics.median(self._norms)
            self._norms.append(norm)
        if silent is not None:
            self._silent.append(silent > _SILENT_FRAC)
            found["no_signal"] = len(self._silent) == _SILENT_ROWS and all(self._silent)
        return found


def _replayed(row: Mapping[str, float]) -> dict[str, bool]:
    """Alerts on replay: the trainer must use the routes and masks that the engine recorded."""
    found = {}
    if "routing/replay_cover_frac" in row:
        cover = row["routing/replay_cover_frac"]
        found["replay_cover"] = cover != 1.0 or row.get("routing/fallback_rows", 0.0) > 0
        tokens = row.get(f"mismatch/tokens/{_BIN}", 0.0)
        if tokens:
            extreme = row[f"mismatch/extreme_frac_2/{_BIN}"]
            found["replay_extreme"] = (
                extreme > _EXTREME_FRAC and extreme * tokens >= _EXTREME_TOKENS
            )
    if "keep/cover_frac" in row:
        found["mask_cover"] = row["keep/cover_frac"] != 1.0
    return found


def _policies(row: Mapping[str, float]) -> dict[str, bool]:
    """Alerts on the distance of the two policies: is the engine's sample usable for training?"""
    found = {}
    if f"mismatch/ratio_se/{_BIN}" in row:
        gap = abs(row[f"mismatch/ratio_mean/{_BIN}"] - 1.0)
        found["sampling_mask"] = gap > max(_SE * row[f"mismatch/ratio_se/{_BIN}"], _SE_FLOOR)
    if "mismatch/ess_seq_frac" in row:
        found["collapse"] = row["mismatch/ess_seq_frac"] < _ESS_FRAC
    return found
