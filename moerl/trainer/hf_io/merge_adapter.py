"""A model folder of W0 + s B A, made from a run's adapter.

tools/lora_merge.py runs/NAME OUT [--adapter runs/NAME/adapter/0.7] [--sglang]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

from moerl.config.load import load_saved
from moerl.config.lora_settings import LoraConfig
from moerl.core.errors import MoerlError
from moerl.layout import hf_tiles
from moerl.layout.adapters import factor_names, module_of
from moerl.runtime.run_dir import RunDir
from moerl.trainer.hf_io.adapter_files import load_adapter, save_sglang_adapter
from moerl.trainer.hf_io.hf_folder import HfFolder
from moerl.trainer.hf_io.hf_save import pinned
from moerl.trainer.hf_io.hf_shards import HfShards, RankGroup
from moerl.weight_sync.adapters.low_rank import merge_into

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def merge_adapter(
    base: Path, adapter: Path, lora: LoraConfig, out: Path, dtype: torch.dtype
) -> None:
    """Write `out`, bit for bit the weights of a trainer in `dtype`.  Raises ModelError."""
    source = HfFolder(base)
    weights = _merged(source, adapter, lora, dtype)
    tiles = {0: hf_tiles(source.spec)}
    HfShards(lambda: weights, tiles, RankGroup(0, None), source.path).save(out)


def _merged(
    source: HfFolder, adapter: Path, lora: LoraConfig, dtype: torch.dtype
) -> dict[str, Tensor]:
    factors, fixed = load_adapter(adapter, source.spec, lora), pinned(source.spec)
    weights = {name: source.read(name) for name in source.names}
    for name, weight in weights.items():
        weights[name] = weight if name in fixed else weight.to(dtype)
        a, b = map(factors.get, factor_names(module_of(name), shared=lora.shares))
        if a is not None and b is not None:
            merge_into(weights[name], weights[name].clone(), a, b, lora.scale)
    return weights


def main(description: str | None) -> int:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run with lora.rank")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument(
        "--adapter", type=Path, help="folder of peft; default: RUN/adapter/peft of the run"
    )
    parser.add_argument("--sglang", action="store_true", help="write an adapter for SGLang instead")
    args = parser.parse_args()
    try:
        _of_run(args)
    except MoerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _of_run(args: argparse.Namespace) -> None:
    run = RunDir(args.run)
    config = load_saved(run.config)
    base, dtype = Path(config.model.path), _DTYPES[config.trainer.dtype]
    adapter, lora = args.adapter or run.adapter, config.lora
    if args.sglang:
        spec = HfFolder(base).spec
        factors = load_adapter(adapter, spec, lora)
        save_sglang_adapter(args.out, factors, spec, lora, str(base))
    else:
        merge_adapter(base, adapter, lora, args.out, dtype)


if __name__ == "__main__":
    sys.exit(main(__doc__))
