"""Layouts in which two ranks train on the double, and the scaled model whose bytes are counted."""

from __future__ import annotations

from dataclasses import dataclass

from moerl.config.schema import OptimizerConfig, ParallelConfig, Precision, TinyModel, TrainerConfig
from moerl.config.tiny_configs import tiny_config
from moerl.layout import ModelSpec, model_spec
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
VOCAB = 2374  # 151,936 / 64: not a multiple of what it is padded to


@dataclass(frozen=True)
class Layout:
    parallel: ParallelConfig
    distributed: bool = False  # the optimizer, over data-parallel ranks

    def trainer(self, dtype: Precision) -> TrainerConfig:
        optimizer = OptimizerConfig(lr=1e-3, distributed=self.distributed)
        return TrainerConfig(parallel=self.parallel, dtype=dtype, optimizer=optimizer)


LAYOUTS = {
    "tensor": Layout(ParallelConfig(tp=2, ep=2)),  # sequences are cut, too
    "expert": Layout(ParallelConfig(dp=2, ep=2)),
    "stages": Layout(ParallelConfig(pp=2)),
    "data": Layout(ParallelConfig(dp=2), distributed=True),
}


def scaled_spec() -> ModelSpec:
    return model_spec(tiny_config(SCALED, VOCAB))
