"""Hugging Face -> Megatron -> Hugging Face is the identity, for every family and valid layout.

Ranks are visited one after another on numpy arrays in which every element is different.  A rank's
tensors must be tiled exactly, and the Hugging Face tensors written back must hold every element,
written by all of its replicas alike.  This proves that nothing is lost; that the table is the right
one is proven by tests/multi/test_layout_families.py.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moerl.config.schema import ParallelConfig
from moerl.core.errors import ConfigError, LayoutError
from moerl.layout import (
    ModelSpec,
    Named,
    Part,
    Shard,
    at,
    check_covers,
    families,
    hf_shapes,
    hf_tiles,
    join,
    megatron_tiles,
    model_spec,
    rules,
    sglang_tiles,
    shards,
    stacked_aliases,
    stacked_forms,
    transposed_stacks,
)

DATA = Path(__file__).resolve().parents[1] / "data/layout_families.json"
FAMILIES: dict[str, dict[str, Any]] = json.loads(DATA.read_text())
CASES = FAMILIES | {
    f"{family}+mtp": FAMILIES[family] | {"num_nextn_predict_layers": 2}
    for family in ("deepseek_v3", "glm4_moe")
}
DENSE = ("llama", "qwen3")


def layout_of(tp: int, pp: int, vpp: int, ep: int, etp: int) -> ParallelConfig:
    """The smallest trainer with these axes."""
    dp = math.lcm(tp, ep * etp) // tp
    return ParallelConfig(tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, dp=dp, vocab_divisible_by=16)


AXES = list(itertools.product((1, 2, 4), (1, 2), (1, 2), (1, 2, 4), (1, 2)))


def make_hf(spec: ModelSpec) -> dict[str, np.ndarray]:
    hf, start = {}, 1
    for name, shape in hf_shapes(spec).items():
        size = math.prod(shape)
        hf[name] = np.arange(start, start + size, dtype=np.int32).reshape(shape)
        start += size
    return hf


def load(named: Named, hf: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    out = {}
    for name, local in named.items():
        out[name] = np.full(local.shape, -1, np.int32)
        for tile in local.tiles:
            out[name][at(tile.box)] = hf[tile.hf][at(tile.hf_box)]
        if local.pad_rows:
            out[name][-local.pad_rows :] = 0
    return out


def check_round_trip(spec: ModelSpec, layout: ParallelConfig, layer_spec: Any) -> None:
    """Rank after rank: load, write back; all of it must come back, replicas equal."""
    hf = make_hf(spec)
    back = {name: np.zeros_like(value) for name, value in hf.items()}
    for rank in range(layout.world_size):
        named = megatron_tiles(spec, layout, rank, layer_spec)
        check_covers(named, {name: local.shape for name, local in named.items()})
        for name, value in load(named, hf).items():
            assert not (value == -1).any(), f"rank {rank}: {name} has elements nobody wrote"
            for tile in named[name].tiles:
                back[tile.hf][at(tile.hf_box)] = value[at(tile.box)]
    for name, value in hf.items():
        assert np.array_equal(back[name], value), f"{name} does not come back"


def refusal(case: str, axes: tuple[int, ...]) -> str | None:
    """Why a combination is not valid; every other one must convert."""
    _, pp, vpp, ep, etp = axes
    if vpp > 1 and pp == 1:
        return "parallel.vpp = 2 .* interleaved over stages; use pp > 1"
    if case in DENSE and ep > 1:
        return "parallel.ep = . .* the model is dense: use 1"
    if case == "gpt_oss" and etp > 1:
        return "parallel.etp = 2 .* no experts with biases"
    return None


def check(case: str, axes: tuple[int, ...], layer_spec: Any = "local") -> None:
    spec, reason = model_spec(CASES[case]), refusal(case, axes)
    if reason is None:
        check_round_trip(spec, layout_of(*axes), layer_spec)
        return
    with pytest.raises(ConfigError, match=reason):
        megatron_tiles(spec, layout_of(*axes), 0, layer_spec)


@pytest.mark.parametrize("layer_spec", ["local", "te"])
@pytest.mark.parametrize("case", CASES)
def test_every_family_comes_back_from_every_layout(case: str, layer_spec: str) -> None:
    for axes in AXES:
        check(case, axes, layer_spec)


def test_the_invalid_combinations_are_these() -> None:
    count = {case: sum(refusal(case, axes) is not None for axes in AXES) for case in CASES}
    assert len(AXES) == 72
    assert count == dict.fromkeys(CASES, 18) | dict.fromkeys(DENSE, 54) | {"gpt_oss": 45}


# --- random sizes --------------------------------------------------------------------------------
@st.composite
def random_cases(draw: st.DrawFn) -> tuple[ModelSpec, tuple[int, ...], int]:
    """Sizes that divide by the trainer's axes; the engine may have more ranks than kv heads."""
    case = draw(st.sampled_from(sorted(CASES)))
    tp, ep = (draw(st.sampled_from((1, 2, 4))) for _ in range(2))
    pp, etp = (draw(st.sampled_from((1, 2))) for _ in range(2))
    vpp = draw(st.sampled_from((1, 2))) if pp > 1 else 1
    small = st.integers(1, 3)
    latent = "kv_lora_rank" in CASES[case]
    heads = tp * draw(small) if latent else 8 * draw(small)
    change: dict[str, Any] = {
        "vocab_size": draw(st.integers(1, 150)),
        "hidden_size": 8 * draw(small) * (1 if "head_dim" in CASES[case] else heads),
        "num_hidden_layers": pp * vpp * draw(st.integers(1, 2)),
        "num_attention_heads": heads,
        "num_key_value_heads": heads if latent else tp * (2 if tp < 4 else 1),
        "intermediate_size": 8 * draw(small),
        "moe_intermediate_size": 8 * draw(small),
        "mlp_only_layers": [],
        "layer_types": None,
    }
    if "shared_expert_intermediate_size" in CASES[case]:
        change["shared_expert_intermediate_size"] = 8 * draw(small)
    if latent:
        change |= {
            "kv_lora_rank": 4 * draw(small),
            "qk_rope_head_dim": 4 * draw(small),
            "qk_nope_head_dim": draw(small),
            "v_head_dim": draw(small),
        }
    if case in DENSE:
        ep = 1
    if case == "gpt_oss":
        etp = 1
    engine_tp = draw(st.sampled_from((1, 2, 4, 8)))
    return model_spec(CASES[case] | change), (tp, pp, vpp, ep, etp), engine_tp


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(random_cases())
def test_random_sizes_come_back_and_fill_the_engine(
    case: tuple[ModelSpec, tuple[int, ...], int],
) -> None:
    spec, axes, engine_tp = case
    layout = layout_of(*axes)
    check_round_trip(spec, layout, "local")
    try:
        sinks = {rank: sglang_tiles(spec, engine_tp, rank) for rank in range(engine_tp)}
    except LayoutError:
        return  # the engine's tp does not divide this model
    sources = {rank: megatron_tiles(spec, layout, rank) for rank in range(layout.world_size)}
    hf = make_hf(spec)
    held = {rank: load(named, hf) for rank, named in sources.items()}
    got = {
        rank: {name: np.zeros(local.shape, np.int32) for name, local in named.items()}
        for rank, named in sinks.items()
    }
    for op in join(sources, sinks):
        got[op.dst][op.dst_name][at(op.dst_box)] = held[op.src][op.src_name][at(op.src_box)]
    for rank, named in sinks.items():
        for name, want in load(named, hf).items():
            assert np.array_equal(got[rank][name], want), f"engine rank {rank}: {name} differs"


