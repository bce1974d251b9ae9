"""The settings of `moerl eval`: a run whose only work is one evaluation, and its model."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from moerl.config import Config, load_config, resolve
from moerl.config.checks import check, check_model
from moerl.config.clusters import is_local
from moerl.config.load import find_recipe, load_resumed, load_saved
from moerl.config.lora_settings import LoraConfig
from moerl.config.schema import CheckpointConfig, ObserveConfig, StreamConfig
from moerl.core.errors import ConfigError, ModelError
from moerl.engine.host.scratch_dir import remove_abandoned
from moerl.runtime.run_dir import RunDir, find_run, read_manifest, refuse_foreign
from moerl.trainer.checkpoints.find_checkpoint import find_checkpoint, model_of

_BASE = "base"  # the model that the recipe names
_NEEDED = (
    "give a model folder (config.json), an adapter of peft (adapter_config.json), a run, one of "
    "its checkpoints/step-N, or base for the recipe's own model"
)


def evaluated(
    recipe: str, overrides: Sequence[str], option: str, model: str, folder: Path
) -> Config:
    """Settings for engines that evaluate a model, checked as far as that starts nothing.

    recipe: also a run, whose newest weights are then the default.  option: that named the model.
    folder: of the logs, and of a model that has to be made.  Raises ConfigError.
    """
    run = run_of(recipe)
    config = load_resumed(run / "config.yaml", overrides) if run else load_config(recipe, overrides)
    named = option if model else "RECIPE"
    config = _with_model(resolve(config), named, model or str(run or _BASE))
    config = replace(
        config,
        run=replace(config.run, root=str(folder.parent), name=folder.name),
        evaluation=replace(config.evaluation, every=1),
        checkpoint=CheckpointConfig(start=config.checkpoint.start),
        stream=StreamConfig(),
        observe=ObserveConfig(),
    )
    if not is_local(config.cluster):
        raise ConfigError(
            "cluster.launcher",
            config.cluster.launcher,
            "moerl eval starts engines on this machine only; use cluster=laptop, gpu1 or node8",
        )
    check(config)
    if config.model.path or not config.model.tiny.enabled:
        check_model(config)
    return config


def run_of(recipe: str) -> Path | None:
    """The folder of a run; None for a recipe.  Raises ConfigError when it is neither."""
    try:
        find_recipe(recipe)
    except ConfigError as unknown:
        try:
            return find_run(recipe, "RECIPE")
        except ConfigError:
            raise unknown from None
    return None


def _with_model(config: Config, option: str, model: str) -> Config:
    if model == _BASE:
        return config
    folder, path, lora, start = _folder(model, option), config.model.path, LoraConfig(), ""
    if (folder / "adapter_config.json").is_file():
        if not config.lora.rank:
            why = "it is an adapter: lora.rank and the other lora.* must describe it"
            raise ConfigError(option, model, why)
        lora = replace(config.lora, start=str(folder))
    elif (folder / "config.json").is_file():
        path = str(folder)
    else:
        try:
            start = str(checkpoint := find_checkpoint(folder))
            if (checkpoint / "manifest.json").is_file():  # of a run, not of Megatron-LM
                path = str(model_of(checkpoint))
                lora = LoraConfig(**read_manifest(checkpoint).get("lora") or {})
        except ModelError as error:
            raise ConfigError(option, model, f"{error}; {_NEEDED}") from error
    weights = replace(config.model, path=path)
    return replace(config, lora=lora, model=weights, checkpoint=CheckpointConfig(start=start))


def _folder(model: str, option: str) -> Path:
    """The folder that is meant: of a run its hf/, unless its newest checkpoint is newer."""
    try:
        run = RunDir(find_run(model, option))
    except ConfigError:
        if Path(model).is_dir():
            return Path(model)
        raise ConfigError(option, model, _NEEDED) from None
    refuse_foreign(run, option)
    saved, newest = load_saved(run.config), run.latest_checkpoint()
    is_last = newest is None or newest[0] >= saved.run.steps or saved.checkpoint.hf == "every"
    return run.hf if is_last and (run.hf / "config.json").is_file() else run.root


def remove_engine_folders() -> None:
    """Remove the engines' temporary folders, once their processes ended."""
    remove_abandoned(Path(tempfile.gettempdir()))
