"""How a run whose engine and trainer take turns spends its time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

_OF_TRAINER = ("unpark", "hand over")  # spans; the publish is in the second
_OF_ENGINES = ("turn/close_s", "turn/open_s")


def turn_figures(
    rows: Sequence[Mapping[str, float]], spans: Iterable[Mapping[str, Any]]
) -> dict[str, tuple[float, str]]:
    """Figures and their units, from the metrics of a run and the spans of its first rank.

    A turn ends with a hand-over.  The first two, of a start and of a first step, make buffers and
    compile kernels: they do not count.
    """
    own = [span for span in spans if span["name"] in _OF_TRAINER]
    ends = [span["end_s"] for span in own if span["name"] == "hand over"][1:]
    assert len(ends) > 1, f"{len(ends)} steps are no turn"
    first, last = ends[0], ends[-1]
    parts = {
        name: sum(
            s["end_s"] - s["start_s"] for s in own if s["name"] == name and s["end_s"] > first
        )
        for name in _OF_TRAINER
    }
    later = rows[1 : len(ends)]
    parts |= {name: sum(row.get(name, 0.0) for row in later) for name in _OF_ENGINES}
    tokens = sum(row["perf/train_tokens_per_s"] * row["perf/step_s"] for row in later)
    turns = [after - before for before, after in pairwise(ends)]
    return {
        "turns": (float(len(turns)), "turns"),
        "tokens of whole turns": (tokens / (last - first), "tokens/s"),
        "longest turn": (max(turns), "s"),
        "switching": (sum(parts.values()) / (last - first), "of a turn"),
        **{name: (value / len(turns), "s a turn") for name, value in parts.items()},
    }