def test_reshard_between_two_layouts() -> None:
    """Interleaved rows on both sides (gpt-oss), virtual and plain pipelines."""
    spec = model_spec(CASES["gpt_oss"])
    hf = make_hf(spec)
    before, after = layout_of(2, 2, 2, 2, 1), layout_of(4, 1, 1, 4, 1)
    sources = {r: megatron_tiles(spec, before, r) for r in range(before.world_size)}
    sinks = {r: megatron_tiles(spec, after, r) for r in range(after.world_size)}
    held = {rank: load(named, hf) for rank, named in sources.items()}
    got = {r: {n: np.zeros(t.shape, np.int32) for n, t in s.items()} for r, s in sinks.items()}
    for op in join(sources, sinks):
        got[op.dst][op.dst_name][at(op.dst_box)] = held[op.src][op.src_name][at(op.src_box)]
    for rank, named in sinks.items():
        assert all(np.array_equal(got[rank][n], want) for n, want in load(named, hf).items())


def test_a_gather_joins_interleaved_rows_with_whole_tensors() -> None:
    spec = model_spec(CASES["gpt_oss"])
    hf = make_hf(spec)
    named = megatron_tiles(spec, ParallelConfig(), 0)
    held = load(named, hf)
    back = {name: np.zeros_like(value) for name, value in hf.items()}
    for op in join({0: named}, {0: hf_tiles(spec)}, same_ranks=True):
        back[op.dst_name][at(op.dst_box)] = held[op.src_name][at(op.src_box)]
    assert all(np.array_equal(back[name], value) for name, value in hf.items())


