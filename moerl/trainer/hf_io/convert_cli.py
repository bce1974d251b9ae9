"""The command lines of tools/hf_to_megatron.py and tools/megatron_to_hf.py.

Errors are one sentence on standard error and exit status 2; a full progress bar goes to a
terminal, one line per stage elsewhere.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

from moerl.config.schema import ParallelConfig
from moerl.errors import ConfigError, MoerlError
from moerl.trainer.hf_io.convert import (
    DTYPE_NAMES,
    MegatronFolder,
    convert_to_hf,
    convert_to_megatron,
    open_source,
)
from moerl.trainer.hf_io.convert_job import ConversionRanks

AXES = {
    "tp": "tensor parallelism of attention and dense layers",
    "pp": "pipeline stages",
    "ep": "expert parallelism",
    "etp": "tensor parallelism inside an expert",
    "vpp": "model chunks per pipeline stage (virtual pipeline); needs --pp of 2 or more",
}
STAGES = {
    "first_stage_layers": "layers of the first pipeline stage, where stages are not equal",
    "last_stage_layers": "layers of the last pipeline stage, where stages are not equal",
}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def hf_to_megatron(description: str | None) -> int:
    parser = _parser(
        description, "model folder, or a checkpoint written by this tool", "checkpoint"
    )
    _add_axes(parser, default=1)
    parser.add_argument(
        "--layer-spec",
        choices=("local", "te"),
        default="local",
        help="parameter names of megatron-core's own layers, or of Transformer Engine's "
        "(default: local)",
    )
    parser.add_argument(
        "--vocab-divisible-by",
        type=int,
        default=128,
        metavar="N",
        help="the vocabulary is padded to a multiple of N * tp (default: 128, as Megatron)",
    )
    return _guarded(_to_megatron, parser.parse_args())


def megatron_to_hf(description: str | None) -> int:
    parser = _parser(description, "checkpoint written by tools/hf_to_megatron.py", "model")
    parser.add_argument(
        "--max-shard-size",
        default="4Gi",
        metavar="SIZE",
        type=_size,
        help="largest safetensors file, e.g. 500M or 4Gi (default: 4Gi)",
    )
    group = parser.add_argument_group(
        "layout on the way",
        "By default tensors are read from the checkpoint's own layout.  With any of these it is "
        "resharded first, into a hidden folder next to OUT that is removed afterwards: a proof "
        "that the weights survive that layout.",
    )
    _add_axes(group, default=None)
    return _guarded(_to_hf, parser.parse_args())


def _to_megatron(args: argparse.Namespace, ranks: ConversionRanks, progress: _Bar) -> None:
    with ranks.together():
        layout = smallest_layout(args, vocab_divisible_by=args.vocab_divisible_by)
        source = open_source(args.source)
    convert_to_megatron(
        source,
        args.target,
        layout,
        args.layer_spec,
        ranks,
        progress,
        dtype=DTYPE_NAMES.get(args.dtype),
        replace=args.force,
    )


def _to_hf(args: argparse.Namespace, ranks: ConversionRanks, progress: _Bar) -> None:
    with ranks.together():
        source = MegatronFolder(args.source)
    between = args.target.absolute().with_name(f".{args.target.name}.resharded")
    if any(getattr(args, axis) for axis in AXES):
        layout = smallest_layout(args, vocab_divisible_by=source.layout.vocab_divisible_by)
        convert_to_megatron(
            source, between, layout, source.layer_spec, ranks, progress, replace=True
        )
        with ranks.together():
            source = MegatronFolder(between)
    convert_to_hf(
        source,
        args.target,
        ranks,
        progress,
        dtype=DTYPE_NAMES.get(args.dtype),
        max_shard_bytes=args.max_shard_size,
        replace=args.force,
    )
    if ranks.rank == 0:
        shutil.rmtree(between, ignore_errors=True)


def smallest_layout(args: argparse.Namespace, **more: int) -> ParallelConfig:
    """The smallest trainer with these axes: experts may need more ranks than tp has."""
    axes = {axis: getattr(args, axis) or 1 for axis in AXES}
    for axis, size in axes.items():
        if size < 1:
            raise ConfigError(f"--{axis}", size, "must be at least 1")
    dp = math.lcm(axes["tp"], axes["ep"] * axes["etp"]) // axes["tp"]
    stages = {name: getattr(args, name) or 0 for name in STAGES}
    return ParallelConfig(**axes, **stages, dp=dp, **more)


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


def _parser(description: str | None, source: str, target: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="A conversion that was stopped leaves a hidden folder .OUT.partial; the same "
        "command continues it.\nOUT appears when every file has been read back and matches its "
        "checksums.",
    )
    parser.add_argument("source", type=Path, metavar=source.split()[0].upper(), help=source)
    parser.add_argument("target", type=Path, metavar="OUT", help=f"folder for the {target}")
    parser.add_argument(
        "--dtype",
        choices=tuple(DTYPE_NAMES),
        help="dtype to convert to (default: the source's; FP8 and MXFP4 become the dtype that "
        "the config names)",
    )
    parser.add_argument("--force", action="store_true", help="replace OUT when it exists")
    return parser


def _add_axes(parser: Any, default: int | None) -> None:
    for axis, meaning in AXES.items():
        shown = f" (default: {default})" if default else ""
        parser.add_argument(
            f"--{axis}", type=int, default=default, metavar="N", help=meaning + shown
        )
    for name, meaning in STAGES.items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=int, metavar="N", help=meaning)


def _size(text: str) -> int:
    digits = text.rstrip("KMGBkmgbi")
    unit = text[len(digits) :].upper().removesuffix("B")
    if not digits.isdigit() or unit not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500M or 4Gi")
    return int(digits) * _UNITS[unit]
