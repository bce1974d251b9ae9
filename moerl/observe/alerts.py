"""Alerts: conditions of an unhealthy run, computed from each row of metrics and the rows before.

An alert is 1 when its condition holds, 0 when it does not, and absent when the row lacks the
metrics for it.  The console and the report show the alerts that are 1.  An alert warns; it never
stops the run.  The probe computes the alerts that need the model (`moerl.trainer.passes.probe`).

docs/metrics.md gives the source of each limit, runs that raise no alert, and faults that do.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping

from moerl.config.schema import Config

_BIN = "lag_0"  # no stale token, and none behind an update of its row
_SE = 4.0
_SE_FLOOR = 1e-5  # a standard error of fp32 on both sides is smaller than rounding
_EXTREME_FRAC, _EXTREME_TOKENS = 3e-4, 3  # the second: one token of a small batch is no alert
_ESS_FRAC = 0.3  # of sequences (arXiv 2602.17616)
_NORM_RATIO, _NORM_ROWS, _NORM_WARM = 5.0, 100, 10
_SILENT_FRAC, _SILENT_ROWS = 0.9, 20
_CUT_FRAC, _CUT_ROWS = 0.5, 10
_LASTING, _OF = 3, 5  # rows: one bad batch is no alert
_GAIN_ROWS = 8  # the first of a run, and the last
_ENTROPY_FRAC = 0.1
_TEACHER_NATS, _TEACHER_FRAC = 2.0, 0.9  # still as far as at first
_SCORE_FAIL_FRAC = 0.01


class Alerts:
    """Reads every row of a run once, in order: what it finds is a function of these rows alone."""

    def __init__(self, config: Config, rows: Iterable[Mapping[str, float]] = ()) -> None:
        """rows: of the run so far."""
        rollout = config.rollout
        self._max_lag = rollout.max_lag
        self._episodes = rollout.groups_per_step * rollout.group_size
        self._norms: deque[float] = deque(maxlen=_NORM_ROWS)
        self._first_norms: list[float] = []
        self._held: defaultdict[str, deque[bool]] = defaultdict(lambda: deque(maxlen=_SILENT_ROWS))
        self._courses: defaultdict[str, _Course] = defaultdict(_Course)
        for row in rows:
            self.check(row)

    def check(self, row: Mapping[str, float]) -> dict[str, float]:
        """`alert/*` of one step (docs/metrics.md)."""
        found = _replayed(row) | _policies(row) | self._silence(row) | self._trends(row)
        if "collapse" in found:
            found["collapse"] = self._lasts("collapse", found["collapse"], _LASTING, _OF)
        if "loss/grad_norm" in row:
            found |= self._norm(row["loss/grad_norm"])
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

    def _lasts(self, name: str, holds: bool, at_least: int, of: int) -> bool:
        """Whether a condition holds now and in `at_least` of the last `of` rows."""
        held = self._held[name]
        held.append(holds)
        return holds and sum(list(held)[-of:]) >= at_least

    def _norm(self, norm: float) -> dict[str, bool]:
        found = {}
        if len(self._norms) >= _NORM_WARM:
            usual = max(statistics.median(self._norms), statistics.median(self._first_norms))
            found["grad_norm"] = self._lasts("norm", norm > _NORM_RATIO * usual, _LASTING, _OF)
        else:
            self._first_norms.append(norm)
        self._norms.append(norm)
        return found

    def _silence(self, row: Mapping[str, float]) -> dict[str, bool]:
        if (share := row.get("reward/zero_var_frac")) is None:
            return {}
        silent, found = share > _SILENT_FRAC, {}
        found["no_signal"] = self._lasts("silent", silent, _SILENT_ROWS, _SILENT_ROWS)
        if "sample/truncated_frac" in row:
            cut = silent and row["sample/truncated_frac"] > _CUT_FRAC
            found["cut"] = self._lasts("cut", cut, _CUT_ROWS, _CUT_ROWS)
        return found

    def _trends(self, row: Mapping[str, float]) -> dict[str, bool]:
        """Alerts on what the run came to, against its first rows."""
        for name in ("reward/mean", "loss/entropy", "loss/kl_teacher"):
            if name in row:
                self._courses[name].add(row[name])
        found, reward = {}, self._courses["reward/mean"]
        if "loss/entropy" in row and reward.is_long:
            first, last = self._courses["loss/entropy"].ends()
            found["entropy"] = last < _ENTROPY_FRAC * first and not reward.has_risen()
        if "loss/kl_teacher" in row and (course := self._courses["loss/kl_teacher"]).is_long:
            first, last = course.ends()
            found["teacher"] = last > max(_TEACHER_NATS, _TEACHER_FRAC * first)
        return found


class _Course:
    """The first values of a metric and its last."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=_GAIN_ROWS)

    def add(self, value: float) -> None:
        if len(self._first) < _GAIN_ROWS:
            self._first.append(value)
        else:
            self._last.append(value)

    @property
    def is_long(self) -> bool:
        return len(self._last) == _GAIN_ROWS

    def ends(self) -> tuple[float, float]:
        return statistics.fmean(self._first), statistics.fmean(self._last)

    def has_risen(self) -> bool:
        """By more than 2 standard errors of the difference."""
        first, last = self.ends()
        spread = statistics.variance(self._first) + statistics.variance(self._last)
        return last - first > 2.0 * math.sqrt(spread / _GAIN_ROWS)


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
