"""Limits of tests grow with the load, and an event ends the wait at once."""

from __future__ import annotations

import pytest

from tests.helpers import patience as module
from tests.helpers.patience import Patience, happens, patience, until


class Machine:
    """A clock, and how much longer everything takes."""

    def __init__(self) -> None:
        self.now, self.load = 0.0, 1.0

    def limit(self, seconds: float) -> Patience:
        return Patience(seconds, lambda: self.now, lambda of: of * self.load)


def test_a_limit_passes_more_slowly_while_the_machine_is_busy() -> None:
    machine = Machine()
    limit = machine.limit(10.0)
    for now, load, over in ((6.0, 1.0, False), (12.0, 3.0, False), (17.0, 2.0, True)):
        machine.now, machine.load = now, load
        assert limit.over() == over, now


def test_a_free_machine_gives_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    class Load:
        text = "0.10 0.10 0.10 1/99 7"

        def read_text(self, **_: str) -> str:
            return self.text

    load = Load()
    monkeypatch.setattr(module, "_LOAD", load)
    monkeypatch.setattr(module.os, "cpu_count", lambda: 2)
    assert patience(10.0) == 10.0
    load.text = "8.00 1.00 1.00 1/99 7"
    assert patience(10.0) == 40.0
    load.text = "0.00 1.00 1.00 6/99 7"
    assert patience(10.0) == 30.0, "processes that just began are in no mean yet"


def test_an_event_ends_the_wait_and_none_is_said() -> None:
    seen = iter([False, True])
    assert happens(lambda: next(seen), 60.0)
    assert not happens(lambda: False, 0.01)
    with pytest.raises(AssertionError, match=r"after 0\.01 s of a free machine: it sleeps"):
        until(lambda: False, 0.01, "it sleeps")