# --- stacked files -------------------------------------------------------------------------------
@pytest.mark.parametrize("case", [case for case in CASES if case not in DENSE])
def test_stacked_forms_cover_the_file_once(case: str) -> None:
    spec = model_spec(CASES[case])
    shapes, swap = hf_shapes(spec), transposed_stacks(spec)
    forms = stacked_forms(spec)
    assert len(forms) == len({n.rpartition(".")[2] for n in forms}) * (
        len(spec.moe_layers) + spec.mtp_layers
    )
    for name, (shape, boxes) in forms.items():
        count = np.zeros(shape, int)
        for part, box in boxes.items():
            inner = tuple(map(len, box))[1:]
            assert (inner[::-1] if swap else inner) == shapes[part]
            count[at(box)] += 1
        assert (count == 1).all(), name
    aliases = stacked_aliases(spec, {name: shape for name, (shape, _) in forms.items()})
    assert sum(len(boxes) for _, boxes in forms.values()) == len(aliases)


# --- negative controls ---------------------------------------------------------------------------
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("local", ["linear_proj.weight", "linear_fc2.weight"])
def test_a_missing_rule_does_not_come_back(
    monkeypatch: pytest.MonkeyPatch, case: str, local: str
) -> None:
    spec = model_spec(CASES[case])
    family = shards.FAMILY_TABLES[spec.family]

    def without(parts: tuple[Part, ...]) -> tuple[Part, ...]:
        return tuple(
            replace(part, megatron=tuple(r for r in part.megatron if not r.local.endswith(local)))
            for part in parts
        )

    broken = replace(
        family, every=without(family.every), moe=without(family.moe), dense=without(family.dense)
    )
    assert broken != family
    monkeypatch.setitem(shards.FAMILY_TABLES, spec.family, broken)
    with pytest.raises(AssertionError, match=r"(o_proj|down_proj|w2).* does not come back"):
        check_round_trip(spec, ParallelConfig(), "local")


def test_a_cut_that_overlaps_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks keep the first half: every shape is right."""
    original = rules.columns
    rule = next(r for r in families.GQA.megatron if r.cut is original)
    same = replace(rule, cut=lambda blocks, shard: original(blocks, Shard(0, shard.size)))
    part = replace(families.GQA, megatron=(families.GQA.megatron[0], same))
    family = shards.FAMILY_TABLES["llama"]
    every = tuple(part if old is families.GQA else old for old in family.every)
    monkeypatch.setitem(shards.FAMILY_TABLES, "llama", replace(family, every=every))
    with pytest.raises(AssertionError, match=r"o_proj\.weight does not come back"):
        check_round_trip(model_spec(CASES["llama"]), ParallelConfig(tp=2), "local")
