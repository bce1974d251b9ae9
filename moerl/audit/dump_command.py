"""`moerl check-dump`: check recorded rollouts of another system; needs no torch."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from moerl.core.json_files import read_model_config


def check_dump(
    dump: Annotated[
        Path, typer.Argument(metavar="FILE", help="A .jsonl or .npz (docs/formats.md).")
    ],
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Its model's folder, or a config.json.")
    ],
) -> None:
    """Check recorded rollouts of another system against a model's shapes, and count them.

    A missing, unknown or misfitting field is reported with its line or rollout.  `moerl mismatch
    RECIPE --records FILE` then scores the file; that needs the trainer.

    Example:

      moerl check-dump dump.jsonl configs/models/qwen3-30b-a3b
    """
    from moerl.audit.dumps import describe, model_shape, read_dump
    from moerl.layout import model_spec
    from moerl.records.blob_store import BlobStore

    shape = model_shape(model_spec(read_model_config(model)))
    with tempfile.TemporaryDirectory(prefix="moerl-dump-") as folder:
        typer.echo(describe(read_dump(dump, BlobStore(Path(folder), "dump"), shape), shape))
