"""The trainer on the device double: policy, reference, teacher and critic equal to the CPU's, their
waits, blunders, offload, parking, adapters, one GPU shared with an engine.
"""

from __future__ import annotations

import pytest

from tests.double.process import Module

pytestmark = pytest.mark.full

TRAINER = Module(
    "on_trainer.py", others=("on_models.py", "on_audit.py", "on_settings.py", "on_grouped.py")
)
OFFLOAD = Module("on_offload.py")
PARKED = Module("on_parked.py")
ADAPTERS = Module("on_lora.py")
ONE_GPU = Module("on_one_gpu.py")
TURNS = Module("on_turns.py")


@pytest.mark.parametrize("name", TRAINER.names())
def test_the_trainer(name: str) -> None:
    TRAINER.passed(name)


@pytest.mark.parametrize("name", OFFLOAD.names())
def test_an_offloaded_optimizer(name: str) -> None:
    OFFLOAD.passed(name)


@pytest.mark.parametrize("name", PARKED.names())
def test_a_parked_trainer(name: str) -> None:
    PARKED.passed(name)


@pytest.mark.parametrize("name", ADAPTERS.names())
def test_adapters(name: str) -> None:
    ADAPTERS.passed(name)


@pytest.mark.parametrize("name", TURNS.names())
def test_turns_with_one_gpu(name: str) -> None:
    TURNS.passed(name)


@pytest.mark.parametrize("name", ONE_GPU.names())
def test_one_gpu(name: str) -> None:
    ONE_GPU.passed(name)
