"""The trained model: opened with its weights, and its adapters as folders of peft and SGLang."""

from __future__ import annotations

import logging
from pathlib import Path

from moerl.config.lora_settings import LoraConfig
from moerl.config.schema import Config
from moerl.runtime.disk_wait import DiskPatience
from moerl.trainer.hf_io.adapter_files import (
    gather_factors,
    note_base,
    save_adapter,
    save_sglang_adapter,
    start_factors,
)
from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf
from moerl.trainer.model.gpt import Model, build
from moerl.trainer.model.parallel import Parallel
from moerl.weight_sync.adapters.sglang_adapter import sglang_refusal

log = logging.getLogger(__name__)


def load_policy(
    config: Config, source: HfFolder, parallel: Parallel, *, resumes: bool = False
) -> Model:
    """This rank's part of the model, with the weights of `source`, and its factors with LoRA.

    resumes: a checkpoint replaces the factors, so `lora.start` is not read.
    Raises ModelError and ConfigError.
    """
    model = build(
        source.spec,
        config.trainer,
        parallel,
        with_replay=config.replay.routing != "off",
        lora=config.lora,
        fp32_head=config.model.fp32_lm_head,
    )
    load_hf(model.tensors, model.tiles, source)
    model.keep_base()
    if config.lora.start and not resumes:
        model.set_factors(start_factors(config.lora, source))
    return model


def save_live_adapters(
    folder: Path,
    model: Model,
    lora: LoraConfig,
    parallel: Parallel,
    base: Path,
    *,
    served: Path | None = None,
    patience: DiskPatience = DiskPatience(),
) -> None:
    """Gather the factors of all ranks and write them; collective.

    base: folder of W0.  served: folder that SGLang opens, too.  patience: for room on the disk.
    Raises NonRetryableError on the rank that could not write.
    """
    held, sizes, spec = model.factors(), parallel.sizes, model.spec
    factors = gather_factors(held, spec, lora, sizes, parallel.control)
    if factors is None:
        return
    gathered = factors

    def write() -> None:
        save_adapter(folder, gathered, spec, lora, str(base))
        note_base(folder, base)
        if served is None:
            return
        if refusal := sglang_refusal(spec, lora):
            log.warning("%s is not written: %s", served, refusal)
        else:
            save_sglang_adapter(served, gathered, spec, lora, str(base))

    patience.write(folder, sum(factor.nbytes for factor in gathered.values()), write)
