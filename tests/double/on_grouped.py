"""Experts by grouped products on the double, in bf16: equal to the loop, and no wait in a layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.double.train_once import Tensors, Trained, another, largest_difference
from tests.double.watch import PAGEABLE, WAITS, watch
from tests.helpers.trainer_support import EXPERTS, LAYERS

pytest_plugins = ("tests.double.trainer_fixtures",)


def with_experts(first: Trained, *, grouped: bool) -> Trained:
    """The same model in bf16."""
    learner = first.learner
    place = replace(learner.parallel.platform, grouped=grouped)
    there = SimpleNamespace(parallel=replace(learner.parallel, platform=place), store=learner.store)
    trainer = replace(learner.config.trainer, dtype="bf16")
    again = Trained(cast("Any", there), first.plan)
    return another(again, replace(learner.config, trainer=trainer))


@pytest.fixture(scope="module")
def both(trained: Trained) -> dict[bool, Trained]:
    assert trained.learner.parallel.platform.grouped, "on CUDA experts are grouped"
    return {grouped: with_experts(trained, grouped=grouped) for grouped in (False, True)}


class Calls(TorchDispatchMode):
    """Operations, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func.overloadpacket).removeprefix("aten.")] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Waits; those of grouped_mm apart: without its kernel torch loops, by ends that it copies."""
    from moerl.trainer.model import grouped_experts

    found: Counter[str] = Counter()
    right = grouped_experts.grouped_mm

    def product(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        with watch() as inside:
            made: Tensor = right(a, b, offs=offs)
        found["in torch's loop"] += inside.count(*WAITS, PAGEABLE)
        return made

    with watch() as seen, patch.object(grouped_experts, "grouped_mm", product):
        yield found
    found["all"] = seen.count(*WAITS, PAGEABLE) - found["in torch's loop"]
    found["in dispatchers"] = sum(e.kind in WAITS and e.line == "megatron" for e in seen.seen)


def gradients(trained: Trained) -> tuple[Tensors, Counter[str], Counter[str]]:
    with counted() as waits:
        trained.learner.gradients(trained.plan)
    found = trained.current_gradients()
    with Calls() as calls:
        trained.learner.gradients(trained.plan)
    return found, waits, calls.seen


def test_no_layer_waits_or_calls_its_experts_one_by_one(both: dict[bool, Trained]) -> None:
    """Values are equal bitwise.  A call of an expert is 2 products, and 4 in its backward pass."""
    loop, waits, calls = gradients(both[False])
    grouped, no_waits, few_calls = gradients(both[True])
    assert largest_difference(grouped, loop) == 0
    layers = both[True].plan.num_microbatches * LAYERS
    print("loop", waits, calls.total(), "grouped", no_waits, few_calls.total())
    assert waits["in dispatchers"] == layers
    assert no_waits["in dispatchers"] == 0
    assert waits["all"] - no_waits["all"] == layers
    assert calls["_grouped_mm"] == 0
    assert few_calls["_grouped_mm"] == 6 * layers
    assert calls["mm"] - few_calls["mm"] == 6 * layers * EXPERTS
