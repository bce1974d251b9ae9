"""Before anything starts: checks, model folder, state of the run directory, the `RunPlan`."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import replace
from pathlib import Path

from moerl.config import Config, resolve
from moerl.config.checks import check, check_model
from moerl.engine.args import check_args
from moerl.errors import ConfigError
from moerl.launch.plan import RunPlan
from moerl.rundir import RunDir


def prepare(config: Config, run: RunDir, *, resume: bool, scratch: Path) -> RunPlan:
    """Check everything that can be checked, make the tiny model if asked, cut the metrics.

    Raises ConfigError before any process is started.
    """
    from moerl.observe.metrics import truncate_after

    config = resolve(config)
    check(config)
    check_args(config.engine.args, replay=config.replay.routing == "R3")
    config = _with_model(config, run)
    hf_config = check_model(config)
    incarnation = next_incarnation(run, resume=resume)
    step, checkpoint = (run.latest_checkpoint() if resume else None) or (0, None)
    if resume:
        truncate_after(run.metrics, step)
        truncate_after(run.samples, step)
    kept = run.records / f"{incarnation}" if config.rollout.keep_records else None
    blob_dir = kept / "blobs" if kept else Path(config.cluster.blob_dir) / scratch.name
    plan = RunPlan(
        config=config,
        run=run,
        model_path=Path(config.model.path),
        hf_config=hf_config,
        token=secrets.token_hex(16),
        incarnation=incarnation,
        node=f"local-{incarnation}",
        blob_dir=blob_dir,
        checkpoint=checkpoint,
        records=kept,
    )
    plan.spec()  # refuses an unknown family before anything starts
    plan.prompts().prompt(0)  # and a task that cannot give a prompt
    if plan.config.evaluation.every:
        plan.held_out().prompt(0)
    return plan


def _with_model(config: Config, run: RunDir) -> Config:
    """The tiny model of a recipe is made below the run directory, once."""
    if not config.model.tiny.enabled or config.model.path:
        return config
    from moerl.data.tiny_model import make_tiny_model

    folder = run.root / "model"
    if not folder.is_dir():
        make_tiny_model(folder, config.model.tiny, config.run.seed)
    return replace(config, model=replace(config.model, path=str(folder)))


def next_incarnation(run: RunDir, *, resume: bool) -> int:
    """How often a trainer of this run was started before; kept in state.json."""
    path = run.root / "state.json"
    started = int(json.loads(path.read_text())["starts"]) if path.exists() else 0
    if started and not resume:
        raise ConfigError(
            "run.name", run.root.name, f"{run.root} exists; choose another --run or use --resume"
        )
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"starts": started + 1, "time_s": time.time()}))
    temporary.rename(path)
    return started
