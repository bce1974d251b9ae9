"""The device double finds the blunders of GPU code that it is made for (tests/double)."""

from __future__ import annotations

import pytest

from tests.double.process import Module

ITSELF = Module("on_itself.py")
RECORDS = Module("on_records.py")  # beside SGLang's capturer


@pytest.mark.parametrize("name", ITSELF.names())
def test_the_double(name: str) -> None:
    ITSELF.passed(name)


@pytest.mark.full
@pytest.mark.parametrize("name", RECORDS.names())
def test_records_of_graphs(name: str) -> None:
    RECORDS.passed(name)
