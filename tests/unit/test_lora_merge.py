"""The merged folder, against a sum by numpy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moerl.config.load import save_config
from moerl.config.schema import Config, ModelConfig, TrainerConfig
from moerl.runtime.run_dir import RunDir
from moerl.trainer.hf_io.adapter_files import save_adapter
from tests.helpers.lora_oracle import LORA, random_factors, read_spec, write_model
from tests.helpers.rank_server import run_code

KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16}
MERGE = "import runpy; runpy.run_path('tools/lora_merge.py', run_name='__main__')"
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
    words = (str(run.root), str(tmp_path / "out"))
    merged = run_code(MERGE, *words)
    assert merged.returncode == 0, merged.stderr
    _check_sum(tmp_path / "out", base, factors, dtype)
    save_config(replace(config, lora=replace(LORA, alpha=1)), run.config)
    refused = run_code(MERGE, *words)
    assert refused.returncode == 2
    assert "its scale is 2" in refused.stderr
