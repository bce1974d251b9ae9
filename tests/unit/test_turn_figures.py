"""Shares of a turn, from the metrics and spans of a run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.turn_figures import turn_figures


def span(name: str, start_s: float, end_s: float) -> dict[str, Any]:
    return {"name": name, "start_s": start_s, "end_s": end_s}


def row(close_s: float, open_s: float, tokens: float) -> dict[str, float]:
    step_s = 2.0
    return {
        "turn/close_s": close_s,
        "turn/open_s": open_s,
        "perf/step_s": step_s,
        "perf/train_tokens_per_s": tokens / step_s,
    }


START = [span("hand over", 0, 5), span("wait", 5, 9)]
FIRST = [span("unpark", 9, 14), span("step", 14, 16), span("hand over", 16, 20)]
LATER = [
    *(span("wait", 20, 26), span("unpark", 26, 27), span("step", 27, 29)),
    *(span("hand over", 29, 30), span("unpark", 36, 37), span("hand over", 38, 40)),
]
ROWS = [row(9, 9, 1e6), row(0.5, 0.25, 100), row(0.5, 0.75, 300)]


def test_shares_are_of_whole_turns_without_the_first() -> None:
    found = turn_figures(ROWS, START + FIRST + LATER)
    assert found["turns"] == (2, "turns")
    assert found["longest turn"] == (10, "s")
    assert found["tokens of whole turns"] == (400 / 20, "tokens/s")
    assert found["unpark"] == (1, "s a turn")
    assert found["hand over"] == (1.5, "s a turn")
    assert found["turn/close_s"][0] + found["turn/open_s"][0] == 1
    assert found["switching"] == (pytest.approx(7 / 20), "of a turn")


def test_a_batch_that_was_ready_needs_no_switch_of_engines() -> None:
    rows = [*ROWS[:2], {k: v for k, v in ROWS[2].items() if not k.startswith("turn/")}]
    found = turn_figures(rows, START + FIRST + LATER)
    assert found["switching"] == (pytest.approx(5.75 / 20), "of a turn")


def test_a_single_step_has_no_figures() -> None:
    with pytest.raises(AssertionError, match="1 steps are no turn"):
        turn_figures(ROWS, START + FIRST)
