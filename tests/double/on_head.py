"""The head with sampling masks: its plan and both passes leave the host free."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from moerl.algorithms import head_plan
from moerl.algorithms.head_logprob import Head, SamplingMask, kept_logprobs
from tests.double.mutations import HEAD_BLUNDERS, Blunder
from tests.double.outcome import caught, check_repeats, outcome, stop_streams
from tests.double.watch import PAGEABLE, WAITS, watch

ROWS, KEPT, VOCAB, HIDDEN = 96, 12, 6000, 32
MANY = 40  # this row keeps more than a share of the vocabulary


def work(device: str, *, pieces: int = 1) -> dict[str, Tensor]:
    """Scores and gradients of rows that keep few entries, one row that keeps many, a support."""
    generator = torch.Generator().manual_seed(4)
    keep = torch.rand(ROWS, VOCAB, generator=generator) < KEPT / VOCAB
    keep[MANY] = True
    sampled = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    keep[torch.arange(ROWS), sampled] = True
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), keep.sum(1).cumsum(0)])
    mask = SamplingMask(offsets, keep.nonzero()[:, 1].int())
    hidden, weight = (torch.randn(n, HIDDEN, generator=generator) for n in (ROWS, VOCAB))
    x, w = (t.to(device).requires_grad_() for t in (hidden, weight))
    tau = torch.full((ROWS,), 0.8, device=device)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(head_plan, "_PIECE", ROWS * KEPT // pieces)
        found = kept_logprobs(x, Head(w, VOCAB), sampled, mask, temperature_S=tau, support=True)
        assert found.support is not None
        (found.logprob.sum() + found.support.square().mean()).backward()
    assert x.grad is not None
    assert w.grad is not None
    return {"logprob": found.logprob.detach(), "hidden": x.grad, "weight": w.grad}


@pytest.fixture(autouse=True)
def _streams() -> Iterator[None]:
    yield
    stop_streams()


@pytest.mark.parametrize("pieces", [1, 8])
def test_the_head_does_not_wait(pieces: int) -> None:
    with watch() as seen:
        found = work("cuda", pieces=pieces)
    assert seen.own_lines("h2d_async"), "the plan is on the device"
    assert not seen.own_lines(*WAITS, PAGEABLE)
    for name, want in work("cpu").items():
        torch.testing.assert_close(found[name].cpu(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("blunder", HEAD_BLUNDERS, ids=[b.name for b in HEAD_BLUNDERS])
def test_blunders_of_a_head_are_caught(blunder: Blunder, monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> dict[str, Tensor]:
        return {name: value.cpu() for name, value in work("cuda", pieces=8).items()}

    sound = outcome(step)
    check_repeats(step, sound)
    blunder.apply(monkeypatch)
    found = caught(step, sound)
    print(f"{blunder.name}: {found or 'NOT CAUGHT'}")
    assert found
