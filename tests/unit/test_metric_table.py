"""The table of metrics, the page that defines them, and the names in the code agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moerl.controller.step_metrics import StepMetrics
from moerl.core.metric_table import METRICS, Adds, Ratio, adds_of, ratios
from moerl.observe.report_sections import SECTIONS
from tests.helpers.documented_metrics import undocumented

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/metrics.md").read_text()
SOURCES = {path: path.read_text() for path in (ROOT / "moerl").rglob("*.py")}
# The first cells of the tables of the page: the names that it defines.
DEFINED = {
    name
    for line in PAGE.splitlines()
    if line.startswith("| `")
    for name in re.findall(r"`(\w+/[^`\s]+)`", line.split("|")[1])
}
FAMILIES = {name.partition("/")[0] for name in DEFINED}
PARTS = {"eval/role", "loss/skip"}  # of longer names


def names_in(text: str) -> set[str]:
    """Whole names of metrics that are written in a source."""
    found = re.findall(r'(?<!f)"([a-z_]+(?:/\w+)+)(?<!_)"', text)
    return {name for name in found if name.partition("/")[0] in FAMILIES}


def test_every_name_in_the_code_is_defined_in_the_page() -> None:
    written = names_in("\n".join(SOURCES.values()))
    assert len(written) > 200
    assert undocumented(written - PARTS, PAGE) == []
    assert undocumented({name for name in METRICS if "{" not in name}, PAGE) == []


def test_every_name_of_the_page_is_in_the_code() -> None:
    words = set(re.findall(r"\w+", "\n".join(SOURCES.values())))
    ends = {name.rpartition("/")[2] for name in DEFINED if "{" not in name}
    assert len(ends) > 150
    assert ends - words == set()


def test_undocumented_finds_what_is_missing() -> None:
    doc = "`a/b`, `refused/{reason}` and a/plain, `perf/{phase}_s`"
    names = ["a/b", "a/c", "a/plain", "refused/x", "refused/", "refused/x/y", "perf/x_s", "perf/x"]
    assert undocumented(names, doc) == ["a/c", "a/plain", "perf/x", "refused/", "refused/x/y"]
    unknown = ["async/lag", "loss/unheard_of", "mismatch/k4"]
    assert undocumented(unknown, PAGE) == unknown
    assert names_in('x = "loss/unheard_of"; f"loss/half_{x}"; "no/metric"') == {unknown[1]}


def test_every_chart_is_drawn_and_has_lines() -> None:
    charts = [chart for _, charts in SECTIONS.values() for chart in charts]
    assert {metric.chart for metric in METRICS.values()} - {""} == {one.title for one in charts}
    assert all(chart.lines for chart in charts)


def test_what_is_added_is_in_the_table_and_the_reverse() -> None:
    """Negative control: a name that is not in the table."""
    others = "\n".join(text for path, text in SOURCES.items() if path.name != "metric_table.py")
    for name in re.findall(r"etrics\.add,?\(?\s*f?\"([^\"]+)\"", others):
        adds_of(name)
    added = {name for name, one in METRICS.items() if one.adds is Adds.SUM}
    added |= {name for one in METRICS.values() if isinstance(one.adds, Ratio) for name in one.adds}
    assert [name for name in added if f'"{name}"' not in others] == []
    with pytest.raises(KeyError):
        StepMetrics().add("async/unheard_of")


def test_a_ratio_needs_its_divisor() -> None:
    assert ratios({"masked": 4.0, "kept": 6.0})["keep/size_mean"] == 1.5
    assert "keep/cover_frac" not in ratios({"masked": 4.0})


def test_the_row_of_a_step_follows_the_rules() -> None:
    metrics = StepMetrics()
    metrics.add_all({"async/routed_groups": 2, "agent/turns": 3, "refused/blob": 1})
    metrics.add_all({"cached_tokens": 30, "prompt_tokens": 40})
    metrics.forked(given_up=1)
    row = metrics.row([])
    assert (row["async/routed_groups"], row["agent/turns"], row["refused/blob"]) == (2, 3, 1)
    assert row["async/cached_frac"] == 0.75
    assert (row["fork/continuations"], row["fork/cached_frac"], row["fork/given_up"]) == (0, 0, 1)
    after = metrics.row([])
    assert (after["async/routed_groups"], after["refused/blob"]) == (0, 1)
    assert {"agent/turns", "async/cached_frac", "fork/given_up"}.isdisjoint(after)
    assert {name for name, one in METRICS.items() if one.adds is Adds.SUM} <= after.keys()
    assert metrics["refused/blob"] == 1
    assert all("/" in name for name in row), "sums of ratios are no metrics"
