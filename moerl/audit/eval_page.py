"""The findings of `moerl eval` as rows of text, and as one self-contained page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from moerl.observe.page import Column, Page, PageSection, Table, write_html

_SHOWN = 40  # prompts of the page
_COLUMNS = {  # metric: title, format
    "reward_mean": ("reward", ".3f"),
    "reward_low": ("95 % from", ".3f"),
    "reward_high": ("to", ".3f"),
    "reward_best": ("best", ".3f"),
    "pass_at_1": ("pass@1", ".3f"),
    "length_mean": ("tokens", ".1f"),
    "truncated_frac": ("cut", ".1%"),
    "items": ("prompts", ".0f"),
    "failed": ("failed", ".0f"),  # episodes of all tasks
}
TITLES = ["model", "task", *(title for title, _ in _COLUMNS.values())]


def rows(found: Mapping[str, Any]) -> Iterator[list[str]]:
    """One row per model and task, below `TITLES`; of a mixture the first one is of all tasks."""
    for name, one in found["models"].items():
        metrics: Mapping[str, float] = one["metrics"]
        for task in dict.fromkeys(["", *(row["task"] for row in one["prompts"])]):
            names = {metric: f"eval/{metric}/{task}".rstrip("/") for metric in _COLUMNS}
            yield [
                name,
                task or "all",
                *(
                    format(metrics[names[metric]], form) if names[metric] in metrics else ""
                    for metric, (_, form) in _COLUMNS.items()
                ),
            ]


def differences(found: Mapping[str, Any]) -> Iterator[str]:
    """A sentence per task on the difference of two models."""
    for task, one in found.get("difference", {}).items():
        within = f" [{one['low']:+.3f}, {one['high']:+.3f}]" if "low" in one else ""
        yield (
            f"difference{f' of {task}' if task else ''}: {one['mean']:+.3f}{within} over "
            f"{one['prompts']:.0f} prompts (model - against; 95 % by Student's t)"
        )


def write_page(path: Path, found: Mapping[str, Any]) -> Path:
    """Write the page: figures, differences, and prompts with their answers."""
    columns = [Column(title, "number" if title in TITLES[2:] else "text") for title in TITLES]
    models = [f"{name}: {one['model']}" for name, one in found["models"].items()]
    figures = PageSection("Figures", table=Table(columns, list(rows(found))))
    words, sections = [*models, *differences(found)], [figures, _prompts(found["models"])]
    page = Page("moerl eval", found["recipe"], paragraphs=words, sections=sections)
    return write_html(path, page)


def _prompts(models: Mapping[str, Mapping[str, Any]]) -> PageSection:
    """Prompts with the first answer of each model, the lowest rewards of the last model first."""
    answered = [{row["index"]: row for row in one["prompts"]} for one in models.values()]
    lowest = sorted(answered[-1].values(), key=lambda row: fmean(row["rewards"]))[:_SHOWN]
    columns = [Column("prompt", "long")]
    for name in models:
        columns += [Column(f"reward, {name}", "number"), Column(f"answer, {name}", "long")]
    table = [
        [
            row["prompt"],
            *(cell for rows in answered for cell in _answer(rows.get(row["index"]))),
        ]
        for row in lowest
    ]
    return PageSection("Prompts", "Lowest rewards first.", Table(columns, table))


def _answer(row: Mapping[str, Any] | None) -> tuple[str, str]:
    return (f"{fmean(row['rewards']):.3f}", row["answers"][0]) if row else ("-", "")
