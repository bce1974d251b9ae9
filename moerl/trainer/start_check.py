"""Settings that megatron-core or torch must judge, tried without ranks and without a GPU.

`python -m moerl.trainer.start_check`, by `moerl.launch.trainer_check`: a `Job` as JSON on stdin;
prints {"unchecked": SENTENCE} or {"refused": [FIELD, VALUE, ALLOWED]}.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from moerl.config.lora_settings import LoraConfig
from moerl.config.schema import TrainerConfig
from moerl.config.validate import read_section
from moerl.core.errors import ConfigError, MoerlError
from moerl.layout import ModelSpec, layers_of, model_spec

if TYPE_CHECKING:
    from moerl.trainer.model.platform import Platform

_OF_TE = re.compile(r"transformer.?engine|\bTE\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Job:
    """Settings to try.  hf: the model's config.json; model: its folder, "" = leave out lora.start;
    gpu: the trainer's ranks have GPUs.
    """

    trainer: TrainerConfig
    hf: dict[str, Any]
    replays: bool
    gpu: bool
    lora: LoraConfig = field(default_factory=LoraConfig)
    model: str = ""

    def text(self) -> str:
        return json.dumps(asdict(self))


def try_settings(job: Job) -> str:
    """Raises MoerlError for a setting with which a rank would end; returns the untried checks."""
    from moerl.trainer.model import platform  # here: the root process reads `Job` without torch

    place, said = platform.prepare("cpu"), ""  # before any import of megatron
    if job.trainer.megatron:
        said = _try_fields(model_spec(job.hf), job, place)
    if job.lora.start and job.model:
        from moerl.trainer.hf_io.adapter_files import start_factors
        from moerl.trainer.hf_io.hf_folder import HfFolder

        try:
            start_factors(job.lora, HfFolder(job.model))
        except MoerlError as error:
            raise ConfigError("lora.start", job.lora.start, str(error)) from error
    return said


def _try_fields(spec: ModelSpec, job: Job, place: Platform) -> str:
    """Without Transformer Engine, its refusals are left to the machine that has it."""
    from moerl.trainer.model.local_modules import check_attention
    from moerl.trainer.model.platform import Platform
    from moerl.trainer.model.transformer import fused_fields, transformer_config

    if job.gpu:
        layers = layers_of(job.trainer.transformer_impl, gpu=True)
        place = Platform("cuda", place.device, "nccl", layers)
    if not spec.sinks and (place.layers == "local" or job.trainer.share_prompts):
        check_attention(job.trainer.megatron)
    spec, asked = replace(spec, mtp_layers=0), job.trainer.megatron  # as `gpt.build`
    has_te, said = importlib.util.find_spec("transformer_engine") is not None, ""
    for more in ({}, dict.fromkeys(fused_fields(spec), False)):  # these are on with it
        trainer = replace(job.trainer, megatron=asked | more)
        try:
            transformer_config(spec, trainer, place, with_replay=job.replays)
        except ConfigError as error:
            if has_te or place.layers == "local" or not _OF_TE.search(str(error)):
                raise
            said = f"trainer.megatron was tried without Transformer Engine: {error.allowed}"
        else:
            return ""
    return said


def answer(text: str) -> str:
    """A line of JSON about `Job.text`."""
    job = read_section(Job, json.loads(text))
    try:
        found: dict[str, object] = {"unchecked": try_settings(job)}
    except ConfigError as error:
        found = {"refused": [error.field, error.value, error.allowed]}
    except MoerlError as error:
        found = {"refused": ["trainer.megatron", job.trainer.megatron, str(error)]}
    return json.dumps(found, default=str)


if __name__ == "__main__":
    print(answer(sys.stdin.read()))
