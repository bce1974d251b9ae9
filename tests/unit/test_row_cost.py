"""Cost of a row: operations of transformers' models as torch counts them, and of published ones."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from moerl.data.batching import pair_cost, row_cost
from moerl.layout import ModelSpec, model_spec
from tests.helpers.trainer_support import ROOT


def _operations(config: transformers.PretrainedConfig, tokens: int) -> int:
    """Of a forward pass without the output layer; eager attention meets all tokens, not half."""
    model = transformers.AutoModel.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(tokens)[None] % config.vocab_size)
    return counter.get_total_flops()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "mixtral", "deepseek_v3"])
def test_a_pair_costs_what_transformers_computes(family: str) -> None:
    """a n + b n^2 operations; control: without the experts' share no model of experts fits."""
    data = json.loads((ROOT / "tests/data/layout_families.json").read_text())[family]
    config, spec = transformers.AutoConfig.for_model(**data), model_spec(data)
    config.num_hidden_layers = spec.layers
    short, long = (_operations(config, tokens) for tokens in (32, 64))
    per_pair = (long - 2 * short) / (64**2 - 2 * 32**2)
    per_token = short / 32 - 32 * per_pair
    assert pair_cost(spec) == pytest.approx(per_pair / per_token, rel=0.01)
    if spec.experts:
        every = replace(spec, experts_per_token=spec.experts)
        assert pair_cost(every) < 0.9 * per_pair / per_token


def _published(name: str) -> ModelSpec:
    return model_spec(json.loads((ROOT / f"configs/models/{name}/config.json").read_text()))


@pytest.mark.parametrize(
    ("name", "active", "per_pair"),
    [
        ("qwen3-30b-a3b", 3.3e9 - 2 * 151936 * 2048, 48 * 2 * 32 * 128),  # model card: 3.3B
        ("deepseek-v3", 37e9 - 129280 * 7168, 61 * 128 * (192 + 128)),  # 2412.19437: 37B, one table
    ],
)
def test_a_pair_of_published_models(name: str, active: float, per_pair: int) -> None:
    assert pair_cost(_published(name)) == pytest.approx(per_pair / active, rel=0.03)


def test_a_row_costs_its_tokens_and_its_pairs() -> None:
    assert row_cost(10, 0.0) == 10 * 1024
    assert row_cost(10, 0.5) == 10 * 1024 + 1024 * 0.5 * 55


def test_layers_whose_tokens_meet_few_others_have_no_pairs() -> None:
    full = _published("qwen3-30b-a3b")
    some = replace(full, sliding_window=128, sliding_layers=tuple(range(24)))
    assert pair_cost(some) == pytest.approx(pair_cost(full) / 2)
