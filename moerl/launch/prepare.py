"""Checks before any process starts; makes the model folder and the `RunContext`."""

from __future__ import annotations

import io
import logging
import secrets
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from moerl.config import Config, resolve
from moerl.config.algorithms import ref_models_of
from moerl.config.checks import check, check_model
from moerl.config.clusters import is_local, placement, starts_on_cuda
from moerl.config.resume import check_adapters, check_resume
from moerl.config.secret_values import refuse_hidden
from moerl.config.task_mixture import entries_of, naming
from moerl.core.errors import ConfigError, LayoutError, ModelError
from moerl.core.json_files import read_model_config
from moerl.core.rpc import Keys
from moerl.engine.host.server_args import check_args, check_planned_layout
from moerl.launch.cluster.node_facts import NETWORK_FILE_SYSTEMS, file_system
from moerl.launch.run_context import RunContext
from moerl.launch.task_agents import task_agents
from moerl.layout import ModelSpec, model_spec
from moerl.runtime.private_dir import private_dir, user_dir
from moerl.runtime.run_dir import RunDir, next_incarnation, read_manifest, refuse_foreign
from moerl.sandbox.limits import isolation_of
from moerl.trainer.checkpoints.checkpoint_files import MANIFEST, newest_checkpoint
from moerl.trainer.checkpoints.find_checkpoint import find_checkpoint

log = logging.getLogger(__name__)


def prepare(
    config: Config, run: RunDir, *, resume: bool, reset_optimizer: bool = False
) -> RunContext:
    """Run every check that needs no process, make the tiny model if asked, clear old files.

    reset_optimizer: with resume, start from fresh optimizer state.  Raises ConfigError before any
    process is started.
    """
    config, hf_config = _checked(config, run, reset_optimizer=reset_optimizer)
    if resume:
        refuse_foreign(run)
    checkpoint = newest_checkpoint(run) if resume else None
    if checkpoint is not None:
        check_resume(config, read_manifest(checkpoint), reset_optimizer=reset_optimizer)
    journal_dir, blob_dir = _folders(config, run)
    incarnation = _first_incarnation(config, run, resume=resume)
    if not resume:  # left by a removed run of the same name
        for folder in (journal_dir, run.journal, blob_dir):
            shutil.rmtree(folder, ignore_errors=True)
    run.endpoints.close()  # of an earlier start that was killed
    run.endpoints.close_ray()
    run.endpoints.make_folder()
    Keys.make().write(run.endpoints.keys)
    plan = RunContext(
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
        records=run.records / f"{incarnation}" if config.rollout.keep_records else None,
        reset_optimizer=reset_optimizer and checkpoint is not None,
    )
    _check_parts(plan)
    return plan


def _checked(
    config: Config, run: RunDir, *, reset_optimizer: bool
) -> tuple[Config, dict[str, Any]]:
    """Settings as they will be used, and the model's config.json."""
    config = resolve(config)
    check(config)
    refuse_hidden(config)
    check_args(config.engine.args, replay=config.replay.routing == "R3")
    if reset_optimizer and not is_local(config.cluster):
        raise ConfigError(
            "--reset-optimizer",
            True,
            "not supported on a cluster yet; needs cluster.launcher=local",
        )
    config = with_start(_with_model(config, run), run)
    hf_config = check_model(config)
    for tp in {config.engine.tp, *config.engine.tp_each}:
        check_planned_layout(
            replace(config.engine, tp=tp),
            hf_config,
            cuda=starts_on_cuda(config, placement(config)),
            routing=config.replay.routing == "R3",
        )
    return config, hf_config


def _check_parts(plan: RunContext) -> None:
    """Raise for a part that cannot be made, before anything starts."""
    spec = plan.spec()  # raises for an unknown family
    for role, path in ref_models_of(plan.config).items():
        _check_ref_models(f"algorithm.{role}", path, spec)
    for task in entries_of(plan.config):
        with naming(task):
            isolation_of(task)  # raises where this machine cannot enforce it
    plan.prompts().draw_first()  # raises for a task that has no prompt
    task_agents(plan)  # raises for a chat template or a program that cannot be used
    if plan.config.evaluation.every:
        plan.held_out().draw_first()


