"""The trainer on the device double: a step equal to the CPU's, its waits, blunders, offload."""

from __future__ import annotations

import pytest

from tests.double.process import Module

TRAINER = Module("on_trainer.py")
OFFLOAD = Module("on_offload.py")


@pytest.mark.parametrize("name", TRAINER.names())
def test_the_trainer(name: str) -> None:
    TRAINER.passed(name)


@pytest.mark.parametrize("name", OFFLOAD.names())
def test_an_offloaded_optimizer(name: str) -> None:
    OFFLOAD.passed(name)
