"""The device double finds blunders of GPU code (tests/double); the head and decode hooks on it."""

from __future__ import annotations

import pytest

from tests.double.process import Module

ITSELF = Module("on_itself.py", others=("on_head.py", "on_decode.py"))


@pytest.mark.parametrize("name", ITSELF.names())
def test_the_double(name: str) -> None:
    ITSELF.passed(name)
