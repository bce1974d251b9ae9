"""The dither of rounding to bf16: the same bits for any part of a tensor, and no bias."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from moerl.weight_sync.adapters.low_rank import merge_into
from moerl.weight_sync.dither import HfPart, round_with_dither, thresholds
from tests.helpers import dither_oracle

ROWS, COLS = 257, 381
CPU = torch.device("cpu")


def _weights(*shape: int) -> Tensor:
    return 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _part(name: str = "a", rows: int = ROWS, cols: int = COLS) -> HfPart:
    return HfPart(name, range(rows), range(cols))


def _step(value: Tensor) -> Tensor:
    """Distance of the two bf16 numbers around each value."""
    low = (value.view(torch.int32) & ~0xFFFF).view(torch.float32)
    return (((low.view(torch.int32) + 0x10000).view(torch.float32)) - low).abs()


def test_any_tile_has_the_bits_of_the_whole_and_of_numpy() -> None:
    value = _weights(ROWS, COLS)
    whole = round_with_dither(value, _part())
    assert torch.equal(whole, dither_oracle.rounded(value.numpy(), "a"))
    chance = np.random.default_rng(0)
    for _ in range(30):
        row, col = (np.sort(chance.integers(0, size + 1, 2)) for size in (ROWS, COLS))
        rows = range(row[0], row[1], chance.integers(1, 4))  # of interleaved tensors, too
        cols = range(col[0], col[1])
        own = value[rows.start : rows.stop : rows.step, cols.start : cols.stop]
        found = round_with_dither(own, HfPart("a", rows, cols))
        want = whole[rows.start : rows.stop : rows.step, cols.start : cols.stop]
        assert torch.equal(found, want)


@pytest.mark.parametrize(("change", "nearest_keeps"), [(3e-6, (0.0, 0.15)), (1e-4, (0.9, 1.1))])
def test_the_error_is_below_a_step_and_has_mean_zero(
    change: float, nearest_keeps: tuple[float, float]
) -> None:
    base = _weights(512, 512).bfloat16().float()
    part = _part("b", 512, 512)
    assert torch.equal(round_with_dither(base, part).float(), base), "what bf16 holds stays"
    wanted = change * torch.randn(base.shape, generator=torch.Generator().manual_seed(1))
    exact = base + wanted
    found = round_with_dither(exact, part).float()
    error = ((found - exact) / _step(exact)).double()
    assert error.abs().max() < 1
    assert abs(float(error.mean())) < 4 * float(error.std()) / 512
    dithered, nearest = (_share_of(wanted, x - base) for x in (found, exact.bfloat16().float()))
    print(f"of changes by {change}: kept {dithered:.2f} (dither), {nearest:.2f} (nearest)")
    assert abs(dithered - 1) < 0.15
    assert nearest_keeps[0] <= nearest <= nearest_keeps[1]


def _share_of(wanted: Tensor, found: Tensor) -> float:
    return float((wanted * found).sum() / wanted.square().sum())


def test_thresholds_are_uniform_and_do_not_follow_their_neighbours() -> None:
    found = thresholds(_part("c", 1024, 1024), CPU).double()
    counts = torch.bincount((found // 4096).long().flatten(), minlength=16).double()
    expected = found.numel() / 16
    assert float(((counts - expected).square() / expected).sum()) < 44.3  # chi-square, 15, p 1e-4
    centred = found - found.mean()
    for moved in (centred.roll(1, 0), centred.roll(1, 1), centred.roll((1, 1), (0, 1)), centred.T):
        assert abs(float((centred * moved).mean() / centred.square().mean())) < 4 / 1024
    other = thresholds(_part("d", 1024, 1024), CPU).double() - found.mean()
    assert abs(float((centred * other).mean() / centred.square().mean())) < 4 / 1024


def test_small_updates_of_factors_change_weights() -> None:
    """One step of B from 0, as at the start of a run."""
    base = _weights(768, 512).bfloat16()
    a = torch.empty(32, 512).uniform_(-1, 1, generator=torch.Generator().manual_seed(2)) / 512**0.5
    for step, most_nearest, times in ((1e-5, 0.03, 2.0), (1e-4, 0.3, 1.5)):
        b = step * torch.randn(768, 32, generator=torch.Generator().manual_seed(3)).sign()
        shares = []
        for dither in (None, _part("e", 768, 512)):
            merged = torch.empty_like(base)
            merge_into(merged, base, a, b, 1.0, dither)
            shares.append(float((merged != base).double().mean()))
        print(f"step {step}: changed {shares[0]:.3f} (nearest), {shares[1]:.3f} (dither)")
        assert shares[0] < most_nearest
        assert shares[1] > times * shares[0]
