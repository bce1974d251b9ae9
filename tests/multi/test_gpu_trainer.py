"""The trainer on the device double: a step equal to the CPU's, its waits, seeded blunders."""

from __future__ import annotations

import pytest

from tests.double.process import Module

TRAINER = Module("on_trainer.py")


@pytest.mark.parametrize("name", TRAINER.names())
def test_the_trainer(name: str) -> None:
    TRAINER.passed(name)
