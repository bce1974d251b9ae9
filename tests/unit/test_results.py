"""Figures of benches (bench/figures.py) and the table that tools/results makes of them."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from bench import figures
from bench.figures import Figure, Result
from tools import results_table


def test_readme_has_the_figures_of_the_committed_files() -> None:
    text = results_table.README.read_text()
    found = results_table.load(results_table.FOLDER)
    assert results_table.with_table(text, results_table.table(found)) == text


def test_another_figure_changes_the_readme() -> None:
    text = results_table.README.read_text()
    figure = Figure("a / b", 0.5)
    found = [*results_table.load(results_table.FOLDER), Result("x", "m", (figure,))]
    changed = results_table.with_table(text, results_table.table(found))
    assert changed != text
    assert "| a / b | 0.50 |" in changed


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    figure = Figure("a / b", 0.5, low=0.4, high=0.6, rounds=3, aim=0.9, why="slow")
    result = Result("python bench/bare.py", "a machine", (figure,), {"seconds": 2.0})
    figures.report(result, tmp_path / "r.json")
    assert figures.read(tmp_path / "r.json") == result
    assert json.loads((tmp_path / "r.json").read_text())["machine"] == "a machine"


def test_a_missed_aim_needs_a_reason(tmp_path: Path) -> None:
    missed = Figure("a / b", 0.5, aim=0.9)
    figures.report(Result("x", "m", (missed,)), tmp_path / "r.json")
    with pytest.raises(ValueError, match=r"r\.json: 'a / b' misses its aim"):
        results_table.load(tmp_path)
    given = dataclasses.replace(missed, why="because")
    figures.report(Result("x", "m", (given,)), tmp_path / "r.json")
    assert "aim 0.9: missed, because" in results_table.table(results_table.load(tmp_path))


def test_a_readme_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="once each"):
        results_table.with_table("no table", "rows")


def test_the_interval_covers_the_median_of_the_source() -> None:
    """In about 95 of 100 samples; a tenth of the interval covers it far less often."""
    rng = np.random.default_rng(0)
    wide = narrow = 0
    for _ in range(200):
        found = figures.of_ratios("r", rng.lognormal(0.0, 0.1, 25).tolist())
        assert found.low is not None
        assert found.high is not None
        wide += found.low <= 1.0 <= found.high
        middle, tenth = found.value, (found.high - found.low) / 20
        narrow += middle - tenth <= 1.0 <= middle + tenth
    assert 180 <= wide <= 200
    assert narrow < 80
