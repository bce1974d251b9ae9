"""Which process starts again, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moerl.config.schema import SupervisionConfig
from moerl.core.errors import EngineError
from moerl.launch.supervision.restarts import Restarts
from tests.helpers.scripted_actors import Clock, Panel


class Policy:
    """The decisions of `Restarts`, without its console and its pending restarts."""

    def __init__(self, clock: Clock, **settings: float) -> None:
        self._steps = 0
        panel: Any = Panel()
        tracer: Any = SimpleNamespace(add=lambda *args, **fields: None)
        config = SupervisionConfig(**settings)  # type: ignore[arg-type]
        self.restarts = Restarts(config, panel, tracer, clock, lambda: 0)
        self.forget, self.pause_s = self.restarts.forget, self.restarts.pause_s

    def stepped(self) -> None:
        self._steps += 1
        self.restarts.made(self._steps)

    def died(self, name: str) -> str:
        return self.restarts.died(name, EngineError("killed"))

    def is_back(self, name: str) -> None:
        self.restarts.began(name)
        self.restarts.is_back(name)


def policy(**settings: float) -> tuple[Policy, Clock]:
    """Of a run that has made steps."""
    clock = Clock()
    made = Policy(clock, **settings)
    made.stepped()
    return made, clock


def storm(made: Policy, clock: Clock, name: str, every_s: float, start_s: float = 0) -> int:
    """Deaths until the process is not restarted (at most 50), with a step of others in between.

    start_s: how long each of its starts takes.
    """
    for number in range(1, 51):
        clock.now += every_s
        made.stepped()
        if made.died(name):
            return number
        clock.now += start_s
        made.is_back(name)
    return 50


@pytest.mark.parametrize(
    ("every_s", "start_s", "num_deaths"),
    [
        (10.0, 0.0, 5),
        (350.0, 0.0, 5),
        (350.0, 900.0, 5),  # a large model: five starts alone take over an hour
        (500.0, 0.0, 50),  # four in a window
    ],
)
def test_an_engine_that_keeps_dying_is_excluded(
    every_s: float, start_s: float, num_deaths: int
) -> None:
    made, clock = policy()
    assert storm(made, clock, "engine 1", every_s, start_s) == num_deaths


def test_steps_forgive_the_trainer_and_the_controller() -> None:
    for name in ("trainer", "controller", "ref_models"):
        made, clock = policy()
        assert storm(made, clock, name, 10.0) == 50


def test_deaths_without_a_step_are_counted() -> None:
    made, _ = policy(max_restarts=2)
    assert [bool(made.died("trainer")) for _ in range(3)] == [False, False, True]
    made, _ = policy(max_restarts=2)
    assert (
        "without a new step (supervision.max_restarts = 2)"
        in [made.died("engine 0") for _ in range(3)][-1]
    )


def test_pauses_grow_with_each_death_and_shrink_with_time() -> None:
    made, clock = policy(backoff_s=1.0, window_s=100.0, max_restarts=1000, max_deaths=1000)
    pauses = []
    for _ in range(4):
        made.died("trainer")
        pauses.append(made.pause_s("trainer"))
        made.stepped()
    assert pauses == [1, 2, 4, 8]
    clock.now += 101.0
    made.died("trainer")
    assert made.pause_s("trainer") == 1
    for _ in range(40):
        made.died("trainer")
    assert made.pause_s("trainer") == 60, "nobody waits for hours"


def test_nothing_restarts_before_the_first_step_or_without_restarts() -> None:
    made = Policy(Clock())
    assert made.died("engine 0")
    made.stepped()
    assert not made.died("engine 0")
    never, _ = policy(max_restarts=0)
    assert never.died("engine 0")
    assert not never.restarts.restarts_at_all


def test_an_engine_that_left_is_forgotten() -> None:
    made, clock = policy(max_deaths=2)
    made.died("engine 1")
    made.forget("engine 1")
    clock.now += 1.0
    assert not made.died("engine 1")
