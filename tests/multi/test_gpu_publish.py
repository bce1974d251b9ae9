"""A publish on the device double: snapshot, packing, staging, commit; bytes, waits, order."""

from __future__ import annotations

import pytest

from tests.double.process import Module

PUBLISH = Module("on_publish.py")
FACTORS = Module("on_factors.py")


@pytest.mark.parametrize("name", PUBLISH.names())
def test_a_publish(name: str) -> None:
    PUBLISH.passed(name)


@pytest.mark.parametrize("name", FACTORS.names())
def test_a_publish_of_factors(name: str) -> None:
    FACTORS.passed(name)
