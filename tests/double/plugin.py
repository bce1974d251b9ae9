"""pytest plugin of the processes on the double: loads it before any module imports torch."""

from __future__ import annotations

from tests.double.load import load

load()
