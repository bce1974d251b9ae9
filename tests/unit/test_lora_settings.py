"""Settings of LoRA, and which part of each factor a rank holds."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from moerl.config.algorithms import base_is_reference, ref_models_of
from moerl.config.checks import check, check_model
from moerl.config.load import CONFIG_ROOT, load_config, resolve
from moerl.config.lora_settings import LoraConfig
from moerl.config.resume import check_resume, resume_facts
from moerl.config.schema import (
    AlgorithmConfig,
    Config,
    ModelConfig,
    ParallelConfig,
    RefModelsConfig,
)
from moerl.core.errors import ConfigError, EngineError, LayoutError
from moerl.layout import ModelSpec, hf_shapes, join, megatron_tiles, model_spec, num_elements
from moerl.layout.adapters import adapter_shapes, adapter_tiles, projections, whole_factors
from moerl.planning.dry_run import describe
from moerl.weight_sync.adapters.engine_adapters import check_same
from tests.helpers.trainer_support import ROOT

ON = LoraConfig(rank=4, alpha=8)
LAYOUTS = (
    ParallelConfig(),
    ParallelConfig(tp=2, etp=2),
    ParallelConfig(tp=2, dp=2, ep=4),
    ParallelConfig(pp=2, tp=2, dp=1, ep=2),
)
FAMILIES = ("qwen3_moe", "deepseek_v3", "qwen2_moe", "mixtral", "glm4_moe", "ernie4_5_moe")


def _spec(family: str) -> ModelSpec:
    return model_spec(json.loads((ROOT / "tests/data/layout_families.json").read_text())[family])


def test_one_scale_holds_for_all_ranks() -> None:
    lora = replace(ON, ranks={"*.experts.*": 2, "*.down_proj": 1})
    assert lora.scale == 2
    assert replace(lora, rslora=True).scale == 4
    assert LoraConfig(rank=8).scale == 1
    names = ("self_attn.q_proj", "mlp.experts.3.up_proj", "mlp.experts.3.down_proj", "mlp.gate")
    assert [lora.rank_of(f"model.layers.0.{name}") for name in names] == [4, 2, 1, 0]


def test_the_base_is_the_reference_unless_another_model_is_wanted() -> None:
    kl = AlgorithmConfig(kl="k3", kl_coef=0.1)
    config = replace(Config(), lora=ON, algorithm=kl, model=ModelConfig(path="base"))
    assert base_is_reference(config)
    assert ref_models_of(config) == {}, "so the dry run counts no second model"
    own = replace(config, algorithm=replace(kl, reference="other"))
    separate = replace(config, ref_models=RefModelsConfig(placement="separate"))
    whole = replace(config, lora=LoraConfig())
    for other, path in ((own, "other"), (separate, "base"), (whole, "base")):
        assert not base_is_reference(other)
        assert ref_models_of(other) == {"reference": path}
    assert not base_is_reference(replace(config, algorithm=AlgorithmConfig()))


def test_the_dry_run_counts_no_second_model() -> None:
    kl = ["algorithm.kl=k3", "algorithm.kl_coef=0.1"]
    adapters, whole = (
        describe(resolve(load_config("quickstart-lora", [*kl, *more])), [])
        for more in ([], ["lora.rank=0"])
    )
    assert "others" in whole, "control: memory of the reference"
    assert "others" not in adapters


def test_a_quantised_folder_is_refused_by_the_dry_run_and_before_a_start() -> None:
    """DeepSeek-V3's released folder is fp8 without a setting; SGLang keeps it so."""
    settings = ["lora.send=factors"]
    config = resolve(load_config("deepseek-v3-lora", settings))
    with pytest.raises(ConfigError, match=r"cannot merge factors, or set lora\.send = weights"):
        check(config, starts=False)
    args = {"ep_size": 8, "attn_dp_size": 8}  # without quantization, as for a folder in bf16
    config = replace(config, engine=replace(config.engine, args=args))
    check(config, starts=False)
    with pytest.raises(ConfigError, match=r"keep the fp8 weights.*set lora\.send=weights, or mod"):
        describe(config, ["deepseek-v3-lora", *settings])
    folder = replace(config, model=ModelConfig(path=str(CONFIG_ROOT / config.model.path)))
    folder = replace(folder, checkpoint=replace(config.checkpoint, start="runs/x"))
    with pytest.raises(ConfigError, match=r"lora\.send = 'factors'"):
        check_model(folder)
    assert "deepseek-v3" in describe(resolve(load_config("deepseek-v3-lora")), ["deepseek-v3-lora"])


