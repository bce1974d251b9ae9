"""The command lines of tools/hf_to_megatron.py and tools/megatron_to_hf.py.

Errors are one sentence on standard error and exit status 2; a full progress bar goes to a
terminal, one line per stage elsewhere.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from moerl.core.errors import MoerlError
from moerl.trainer.checkpoints.convert import DTYPE_NAMES, convert_to_hf, convert_to_megatron
from moerl.trainer.checkpoints.convert_job import ConversionRanks
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
    return _guarded(_to_megatron, parser.parse_args())


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
    return _guarded(_to_hf, parser.parse_args())


def _to_megatron(args: argparse.Namespace, ranks: ConversionRanks, progress: _Bar) -> None:
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


def _to_hf(args: argparse.Namespace, ranks: ConversionRanks, progress: _Bar) -> None:
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


class _Bar:
    """Bytes and time left on a terminal; elsewhere a line when a stage begins."""

    def __init__(self, quiet: bool) -> None:
        console = Console(stderr=True, quiet=quiet)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console)
        self._live = console.is_terminal
        self._tasks: dict[str, TaskID] = {}
        if self._live:
            self._progress.start()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total)
            if not self._live:
                self._progress.console.print(f"{stage} {total:,} bytes", highlight=False)
        self._progress.update(self._tasks[stage], completed=done, total=total)

    def close(self) -> None:
        if self._live:
            self._progress.stop()


def _guarded(
    convert: Callable[[argparse.Namespace, ConversionRanks, _Bar], None], args: argparse.Namespace
) -> int:
    ranks = ConversionRanks()
    bar = _Bar(quiet=ranks.rank != 0)
    try:
        convert(args, ranks, bar)
    except MoerlError as error:
        bar.close()
        if ranks.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        bar.close()
        print("stopped; the same command continues", file=sys.stderr)
        return 130
    bar.close()
    if ranks.rank == 0:
        print(args.target)
    return 0


def _parser(description: str | None, name: str, meaning: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="A conversion that was stopped leaves a hidden folder .OUT.partial; the same "
        "command continues it.\nOUT appears when every file has been read back and matches its "
        "digest.",
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