def _folders(config: Config, run: RunDir) -> tuple[Path, Path]:
    """Folders of the journal and of the records, made.  Raises ConfigError when others own them."""
    outside, keeps = config.rollout.journal_dir, config.rollout.keep_records
    journal_dir = outside_folder(outside, run) if outside else run.journal
    _refuse_network(journal_dir)
    blob_dir = run.records / "blobs" if keeps else outside_folder(config.cluster.blob_dir, run)
    private_dir(journal_dir, "rollout.journal_dir")
    return journal_dir, private_dir(blob_dir, "cluster.blob_dir")


def _check_ref_models(field: str, folder: str, student: ModelSpec) -> None:
    """Check that a reference or teacher is a known model with the student's vocabulary."""
    try:
        other = model_spec(read_model_config(Path(folder)))
    except (ModelError, LayoutError) as error:
        raise ConfigError(field, folder, str(error)) from error
    if other.vocab_size != student.vocab_size:
        raise ConfigError(
            field,
            folder,
            f"it has {other.vocab_size} vocabulary entries, the trained model has "
            f"{student.vocab_size}; both must share a tokenizer",
        )


def outside_folder(base: str, run: RunDir) -> Path:
    """This run's folder outside its directory: unique per run, equal at every start."""
    name = xxhash.xxh3_64_hexdigest(str(run.root.resolve()).encode())
    return user_dir(Path(base)) / name


def _refuse_network(folder: Path) -> None:
    """SQLite's locks and shared memory do not work on network file systems."""
    kind = file_system(folder)
    if kind in NETWORK_FILE_SYSTEMS:
        raise ConfigError(
            "rollout.journal_dir",
            str(folder),
            f"{kind} is a network file system; name a local folder",
        )


def _with_model(config: Config, run: RunDir) -> Config:
    """Make the tiny model of a recipe in the run directory, once."""
    if not config.model.tiny.enabled or config.model.path:
        return config
    from moerl.data.tiny_model import make_tiny_model

    folder = run.root / "model"
    if not folder.is_dir():
        make_tiny_model(folder, config.model.tiny, config.run.seed)
    return replace(config, model=replace(config.model, path=str(folder)))


def with_start(config: Config, run: RunDir) -> Config:
    """Make a model folder of the weights of `checkpoint.start`, or of its adapters, once.

    Engines, trainer and reference then begin with it as with any other model: their first version
    has its weights, and an engine that starts again later does, too.
    """
    start, folder = config.checkpoint.start, run.root / "start"
    if not start:
        return config
    if not folder.is_dir():
        dtype = {"bf16": "bfloat16", "fp32": "float32"}[config.trainer.dtype]
        try:
            found = find_checkpoint(Path(start))
        except ModelError as error:
            raise ConfigError("checkpoint.start", start, str(error)) from error
        options = ["--model", config.model.path]
        if config.lora.rank and (found / MANIFEST).is_file() and read_manifest(found).get("lora"):
            check_adapters(config, read_manifest(found))
            _convert(start, found, folder, options, "start_adapter")
        else:
            _convert(start, found, folder, [*options, "--dtype", dtype])
    if (folder / "adapter_config.json").is_file():
        return replace(config, lora=replace(config.lora, start=str(folder)))
    return replace(config, model=replace(config.model, path=str(folder)))


def _first_incarnation(config: Config, run: RunDir, *, resume: bool) -> int:
    """Version 0.0 is the model folder, which engines serve first: adapters begin as 1.0."""
    incarnation = next_incarnation(run, resume=resume)
    has_adapter = bool(config.lora.start) or config.lora.serves_adapters
    begins_later = has_adapter and incarnation == 0
    return next_incarnation(run, resume=True) if begins_later else incarnation


def _convert(
    start: str, found: Path, folder: Path, options: list[str], tool: str = "convert_cli"
) -> None:
    """In a process of its own, as this one keeps the memory of what it imports.

    Raises ConfigError with its sentence.
    """
    command = [sys.executable, "-m", f"moerl.trainer.checkpoints.{tool}", str(found)]
    process = subprocess.Popen(
        [*command, str(folder), *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr is not None, "it is a pipe"
    last = ""
    for line in io.TextIOWrapper(process.stderr, encoding="utf-8", errors="replace"):
        last = line.strip() or last
        log.info("checkpoint.start: %s", line.rstrip())
    if process.wait():
        raise ConfigError("checkpoint.start", start, last.removeprefix("error: "))
