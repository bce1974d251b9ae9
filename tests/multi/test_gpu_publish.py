"""A publish on the device double: snapshot, packing, staging, commit; bytes, waits, order."""

from __future__ import annotations

import pytest

from tests.double.process import Module

PUBLISH = Module("on_publish.py")


@pytest.mark.parametrize("name", PUBLISH.names())
def test_a_publish(name: str) -> None:
    PUBLISH.passed(name)
