"""Bytes of a publish of adapters for four released models, at four ranks, from shapes alone.

    python bench/lora_sync.py [--json]

Into an engine of one rank, in bf16, where each factor is sent once; adapters of all projections.
"each" gives experts the rank of the others, "by k" rank / top-k.  Percent are of whole weights.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from moerl.config.lora_settings import LoraConfig
from moerl.layout import hf_shapes, model_spec, num_elements
from moerl.layout.adapters import adapter_shapes
from moerl.layout.tiles import full_box
from moerl.weight_sync.buckets import WirePolicy, wire_bytes

MODELS = Path(__file__).resolve().parents[1] / "configs" / "models"
NAMES = ("qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "kimi-k2")
RANKS = (8, 16, 32, 64)
POLICY = WirePolicy("bfloat16")


def row(name: str) -> dict[str, object]:
    spec = model_spec(json.loads((MODELS / name / "config.json").read_text()))
    shapes = hf_shapes(replace(spec, mtp_layers=0))  # engines do not get prediction layers
    whole = sum(wire_bytes(hf, shape, POLICY) for hf, shape in shapes.items())
    found: dict[str, object] = {"model": name, "weights_GB": round(whole / 1e9, 1)}
    for rank in RANKS:
        by_k = max(1, rank // spec.experts_per_token)
        for label, experts in (("each", rank), ("by k", by_k), ("shared", rank)):
            lora = LoraConfig(rank=rank, ranks={"*.experts.*": experts})
            every = adapter_shapes(shapes, lora.rank_of, shared=label == "shared").values()
            sent = 2 * sum(num_elements(full_box(shape)) for shape in every)
            found[f"{rank} {label}"] = f"{sent / 1e9:.3g} GB {sent / whole:.2%}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    rows = [row(name) for name in NAMES]
    if parser.parse_args().json:
        print(json.dumps(rows))
        return
    for found in rows:
        print(" | ".join(f"{key} {value}" for key, value in found.items()))


if __name__ == "__main__":
    main()
