"""Three errors in a row of an engine that lives end the run; its loss, or a burst, does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moerl.config.schema import RunConfig
from moerl.controller import engine_pool, turn_router
from moerl.core.errors import AnswerError, EngineError, RecordError
from moerl.core.types import GenerateRequest
from tests.helpers.controllers import CONFIG, PublishingTrainer, make, running
from tests.helpers.patience import patience
from tests.helpers.stub_engine import KILLED, StubEngine

STEPS = 40
GARBAGE = AnswerError("engine /generate: the answer is no JSON: nan")
ENDS = r"engine 0 answered 3 requests in a row with an error and none with a reply; last: "


class FaultyEngine(StubEngine):
    """Fails the calls whose number, from 1 on, `faulty` names."""

    def __init__(
        self, faulty: Callable[[int], bool], error: Exception = GARBAGE, **options: Any
    ) -> None:
        super().__init__(**options)
        self.faulty, self.error, self.asked = faulty, error, 0

    async def generate(self, requests: Any) -> Any:
        self.asked += 1
        if self.faulty(self.asked):
            raise self.error
        return await super().generate(requests)


def trained(tmp_path: Path, engine: StubEngine, *more: StubEngine) -> int:
    """Number of groups that a run of STEPS steps trains."""

    async def body() -> int:
        config = replace(CONFIG, run=RunConfig(steps=STEPS))
        controller, _ = make(tmp_path, engine, config, more_engines=more)
        engines = range(len(more), -1, -1)  # engine 0 is published to first, so it begins groups
        trainer = PublishingTrainer(controller, tuple(engines))

        async def train() -> None:
            await trainer.hello()
            for _ in range(STEPS):
                await trainer.step()

        await running(controller, train(), patience(30))
        return len(trainer.groups)

    return asyncio.run(body())


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pool, "_REST_S", 0.05)
    monkeypatch.setattr(turn_router, "_APART_S", 0.05)


@pytest.mark.parametrize("others", [0, 1])
def test_an_engine_that_answers_nothing_but_errors_ends_the_run(
    tmp_path: Path, others: int
) -> None:
    engine = FaultyEngine(lambda _: True)
    more = [StubEngine(number=1) for _ in range(others)]
    with pytest.raises(EngineError, match=ENDS + r".*no JSON.*engine\.args.*logs/engine0\.log"):
        trained(tmp_path, engine, *more)
    assert engine.asked >= 3


def test_a_loss_is_no_error(tmp_path: Path) -> None:
    """Control: the same engine, whose process is gone."""
    engine = FaultyEngine(lambda _: True, EngineError(KILLED))
    assert trained(tmp_path, engine, StubEngine(number=1)) == 2 * STEPS
    assert engine.asked > 9


def test_a_reply_between_errors_begins_again(tmp_path: Path) -> None:
    engine = FaultyEngine(lambda number: number % 2 == 1)
    assert trained(tmp_path, engine) == 2 * STEPS
    assert engine.asked > 9, "more than three errors"


def test_errors_of_one_moment_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that dies answers its last requests with errors; so do requests of one message."""
    refused = set[str]()

    def each_once(request: GenerateRequest) -> RecordError | None:
        is_first = request.rollout_id.count(".") == 2  # GROUP.SIBLING.TURN, without a try
        refused.update([request.rollout_id] * is_first)
        return RecordError("engine", "HTTP 500") if is_first else None

    monkeypatch.setattr(turn_router, "_APART_S", 5.0)
    assert trained(tmp_path, StubEngine(refuses=each_once)) == 2 * STEPS
    assert len(refused) >= 4 * STEPS


@pytest.mark.parametrize(
    ("reason", "message"), [("engine", ENDS), ("request", "was refused 3 times")]
)
def test_only_errors_of_the_engine_itself_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, message: str
) -> None:
    """Control: a request that the server calls wrong is the fault of who wrote it."""
    monkeypatch.setattr(turn_router, "_APART_S", 0.0)
    engine = StubEngine(refuses=lambda request: RecordError(reason, "HTTP 400 or 500"))
    with pytest.raises(EngineError, match=message):
        trained(tmp_path, engine)
