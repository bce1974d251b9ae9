"""Names of metrics in the code and in the page that defines them, and the row of a step."""

from __future__ import annotations

import re
from pathlib import Path

from moerl.controller.step_metrics import StepMetrics
from moerl.core.step_counts import COUNTERS, RATIOS
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


def test_the_sums_of_ratios_and_the_counters_are_added_somewhere() -> None:
    others = "\n".join(text for path, text in SOURCES.items() if path.name != "step_counts.py")
    added = {*COUNTERS, *(name for pair in RATIOS.values() for name in pair)}
    assert [name for name in added if f'"{name}"' not in others] == []


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
    assert set(COUNTERS) <= after.keys()
    assert metrics["refused/blob"] == 1
    assert all("/" in name for name in row), "sums of ratios are no metrics"
