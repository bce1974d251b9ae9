"""Which routing differences are roots, and which only follow from an earlier one."""

from __future__ import annotations

import torch

from moerl.trainer.passes.probe import downstream


def test_a_difference_touches_later_positions_of_higher_layers_of_its_own_rollout() -> None:
    length, rows = 4, 2
    differs = {layer: torch.zeros(length * rows, dtype=torch.bool) for layer in (1, 2, 5)}
    position, row = 1, 0
    differs[2][position * rows + row] = True

    touched = downstream(differs, rows=rows)

    assert not touched[1].any()
    assert not touched[2].any(), "another position of the same layer reads lower layers only"
    assert touched[5].view(length, rows).tolist() == [
        [False, False],
        [True, False],
        [True, False],
        [True, False],
    ]


def test_two_ties_are_two_roots() -> None:
    """An earlier position of a higher layer has not seen the difference."""
    differs = {0: torch.tensor([False, True, False]), 1: torch.tensor([True, False, True])}
    touched = downstream(differs, rows=1)
    roots = {layer: (differs[layer] & ~touched[layer]).tolist() for layer in differs}
    assert roots == {0: [False, True, False], 1: [True, False, False]}
