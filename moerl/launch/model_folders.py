"""Folders of the models that a run starts from, made before any process starts."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moerl.config import Config, save_config
from moerl.config.lora_settings import LoraConfig
from moerl.config.resume import check_adapters
from moerl.core.errors import ConfigError, LayoutError, ModelError
from moerl.core.json_files import read_model_config
from moerl.data.tasks import load_tokenizer
from moerl.launch.folder_checks import check_folder
from moerl.layout import ModelSpec, model_spec
from moerl.runtime.run_dir import RunDir, read_manifest
from moerl.trainer.checkpoints.checkpoint_files import MANIFEST
from moerl.trainer.checkpoints.find_checkpoint import find_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

log = logging.getLogger(__name__)
_TOOLS = "moerl.trainer.checkpoints"
_HEADS = (
    "it has a value head; a language model is needed",
    "it has no value head: a model of a class ...ForSequenceClassification or "
    "...ForTokenClassification is needed, as moerl sft sft.value_head=bce writes it",
)


def check_ref_models(
    field: str, folder: str, student: ModelSpec, *, has_values: bool = False
) -> None:
    """Check that a model that scores is a known one with the student's vocabulary.

    has_values: it has a value head, as reward models do, but neither reference nor teacher.
    """
    try:
        other = model_spec(read_model_config(Path(folder)))
    except (ModelError, LayoutError) as error:
        raise ConfigError(field, folder, str(error)) from error
    if bool(other.values) != has_values:
        raise ConfigError(field, folder, _HEADS[has_values])
    if other.vocab_size != student.vocab_size:
        raise ConfigError(
            field,
            folder,
            f"it has {other.vocab_size} vocabulary entries, the trained model has "
            f"{student.vocab_size}; both must share a tokenizer",
        )


def check_reward_model(folder: str, student: ModelSpec, tokenizer: Tokenizer) -> None:
    """Check that a folder has a value head, and token ids with the policy's meaning."""
    field = "task.rewards"
    check_ref_models(field, folder, student, has_values=True)
    values = check_folder(field, folder, has_text=True).spec.values
    if values != 1:
        raise ConfigError(field, folder, f"its head has {values} labels, needed is one label")
    try:
        own = load_tokenizer(folder).get_vocab()
    except ModelError as error:
        raise ConfigError(field, folder, str(error)) from error
    if own != tokenizer.get_vocab():
        raise ConfigError(
            field, folder, "its tokenizer is not the trained model's: token ids mean other tokens"
        )


def check_policy(config: Config, spec: ModelSpec, hf: Mapping[str, Any]) -> None:
    """Check that a model can be trained as a policy, or by `sft.value_head`."""
    kind, names = config.sft.value_head, hf.get("architectures") or ["(none)"]
    if kind == "off":
        if spec.values:
            raise ConfigError("model.path", config.model.path, _HEADS[0])
        return
    fits = ("ForCausalLM", "ForTokenClassification")
    if not all(name.endswith(fits) for name in names) or "text_config" in hf:
        raise ConfigError("sft.value_head", kind, f"model.path is {names}; needed is {fits}")
    if config.lora.rank:
        raise ConfigError("sft.value_head", kind, "lora.rank must be 0: all weights are trained")


def with_tiny_model(config: Config, run: RunDir) -> Config:
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
            _convert(start, found, folder, options, f"{_TOOLS}.start_adapter")
        else:
            _convert(start, found, folder, [*options, "--dtype", dtype])
    if (folder / "adapter_config.json").is_file():
        return replace(config, lora=replace(config.lora, start=str(folder)))
    return replace(config, model=replace(config.model, path=str(folder)))


def with_one_model(config: Config, run: RunDir) -> Config:
    """Make one model folder of weights and adapters, for engines that no trainer updates."""
    config = with_start(with_tiny_model(config, run), run)
    start, folder = config.lora.start, run.root / "merged"
    if start:
        save_config(config, run.config)  # the converter reads lora.* there
        _convert(start, run.root, folder, ["--adapter", start], "moerl.trainer.hf_io.merge_adapter")
        config = replace(config, model=replace(config.model, path=str(folder)))
    return replace(config, lora=LoraConfig(), checkpoint=replace(config.checkpoint, start=""))


def _convert(
    start: str, found: Path, folder: Path, options: list[str], tool: str = f"{_TOOLS}.convert_cli"
) -> None:
    """Run a converter in its own process: this process would keep the memory of its imports.

    Raises ConfigError with the last line of the converter.
    """
    command = [sys.executable, "-m", tool, str(found)]
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
