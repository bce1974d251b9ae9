"""The folder for SGLang, opened by SGLang's own loader, which stacks the parts of fused tensors."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moerl.config.load import save_config
from moerl.config.lora_settings import LoraConfig
from moerl.config.schema import Config, ModelConfig
from moerl.core.errors import ModelError
from moerl.layout import hf_shapes
from moerl.layout.adapters import factor_names
from moerl.runtime.run_dir import RunDir
from moerl.trainer.hf_io.adapter_files import save_adapter, save_sglang_adapter
from moerl.trainer.hf_io.merge_adapter import main
from moerl.weight_sync.adapters.sglang_adapter import sglang_form
from tests.helpers.lora_oracle import LORA, random_factors, read_spec, write_model

RSLORA = LoraConfig(rank=4, alpha=6, rslora=True, ranks={"*.experts.*": 1, "*.o_proj": 3})
# parts of fused tensors, whose other parts have no factors
SOME = LoraConfig(rank=4, alpha=4, targets=["*.v_proj", "*.kv_a_*", "*.experts.*.down_proj"])
PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
OTHER = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}  # names of mixtral's files


def opened(folder: Path, model: Path) -> tuple[dict[str, Tensor], float]:
    """SGLang's weights of an adapter and its scale; names must be those of its memory pool."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.lora.lora_config import LoRAConfig
    from sglang.srt.lora.utils import get_normalized_target_modules, get_target_module_name
    from transformers import AutoConfig

    config = LoRAConfig(str(folder))
    adapter = LoRAAdapter("it", config, AutoConfig.from_pretrained(model), LoadConfig(), None)
    adapter.initialize_weights_from_tensors(load_file(folder / "adapter_model.safetensors"))
    weights = {name: t for layer in adapter.layers for name, t in layer.weights.items()}
    for name in weights:
        leaf = name.split(".")[-3]
        targets = get_normalized_target_modules(config.target_modules)
        assert get_target_module_name(name, targets) == leaf, name
    return weights, adapter.scaling


def products(weights: dict[str, Tensor], scale: float, model: Path) -> dict[str, Tensor]:
    """s B A by Hugging Face module, from factors that SGLang has stacked."""
    shapes, found = hf_shapes(read_spec(model)), {}
    for name, a in weights.items():
        if not name.endswith("lora_A.weight"):
            continue
        path, leaf = name.removesuffix(".lora_A.weight").rsplit(".", 1)
        parent = path.removeprefix("base_model.model.")
        modules = [f"{parent}.{part}" for part in PARTS.get(leaf, (leaf,))]
        if f"{modules[0]}.weight" not in shapes:
            modules = [f"{parent}.{OTHER[m.rpartition('.')[2]]}" for m in modules]
        rows = [shapes[f"{module}.weight"][0] for module in modules]
        b = weights[name.replace("lora_A", "lora_B")].split(rows)
        for module, one, part in zip(modules, b, a.chunk(len(modules)), strict=True):
            assert one.shape[1] == len(part), name
            found[module] = scale * one @ part
    return found


@pytest.mark.parametrize("lora", [LORA, RSLORA, SOME], ids=["ranks", "rslora", "some"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "mixtral"])
def test_sglang_reads_every_product(family: str, lora: LoraConfig, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", family)
    spec, factors = read_spec(model), random_factors(model, lora)
    save_sglang_adapter(tmp_path / "adapter", factors, spec, lora, str(model))
    found = products(*opened(tmp_path / "adapter", model), model)
    modules = {name.rpartition(".")[0] for name in factors}
    assert modules <= found.keys()
    for module, product in found.items():
        want = torch.zeros_like(product)
        if module in modules:
            want = lora.scale * factors[f"{module}.lora_B"] @ factors[f"{module}.lora_A"]
        torch.testing.assert_close(product, want, rtol=1e-6, atol=1e-7, msg=module)


def test_each_expert_gets_what_they_share(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "qwen3_moe")
    spec, shared = read_spec(model), replace(LORA, experts="shared")
    factors = random_factors(model, shared)
    save_sglang_adapter(tmp_path / "adapter", factors, spec, shared, str(model))
    found = products(*opened(tmp_path / "adapter", model), model)
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        experts = [found[f"model.layers.2.mlp.experts.{e}.{leaf}"] for e in range(spec.experts)]
        pair = factor_names(f"model.layers.2.mlp.experts.3.{leaf}", shared=True)
        a, b = (factors[name] for name in pair)
        torch.testing.assert_close(experts[3], shared.scale * b @ a, rtol=1e-6, atol=1e-7)
        assert not torch.allclose(experts[3], experts[2])


def test_adapters_of_routers_are_refused_by_name(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "qwen3_moe")
    lora = replace(LORA, targets=[*LORA.targets, "*.mlp.gate"])
    with pytest.raises(ModelError, match=r"routers, such as model\.layers\.0\.mlp\.gate\.lora_A"):
        sglang_form(random_factors(model, lora), read_spec(model), lora)


def test_the_head_has_no_parent(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "qwen3_moe")
    head = LoraConfig(rank=2, targets=["lm_head"])
    tensors, config = sglang_form(random_factors(model, head), read_spec(model), head)
    assert sorted(tensors) == [f"base_model.model.lm_head.lora_{x}.weight" for x in "AB"]
    assert config["target_modules"] == ["lm_head"]


def test_a_folder_of_peft_is_not_what_sglang_reads(tmp_path: Path) -> None:
    """The control: stacked experts have names that its memory pool does not know."""
    model = write_model(tmp_path / "model", "qwen3_moe")
    save_adapter(tmp_path / "a", random_factors(model), read_spec(model), LORA, str(model))
    with pytest.raises(ValueError, match="Cannot find target module"):
        opened(tmp_path / "a", model)


def test_the_tool_writes_it_from_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, run = write_model(tmp_path / "model", "qwen3_moe"), RunDir(tmp_path / "run")
    factors = random_factors(model)
    run.root.mkdir()
    save_config(Config(model=ModelConfig(path=str(model)), lora=LORA), run.config)
    save_adapter(run.adapter, factors, read_spec(model), LORA, str(model))
    command = ["tools/lora_merge.py", str(run.root), str(tmp_path / "out"), "--sglang"]
    monkeypatch.setattr(sys, "argv", command)
    assert main("") == 0
    tensors, _ = sglang_form(factors, read_spec(model), LORA)
    weights, scale = opened(tmp_path / "out", model)
    assert scale == LORA.scale
    assert len(weights) < len(tensors), "parts of fused tensors are stacked"


def test_a_latent_attention_that_sglang_cannot_adapt_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "deepseek_v2_lite")
    spec = read_spec(model)
    assert not spec.q_lora
    with pytest.raises(ModelError, match="q_a_proj"):
        sglang_form(random_factors(model), spec, LORA)
