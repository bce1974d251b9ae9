"""What some work on the double gave and cost, and how a blunder in it shows."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.double.train_once import Tensors, largest_difference
from tests.double.watch import OPS, PAGEABLE, WAITS, memory, watch

Work = Callable[[], Tensors]


@dataclass(frozen=True)
class Outcome:
    """Waits and copies are those of our own lines."""

    numbers: Tensors
    waits: int
    pageable: int
    peak: int  # bytes above those before

    def same_numbers(self, other: Outcome) -> bool:
        return largest_difference(self.numbers, other.numbers) == 0

    def is_larger(self, other: Outcome) -> bool:
        """Threads of autograd free their tensors at their own time: peaks vary by a quarter."""
        return self.peak > 2 * other.peak


def outcome(work: Work) -> Outcome:
    gc.collect()  # of what is freed during the work, the peak would know nothing
    torch.cuda.synchronize()
    OPS.reset_peak(0)
    before = memory().live
    with watch() as seen:
        numbers = work()
    waits, pageable = seen.count(*WAITS, own=True), seen.count(PAGEABLE, own=True)
    return Outcome(numbers, waits, pageable, memory().peak - before)


def check_repeats(work: Work, sound: Outcome) -> None:
    """Without a blunder nothing is noticed."""
    again = outcome(work)
    assert again.same_numbers(sound)
    assert (again.waits, again.pageable) == (sound.waits, sound.pageable)
    assert not again.is_larger(sound)


def caught(work: Work, sound: Outcome) -> str:
    """How the work differs from its sound form; "" = not at all."""
    try:
        hurt = outcome(work)
    except Exception as error:
        return str(error).splitlines()[0]
    if not hurt.same_numbers(sound):
        return "other numbers"
    if hurt.pageable > sound.pageable:
        return f"{hurt.pageable} pageable copies, {sound.pageable} before"
    if hurt.waits > sound.waits:
        return f"{hurt.waits} waits, {sound.waits} before"
    if hurt.is_larger(sound):
        return f"peak {hurt.peak} bytes, {sound.peak} before"
    return ""


def stop_streams() -> None:
    """A blunder may leave another stream selected, or work that nothing waited for."""
    torch.cuda.set_stream(torch.cuda.default_stream())
    torch.cuda.synchronize()
