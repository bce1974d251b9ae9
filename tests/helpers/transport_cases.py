"""The transports that tests run on, and what each promises: a new one is added here.

`transports()` are the parameters of every test that goes over all of them.  A transport that needs
special hardware is listed in ELSEWHERE with the tests that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import pytest

from tests.helpers.transport_peer import mooncake_missing


@dataclass(frozen=True, slots=True)
class TransportCase:
    """What the tests expect of one transport."""

    same_machine: bool  # endpoints are useless on another machine
    is_mapped: bool = False  # a link shows the remote buffer as local memory
    needs_receiver: bool = True  # a put waits for the receiving process when that is stopped
    listens: bool = False  # on a socket, whose peers must know a token
    missing: Callable[[], str] | None = None  # why its library cannot be loaded here; empty: it can


CASES = {
    "shm": TransportCase(
        same_machine=True,
        is_mapped=True,
        needs_receiver=False,
    ),
    "gloo": TransportCase(
        same_machine=False,
        listens=True,
    ),
    "mooncake": TransportCase(
        same_machine=False,
        listens=True,
        missing=mooncake_missing,
    ),
    "disk": TransportCase(
        same_machine=False,
        needs_receiver=False,
    ),
}
ELSEWHERE = {
    "nccl": "tests/multi/test_gpu_transports.py on the device double, tests/gpu on two GPUs",
    "cuda_ipc": "tests/unit/test_cuda_ipc.py, and as nccl; tests/gpu needs one GPU",
}


def transports(*, default: Collection[str] = CASES, listening: bool = False) -> list[object]:
    """Names as parameters, with the mark of those that need a library of their own.

    default: those that run in the default selection; the others are for --full.
    """
    return [
        pytest.param(name, marks=_marks(name, case, default))
        for name, case in CASES.items()
        if case.listens or not listening
    ]


def _marks(name: str, case: TransportCase, default: Collection[str]) -> list[pytest.MarkDecorator]:
    if case.missing is not None:
        return [pytest.mark.mooncake]
    return [] if name in default else [pytest.mark.full]


def skip_if_missing(name: str) -> None:
    """Skip a test, with the library's own complaint, where its transport cannot be loaded."""
    missing = CASES[name].missing
    if missing is not None and (reason := missing()):
        pytest.skip(reason)
