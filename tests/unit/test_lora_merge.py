"""The merged folder, against a sum by numpy."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moerl.config.load import save_config
from moerl.config.schema import Config, ModelConfig, TrainerConfig
from moerl.core.errors import ModelError
from moerl.runtime.run_dir import RunDir
from moerl.trainer.hf_io.adapter_files import load_adapter, save_adapter
from moerl.trainer.hf_io.merge_adapter import merge_adapter, unmerge
from tests.helpers.lora_oracle import LORA, random_factors, read_spec, write_model
from tests.helpers.trainer_support import ROOT

KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16}
Tensors = dict[str, Tensor]


def _check_sum(folder: Path, base: Path, factors: Tensors, dtype: str) -> None:
    found, plain = (load_file(x / "model.safetensors") for x in (folder, base))
    for name, weight in plain.items():
        want, module = weight.to(KINDS[dtype]), name.removesuffix(".weight")
        if f"{module}.lora_A" in factors:
            a, b = (factors[f"{module}.lora_{x}"].numpy() for x in "AB")
            total = np.zeros(weight.shape, np.float32)
            for row, column in zip(a, b.T, strict=True):
                total += np.outer(column, row)
            whole = total * np.float32(LORA.scale) + want.float().numpy()
            want = torch.from_numpy(whole).to(KINDS[dtype])
        assert torch.equal(found[name], want), name


@pytest.mark.parametrize("dtype", KINDS)
def test_a_merged_folder_is_the_sum(dtype: str, tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", "qwen3_moe")
    run, spec, factors = RunDir(tmp_path / "run"), read_spec(base), random_factors(base)
    run.root.mkdir()
    config = Config(
        model=ModelConfig(path=str(base)), trainer=TrainerConfig(dtype=dtype), lora=LORA
    )
    save_config(config, run.config)
    save_adapter(run.adapter, factors, spec, LORA, str(base))
    command = [sys.executable, "tools/lora_merge.py", str(run.root), str(tmp_path / "out")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    _check_sum(tmp_path / "out", base, factors, dtype)
    save_config(replace(config, lora=replace(LORA, alpha=1)), run.config)
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "its scale is 2" in refused.stderr


def test_a_merged_folder_gives_back_what_it_was_made_of(tmp_path: Path) -> None:
    """Controls: one changed weight, another base, a folder that keeps no adapter."""
    base, merged = write_model(tmp_path / "base", "deepseek_v3"), tmp_path / "merged"
    spec, factors = read_spec(base), random_factors(base)
    save_adapter(tmp_path / "adapter", factors, spec, LORA, str(base))
    merge_adapter(base, tmp_path / "adapter", LORA, merged, torch.bfloat16)
    assert unmerge(merged, tmp_path / "back", None) == base
    back = load_adapter(tmp_path / "back", spec, LORA)
    assert all(torch.equal(back[name], value) for name, value in factors.items())
    other = write_model(tmp_path / "other", "deepseek_v3", seed=1)
    with pytest.raises(ModelError, match="fingerprint"):
        unmerge(merged, tmp_path / "again", other)
    moved = base.rename(tmp_path / "moved")
    assert unmerge(merged, tmp_path / "again", moved) == moved
    weights = load_file(merged / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    weights[name].view(torch.uint8)[0, 0] ^= 1
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=name):
        unmerge(merged, tmp_path / "third", moved)
    with pytest.raises(ModelError, match="keeps no adapter"):
        unmerge(moved, tmp_path / "fourth", None)
