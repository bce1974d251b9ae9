"""A trainer that leaves the device and comes back: bytes, waits, and the next step."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from moerl.config.schema import TrainerConfig
from moerl.trainer.learner.parked import PARTS, Parked
from tests.double.on_offload import OFFLOADED, ON_DEVICE, Made, Make, first, fresh, optimizer_state
from tests.double.train_once import Tensors
from tests.double.watch import PAGEABLE, WAITS, memory, purpose, watch

__all__ = ["first", "fresh"]  # fixtures

PLAIN = replace(ON_DEVICE, optimizer=replace(ON_DEVICE.optimizer, distributed=False))
FORMS = {
    "bf16 distributed": ON_DEVICE,
    "fp32 distributed": replace(ON_DEVICE, dtype="fp32"),
    "bf16": PLAIN,
    "bf16 optimizer on the host": OFFLOADED,
}
LEFT = 20_000  # bytes: counters and scalars of the trainer that are in no part


def numbers(made: Made) -> Tensors:
    return made.trained.weights() | optimizer_state(made.learner)


def equal(one: Made, other: Made) -> bool:
    mine, theirs = numbers(one), numbers(other)
    assert mine.keys() == theirs.keys()
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


def parked_of(made: Made) -> Parked:
    return Parked(made.learner, made.learner.parallel.device)


@pytest.mark.parametrize("form", FORMS)
def test_the_step_after_parking_is_bitwise_the_step_without(fresh: Make, form: str) -> None:
    plain, moved = fresh(FORMS[form]), fresh(FORMS[form])
    plain.step()
    moved.step()
    gc.collect()
    parked, before = parked_of(moved), memory(moved.name).live
    with watch() as seen:
        sizes = [parked.out([part]) for part in PARTS]
    away = memory(moved.name).live
    assert seen.count(*WAITS, own=True) <= 2, "one per part that is copied"
    assert seen.count(PAGEABLE, own=True) == 0
    assert all(sizes[0::2])
    assert bool(sizes[1]) == ("host" not in form), "an optimizer on the host has nothing here"
    assert before - away >= sum(sizes)
    assert away < LEFT
    with purpose(moved.name):
        parked.back()
    assert memory(moved.name).live == before
    assert equal(plain, moved)
    for made in (plain, moved):
        made.step()
    assert equal(plain, moved)
    moved.step()
    assert not equal(plain, moved), "control: another step"


def test_a_second_time_and_parts_alone(fresh: Make) -> None:
    plain, moved = fresh(ON_DEVICE), fresh(ON_DEVICE)
    parked = parked_of(moved)
    for parts in (("gradients",), ("optimizer", "gradients"), PARTS):
        for made in (plain, moved):
            made.step()
        assert parked.out(iter(parts)) > 0
        assert parked.out(parts) == 0, "they are away"
        assert set(parked.away) == set(parts)
        parked.back()
        assert parked.away == ()
        assert equal(plain, moved)


def test_numbers_that_are_not_kept_are_noticed(
    fresh: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: an optimizer whose bytes do not come back."""
    plain, moved = fresh(ON_DEVICE), fresh(ON_DEVICE)
    for made in (plain, moved):
        made.step()
    parked = parked_of(moved)
    parked.out(["optimizer"])
    parked._host["optimizer"].zero_()
    parked.back()
    assert not equal(plain, moved)


def test_a_trainer_in_fp32_without_parts_here(fresh: Make) -> None:
    """The default form, in which the optimizer shares its parameters with the model."""
    plain, moved = fresh(TrainerConfig()), fresh(TrainerConfig())
    for made in (plain, moved):
        made.step()
    parked = parked_of(moved)
    assert parked.out(PARTS) > 0
    parked.back()
    for made in (plain, moved):
        made.step()
    assert equal(plain, moved)
