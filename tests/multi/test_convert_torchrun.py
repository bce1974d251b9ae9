"""The two tools as people run them: several processes one way, one process back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moerl.layout import hf_shapes, model_spec
from moerl.trainer.checkpoints.convert import convert_to_megatron
from moerl.trainer.checkpoints.convert_output import ConversionRanks
from moerl.trainer.hf_io.hf_folder import HfFolder
from moerl.trainer.hf_io.hf_save import file_form, write_json

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = json.loads((ROOT / "tests/data/layout_families.json").read_text())


def write_model(folder: Path, family: str) -> HfFolder:
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(3)
    form = file_form(model_spec(CONFIGS[family]))
    tensors = {
        name: torch.randn(tensor.shape, generator=generator) for name, tensor in form.items()
    }
    folder.mkdir()
    write_json(folder / "config.json", CONFIGS[family])
    save_file(tensors, folder / "model.safetensors")
    return HfFolder(folder)


def run_tool(num_processes: int, tool: str, *args: object) -> subprocess.CompletedProcess[str]:
    """One process runs plainly, several under torchrun."""
    launch = [sys.executable]
    if num_processes > 1:
        launch += ["-m", "moerl.distributed.torchrun", f"--nproc-per-node={num_processes}"]
    return subprocess.run(
        [*launch, str(ROOT / "tools" / tool), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=150,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )


FAMILIES = [
    family if family == "qwen3_moe" else pytest.param(family, marks=pytest.mark.full)
    for family in CONFIGS
]


@pytest.mark.parametrize("family", FAMILIES)
def test_torchrun_there_and_one_process_back(tmp_path: Path, family: str) -> None:
    source = write_model(tmp_path / "model", family)
    there = run_tool(4, "hf_to_megatron.py", source.path, tmp_path / "a")
    assert there.returncode == 0, there.stderr[-2000:]
    out = tmp_path / "hf"
    back = run_tool(1, "megatron_to_hf.py", tmp_path / "a", out, "--max-shard-size", "1M")
    assert back.returncode == 0, back.stderr[-2000:]
    found = HfFolder(out)
    for name in hf_shapes(source.spec):
        assert torch.equal(found.read(name), source.read(name)), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "hf", "model"]


def test_one_failing_process_ends_all_with_its_sentence(tmp_path: Path) -> None:
    """The damage is in one file: only the process that reads it can know."""
    source = write_model(tmp_path / "model", "qwen3_moe")
    out = tmp_path / "a"
    convert_to_megatron(source, out, ConversionRanks(), lambda *_: None, max_file_bytes=100_000)
    damaged = out / "__1_0.distcp"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 255
    damaged.write_bytes(data)
    failed = run_tool(2, "megatron_to_hf.py", out, tmp_path / "hf", "--max-shard-size", "100K")
    assert failed.returncode != 0
    lines = [line for line in failed.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, failed.stderr[-2000:]
    assert "__1_0.distcp does not match its digest" in lines[0]
    assert not (tmp_path / "hf").exists()