def test_adapters_belong_to_one_base(tmp_path: Path) -> None:
    for name in ("a", "b", "again"):
        (tmp_path / name).mkdir()
        content = b"weights" if name != "b" else b"Weights"
        (tmp_path / name / "model.safetensors").write_bytes(content)
    saved = resume_facts(_trained_from(tmp_path / "a"))
    check_resume(_trained_from(tmp_path / "again"), saved, reset_optimizer=False)
    with pytest.raises(ConfigError, match=r"model\.path.*belong to weights"):
        check_resume(_trained_from(tmp_path / "b"), saved, reset_optimizer=True)


def _trained_from(folder: Path) -> Config:
    return replace(Config(), lora=ON, model=ModelConfig(path=str(folder)))


def test_how_factors_travel_may_change_at_a_resume() -> None:
    config = replace(Config(), lora=ON)
    saved = resume_facts(config)
    for change in ({"send": "weights"}, {"delivery": "adapter"}, {"slots": 8}):
        other = replace(config, lora=replace(ON, **change))
        check_resume(other, saved, reset_optimizer=False)


def test_where_w0_is_may_differ_and_is_one_of_two() -> None:
    """Between both ends of a publish, and at a resume; control: another scale may not."""
    config, there = replace(Config(), lora=ON), replace(ON, base="device")
    assert LoraConfig().base == "host"
    check_same(ON, there)
    check_resume(replace(config, lora=there), resume_facts(config), reset_optimizer=False)
    with pytest.raises(EngineError, match="need a new start"):
        check_same(ON, replace(there, alpha=ON.alpha + 1))


def test_a_checkpoint_continues_with_its_own_adapters() -> None:
    config = replace(Config(), lora=ON)
    saved = resume_facts(config)
    check_resume(config, saved, reset_optimizer=False)
    for other in (Config(), replace(config, lora=replace(ON, alpha=4))):
        with pytest.raises(ConfigError, match="the checkpoint holds adapters of"):
            check_resume(other, saved, reset_optimizer=True)
    with pytest.raises(ConfigError, match="the checkpoint holds all weights"):
        check_resume(config, resume_facts(Config()), reset_optimizer=False)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_hold_every_element_of_every_factor(family: str, layout: ParallelConfig) -> None:
    spec = _spec(family)
    held = {r: adapter_tiles(spec, layout, r, ON.rank_of) for r in range(layout.world_size)}
    whole = whole_factors(spec, ON.rank_of)
    ops = join(held, {0: whole})  # raises for an element that no rank holds
    total = sum(num_elements(tuple(map(range, local.shape))) for local in whole.values())
    assert sum(num_elements(op.dst_box) for op in ops) == total
    name = "model.layers.0.self_attn.o_proj.lora_A"
    lost = held[0][name]
    for named in held.values():
        if named.get(name) == lost:
            del named[name]
    with pytest.raises(LayoutError, match=re.escape(name)):
        join(held, {0: whole})


def test_a_fused_tensor_has_factors_of_its_own_for_each_part() -> None:
    """Two kv groups of rank 1 of 2: q, q, k, v, twice, in heads of 16 rows."""
    spec = _spec("qwen3_moe")
    tiles = megatron_tiles(spec, ParallelConfig(tp=2), 1)
    local = tiles["decoder.layers.0.self_attention.linear_qkv.weight"]
    q, k, v = projections(local, ON.rank_of, hf_shapes(spec))
    assert (q.rows, k.rows, v.rows) == (range(64, 128), range(32, 64), range(32, 64))
    assert q.places == (
        (range(64, 96), range(32)),
        (range(96, 128), range(64, 96)),
    )
    assert k.places == ((range(32, 48), range(32, 48)), (range(48, 64), range(96, 112)))
    assert v.places == ((range(32, 48), range(48, 64)), (range(48, 64), range(112, 128)))
    assert [local.shape for local in q.factors.values()] == [(4, 32), (64, 4)]


def test_shared_factors_have_one_rank_and_one_name_per_layer() -> None:
    spec = _spec("qwen3_moe")
    shapes = hf_shapes(spec)
    shared = replace(ON, experts="shared")
    names = adapter_shapes(shapes, shared.rank_of, shared=True)
    outer = [name for name in names if re.search(r"layers\.2\.mlp\.experts\.\D", name)]
    layer = "model.layers.2.mlp.experts"
    wanted = ("gate_proj.lora_A", "up_proj.lora_A", "down_proj.lora_B")
    assert sorted(outer) == sorted(f"{layer}.{name}" for name in wanted)
    several = replace(shared, ranks={"*.experts.3.*": 2})
    with pytest.raises(LayoutError, match="is shared by experts of several ranks"):
        adapter_shapes(shapes, several.rank_of, shared=True)
    adapter_shapes(shapes, several.rank_of)
