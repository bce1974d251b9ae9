"""A model folder in fp8 blocks, made from one that is not: what engines serve quantised."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from moerl.weight_sync.wire_formats import FP8_BLOCKS, PLAIN, format_of

CONFIG: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def quantise(source: Path, target: Path) -> Path:
    """Copy `source` with its projections in fp8 blocks, as released models have them."""
    shutil.copytree(source, target)
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [n for n in tensors if format_of(n, FP8_BLOCKS.name) is not PLAIN]:
            values, scales = FP8_BLOCKS.pack(tensors[name])
            tensors[name], tensors[name + FP8_BLOCKS.scale_suffix] = values, scales
        save_file(tensors, file, metadata={"format": "pt"})
    for index in target.glob("*.safetensors.index.json"):
        index.unlink()  # it lacks the scales; readers take the names from the files then
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}))
    return target
