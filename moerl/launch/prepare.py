"""Before anything starts: checks, model folder, state of the run directory, the `RunPlan`."""

from __future__ import annotations

import json
import secrets
import shutil
import time
from dataclasses import replace
from pathlib import Path

import psutil
import xxhash

from moerl.config import Config, resolve
from moerl.config.checks import check, check_model
from moerl.config.resume import check_resume
from moerl.engine.args import check_args
from moerl.errors import ConfigError
from moerl.launch.plan import RunPlan
from moerl.rundir import RunDir, read_manifest

_NETWORK = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p", "afs")
) | {"fuse.sshfs", "fuse.glusterfs", "fuse.ceph"}


def prepare(config: Config, run: RunDir, *, resume: bool, reset_optimizer: bool = False) -> RunPlan:
    """Check everything that can be checked, make the tiny model if asked, cut the metrics.

    reset_optimizer: with resume, begin with fresh optimizer state.
    Raises ConfigError before any process is started.
    """
    from moerl.observe.metrics import truncate_after

    config = resolve(config)
    check(config)
    check_args(config.engine.args, replay=config.replay.routing == "R3")
    config = _with_model(config, run)
    hf_config = check_model(config)
    step, checkpoint = (run.latest_checkpoint() if resume else None) or (0, None)
    if checkpoint is not None:
        check_resume(config, read_manifest(checkpoint), reset_optimizer=reset_optimizer)
    incarnation = next_incarnation(run, resume=resume)
    if resume:
        truncate_after(run.metrics, step)
        truncate_after(run.samples, step)
    own = outside_name(run)
    journal_dir = (
        Path(config.rollout.journal_dir) / own if config.rollout.journal_dir else run.journal
    )
    _refuse_network(journal_dir)
    keeps = config.rollout.keep_records
    blob_dir = run.records / "blobs" if keeps else Path(config.cluster.blob_dir) / own
    if not resume:  # left by a run of this name that was removed
        for folder in (journal_dir, blob_dir):
            shutil.rmtree(folder, ignore_errors=True)
    plan = RunPlan(
        config=config,
        run=run,
        model_path=Path(config.model.path),
        hf_config=hf_config,
        token=secrets.token_hex(16),
        incarnation=incarnation,
        node="local",
        blob_dir=blob_dir,
        journal_dir=journal_dir,
        checkpoint=checkpoint,
        records=run.records / f"{incarnation}" if keeps else None,
        reset_optimizer=reset_optimizer and checkpoint is not None,
    )
    plan.spec()  # refuses an unknown family before anything starts
    plan.prompts().prompt(0)  # and a task that cannot give a prompt
    if plan.config.evaluation.every:
        plan.held_out().prompt(0)
    return plan


def outside_name(run: RunDir) -> str:
    """A name for folders outside the run directory: the same at every start, of no other run."""
    return f"moerl-{xxhash.xxh3_64_hexdigest(str(run.root.resolve()).encode())}"


def _refuse_network(folder: Path) -> None:
    """SQLite's locks and its shared memory do not hold on network file systems."""
    kind = file_system(folder)
    if kind in _NETWORK:
        raise ConfigError(
            "rollout.journal_dir",
            str(folder),
            f"{kind} is a network file system; name a local folder",
        )


def file_system(folder: Path) -> str:
    """Type of the file system that holds a folder, which need not exist yet: ext4, nfs4, ..."""
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    folder = folder.resolve()
    return next((mounts[one] for one in (folder, *folder.parents) if one in mounts), "")


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
