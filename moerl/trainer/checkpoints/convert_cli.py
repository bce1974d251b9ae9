"""The command lines of tools/hf_to_megatron.py and tools/megatron_to_hf.py.

Errors are one sentence on standard error and exit status 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from moerl.core.errors import MoerlError
from moerl.trainer.checkpoints.convert import DTYPE_NAMES, convert_to_hf, convert_to_megatron
from moerl.trainer.checkpoints.convert_output import ConversionProgress, ConversionRanks
from moerl.trainer.checkpoints.megatron_folder import MegatronFolder
from moerl.trainer.hf_io.hf_folder import HfFolder

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def hf_to_megatron(description: str | None) -> int:
    parser = _parser(description, "MODEL", "model folder (config.json, safetensors, tokenizer)")
    parser.add_argument(
        "--layer-spec",
        choices=("local", "te"),
        default="local",
        help="names of tensors as megatron-core's own layers store them, or as Transformer "
        "Engine's do; runs of moerl read both (default: local)",
    )
    args = parser.parse_args()

    def convert(ranks: ConversionRanks, progress: ConversionProgress) -> None:
        with ranks.together():
            source = HfFolder(args.source)
        convert_to_megatron(
            source,
            args.target,
            ranks,
            progress,
            layer_spec=args.layer_spec,
            dtype=DTYPE_NAMES.get(args.dtype),
            replace=args.force,
        )

    return _guarded(convert, args.target)


def megatron_to_hf(description: str | None) -> int:
    parser = _parser(
        description,
        "CHECKPOINT",
        "a run (its newest checkpoint), one of its checkpoints/step-N, or a torch_dist folder of "
        "Megatron-LM or Megatron-Bridge",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="folder with config.json and tokenizer (default: the checkpoint's own, or "
        "model.path of its run)",
    )
    parser.add_argument(
        "--max-shard-size",
        default="4Gi",
        metavar="SIZE",
        type=_size,
        help="largest safetensors file, e.g. 500M or 4Gi (default: 4Gi)",
    )
    args = parser.parse_args()

    def convert(ranks: ConversionRanks, progress: ConversionProgress) -> None:
        with ranks.together():
            source = MegatronFolder(args.source, args.model)
        convert_to_hf(
            source,
            args.target,
            ranks,
            progress,
            dtype=DTYPE_NAMES.get(args.dtype),
            max_shard_bytes=args.max_shard_size,
            replace=args.force,
        )

    return _guarded(convert, args.target)


def _show(stage: str, done: int, total: int) -> None:
    """Overwrite one line of a terminal; elsewhere print nothing until the stage is done."""
    is_live, ends = sys.stderr.isatty(), done >= total
    if is_live or ends:
        line = f"{stage} {done / 1e9:,.2f} of {total / 1e9:,.2f} GB"
        print(line, end="\n" if ends else "\r", file=sys.stderr, flush=True)


def _guarded(convert: Callable[[ConversionRanks, ConversionProgress], None], target: Path) -> int:
    ranks = ConversionRanks()
    try:
        convert(ranks, _show if ranks.rank == 0 else lambda _stage, _done, _total: None)
    except MoerlError as error:
        if ranks.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; nothing was published", file=sys.stderr)
        return 130
    if ranks.rank == 0:
        print(target)
    return 0


def _parser(description: str | None, name: str, meaning: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="OUT appears when every file has been read back and matches its digest.",
    )
    parser.add_argument("source", type=Path, metavar=name, help=meaning)
    parser.add_argument("target", type=Path, metavar="OUT", help="folder for the result")
    parser.add_argument(
        "--dtype",
        choices=tuple(DTYPE_NAMES),
        help="dtype to convert to (default: the source's; FP8 and MXFP4 become the dtype that "
        "the config names)",
    )
    parser.add_argument("--force", action="store_true", help="replace OUT when it exists")
    return parser


def _size(text: str) -> int:
    digits = text.rstrip("KMGBkmgbi")
    unit = text[len(digits) :].upper().removesuffix("B")
    if not digits.isdigit() or unit not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500M or 4Gi")
    return int(digits) * _UNITS[unit]


if __name__ == "__main__":
    sys.exit(megatron_to_hf(__doc__))
