"""Transports between GPUs, on the device double."""

from __future__ import annotations

import pytest

from tests.double.process import Module

pytestmark = pytest.mark.full

TRANSPORTS = Module("on_transports.py")


@pytest.mark.parametrize("name", TRANSPORTS.names())
def test_on_the_double(name: str) -> None:
    TRANSPORTS.passed(name)
