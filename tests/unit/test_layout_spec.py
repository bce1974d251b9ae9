"""Configs that are read or refused, padding, rank order, and errors that name the tensor."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from moerl.config.schema import ParallelConfig
from moerl.core.errors import ConfigError, LayoutError
from moerl.layout import (
    Local,
    Tile,
    check_covers,
    chunk_layers,
    coords_of,
    hf_shapes,
    join,
    megatron_tiles,
    model_spec,
    mtp_copies,
    padded_vocab,
    sglang_tiles,
    stacked_aliases,
)
from tests.helpers.rank_server import run_code

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 130,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "max_position_embeddings": 512,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}


def test_spec_reads_every_size() -> None:
    spec = model_spec(CONFIG)
    assert (spec.hidden, spec.layers, spec.heads, spec.kv_heads) == (32, 2, 8, 2)
    assert (spec.q_rows, spec.kv_rows, spec.moe_layers) == (128, 32, (0, 1))
    assert (spec.norm_topk_prob, spec.tied, spec.dtype) == (True, False, "bfloat16")


@pytest.mark.parametrize(
    ("change", "theta"),
    [
        ({}, 1e4),
        ({"rope_theta": 1e6}, 1e6),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),
        ({"rope_theta": 1e6, "rope_scaling": None}, 1e6),
    ],
)
def test_rope_theta_of_every_transformers_version(change: dict, theta: float) -> None:
    assert model_spec(CONFIG | change).rope_theta == theta


def test_names_of_older_and_newer_configs() -> None:
    newer = {k: v for k, v in CONFIG.items() if k != "num_experts"} | {"num_local_experts": 4}
    assert model_spec(newer) == model_spec(CONFIG)
    no_head_dim = {k: v for k, v in CONFIG.items() if k != "head_dim"}
    assert model_spec(no_head_dim).head_dim == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type = 'gpt2' has no layout; known families: qwen3_moe"),
        ({"hidden_size": None}, "hidden_size = None .* positive integer"),
        ({"num_experts": 0}, "num_experts = 0 .* positive integer"),
        ({"vocab_size": "130"}, "vocab_size = '130' .* positive integer"),
        ({"mlp_only_layers": [0]}, "intermediate_size = None .* positive integer"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"quantization_config": {"bits": 8}}, "quantization_config = .* is not supported"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_type = 'yarn' is not supported"),
        ({"num_attention_heads": 7}, "num_attention_heads = 7 is not a multiple"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok = 5 exceeds num_experts = 4"),
    ],
)
def test_unusable_configs_are_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        model_spec(CONFIG | change)


def test_missing_key_is_refused() -> None:
    with pytest.raises(LayoutError, match="num_local_experts = None"):
        model_spec({k: v for k, v in CONFIG.items() if k != "num_experts"})


@pytest.mark.parametrize(
    ("vocab", "tp", "divisible_by", "rows"),
    [(130, 1, 128, 256), (128, 1, 128, 128), (130, 2, 64, 256), (130, 4, 1, 132), (5, 2, 128, 256)],
)
def test_padded_vocab(vocab: int, tp: int, divisible_by: int, rows: int) -> None:
    assert padded_vocab(model_spec(CONFIG | {"vocab_size": vocab}), tp, divisible_by) == rows


def test_a_rank_may_hold_only_padding() -> None:
    spec = model_spec(CONFIG | {"vocab_size": 5})
    local = megatron_tiles(spec, ParallelConfig(tp=2), 1)["embedding.word_embeddings.weight"]
    assert local == Local((128, 32), (), 128)


def test_tied_head_lives_once_per_stage_that_needs_it() -> None:
    spec = model_spec(CONFIG | {"tie_word_embeddings": True})
    assert "lm_head.weight" not in hf_shapes(spec)
    assert "output_layer.weight" not in megatron_tiles(spec, ParallelConfig(), 0)
    last = megatron_tiles(spec, ParallelConfig(pp=2), 1)["output_layer.weight"]
    assert {tile.hf for tile in last.tiles} == {"model.embed_tokens.weight"}


def test_te_layer_spec_renames_and_moves_nothing() -> None:
    spec, layout = model_spec(CONFIG), ParallelConfig(ep=2, dp=2)
    local = megatron_tiles(spec, layout, 1, "local")
    te = megatron_tiles(spec, layout, 1, "te")
    assert list(local.values()) == list(te.values())
    prefix = "decoder.layers.1."
    assert prefix + "self_attention.linear_qkv.layer_norm_weight" in te
    assert prefix + "pre_mlp_layernorm.weight" in te
    fc2 = te[prefix + "mlp.experts.linear_fc2.weight1"].tiles
    assert [tile.hf for tile in fc2] == ["model.layers.1.mlp.experts.3.down_proj.weight"]
    with pytest.raises(LayoutError, match="layer_spec = 'TE' is unknown"):
        megatron_tiles(spec, layout, 1, "TE")  # type: ignore[arg-type]


def test_hf_shapes_count_and_order() -> None:
    shapes = hf_shapes(model_spec(CONFIG))
    names = list(shapes)
    assert len(names) == 3 + 2 * (9 + 4 * 3)
    assert (names[0], names[-1]) == ("model.embed_tokens.weight", "lm_head.weight")
    assert shapes["model.layers.1.self_attn.o_proj.weight"] == (32, 128)
    assert shapes["model.layers.1.mlp.experts.3.down_proj.weight"] == (32, 24)


def test_stacked_files_are_recognised_by_shape() -> None:
    spec = model_spec(CONFIG)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    aliases = stacked_aliases(spec, {name: (4, 48, 32)})
    box = (range(2, 3), range(24, 48), range(32))
    assert aliases["model.layers.1.mlp.experts.2.up_proj.weight"] == (name, box)
    with pytest.raises(LayoutError, match=r"gate_up_proj has shape \(4, 32, 48\)"):
        stacked_aliases(spec, {name: (4, 32, 48)})


# --- families ------------------------------------------------------------------------------------
MODELS = json.loads((Path(__file__).resolve().parents[1] / "data/layout_families.json").read_text())


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ("qwen2_moe", {"qkv_bias": True, "shared_ffn": 48, "shared_gate": True}),
        ("qwen2_moe", {"pre_softmax": True, "qk_norm": False}),
        ("qwen3_moe", {"moe_layers": (0, 2, 3), "ffn": 40, "pre_softmax": False}),
        ("mixtral", {"moe_ffn": 24, "pre_softmax": False, "ffn": 0}),
        ("olmoe", {"qk_norm_all_heads": True, "pre_softmax": True}),
        ("deepseek_v2_lite", {"q_lora": 0, "direct_q": True, "groups": 1, "moe_layers": (1, 2, 3)}),
        ("deepseek_v2", {"groups": 4, "group_topk": 2, "group_score": "max", "shared_ffn": 48}),
        ("deepseek_v3", {"score": "sigmoid", "expert_bias": True, "topk_scaling": 2.5}),
        ("deepseek_v3", {"q_rows": 160, "kv_a_rows": 28, "kv_b_rows": 224, "o_cols": 128}),
        ("glm4_moe", {"rotary_percent": 0.5, "qkv_bias": True, "qk_norm": True, "groups": 1}),
        ("gpt_oss", {"sinks": True, "sliding_layers": (0, 2), "o_bias": True}),
        ("qwen3", {"experts": 0, "moe_layers": (), "tied": True}),
        ("minimax_m2", {"score": "sigmoid", "qk_norm_all_heads": True, "rotary_percent": 0.5}),
        ("ernie4_5_moe", {"score": "softmax", "expert_bias": True, "pre_softmax": False}),
        ("ernie4_5_moe", {"moe_layers": (1, 2, 3), "shared_ffn": 48, "rotary_pairs": True}),
        ("llama4", {"root": "language_model.", "moe_layers": (1, 3), "nope_layers": (3,)}),
        ("llama4", {"weigh_input": True, "experts_per_token": 1, "longest": 8191, "ffn": 40}),
        ("qwen3_next", {"linear_layers": (0, 1, 2), "q_rows": 256, "o_cols": 128}),
        ("qwen3_next", {"delta_rows": 416, "conv_rows": 256, "step_rows": 16}),
    ],
)
def test_switches_of_each_family(model: str, wanted: dict) -> None:
    spec = model_spec(MODELS[model])
    assert {name: getattr(spec, name) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        ("mixtral", {"sliding_window": 4096}, "sliding_window = 4096 is not supported for mixtral"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc' is not supported"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True is not supported"),
        ("deepseek_v3", {"n_group": 3}, "n_group = 3 must divide 8 experts"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias = True is not supported"),
        ("gpt_oss", {"swiglu_limit": 6.0}, "swiglu_limit = 6.0 is not supported"),
        ("llama", {"mlp_bias": True}, "mlp_bias = True is not supported"),
        ("llama4", {"model_type": "llama4_text"}, "SGLang's class for it leaves the experts"),
        ("qwen3_next", {"mlp_only_layers": [1]}, "is not supported for qwen3_next"),
        ("ernie4_5_moe", {"moe_layer_interval": 2}, "moe_layer_interval = 2 is not supported"),
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm = False is not supported"),
    ],
)
def test_variants_without_rules_are_refused(model: str, change: dict, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        model_spec(MODELS[model] | change)


def test_mixtral_keeps_the_names_of_its_files() -> None:
    names = hf_shapes(model_spec(MODELS["mixtral"]))
    assert "model.layers.0.block_sparse_moe.gate.weight" in names
    assert names["model.layers.3.block_sparse_moe.experts.7.w2.weight"] == (32, 24)


def test_expert_bias_is_fp32_on_both_sides() -> None:
    spec = model_spec(MODELS["deepseek_v3"])
    trainer = megatron_tiles(spec, ParallelConfig(), 0)
    assert trainer["decoder.layers.1.mlp.router.expert_bias"].dtype == "float32"
    engine = sglang_tiles(spec, 1, 0)
    assert engine["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == "float32"


def test_transformer_engine_names_of_latent_attention() -> None:
    spec, layout = model_spec(MODELS["deepseek_v3"]), ParallelConfig(tp=2)
    local, te = (megatron_tiles(spec, layout, 1, layer_spec) for layer_spec in ("local", "te"))
    layer = "decoder.layers.0."
    assert layer + "input_layernorm.weight" in te
    assert layer + "mlp.linear_fc1.layer_norm_weight" in te  # layer 0 is dense
    assert layer + "self_attention.linear_kv_up_proj.layer_norm_weight" in te
    down = layer + "self_attention.linear_kv_down_proj.weight"
    assert local[down] == te[down]
    assert te[down].shape == (28, 32)  # whole


def test_names_of_prediction_layers() -> None:
    spec = model_spec(MODELS["deepseek_v3"] | {"num_nextn_predict_layers": 1})
    tiles = megatron_tiles(spec, ParallelConfig(pp=2), 1)
    router = tiles["mtp.layers.0.mtp_model_layer.mlp.router.weight"]
    assert {tile.hf for tile in router.tiles} == {"model.layers.4.mlp.gate.weight"}
    assert "embedding.word_embeddings.weight" in tiles  # the stage embeds the next token
    copies = mtp_copies(spec)
    assert copies["model.layers.4.shared_head.head.weight"] == "lm_head.weight"
    assert not copies.keys() & hf_shapes(spec).keys()


@pytest.mark.parametrize(
    ("sizes", "chunks"),
    [
        ({"pp": 2, "vpp": 2}, [[(0, 2), (4, 6)], [(2, 4), (6, 8)]]),
        ({"pp": 4}, [[(0, 2)], [(2, 4)], [(4, 6)], [(6, 8)]]),
        ({"pp": 3, "first_stage_layers": 2}, [[(0, 2)], [(2, 5)], [(5, 8)]]),
        (
            {"pp": 3, "first_stage_layers": 3, "last_stage_layers": 1},
            [[(0, 3)], [(3, 7)], [(7, 8)]],
        ),
    ],
)
def test_layers_of_every_chunk(sizes: dict, chunks: list) -> None:
    layout = ParallelConfig(**sizes)
    found = [
        [chunk_layers(8, layout, stage, chunk) for chunk in range(layout.vpp)]
        for stage in range(layout.pp)
    ]
    assert found == [[range(*ends) for ends in stage] for stage in chunks]


# --- meshes --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 4}, "parallel.tp = 4 .* num_key_value_heads = 2"),
        ({"pp": 3}, "parallel.pp = 3 .* num_hidden_layers = 2"),
        ({"pp": 2, "vpp": 2}, r"parallel.vpp = 2 .* every pipeline stage, \[1, 1\]"),
        ({"vpp": 2}, "parallel.vpp = 2 .* interleaved over stages; use pp > 1"),
        ({"ep": 8, "dp": 8}, "parallel.ep = 8 .* num_experts = 4"),
        ({"etp": 16, "dp": 16}, "parallel.etp = 16 .* moe_intermediate_size = 24"),
        ({"ep": 2}, "parallel.ep = 2 .* must divide tp . cp . dp = 1"),
        ({"tp": 0}, "parallel.tp = 0 .* at least 1"),
    ],
)
def test_impossible_meshes_name_the_axis(sizes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        megatron_tiles(model_spec(CONFIG), ParallelConfig(**sizes), 0)


def test_engine_tp_that_does_not_divide_is_refused() -> None:
    with pytest.raises(LayoutError, match="does not divide into 3 equal parts"):
        sglang_tiles(model_spec(CONFIG), 3, 0)


def test_coords_are_megatrons_rank_order() -> None:
    """Oracle: megatron-core's own RankGenerator, as initialize_model_parallel builds both grids.

    In a process of its own, because importing megatron here would precede the CPU platform's
    patches of other tests.
    """
    done = run_code(MEGATRON_ORDER)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "compared 55"


MEGATRON_ORDER = """
import itertools
from megatron.core.parallel_state import RankGenerator
from moerl.config.schema import ParallelConfig
from moerl.layout import coords_of

