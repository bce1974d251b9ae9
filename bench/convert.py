"""Conversion of a checkpoint, both ways, beside what transformers takes to load and save it.

    python bench/convert.py [--rounds 5] [--layers 8] [--json FILE]

A random Qwen3-MoE in fp32 (8 layers: 1 GB) goes from its folder to a Megatron checkpoint
(tools/hf_to_megatron.py) and back (tools/megatron_to_hf.py); transformers loads and saves the same
folder (from_pretrained, save_pretrained).  Each is a process of its own, start and imports
included; in each round every arm has a turn, in rotating order.  Ratios are times of one conversion
over that of transformers: all of them read the model once and write it once, so 1 is level, and
below 1 moerl is faster.  The way back is compared bit by bit with the folder it came from.

The bound is the disk: the seconds of one copy of the folder are printed.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from figures import ROOT, of_ratios, report, result
from safetensors.torch import load_file

from moerl.config.schema import TinyModel
from moerl.data.tiny_model import make_tiny_model

RUN_S = 900.0
LOAD_AND_SAVE = (
    "import sys, transformers;"
    "transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype='auto')"
    ".save_pretrained(sys.argv[2])"
)


def shape(layers: int) -> TinyModel:
    return TinyModel(
        enabled=True,
        hidden_size=1024,
        num_layers=layers,
        num_heads=16,
        num_kv_heads=4,
        head_dim=64,
        num_experts=16,
        experts_per_token=4,
        moe_ffn=640,
    )


def seconds(words: list[str], out: Path) -> float:
    """Of a command that makes `out`, which must not exist before."""
    shutil.rmtree(out, ignore_errors=True)
    begin = time.monotonic()
    done = subprocess.run(
        words, cwd=ROOT, check=False, timeout=RUN_S, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return time.monotonic() - begin


def copied(model: Path, out: Path) -> float:
    """Seconds of one copy of the folder, on the disk at the end."""
    shutil.rmtree(out, ignore_errors=True)
    begin = time.monotonic()
    shutil.copytree(model, out)
    subprocess.run(["sync", "-f", str(out)], check=True)
    return time.monotonic() - begin


def is_equal(one: Path, other: Path) -> bool:
    """Whether two folders hold the same tensors, bit by bit."""
    both = [
        {
            name: tensor
            for file in sorted(x.glob("*.safetensors"))
            for name, tensor in load_file(file).items()
        }
        for x in (one, other)
    ]
    return both[0].keys() == both[1].keys() and all(
        torch.equal(both[0][name].view(torch.uint8), both[1][name].view(torch.uint8))
        for name in both[0]
    )


def play(work: Path, rounds: int, layers: int) -> dict[str, list[float]]:
    model, there, back = work / "model", work / "megatron", work / "back"
    make_tiny_model(model, shape(layers), 0)
    gb = sum(file.stat().st_size for file in model.iterdir()) / 1e9
    python = sys.executable
    arms = {
        "to Megatron": ([python, "tools/hf_to_megatron.py", str(model), str(there)], there),
        "to Hugging Face": ([python, "tools/megatron_to_hf.py", str(there), str(back)], back),
        "transformers": ([python, "-c", LOAD_AND_SAVE, str(model), str(work / "hf")], work / "hf"),
    }
    arms["to Hugging Face"][0].extend(["--model", str(model)])
    seconds(*arms["to Megatron"])  # the way back needs one, and files are in the page cache
    found: dict[str, list[float]] = {name: [] for name in arms}
    order = list(arms)
    for number in range(rounds):
        for name in order[number % len(order) :] + order[: number % len(order)]:
            found[name].append(seconds(*arms[name]))
    if not is_equal(model, back):
        sys.exit(f"{back} is not {model}")
    for name, times in found.items():
        print(f"{name:16} {statistics.median(times):6.1f} s, {gb:.2f} GB")
    print(f"one copy         {copied(model, work / 'copy'):6.1f} s")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write the figures for tools/results")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="moerl-convert-"))
    try:
        found = play(work, options.rounds, options.layers)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    bare = found.pop("transformers")
    figures = [
        of_ratios(
            f"conversion {name}, time / transformers' load and save",
            [ours / theirs for ours, theirs in zip(times, bare, strict=True)],
        )
        for name, times in found.items()
    ]
    report(result(figures), options.json)


if __name__ == "__main__":
    main()
