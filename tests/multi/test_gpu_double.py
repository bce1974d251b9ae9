"""The device double finds the blunders of GPU code that it is made for (tests/double)."""

from __future__ import annotations

import pytest

from tests.double.process import Module

ITSELF = Module("on_itself.py")


@pytest.mark.parametrize("name", ITSELF.names())
def test_the_double(name: str) -> None:
    ITSELF.passed(name)
