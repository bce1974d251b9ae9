"""Hugging Face logits against Megatron logits, one tiny random model per family, in fp32.

This sees what tables that agree with each other cannot: a swapped k and v, a norm in the wrong
place, a router that normalises otherwise.  transformers and the CPU-patched megatron-core need
processes of their own; each serves all families, because starting costs more than running.
Workers are this file run as a program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = json.loads((ROOT / "tests/data/layout_families.json").read_text())
TOLERANCE = 1e-5
NUM_TOKENS = 24


def write_models(folder: Path) -> None:
    """A model folder per family, written by transformers, and the logits of a fixed batch."""
    from moerl.engine import shim

    shim.arm()
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    for family, config in FAMILIES.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config),
            attn_implementation="eager",
            experts_implementation="eager",
        )
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if "norm" in name:
                    tensor.copy_(1 + 0.2 * torch.randn_like(tensor))
                elif "inv_freq" not in name:
                    tensor.normal_(0, 0.15)
        model.eval().save_pretrained(folder / family)
        with torch.no_grad():
            logits = model(tokens(config["vocab_size"])).logits
        save_file({"logits": logits.contiguous()}, folder / f"{family}.logits")


def tokens(vocab: int):
    import torch

    return torch.randint(vocab, (2, NUM_TOKENS), generator=torch.Generator().manual_seed(1))


def compare_models(folder: Path, families: list[str]) -> dict[str, float]:
    """Largest difference of Megatron's logits from those beside the folder, per family."""
    from moerl.trainer import platform

    place = platform.prepare("cpu")
    import torch
    from safetensors.torch import load_file

    from moerl.config.schema import ParallelConfig, TrainerConfig
    from moerl.trainer import parallel
    from moerl.trainer.hf_weights import HfFolder, load_hf
    from moerl.trainer.model import build, live_tensors

    ranks = parallel.start(ParallelConfig(), place, timeout_s=60)
    found = {}
    for family in families:
        source = HfFolder(folder / family)
        model = build(source.spec, TrainerConfig(), ranks, with_replay=False)
        load_hf(live_tensors(model.gpt), model.tiles, source)
        ids = tokens(source.spec.vocab_size)
        with torch.no_grad():
            logits = model.module(ids, torch.arange(NUM_TOKENS).expand_as(ids), None)
        want = load_file(folder / f"{family}.logits")["logits"]
        gap = (logits[..., : source.spec.vocab_size] - want).abs().max()
        found[family] = float(gap)
    return found


def run(task: str, folder: Path, *args: str) -> str:
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, __file__, task, str(folder), *args],
        env=os.environ
        | {
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1] if done.stdout else ""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    run("write", folder)
    return folder


@pytest.fixture(scope="module")
def gaps(models: Path) -> dict[str, float]:
    return json.loads(run("compare", models, *FAMILIES))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree_with_transformers(gaps: dict[str, float], family: str) -> None:
    assert gaps[family] <= TOLERANCE, f"{family}: logits differ by {gaps[family]:.2e}"


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write_models(Path(sys.argv[2]))
    else:
        print(json.dumps(compare_models(Path(sys.argv[2]), sys.argv[3:])))
