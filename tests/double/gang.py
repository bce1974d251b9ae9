"""Layouts in which two ranks train on the double, and the scaled model whose bytes are counted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from moerl.config.lora_settings import LoraConfig
from moerl.config.schema import (
    AlgorithmConfig,
    Config,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Precision,
    TinyModel,
    TrainerConfig,
)
from tests.helpers.trainer_support import EXPERTS, LAYERS, TOP_K

RANKS = 2
# Qwen3-30B-A3B with an eighth of its widths, and the layers and experts of the tests' records
SCALED = TinyModel(
    enabled=True,
    hidden_size=256,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    moe_ffn=96,
    num_layers=LAYERS,
    num_experts=EXPERTS,
    experts_per_token=TOP_K,
)
SCALED_MODEL = "scaled"


@dataclass(frozen=True)
class Layout:
    parallel: ParallelConfig
    distributed: bool = False  # the optimizer, over data-parallel ranks
    lora: LoraConfig = field(default_factory=LoraConfig)

    def config(self, model: Path, dtype: Precision, algorithm: AlgorithmConfig) -> Config:
        optimizer = OptimizerConfig(lr=1e-3, distributed=self.distributed)
        trainer = TrainerConfig(
            parallel=self.parallel,
            dtype=dtype,
            optimizer=optimizer,
            megatron={"perform_initialization": False},  # weights are loaded
        )
        path = ModelConfig(path=str(model))
        return Config(model=path, trainer=trainer, algorithm=algorithm, lora=self.lora)


LAYOUTS = {
    "tensor": Layout(ParallelConfig(tp=2, ep=2)),  # sequences are cut, too
    "context": Layout(ParallelConfig(cp=2, ep=2)),
    "stages": Layout(ParallelConfig(pp=2)),
    "data": Layout(ParallelConfig(dp=2), distributed=True),
}
# Without a critic, which has no adapters.
_LORA = LoraConfig(rank=32, ranks={"*.experts.*": 4})
ADAPTED = {
    "adapters": Layout(ParallelConfig(tp=2, ep=2), lora=_LORA),
    "adapters, data": Layout(
        ParallelConfig(dp=2, ep=2), distributed=True, lora=replace(_LORA, base="device")
    ),
}
