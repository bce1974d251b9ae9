"""The tasks of a run: the entries of `tasks`, each laid over `task` and `sampling`.

A recipe with `task` alone has one entry without a label.  Entries are stored as they were written
(only the differences), so `task.score_timeout_s=20` still reaches each entry that does not set it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from math import gcd, lcm
from typing import Any

from moerl.config.bounds import Positive, UserPath
from moerl.config.schema import Config, SamplingConfig, TaskConfig
from moerl.config.validate import check_keys, read_section
from moerl.core.errors import ConfigError

MAX_PERIOD = 10_000  # prompts after which the order of tasks repeats
HELD_OUT = ("path", "split")  # settings of `evaluation` that belong to a task
MISSING = "???"  # OmegaConf: a value that this layer does not set
_LABEL = re.compile(r"[A-Za-z][\w.-]*")  # it is part of metric names


@dataclass(frozen=True)
class TaskEntry(TaskConfig):
    """One task of a run, with the settings that the entry itself does not name filled in."""

    label: str = ""  # name in metrics, samples, overrides and errors
    weight: Positive = 1.0  # share of the prompts, relative to the other entries
    evaluation_path: UserPath = ""  # tasks with files: held-out prompts
    evaluation_split: str = ""  # of evaluation_path, or without it of path
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    @property
    def samplings(self) -> dict[str, SamplingConfig]:
        """Of each role; "": of a turn without one.  Raises ConfigError."""
        found = {"": self.sampling}
        for role, settings in self.roles.items():
            where, given = f"task.roles.{role}.sampling.", settings.sampling
            check_keys(SamplingConfig, given, where)
            found[role] = read_section(SamplingConfig, asdict(self.sampling) | given, where)
        return found


def entries_of(config: Config) -> tuple[TaskEntry, ...]:
    """The tasks of a run, at least one.  Raises ConfigError."""
    if not config.tasks:
        sampling = with_finite_top_k(config.sampling, kept=config.replay.sampling_mask)
        held_out = {f"evaluation_{name}": getattr(config.evaluation, name) for name in HELD_OUT}
        own = held_out | {"sampling": asdict(sampling)}
        return (read_section(TaskEntry, asdict(config.task) | own, "task."),)
    found = tuple(_entry(config, place) for place in range(len(config.tasks)))
    _check_labels(found)
    return found


def by_label(config: Config) -> dict[str, TaskEntry]:
    """The tasks of a run by their label, which is `Prompt.task`."""
    return {entry.label: entry for entry in entries_of(config)}


def reward_models_of(config: Config) -> tuple[str, ...]:
    """Folders of the models with a value head that give rewards (where=model), each once."""
    terms = [term for entry in entries_of(config) for term in entry.terms]
    return tuple(dict.fromkeys(term.model for term in terms if term.where == "model"))


def longest_row(config: Config) -> int:
    """Tokens of the longest prompt with one turn, over all tasks."""
    return max(
        entry.max_prompt_tokens + sampling.max_new_tokens
        for entry in entries_of(config)
        for sampling in entry.samplings.values()
    )


def with_finite_top_k(sampling: SamplingConfig, *, kept: bool) -> SamplingConfig:
    """Give a truncating recipe without top_k a bound.  kept: sampling masks are recorded."""
    truncates = sampling.top_p < 1.0 or sampling.min_p > 0.0
    if kept and truncates and sampling.top_k == -1:
        return replace(sampling, top_k=sampling.mask_top_k)
    return sampling


@contextmanager
def naming(entry: TaskEntry) -> Iterator[None]:
    """Errors about `task.*` and `sampling.*` name the entry: `tasks.LABEL.*`."""
    try:
        yield
    except ConfigError as error:
        section, _, name = error.field.partition(".")
        if not entry.label or section not in ("task", "sampling"):
            raise
        inner = f"sampling.{name}" if section == "sampling" else name
        raise error.under(f"tasks.{entry.label}.{inner}") from error


def whole_weights(entries: Sequence[TaskEntry]) -> list[int]:
    """Weights as whole numbers without a common divisor.  Raises ConfigError: sum too large."""
    exact = [Fraction(str(entry.weight)) for entry in entries]
    scale = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    whole = [number // gcd(*whole) for number in whole]
    if sum(whole) > MAX_PERIOD:
        given = ":".join(f"{entry.weight:g}" for entry in entries)
        raise ConfigError(
            f"tasks.{entries[0].label}.weight",
            entries[0].weight,
            f"the ratio of all weights, {given}, needs whole numbers of sum {sum(whole):,}; "
            f"at most {MAX_PERIOD:,} is allowed, such as 3 and 1, or 0.35 and 0.65",
        )
    return whole


def with_changes(entries: Sequence[object], changes: Mapping[str, object]) -> list[object]:
    """Entries after `tasks.LABEL.FIELD=VALUE`; a layer that sets `tasks` to a mapping."""
    found = list(entries)
    for label, change in changes.items():
        places = [
            place
            for place, entry in enumerate(found)
            if isinstance(entry, Mapping) and str(entry.get("label", "")) == str(label)
        ]
        if not places or not isinstance(change, Mapping):
            known = [str(e.get("label", "")) for e in found if isinstance(e, Mapping)]
            raise ConfigError(
                f"tasks.{label}",
                change,
                f"use tasks.LABEL.FIELD=VALUE; the labels are {', '.join(known) or '(none)'}",
            )
        for place in places:
            found[place] = laid_over(found[place], change)
    return found


def _entry(config: Config, place: int) -> TaskEntry:
    given = config.tasks[place]
    label = str(given.get("label", ""))
    where = f"tasks.{label or place}."
    check_keys(TaskEntry, given, where)
    base = asdict(config.task) | {"sampling": asdict(config.sampling)}
    entry = read_section(TaskEntry, laid_over(base, given), where)
    sampling = with_finite_top_k(entry.sampling, kept=config.replay.sampling_mask)
    return replace(entry, sampling=sampling)


def _check_labels(entries: Sequence[TaskEntry]) -> None:
    seen: set[str] = set()
    for place, entry in enumerate(entries):
        if not _LABEL.fullmatch(entry.label):
            raise ConfigError(
                f"tasks.{place}.label",
                entry.label,
                "each task needs a name: a letter, then letters, digits, _, . and -",
            )
        if entry.label in seen:
            raise ConfigError(f"tasks.{place}.label", entry.label, "use each label once")
        seen.add(entry.label)
    whole_weights(entries)


def laid_over(below: Any, above: Any) -> Any:
    """Mappings are merged key by key; other values are replaced, except by MISSING."""
    if above == MISSING:
        return below
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return above
    merged = {key: laid_over(below[key], above[key]) for key in below if key in above}
    return {**below, **above, **merged}
