"""A model folder of W0 + s B A, and the way back from it.

tools/lora_merge.py runs/NAME OUT [--adapter runs/NAME/adapter/0.7] [--sglang]
tools/lora_merge.py MODEL OUT --adapter FOLDER [--dtype bf16]
tools/lora_merge.py MERGED OUT --unmerge [--base MODEL]
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
from moerl.trainer.hf_io.adapter_base import check_base
from moerl.trainer.hf_io.adapter_files import load_adapter, save_sglang_adapter
from moerl.trainer.hf_io.foreign_adapter import read_foreign
from moerl.trainer.hf_io.hf_folder import HfFolder
from moerl.trainer.hf_io.hf_save import pinned
from moerl.trainer.hf_io.hf_shards import HfShards, RankGroup
from moerl.trainer.hf_io.unmerge_adapter import (
    MergedFrom,
    check_equal,
    give_back,
    keep_parts,
    read_parts,
)
from moerl.weight_sync.adapters.low_rank import merge_into

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def merge_adapter(
    base: Path, adapter: Path, lora: LoraConfig, out: Path, dtype: torch.dtype
) -> None:
    """Write `out`, bit for bit what a trainer in `dtype` has.  Raises ModelError."""
    source = HfFolder(base)
    weights = _merged(source, adapter, lora, dtype)
    _save(source, weights, out)
    keep_parts(out, MergedFrom(base, adapter, dtype, lora))


def merge_foreign(base: Path, adapter: Path, out: Path, dtype: torch.dtype) -> None:
    """The same for a folder of peft from elsewhere, rounded to the nearest.  Raises ModelError."""
    source = HfFolder(base)
    _save(source, _merged_foreign(source, adapter, dtype), out)
    keep_parts(out, MergedFrom(base, adapter, dtype, None))


def unmerge(merged: Path, out: Path, base: Path | None) -> Path:
    """Write the adapter of a merged folder, prove that it is; returns the folder of W0.

    Raises ModelError where W0 is not found, or the folder is not the merge of both.
    """
    parts = read_parts(merged, base)
    source = HfFolder(parts.base)
    if parts.lora is None:
        wanted = _merged_foreign(source, parts.adapter, parts.dtype)
    else:
        wanted = _merged(source, parts.adapter, parts.lora, parts.dtype)
    check_equal(merged, wanted)
    give_back(parts.adapter, out)
    return parts.base


def _save(source: HfFolder, weights: dict[str, Tensor], out: Path) -> None:
    tiles = {0: hf_tiles(source.spec)}
    HfShards(lambda: weights, tiles, RankGroup(0, None), source.path).save(out)


def _merged_foreign(source: HfFolder, adapter: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    check_base(adapter, source.path)
    found, fixed = read_foreign(adapter, source.spec), pinned(source.spec)
    weights = {name: source.read(name) for name in source.names}
    for name, weight in weights.items():
        weights[name] = weight if name in fixed else weight.to(dtype)
        if low := found.get(module_of(name)):
            merge_into(weights[name], weights[name].clone(), low.a, low.b, low.scale)
    return weights


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
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="run with lora.rank, model folder, or merged folder"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument(
        "--adapter", type=Path, help="folder of peft; default: RUN/adapter/peft of a run"
    )
    parser.add_argument("--dtype", choices=_DTYPES, default="bf16", help="with a model folder")
    parser.add_argument("--unmerge", action="store_true", help="write the adapter of a merged RUN")
    parser.add_argument("--base", type=Path, help="model folder to unmerge to, if it was moved")
    parser.add_argument("--sglang", action="store_true", help="write an adapter for SGLang instead")
    args = parser.parse_args()
    is_model = (args.run / "config.json").is_file()
    if is_model and not (args.unmerge or args.adapter):
        parser.error(f"{args.run} is a model folder: give --adapter or --unmerge")
    try:
        if args.unmerge:
            base = unmerge(args.run, args.out, args.base)
            print(f"{args.run} is {base} with the adapter in {args.out}, bit for bit")
        elif is_model:
            merge_foreign(args.run, args.adapter, args.out, _DTYPES[args.dtype])
        else:
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
