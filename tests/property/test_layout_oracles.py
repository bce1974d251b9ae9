"""Tiles against statements of the same layouts written without tiles.

A table can be wrong and still round-trip (a k/v swap does), so every rank's content is compared
with `megatron_rank` and `sglang_rank` below: reshape, concatenate and split on whole numpy tensors,
ranks found by position in an arange.  Every element has a value of its own.  The negative controls
break the table on purpose and name the oracle that sees it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moerl.config.schema import ParallelConfig
from moerl.core.errors import LayoutError
from moerl.layout import (
    ModelSpec,
    Named,
    Op,
    Part,
    Rule,
    at,
    check_covers,
    each,
    families,
    flat,
    hf_shapes,
    hf_tiles,
    join,
    megatron_tiles,
    model_spec,
    sglang_tiles,
    shards,
)

Arrays = dict[str, np.ndarray]


class Mesh(NamedTuple):
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp


def mesh_of(tp: int, pp: int, ep: int, etp: int) -> Mesh:
    """The smallest trainer with these axes."""
    return Mesh(tp, pp, ep, etp, math.lcm(tp, ep * etp) // tp)


MESHES = [mesh_of(*axes) for axes in itertools.product((1, 2, 4), (1, 2), (1, 2, 4), (1, 2))]
VOCAB_MULTIPLE = 16


def make_spec(**change: object) -> ModelSpec:
    config = {
        "model_type": "qwen3_moe",
        "vocab_size": 37,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "max_position_embeddings": 64,
    }
    return model_spec(config | change)


def make_hf(spec: ModelSpec) -> Arrays:
    """Every element of every tensor has its own value, from 1 up; 0 stays free for padding."""
    hf, first = {}, 1
    for name, shape in hf_shapes(spec).items():
        size = math.prod(shape)
        hf[name] = np.arange(first, first + size).reshape(shape)
        first += size
    return hf


# --- the same layouts without tiles --------------------------------------------------------------
def megatron_rank(hf: Arrays, m: ModelSpec, mesh: Mesh, rank: int) -> Arrays:
    """All parameters of one Megatron rank (local spec), by definition."""
    tp, pp, ep, etp, dp = mesh
    stage, _, t = np.argwhere(np.arange(mesh.world).reshape(pp, dp, tp) == rank)[0]
    experts = np.arange(mesh.world).reshape(pp, tp * dp // (ep * etp), ep, etp)
    _, _, e, x = np.argwhere(experts == rank)[0]
    out: Arrays = {}
    if stage == 0:
        out["embedding.word_embeddings.weight"] = vocab_part(
            hf["model.embed_tokens.weight"], VOCAB_MULTIPLE * tp, tp, t
        )
    for local, layer in enumerate(np.split(np.arange(m.layers), pp)[stage]):
        src, dst = f"model.layers.{layer}.", f"decoder.layers.{local}."
        q, k, v = (hf[f"{src}self_attn.{n}_proj.weight"] for n in "qkv")
        grouped = [w.reshape(m.kv_heads, -1, m.hidden) for w in (q, k, v)]
        fused = np.concatenate(grouped, axis=1).reshape(-1, m.hidden)
        out[dst + "self_attention.linear_qkv.weight"] = np.split(fused, tp)[t]
        out[dst + "self_attention.linear_proj.weight"] = np.split(
            hf[src + "self_attn.o_proj.weight"], tp, axis=1
        )[t]
        for here, there in {
            "input_layernorm": "input_layernorm",
            "pre_mlp_layernorm": "post_attention_layernorm",
            "self_attention.q_layernorm": "self_attn.q_norm",
            "self_attention.k_layernorm": "self_attn.k_norm",
            "mlp.router": "mlp.gate",
        }.items():
            out[f"{dst}{here}.weight"] = hf[f"{src}{there}.weight"]
        for slot in range(m.experts // ep):
            of = f"{src}mlp.experts.{e * (m.experts // ep) + slot}."
            gate, up, down = (hf[f"{of}{n}_proj.weight"] for n in ("gate", "up", "down"))
            to = f"{dst}mlp.experts.local_experts.{slot}."
            out[to + "linear_fc1.weight"] = np.concatenate(
                [np.split(gate, etp)[x], np.split(up, etp)[x]]
            )
            out[to + "linear_fc2.weight"] = np.split(down, etp, axis=1)[x]
    if stage == pp - 1:
        out["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
        if not m.tied or pp > 1:
            head = hf["model.embed_tokens.weight" if m.tied else "lm_head.weight"]
            out["output_layer.weight"] = vocab_part(head, VOCAB_MULTIPLE * tp, tp, t)
    return out


def sglang_rank(hf: Arrays, m: ModelSpec, tp: int, rank: int) -> Arrays:
    """All parameters of one SGLang rank, by definition."""
    multiple = 64 if math.ceil(m.vocab_size / 64) * 64 % tp == 0 else 64 * tp
    embed = hf["model.embed_tokens.weight"]
    out = {
        "model.embed_tokens.weight": vocab_part(embed, multiple, tp, rank),
        "model.norm.weight": hf["model.norm.weight"],
        "lm_head.weight": vocab_part(hf.get("lm_head.weight", embed), multiple, tp, rank),
    }
    for layer in range(m.layers):
        p = f"model.layers.{layer}."
        q, k, v = (hf[f"{p}self_attn.{n}_proj.weight"] for n in "qkv")
        heads = [w.reshape(-1, m.head_dim, m.hidden) for w in (k, v)]
        if tp > m.kv_heads:  # ranks share a kv head
            kv = [w[rank // (tp // m.kv_heads)] for w in heads]
        else:
            kv = [np.split(w, tp)[rank].reshape(-1, m.hidden) for w in heads]
        out[p + "self_attn.qkv_proj.weight"] = np.concatenate([np.split(q, tp)[rank], *kv])
        out[p + "self_attn.o_proj.weight"] = np.split(
            hf[p + "self_attn.o_proj.weight"], tp, axis=1
        )[rank]
        for same in (
            "self_attn.q_norm",
            "self_attn.k_norm",
            "input_layernorm",
            "post_attention_layernorm",
            "mlp.gate",
        ):
            out[f"{p}{same}.weight"] = hf[f"{p}{same}.weight"]
        w13, w2 = [], []
        for expert in range(m.experts):
            gate, up, down = (
                hf[f"{p}mlp.experts.{expert}.{n}_proj.weight"] for n in ("gate", "up", "down")
            )
            w13.append(np.concatenate([np.split(gate, tp)[rank], np.split(up, tp)[rank]]))
            w2.append(np.split(down, tp, axis=1)[rank])
        out[p + "mlp.experts.w13_weight"] = np.stack(w13)
        out[p + "mlp.experts.w2_weight"] = np.stack(w2)
    return out


def vocab_part(weight: np.ndarray, multiple: int, tp: int, rank: int) -> np.ndarray:
    pad = -len(weight) % multiple
    return np.split(np.concatenate([weight, np.zeros((pad, weight.shape[1]), int)]), tp)[rank]


# --- executing tiles and plans -------------------------------------------------------------------
def load(named: Named, hf: Arrays) -> Arrays:
    """Content of a rank by its tiles; padding is 0, an element that no tile writes -1."""
    out = {}
    for name, local in named.items():
        out[name] = np.full(local.shape, -1)
        for tile in local.tiles:
            out[name][at(tile.box)] = hf[tile.hf][at(tile.hf_box)]  # a stacking dim broadcasts
        if local.pad_rows:
            out[name][-local.pad_rows :] = 0
    return out


def execute(ops: list[Op], sources: Mapping[int, Arrays], sinks: Mapping[int, Named]) -> Iterator:
    """Yields (rank, name, content, number of writes per element)."""
    got = {r: {n: np.zeros(t.shape, int) for n, t in named.items()} for r, named in sinks.items()}
    writes = {
        r: {n: np.zeros(t.shape, int) for n, t in named.items()} for r, named in sinks.items()
    }
    for op in ops:
        part = sources[op.src][op.src_name][at(op.src_box)]
        got[op.dst][op.dst_name][at(op.dst_box)] = part
        writes[op.dst][op.dst_name][at(op.dst_box)] += 1
    for rank, named in sinks.items():
        for name, local in named.items():
            stop = local.shape[0] - local.pad_rows
            yield rank, name, got[rank][name], writes[rank][name][:stop]


def same(a: Arrays, b: Arrays) -> list[str]:
    """Names that differ in presence, shape or any element."""
    return sorted(
        name
        for name in a.keys() | b.keys()
        if name not in a or name not in b or not np.array_equal(a[name], b[name])
    )


def trainer(spec: ModelSpec, mesh: Mesh) -> dict[int, Named]:
    layout = ParallelConfig(**mesh._asdict(), vocab_divisible_by=VOCAB_MULTIPLE)
    return {rank: megatron_tiles(spec, layout, rank) for rank in range(layout.world_size)}


def check_megatron(spec: ModelSpec, mesh: Mesh) -> None:
    """Oracle of trainer ranks: tiles give what `megatron_rank` says, and HF comes back bitwise."""
    hf, tiles = make_hf(spec), trainer(spec, mesh)
    held = {rank: megatron_rank(hf, spec, mesh, rank) for rank in tiles}
    for rank, named in tiles.items():
        check_covers(named, {name: value.shape for name, value in held[rank].items()})
        assert not same(load(named, hf), held[rank]), f"rank {rank} differs from its definition"
    check_round_trip(spec, tiles, held)


def check_round_trip(spec: ModelSpec, tiles: dict[int, Named], held: dict[int, Arrays]) -> None:
    sinks = {0: hf_tiles(spec)}
    hf = make_hf(spec)
    for _, name, content, writes in execute(join(tiles, sinks, same_ranks=True), held, sinks):
        assert np.array_equal(content, hf[name]), f"{name} does not come back"
        assert (writes == 1).all(), f"{name}: an element is written {writes.max()} times"


def check_sync(spec: ModelSpec, mesh: Mesh, tp: int) -> None:
    """Oracle of engine ranks: the trainer-to-engine plan gives what `sglang_rank` says."""
    hf, tiles = make_hf(spec), trainer(spec, mesh)
    held = {rank: megatron_rank(hf, spec, mesh, rank) for rank in tiles}
    sinks = {rank: sglang_tiles(spec, tp, rank) for rank in range(tp)}
    want = {rank: sglang_rank(hf, spec, tp, rank) for rank in range(tp)}
    for rank, named in sinks.items():
        check_covers(named, {name: value.shape for name, value in want[rank].items()})
    for rank, name, content, writes in execute(join(tiles, sinks), held, sinks):
        assert np.array_equal(content, want[rank][name]), f"engine rank {rank}: {name} differs"
        assert (writes == 1).all(), f"engine rank {rank}: {name} is not written exactly once"


# --- exactness -----------------------------------------------------------------------------------
@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: "tp{}pp{}ep{}etp{}dp{}".format(*m))
def test_every_rank_matches_its_definition_and_round_trips(mesh: Mesh) -> None:
    check_megatron(make_spec(), mesh)


@pytest.mark.parametrize("mesh", [Mesh(), mesh_of(2, 2, 2, 1), mesh_of(1, 2, 2, 2)])
def test_tied_embeddings(mesh: Mesh) -> None:
    check_megatron(make_spec(tie_word_embeddings=True), mesh)
    check_sync(make_spec(tie_word_embeddings=True), mesh, 2)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("mesh", [Mesh(), mesh_of(2, 2, 4, 1), mesh_of(4, 1, 2, 2)])
def test_plan_equals_loading_the_engine(mesh: Mesh, tp: int) -> None:
    """tp 8 over 4 kv heads: pairs of ranks share a head."""
    check_sync(make_spec(), mesh, tp)


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelSpec, Mesh, int]:
    power = st.sampled_from((1, 2, 4))
    kv_heads, tp, pp, ep, etp = (draw(power) for _ in range(5))
    engine_tp = draw(power)
    tp = min(tp, kv_heads)
    spec = make_spec(
        num_key_value_heads=kv_heads,
        num_attention_heads=4 * kv_heads,
        head_dim=draw(st.integers(1, 3)),
        hidden_size=draw(st.integers(1, 9)),
        num_hidden_layers=pp * draw(st.integers(1, 2)),
        num_experts=4 * draw(st.integers(1, 2)),
        moe_intermediate_size=4 * draw(st.integers(1, 3)),
        vocab_size=draw(st.integers(1, 150)),
        tie_word_embeddings=draw(st.booleans()),
    )
    return spec, mesh_of(tp, pp, ep, etp), engine_tp


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_any_sizes_and_meshes(case: tuple[ModelSpec, Mesh, int]) -> None:
    spec, mesh, engine_tp = case
    check_megatron(spec, mesh)
    check_sync(spec, mesh, engine_tp)


# --- negative controls ---------------------------------------------------------------------------
MESH = mesh_of(2, 2, 2, 2)


def with_layer_rule(monkeypatch: pytest.MonkeyPatch, local: str, change: Rule | None) -> None:
    """Replace (or, with None, remove) the Megatron rule of one tensor."""
    family = families.FAMILY_TABLES["qwen3_moe"]

    def broken(parts: tuple[Part, ...]) -> tuple[Part, ...]:
        return tuple(
            replace(
                part,
                megatron=tuple(
                    new
                    for rule in part.megatron
                    if (new := change if rule.local.endswith(local) else rule) is not None
                ),
            )
            for part in parts
        )

    changed = replace(family, every=broken(family.every), moe=broken(family.moe))
    assert changed != family
    monkeypatch.setitem(shards.FAMILY_TABLES, "qwen3_moe", changed)


def rule_of(local: str) -> Rule:
    family = families.FAMILY_TABLES["qwen3_moe"]
    rules = (rule for part in (*family.every, *family.moe) for rule in part.megatron)
    return next(rule for rule in rules if rule.local.endswith(local))


def self_consistent(spec: ModelSpec, mesh: Mesh) -> None:
    """What passes without an outside oracle: load by tiles, join back."""
    tiles = trainer(spec, mesh)
    hf = make_hf(spec)
    check_round_trip(spec, tiles, {rank: load(named, hf) for rank, named in tiles.items()})


def test_a_kv_swap_is_seen_only_by_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = rule_of("linear_qkv.weight")
    q, k, v = rule.hf
    with_layer_rule(monkeypatch, rule.local, replace(rule, hf=(q, v, k)))
    self_consistent(make_spec(), MESH)
    with pytest.raises(AssertionError, match="differs from its definition"):
        check_megatron(make_spec(), MESH)


@pytest.mark.parametrize("local", ["linear_fc1.weight", "linear_qkv.weight"])
def test_a_wrong_cut_is_seen_only_by_the_definition(
    monkeypatch: pytest.MonkeyPatch, local: str
) -> None:
    rule = rule_of(local)
    with_layer_rule(monkeypatch, local, replace(rule, cut=each if rule.cut is flat else flat))
    self_consistent(make_spec(), MESH)
    with pytest.raises(AssertionError, match="differs from its definition"):
        check_megatron(make_spec(), MESH)


def test_rows_instead_of_columns_is_refused_by_the_live_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule = rule_of("linear_proj.weight")
    with_layer_rule(monkeypatch, rule.local, replace(rule, cut=flat))
    self_consistent(make_spec(), MESH)
    with pytest.raises(LayoutError, match=r"linear_proj.weight: live shape"):
        check_megatron(make_spec(), MESH)


def test_a_missing_rule_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with_layer_rule(monkeypatch, "router.weight", None)
    with pytest.raises(LayoutError, match=r"mlp.router.weight: no layout rule"):
        check_megatron(make_spec(), MESH)
    with pytest.raises(LayoutError, match=r"sources hold 0 of \d+ elements of .*mlp.gate.weight"):
        self_consistent(make_spec(), MESH)


def test_a_misspelt_hf_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with_layer_rule(
        monkeypatch, "router.weight", replace(rule_of("router.weight"), hf=("mlp.gaet.weight",))
    )
    with pytest.raises(LayoutError, match=r"mlp\.gaet\.weight, which the family does not have"):
        trainer(make_spec(), MESH)


def test_a_misspelt_local_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with_layer_rule(
        monkeypatch, "router.weight", replace(rule_of("router.weight"), local="mlp.ruoter.weight")
    )
    with pytest.raises(LayoutError, match=r"mlp\.router\.weight: no layout rule"):
        check_megatron(make_spec(), MESH)


def test_experts_off_by_one_are_seen_only_by_the_definition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every rank holds the next rank's first expert: still a permutation, so it round-trips."""
    original = shards.expand

    def shifted(spec: ModelSpec, shapes: object, place: object) -> Named:
        named = original(spec, shapes, place)

        def move(name: str) -> str:
            head, experts, tail = name.partition(".experts.")
            if not experts:
                return name
            expert, rest = tail.split(".", 1)
            return f"{head}.experts.{(int(expert) + 1) % spec.experts}.{rest}"

        return {
            name: replace(local, tiles=tuple(t._replace(hf=move(t.hf)) for t in local.tiles))
            for name, local in named.items()
        }

    monkeypatch.setattr(shards, "expand", shifted)
    self_consistent(make_spec(), MESH)
    with pytest.raises(AssertionError, match="differs from its definition"):
        check_megatron(make_spec(), MESH)
