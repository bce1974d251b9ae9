"""`moerl train RECIPE --dry-run`: what would start, without starting it or needing torch or ray."""

from __future__ import annotations

import io
import shlex
from dataclasses import asdict
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from moerl.config import Config
from moerl.launch.plan import RunPlan, trainer_command
from moerl.rundir import RunDir


def describe(config: Config) -> str:
    """Resolved configuration, process table and the exact trainer command."""
    run = RunDir(Path(config.run.root) / config.run.name)
    plan = RunPlan(
        config=config,
        run=run,
        model_path=Path(config.model.path or run.root / "model"),
        hf_config={},
        token="",
        incarnation=0,
        node="local-0",
        blob_dir=Path(config.cluster.blob_dir) / "moerl-RUN",
        checkpoint=None,
        records=None,
    )
    table = Table(title=f"processes of {config.run.name} on {config.cluster.name}")
    for column in ("process", "count", "what it does"):
        table.add_column(column)
    engine, parallel = config.engine, config.trainer.parallel
    table.add_row("moerl train (front)", "1", "ends whatever is left when the root is gone")
    table.add_row("root", "1", "starts and watches everything, draws the panel, writes the report")
    table.add_row("controller (Ray actor)", "1", "produce, score and learn loops; headers only")
    table.add_row("scorer (Ray actor)", "1", f"rewards in {config.task.scorer_workers} worker(s)")
    table.add_row(
        "engine host + SGLang", str(engine.count), f"tp {engine.tp}, {engine.dtype}, both replays"
    )
    table.add_row(
        "trainer rank",
        str(parallel.world_size),
        f"dp {parallel.dp} ep {parallel.ep} tp {parallel.tp} etp {parallel.etp}, "
        f"{config.trainer.dtype}",
    )
    out = io.StringIO()
    Console(file=out, width=100).print(table)
    command = shlex.join(trainer_command(plan, f"tcp://{config.cluster.address}:PORT"))
    settings = OmegaConf.to_yaml(OmegaConf.create(asdict(config)))
    return f"{settings}\n{out.getvalue()}\ntrainer command:\n  {command}"
