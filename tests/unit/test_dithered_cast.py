"""Masters become bf16 weights with a dither: by Hugging Face coordinate, and without bias."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from moerl.config.lora_checks import check_lora
from moerl.config.lora_settings import LoraConfig
from moerl.config.optimizer_settings import check_optimizer_settings
from moerl.config.schema import Config, OptimizerConfig, ParallelConfig, TrainerConfig
from moerl.core.errors import ConfigError
from moerl.layout import Local, at, hf_shapes, megatron_tiles, model_spec
from moerl.layout.tiles import Tile, full_box
from moerl.trainer.learner import dithered_cast
from moerl.trainer.learner.dithered_cast import round_flat
from tests.helpers import dither_oracle
from tests.helpers.trainer_support import ROOT

DITHERED = TrainerConfig(dtype="bf16", optimizer=OptimizerConfig(rounding="dither"))
LAYOUTS = (ParallelConfig(tp=2, etp=2), ParallelConfig(pp=2, tp=2, dp=2, ep=4))


def _master(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.1, shape).astype(np.float32)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_cut_of_any_layout_has_the_bits_of_the_whole(
    family: str, layout: ParallelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The distributed optimizer holds runs of elements that start anywhere."""
    monkeypatch.setattr(dithered_cast, "_BLOCK", 3000)
    config = json.loads((ROOT / "tests/data/layout_families.json").read_text())[family]
    spec, chance = model_spec(config), np.random.default_rng(0)
    shapes = hf_shapes(spec)
    masters = {name: _master(shape, index) for index, (name, shape) in enumerate(shapes.items())}
    whole = {
        name: dither_oracle.rounded(value.reshape(-1, value.shape[-1]), name).view(value.shape)
        for name, value in masters.items()
    }
    tiles = megatron_tiles(spec, layout, layout.world_size - 1)
    for name, local in tiles.items():
        if local.dtype:
            continue  # not bf16
        master, want = torch.zeros(local.shape), torch.zeros(local.shape, dtype=torch.bfloat16)
        for tile in local.tiles:
            master[at(tile.box)] = torch.from_numpy(masters[tile.hf][at(tile.hf_box)])
            want[at(tile.box)] = whole[tile.hf][at(tile.hf_box)]
        found = torch.full_like(want, 7.0).view(-1)
        cuts = [0, *sorted(chance.integers(0, master.numel() + 1, 2)), master.numel()]
        for start, stop in itertools.pairwise(cuts):
            round_flat(found[start:stop], master.view(-1)[start:stop], start, local)
        assert torch.equal(found.view(local.shape), want), name


@pytest.mark.parametrize(("least", "still"), [(2**-6, 10), (0.5, 1000)])
def test_a_thousand_small_updates_move_weights_as_they_move_the_masters(
    least: float, still: int
) -> None:
    """Steps of 1e-6.  still: after so many, half a step of bf16 is above what they gave."""
    shape, step = (256, 1024), 1e-6
    local = Local(shape, (Tile("w", full_box(shape), full_box(shape)),))
    chance = torch.Generator().manual_seed(0)
    first = torch.empty(shape).uniform_(least, 4 * least, generator=chance).bfloat16()
    master, counts = first.double(), (1, 10, 100, 1000)
    for count in range(1, counts[-1] + 1):
        master += step
        if count not in counts:
            continue
        exact, wanted = master.float(), count * step
        dithered = torch.empty(exact.numel(), dtype=torch.bfloat16)
        round_flat(dithered, exact.view(-1), 0, local)
        moves = (dithered.view(shape) - first).double()
        moved, nearest = float(moves.mean()), float((exact.bfloat16() - first).double().mean())
        print(f"{count}: masters {wanted:.1e}, dither {moved:.2e}, nearest {nearest:.2e}")
        assert abs(moved - wanted) < 5 * float(moves.std()) / moves.numel() ** 0.5 + 0.01 * wanted
        assert (nearest == 0.0) == (count <= still), "the control"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": "fp32"}, "there are no bf16 weights"),
        (
            {"platform": "cuda", "optimizer_args": {"use_precision_aware_optimizer": True}},
            "rounds its own masters",
        ),
    ],
)
def test_what_has_no_such_cast_is_refused(changes: dict[str, Any], says: str) -> None:
    check_optimizer_settings(DITHERED)
    wrong = replace(DITHERED, **changes)
    optimizer = replace(DITHERED.optimizer, distributed=True)
    with pytest.raises(ConfigError, match=says):
        check_optimizer_settings(replace(wrong, optimizer=optimizer))


def test_factors_have_a_setting_of_their_own() -> None:
    with pytest.raises(ConfigError, match=r"set lora\.rounding"):
        check_lora(replace(Config(), trainer=DITHERED, lora=LoraConfig(rank=4)))