def groups(coords, axes, free):
    found = {}
    for rank, c in enumerate(coords):
        found.setdefault(tuple(getattr(c, a) for a in axes if a != free), []).append(rank)
    return sorted(found.values())

num = 0
for tp, cp, pp, dp, etp, ep in itertools.product((1, 2), (1, 2), (1, 2), (1, 3, 4), (1, 2), (1, 4)):
    stage = tp * cp * dp
    if stage % (etp * ep) or stage * pp > 16:
        continue
    layout = ParallelConfig(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, dp=dp)
    coords = [coords_of(layout, rank) for rank in range(layout.world_size)]
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    expert = RankGenerator(tp=etp, ep=ep, dp=stage // (etp * ep), pp=pp, cp=1, order=order)
    for axis in ("tp", "cp", "dp", "pp"):
        assert groups(coords, ("tp", "cp", "dp", "pp"), axis) == sorted(dense.get_ranks(axis)), axis
    for axis, token in (("etp", "tp"), ("ep", "ep"), ("edp", "dp"), ("pp", "pp")):
        mine = groups(coords, ("etp", "ep", "edp", "pp"), axis)
        assert mine == sorted(expert.get_ranks(token)), axis
    num += 1
print("compared", num)
"""


# --- exact coverage ------------------------------------------------------------------------------
def named(*tiles: Tile, shape: tuple[int, ...] = (4, 2), pad: int = 0) -> dict[str, Local]:
    return {"w": Local(shape, tiles, pad)}


def rows(start: int, stop: int, *, hf: int | None = None) -> Tile:
    """Rows of tensor `t`, stored at the same rows, or from row `hf` of the Hugging Face tensor."""
    first = start if hf is None else hf
    hf_rows = range(first, first + stop - start)
    return Tile("t", (hf_rows, range(2)), (range(start, stop), range(2)))


@pytest.mark.parametrize(
    ("local", "live", "message"),
    [
        (named(rows(0, 4)), {}, "w: the layout has this tensor"),
        (named(rows(0, 4)), {"w": (4, 2), "v": (1,)}, "v: no layout rule"),
        (named(rows(0, 4)), {"w": (2, 4)}, r"w: live shape \(2, 4\), the layout says \(4, 2\)"),
        (named(rows(0, 3)), {"w": (4, 2)}, "w: tiles cover 6 of 8 elements"),
        (named(rows(0, 3), rows(2, 4)), {"w": (4, 2)}, "w: two tiles write the same"),
        (named(rows(0, 4), pad=1), {"w": (4, 2)}, "w: tile .* does not fit"),
    ],
)
def test_coverage_errors_name_the_tensor(local: dict, live: dict, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        check_covers(local, live)


def test_padding_is_not_a_gap() -> None:
    check_covers(named(rows(0, 3), pad=1), {"w": (4, 2)})


def test_join_refuses_a_gap_and_partial_replicas() -> None:
    sink = {0: named(rows(0, 4))}
    with pytest.raises(LayoutError, match="w: sources hold 6 of 8 elements of t"):
        join({0: named(rows(0, 3))}, sink)
    with pytest.raises(LayoutError, match="overlap without being equal"):
        join({0: named(rows(0, 3)), 1: named(rows(1, 4))}, sink)
    with pytest.raises(LayoutError, match="overlap without being equal"):
        # a gap of one row and an overlap of one row: the element count alone would agree
        join({0: named(rows(0, 2)), 1: named(rows(1, 3))}, sink)


def test_join_spreads_replicas_and_prefers_the_sink_itself() -> None:
    sources = {rank: named(rows(0, 4)) for rank in (1, 2)}
    sinks = {rank: named(rows(0, 4)) for rank in range(3, 9)}
    senders = [op.src for op in join(sources, sinks)]
    assert (senders.count(1), senders.count(2)) == (3, 3)
    own = join(sources, {1: named(rows(0, 4)), 2: named(rows(0, 4))}, same_ranks=True)
    assert [(op.src, op.dst) for op in own] == [(1, 1), (2, 2)]


def test_join_maps_a_part_into_both_local_boxes() -> None:
    """Source keeps HF rows 2..3 at its rows 0..1; the sink wants HF row 3 at its row 0."""
    sources = {0: named(rows(0, 2, hf=2), shape=(2, 2))}
    (op,) = join(sources, {0: named(rows(0, 1, hf=3), shape=(1, 2))})
    assert op.src_box == (range(1, 2), range(2))
    assert op.dst_box == (range(0, 1), range(2))


def test_every_mesh_rank_has_its_own_expert_shard() -> None:
    layout = ParallelConfig(tp=2, ep=2, etp=1, dp=2)
    seen = {(coords_of(layout, r).ep, coords_of(layout, r).edp) for r in range(layout.world_size)}
    assert seen == set(itertools.product(range(2), range(2)))
