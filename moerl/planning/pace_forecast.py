"""`moerl plan RECIPE --costs ...`: advice on engines, buffer depth and in-flight mode.

Runs the simulation (`moerl.planning.simulate`) with stated or measured service times of the model
on the hardware; the duration of a publish comes from the transfer forecast.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from moerl.config import Config
from moerl.config.task_mixture import longest_turn
from moerl.core.errors import ConfigError
from moerl.planning.simulate import Advice, Choice, Costs, Outcome, Workload, advise

NAMES = {
    "train_s": "an optimizer step of the trainer",
    "token_s": "a decode step of one engine, fixed part",
    "request_token_s": "added to it by each running request (0)",
    "prefill_token_s": "prefill of one token (0)",
    "output_tokens": "mean sampled tokens of a rollout",
    "output_sigma": "of their logarithm: 0 all equal, 1 heavy-tailed (1)",
    "prompt_tokens": "of a rollout (0)",
    "wait_s": "mean tool and scoring time of a group, exponential (0)",
    "pause_s": "an engine pauses for a weight update (1)",
    "publish_s": "from the end of a step until engines can update (forecast)",
}
_NEEDED = ("train_s", "token_s", "output_tokens")
_DRAWS = 4000


def pace(config: Config, values: Mapping[str, str], publish_s: float) -> Advice:
    """Run the simulation.  values: of `--costs`.  Raises ConfigError for a bad one."""
    given = {name: _number(name, text) for name, text in values.items()}
    if missing := [name for name in _NEEDED if name not in given]:
        raise ConfigError("--costs", ",".join(values), f"{missing[0]} is missing")
    costs = Costs(
        train_s=[given["train_s"]],
        token_s=given["token_s"],
        request_token_s=given.get("request_token_s", 0.0),
        prefill_token_s=given.get("prefill_token_s", 0.0),
        transfer_s=given.get("publish_s", publish_s),
        pause_s=given.get("pause_s", 1.0),
    )
    return advise(
        _workload(config, given),
        costs,
        max_engines=config.engine.count,
        max_lag=config.rollout.max_lag,
    )


def _workload(config: Config, given: Mapping[str, float]) -> Workload:
    draw, sigma = random.Random(0), given.get("output_sigma", 1.0)
    mean, limit = given["output_tokens"], longest_turn(config)
    center = mean / 2.718281828 ** (sigma**2 / 2)  # of a lognormal with this mean
    lengths = [
        max(1, min(limit, round(center * draw.lognormvariate(0.0, sigma)))) for _ in range(_DRAWS)
    ]
    wait_s = given.get("wait_s", 0.0)
    return Workload(
        config.rollout.groups_per_step,
        config.rollout.group_size,
        lengths,
        [draw.expovariate(1.0) * wait_s for _ in range(_DRAWS)] if wait_s else (0.0,),
        int(given.get("prompt_tokens", 0)),
    )


def as_json(found: Advice) -> dict[str, Any]:
    """All that `describe` prints."""
    return {
        "choice": asdict(found.choice),
        "outcome": asdict(found.outcome),
        "table": [asdict(choice) | asdict(outcome) for choice, outcome in found.table],
    }


def describe(found: Advice, config: Config) -> str:
    """A table and the advice."""
    lines = [
        "",
        f"pace of {config.engine.count} engines at most, simulated",
        f"{'engines':>8} {'depth':>6} {'mode':<13}{'step s':>9}{'idle trainer':>14}"
        f"{'idle engines':>14}{'lag':>7}{'prefilled again':>17}",
        *(_row(*entry) for entry in found.table),
    ]
    choice, outcome = found.choice, found.outcome
    lines.append(
        f"advice: engine.count={choice.engines} rollout.buffer_depth={choice.depth} "
        f"rollout.in_flight_mode={choice.mode}"
    )
    if outcome.trainer_idle > 0.3:
        lines.append(
            f"the trainer waits {outcome.trainer_idle:.0%} of the time: more engines, shorter "
            "answers or a smaller trainer would help"
        )
    return "\n".join(lines)


def _row(choice: Choice, outcome: Outcome) -> str:
    return (
        f"{choice.engines:>8} {choice.depth:>6} {choice.mode:<13}{outcome.step_s:>9.3g}"
        f"{outcome.trainer_idle:>14.0%}{outcome.engine_idle:>14.0%}{outcome.lag_mean:>7.2f}"
        f"{outcome.recomputed_tokens:>17.1%}"
    )


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise ConfigError(f"--costs {name}", text, "a finite number of at least 0 is needed")
    return value
