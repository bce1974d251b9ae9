"""Layouts in which two ranks train on the double, and the scaled model whose bytes are counted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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

    def config(self, model: Path, dtype: Precision, algorithm: AlgorithmConfig) -> Config:
        optimizer = OptimizerConfig(lr=1e-3, distributed=self.distributed)
        trainer = TrainerConfig(
            parallel=self.parallel,
            dtype=dtype,
            optimizer=optimizer,
            megatron={"perform_initialization": False},  # weights are loaded
        )
        return Config(model=ModelConfig(path=str(model)), trainer=trainer, algorithm=algorithm)


LAYOUTS = {
    "tensor": Layout(ParallelConfig(tp=2, ep=2)),  # sequences are cut, too
    "context": Layout(ParallelConfig(cp=2, ep=2)),
    "stages": Layout(ParallelConfig(pp=2)),
    "data": Layout(ParallelConfig(dp=2), distributed=True),
}
