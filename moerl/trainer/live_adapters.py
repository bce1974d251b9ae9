"""The adapters of a live model as a folder of peft."""

from __future__ import annotations

from pathlib import Path

from moerl.config.lora_settings import LoraConfig
from moerl.trainer.hf_io.adapter_base import note_base
from moerl.trainer.hf_io.adapter_files import gather_factors, save_adapter
from moerl.trainer.model.gpt import Model
from moerl.trainer.model.parallel import Parallel


def save_live_adapters(
    folder: Path, model: Model, lora: LoraConfig, parallel: Parallel, base: Path
) -> None:
    """Gather the factors of all ranks and write them; collective.  base: folder of W0."""
    held, sizes = model.factors(), parallel.sizes
    factors = gather_factors(held, model.spec, lora, sizes, parallel.control)
    if factors is not None:
        save_adapter(folder, factors, model.spec, lora, str(base))
        note_base(folder, base)
