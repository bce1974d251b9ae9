"""Checks that a checkpoint and the configuration that resumes it agree, without torch.

The facts are in the checkpoint's manifest, so a resume that cannot work is refused before any
process is started.  Tensors are saved in global coordinates and fit every layout; optimizers of
megatron-core 0.19.2 do not: with expert parallelism they are a chain of two, without it one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xxhash

from moerl.config.lora_settings import LoraConfig
from moerl.config.schema import Config
from moerl.core.errors import ConfigError

_ENDS = 2**20  # bytes of a file's begin and end that name it


def resume_facts(config: Config) -> dict[str, Any]:
    """The values that `check_resume` compares, as plain JSON."""
    trainer = config.trainer
    return {
        "parallel": asdict(trainer.parallel),
        "distributed_optimizer": trainer.optimizer.distributed,
        "dtype": trainer.dtype,
        "critic": config.algorithm.advantage == "gae",
        "lora": _adapters(config.lora),
        "base": fingerprint(Path(config.model.path)) if config.lora.rank else "",
    }


def fingerprint(folder: Path) -> str:
    """Of a model's files: names, sizes, their first and last MiB."""
    found = xxhash.xxh3_64()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        found.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            found.update(file.read(_ENDS))
            file.seek(max(0, size - _ENDS))
            found.update(file.read(_ENDS))
    return str(found.hexdigest())


def _adapters(lora: LoraConfig) -> dict[str, Any] | None:
    """Settings of the factors, without start, transfer, delivery or the place of W0."""
    left_out = ("send", "start", "delivery", "slots", "base")
    return (
        {name: value for name, value in asdict(lora).items() if name not in left_out}
        if lora.rank
        else None
    )


def check_adapters(config: Config, saved: Mapping[str, Any]) -> None:
    """Raises ConfigError where a checkpoint has other adapters than this configuration."""
    if (lora := resume_facts(config)["lora"]) != saved.get("lora"):
        kept = saved.get("lora")
        raise ConfigError(
            "lora", lora, f"the checkpoint holds {f'adapters of {kept}' if kept else 'all weights'}"
        )


def check_resume(config: Config, saved: Mapping[str, Any], *, reset_optimizer: bool) -> None:
    """Raises ConfigError for a checkpoint that this configuration cannot continue.

    saved: the checkpoint's manifest.  reset_optimizer: only weights and schedule position are used.
    """
    trainer = config.trainer
    if config.run.steps < (done := saved.get("step", 0)):
        raise ConfigError(
            "run.steps", config.run.steps, f"{done} steps are done; use at least that"
        )
    if trainer.dtype != saved["dtype"]:
        raise ConfigError(
            "trainer.dtype", trainer.dtype, f"the checkpoint holds {saved['dtype']} weights; use it"
        )
    if config.algorithm.advantage == "gae" and not saved["critic"]:
        raise ConfigError("algorithm.advantage", "gae", "the checkpoint holds no critic")
    check_adapters(config, saved)
    if saved.get("base") and (base := resume_facts(config)["base"]) != saved["base"]:
        raise ConfigError(
            "model.path",
            config.model.path,
            f"its files have the fingerprint {base}, the checkpoint's adapters belong to weights "
            f"with {saved['base']}; name their folder",
        )
    if reset_optimizer:
        return
    ep, saved_ep = trainer.parallel.ep, saved["parallel"]["ep"]
    if (ep > 1) != (saved_ep > 1):
        raise ConfigError(
            "trainer.parallel.ep",
            ep,
            f"the checkpoint was written with ep {saved_ep}, and megatron-core keeps the optimizer "
            "of ep 1 in another form than that of ep > 1; stay on that side, or give "
            "--reset-optimizer to start with fresh optimizer state",
        )
    distributed = trainer.optimizer.distributed
    if distributed != saved["distributed_optimizer"]:
        raise ConfigError(
            "trainer.optimizer.distributed",
            distributed,
            f"the checkpoint was written with {saved['distributed_optimizer']}, and the two keep "
            "their state in different forms; use that, or give --reset-optimizer",
        )
