"""`trainer.megatron` and `lora.start`, judged before a start by the trainer's own code.

Importing megatron-core takes seconds and stays in memory, so that another process does it, and only
where one of the two is set.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moerl.config import Config
from moerl.config.clusters import placement
from moerl.core.errors import ConfigError
from moerl.launch.folder_checks import has_weights
from moerl.trainer.start_check import Job

_WAIT_S = 300.0


def _has_megatron() -> bool:
    try:
        return importlib.util.find_spec("megatron") is not None
    except ImportError:
        return False


def check_trainer(config: Config, hf: Mapping[str, Any]) -> list[str]:
    """Raises ConfigError; returns sentences about skipped checks.  hf: the model's config.json."""
    trainer, start = config.trainer, config.lora.start and has_weights(Path(config.model.path))
    if not trainer.megatron and not start:
        return []
    if not _has_megatron():
        return ["trainer.megatron was not checked: megatron-core is not installed here"]
    on_gpus = placement(config).trainers[0].node.group.devices > 0
    job = Job(
        trainer,
        dict(hf),
        replays=config.replay.routing != "off",
        gpu=trainer.platform == "cuda" or (trainer.platform == "auto" and on_gpus),
        lora=config.lora,
        model=config.model.path if start else "",
    )
    answer = ask(job)
    if refusal := answer.get("refused"):
        raise ConfigError(*refusal)
    return [answer["unchecked"]] if answer["unchecked"] else []


def ask(job: Job) -> dict[str, Any]:
    """The answer of `moerl.trainer.start_check`; ConfigError when it ends without one."""
    done = subprocess.run(
        [sys.executable, "-m", "moerl.trainer.start_check"],
        input=job.text(),
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=_WAIT_S,
    )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        cause = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        asked = job.trainer.megatron
        raise ConfigError("trainer.megatron", asked, f"its check failed: {cause}")
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer
