"""A real run listens on what the allow list names and on nothing else; the page has that list."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.listeners import Seen, missing, strangers, table
from tests.helpers.short_run import ShortRun

ROOT = Path(__file__).resolve().parents[2]
# The monitor starts later than a run of seconds ends, on some machines; the port is fixed, so of
# two runs on a machine one has it.
MAY_BE_ABSENT = {"Ray: metrics of its monitor"}


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_a_run_on_one_machine_listens_on_what_is_listed(short_run: ShortRun) -> None:
    assert strangers(short_run.listeners) == []
    assert {*missing(short_run.listeners)} <= MAY_BE_ABSENT, "somebody looked"


def listening(process: str, address: str = "127.0.0.1", port: int = 1) -> Seen:
    return Seen(process, 7, address, port)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.0.2.7", "::ffff:192.0.2.7"])
def test_another_address_is_noticed(address: str) -> None:
    agent = "python -m moerl.distributed.torchrun x"
    assert strangers([listening(agent), listening(agent, "127.0.0.1")]) == []
    assert strangers([listening("ray::EngineActor", "::ffff:127.0.0.1")]) == []
    (sentence,) = strangers([listening(agent, address)])
    assert sentence.endswith(f"listens on {address}:1")


def test_another_listener_of_a_known_process_is_noticed() -> None:
    one = listening("python -m moerl.distributed.torchrun x")
    (sentence,) = strangers([one, replace(one, port=2)])
    assert sentence.endswith("has 2 listeners; 1 are listed")


def test_another_process_is_noticed() -> None:
    (sentence,) = strangers([listening("python -m http.server")])
    assert sentence == "python -m http.server has 1 listeners; 0 are listed"


def test_the_page_prints_the_list() -> None:
    assert table() in (ROOT / "docs/clusters.md").read_text()
