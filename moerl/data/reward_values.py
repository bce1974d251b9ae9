"""Values that a user's reward may return: a number of any library, or a dict of numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from moerl.core.types import Score, reward_problem

_FIELDS = ("reward", "steps", "turns", "errors", "reason", "roles", "answer")
MOST_ANSWER = 2000  # most characters of an extracted answer
_METRIC = re.compile(r"[\w.-]{1,64}", re.ASCII)
_TAKEN = ("mean", "std", "zero_var_frac")  # metrics reward/... of moerl
_METRICS, _SHOWN = 32, 80  # most metrics of a dict; characters of a value in an error


class BadReturn(Exception):
    """A value that is no score, or a call that does not fit; it continues "the reward ..."."""


def score_of(found: Any, key: str = "reward") -> Score:
    """The Score of a returned value.  key: of the reward in a dict.  Raises BadReturn."""
    if not isinstance(found, Mapping):
        return Score(number(found))
    if key not in found and not any(found.get(one) for one in ("steps", "turns", "roles")):
        wanted = f"{key}, steps, turns or roles" if key == "reward" else key
        raise BadReturn(f"returned {quoted(found)}, which has no {wanted}")
    steps = tuple((int(end), number(reward)) for end, reward in found.get("steps", ()))
    turns = tuple(number(reward) for reward in found.get("turns", ()))
    roles = {str(role): number(reward) for role, reward in dict(found.get("roles", {})).items()}
    earned = sum(value for _, value in steps) + sum(turns) + sum(roles.values())
    return Score(
        number(found.get(key, earned)),
        text_steps=steps,
        turns=turns,
        errors=number(found.get("errors", 0.0)),
        metrics=_metrics(found, {key, *_FIELDS}),
        reason=str(found.get("reason") or ""),
        answer=str(found.get("answer") or "")[:MOST_ANSWER],
        roles=roles,
    )


def number(value: Any) -> float:
    """A bool, int, float, Decimal, Fraction, or scalar of numpy or torch.  Raises BadReturn."""
    try:
        found = _plain(value)
        problem = "" if found is None else reward_problem(found)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        found, problem = None, ""
    if found is None:
        raise BadReturn(f"returned {quoted(value)}, want a number or a dict with one")
    if problem:
        raise BadReturn(f"returned {quoted(value)}, which {problem}")
    return found


def quoted(value: Any) -> str:
    """Type and value, short."""
    try:
        shown = repr(value)
    except Exception:
        shown = "without a readable form"
    cut = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return f"{type(value).__name__} {cut}"


def _plain(value: Any) -> float | None:
    """The number, or None for text and everything else that is none."""
    if hasattr(value, "dtype") and hasattr(value, "item"):
        value = value.item()  # raises for more than one element
    if isinstance(value, str | bytes | bytearray | complex) or value is None:
        return None
    return float(value)


def _metrics(found: Mapping[Any, Any], other: set[str]) -> dict[str, float]:
    """Numbers under further keys; text and objects, which verl's functions add, are left out."""
    metrics: dict[str, float] = {}
    for key in [key for key in found if key not in other]:
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):
            if (plain := _plain(found[key])) is not None:
                metrics[key] = plain
    if problem := metrics_problem(metrics):
        raise BadReturn(problem)
    return metrics


def metrics_problem(metrics: Mapping[Any, float]) -> str:
    """Why numbers cannot become metrics `reward/{name}`; "" if they can."""
    if len(metrics) > _METRICS:
        return f"returned {len(metrics)} metrics, more than {_METRICS}"
    for key, value in metrics.items():
        if not isinstance(key, str) or not _METRIC.fullmatch(key) or key in _TAKEN:
            return f"returned a dict with {quoted(key)}, which cannot name a metric"
        if problem := reward_problem(value):
            return f"returned {key} = {value}, which {problem}"
    return ""
