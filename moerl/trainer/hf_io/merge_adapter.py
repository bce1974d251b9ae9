"""A model folder of W0 + s B A, from the model that a run began with and one of its adapters.

tools/lora_merge.py runs/NAME OUT [--adapter runs/NAME/adapter/0.7] [--sglang]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from moerl.config.load import load_saved
from moerl.config.lora_settings import LoraConfig
from moerl.errors import MoerlError
from moerl.layout import hf_tiles
from moerl.layout.adapters import factor_names, module_of
from moerl.run_dir import RunDir
from moerl.trainer.hf_io.adapter_files import load_adapter
from moerl.trainer.hf_io.hf_folder import HfFolder
from moerl.trainer.hf_io.hf_save import pinned
from moerl.trainer.hf_io.hf_shards import HfShards, RankGroup
from moerl.trainer.hf_io.sglang_adapter import save_sglang_adapter
from moerl.weight_sync.dither import HfPart
from moerl.weight_sync.low_rank import merge_into

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def merge_adapter(
    base: Path, adapter: Path, lora: LoraConfig, out: Path, dtype: torch.dtype
) -> None:
    """Write `out`, bit for bit what a trainer in `dtype` has.  Raises ModelError."""
    source = HfFolder(base)
    factors, fixed = load_adapter(adapter, source.spec, lora), pinned(source.spec)
    weights = {name: source.read(name) for name in source.names}
    for name, weight in weights.items():
        weights[name] = weight if name in fixed else weight.to(dtype)
        a, b = map(factors.get, factor_names(module_of(name), shared=lora.shares))
        if a is not None and b is not None:
            dither = HfPart(module_of(name), *map(range, weight.shape)) if lora.dithers else None
            merge_into(weights[name], weights[name].clone(), a, b, lora.scale, dither)
    HfShards(lambda: weights, {0: hf_tiles(source.spec)}, RankGroup(0, None), base).save(out)


def main(description: str | None) -> int:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="runs/NAME of a run with lora.rank")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument("--adapter", type=Path, help="default: RUN/adapter/peft")
    parser.add_argument("--sglang", action="store_true", help="write an adapter for SGLang instead")
    args = parser.parse_args()
    run = RunDir(args.run)
    try:
        config = load_saved(run.config)
        base, dtype = Path(config.model.path), _DTYPES[config.trainer.dtype]
        adapter, lora = args.adapter or run.adapter, config.lora
        if args.sglang:
            spec = HfFolder(base).spec
            factors = load_adapter(adapter, spec, lora)
            save_sglang_adapter(args.out, factors, spec, lora, str(base))
        else:
            merge_adapter(base, adapter, lora, args.out, dtype)
    except MoerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
