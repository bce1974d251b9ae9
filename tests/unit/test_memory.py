"""The memory estimate: exact where it counts, near published figures where those exist."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moerl.algorithms import head_plan
from moerl.config.lora_settings import LoraConfig
from moerl.config.schema import ParallelConfig, TrainerConfig
from moerl.layout import ModelSpec, hf_shapes, model_spec
from moerl.planning.memory import (
    COPIED_BY_A_BLOCK,
    ENTRIES_OF_A_BLOCK,
    LOGITS_OF_A_BLOCK,
    Training,
    engine_memory,
    layer_activations,
    optimizer_bytes,
    trainer_memory,
)
from moerl.planning.publish_forecast import factor_forecast
from moerl.weight_sync.held_shards import EngineLayout

ROOT = Path(__file__).resolve().parents[2]
MODELS = sorted(path.parent.name for path in ROOT.glob("configs/models/*/config.json"))
GIB = 2**30


def spec_of(name: str) -> ModelSpec:
    return model_spec(json.loads((ROOT / f"configs/models/{name}/config.json").read_text()))


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_holds_the_whole_model(name: str) -> None:
    """Parameters on one rank are those of the checkpoint, vocabulary padding aside.

    Biases of routers are fp32 and not trained.
    """
    (rank,) = trainer_memory(spec_of(name), ParallelConfig(), Training())
    spec = replace(spec_of(name), mtp_layers=0)  # prediction layers are not trained
    sizes = {tensor: math.prod(shape) for tensor, shape in hf_shapes(spec).items()}
    biases = sum(
        size for tensor, size in sizes.items() if tensor.endswith("e_score_correction_bias")
    )
    whole = sum(sizes.values()) - biases
    assert whole <= rank.parameters <= whole * 1.001
    assert rank.weights == rank.snapshot == 2 * rank.parameters + 4 * biases
    assert rank.gradients == 4 * rank.parameters
    assert rank.optimizer == 12 * rank.parameters


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3-30b-a3b", 30.5),
        ("qwen3-235b-a22b", 235),
        ("glm-4.5-air", 106),
        ("gpt-oss-120b", 116.8),
        ("deepseek-v3", 671),  # of 685: 14 are the prediction layer
    ],
)
def test_model_cards_agree(name: str, billions: float) -> None:
    (rank,) = trainer_memory(spec_of(name), ParallelConfig(), Training())
    assert rank.parameters / 1e9 == pytest.approx(billions, rel=0.03)


def test_the_published_memory_of_deepseek_v3() -> None:
    """arXiv 2502.07846: tp 2, pp 16, ep 8, etp 1; a stage of four MoE layers.

    11.64 GiB of weights per device, 86 GiB of the stage on all of them.
    """
    layout = ParallelConfig(tp=2, pp=16, ep=8, dp=32, first_stage_layers=4, last_stage_layers=1)
    stage = trainer_memory(spec_of("deepseek-v3"), layout, Training())[7]
    assert stage.weights / GIB == pytest.approx(11.64, rel=0.03)
    assert stage.gradients == 4 * stage.parameters
    experts = 4 * 256 * 3 * 7168 * 2048
    dense = (stage.parameters - experts // 8) * 2
    assert 2 * (experts + dense) / GIB == pytest.approx(86, rel=0.02)


def test_recompute_and_sharding_save_what_they_should() -> None:
    spec, layout = spec_of("qwen3-30b-a3b"), ParallelConfig(tp=4, pp=2, ep=8, dp=4)
    plain = trainer_memory(spec, layout, Training(recompute="none"))
    full = trainer_memory(spec, layout, Training(recompute="full"))
    assert full[0].activations < plain[0].activations / 10
    assert full[0].activations > layer_activations(spec, layout, 8192, 2, 0)
    assert plain[0].activations > 1.9 * plain[1].activations, "two microbatches in flight"
    whole = trainer_memory(spec, layout, Training(distributed_optimizer=False))
    assert plain[0].optimizer < whole[0].optimizer / 2
    assert (plain[0].head, plain[1].head > 0) == (0, True)
    all_logits = 10 * 8192 * spec.vocab_size // 4  # bf16, fp32 and their gradient
    assert plain[1].head < all_logits / 4
    long = trainer_memory(spec, layout, Training(tokens=16384))
    assert long[0].activations == pytest.approx(2 * plain[0].activations, rel=0.01)


def test_the_size_of_a_block_is_that_of_the_head() -> None:
    assert (head_plan._BLOCK, head_plan._PIECE, head_plan._COPIED) == (
        LOGITS_OF_A_BLOCK, ENTRIES_OF_A_BLOCK, COPIED_BY_A_BLOCK,
    )  # fmt: skip


def test_kv_bytes_of_a_token() -> None:
    """DeepSeek-V3: 70 KB per token (arXiv 2505.09343, table 1); four heads over eight ranks."""
    latent = engine_memory(spec_of("deepseek-v3"), EngineLayout(8, 8), 1e9, 1, "bfloat16")
    assert latent.kv_token == 61 * (512 + 64) * 2 == 70272
    spec = spec_of("qwen3-235b-a22b")
    heads = engine_memory(spec, EngineLayout(8, 8), 1e9, 1000, "bfloat16")
    assert heads.kv == 1000 * 94 * 2 * 128 * 2
    assert engine_memory(spec, EngineLayout(2, 2), 1e9, 1, "bfloat16").kv_token == 94 * 2 * 256 * 2


OFFLOAD = {"optimizer_cpu_offload": True}
PRECISE = {"use_precision_aware_optimizer": True}


@pytest.mark.parametrize(
    ("dtype", "args", "device", "host", "saved"),
    [
        ("fp32", {}, 8, 0, 8),
        ("bf16", {}, 12, 0, 12),
        ("bf16", OFFLOAD, 0, 16, 0),
        ("bf16", PRECISE, 2 + 8, 0, 12),
        ("bf16", PRECISE | {"store_param_remainders": False}, 12, 0, 12),
        ("bf16", PRECISE | {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8"}, 2 + 2 + 1, 0, 12),
        ("bf16", PRECISE | {"main_params_dtype": "fp16"}, 2 + 8, 0, 12),
    ],
    ids=str,
)
def test_bytes_of_the_optimizer(
    dtype: Any, args: dict[str, Any], device: int, host: int, saved: int
) -> None:
    held = optimizer_bytes(TrainerConfig(dtype=dtype, optimizer_args=args))
    assert (held.device, held.host, held.saved) == (device, host, saved)
    spec, layout = spec_of("qwen3-30b-a3b"), ParallelConfig(tp=4, ep=4)
    (rank,) = trainer_memory(spec, layout, Training(dtype=dtype, optimizer=held))
    assert rank.optimizer == device * rank.parameters
    assert rank.offloaded == host * rank.parameters
    assert rank.checkpoint == rank.weights + saved * rank.parameters


def test_adapters_have_gradients_and_the_base_has_none() -> None:
    """Qwen3-30B-A3B, rank 32, experts 4, tp 4 ep 4: counted by hand."""
    lora = LoraConfig(rank=32, ranks={"*.experts.*": 4})
    spec, layout = spec_of("qwen3-30b-a3b"), ParallelConfig(tp=4, ep=4)
    (whole,) = trainer_memory(spec, layout, Training())
    (rank,) = trainer_memory(spec, layout, Training(lora=lora))
    q, kv, out = (2048 + 4096 // 4), (2048 + 512 // 4), (4096 // 4 + 2048)
    attention = 48 * 32 * (q + 2 * kv + out)
    experts = 48 * (128 // 4) * 3 * 4 * (2048 + 768)
    assert rank.gradients == 4 * (attention + experts)
    assert rank.optimizer == 12 * (attention + experts)
    assert rank.weights == whole.weights + 2 * (attention + experts)
    assert rank.checkpoint == (2 + 12) * (attention + experts)
    adapted = 48 * (2048 * (2 * 4096 + 2 * 512) // 4 + 32 * 3 * 2048 * 768)
    assert rank.base == 2 * adapted
    qkv = 2048 * (4096 + 2 * 512) // 4
    assert rank.device_base == 2 * 2 * max(qkv, 2 * 2048 * 768), "two buckets of the largest"
    (there,) = trainer_memory(spec, layout, Training(lora=replace(lora, base="device")))
    assert (there.base, there.device_base) == (0, rank.base)
    assert there.total - rank.total == rank.base - rank.device_base
    (on_cpu,) = trainer_memory(spec, layout, Training(lora=replace(lora, base="device"), gpu=False))
    assert (on_cpu.base, on_cpu.device_base) == (rank.base, 0)
    (served,) = trainer_memory(spec, layout, Training(lora=replace(lora, delivery="adapter")))
    assert (served.base, served.device_base) == (0, 0), "the weights are W0"
    assert served.weights == rank.weights
    one = EngineLayout(tp=1)
    found = factor_forecast(spec, one, lora, "bfloat16")
    whole_experts = 48 * 128 * 3 * 4 * (2048 + 768)
    assert found.received.high == found.engine_bytes
    assert found.engine_bytes == 2 * (
        48 * 32 * (2 * (2048 + 4096) + 2 * (2048 + 512)) + whole_experts
    )


def test_a_checkpoint_is_copied_by_shard() -> None:
    """With more data-parallel ranks each writes less of the optimizer."""
    spec = spec_of("qwen3-30b-a3b")
    for dp in (2, 4):
        (rank,) = trainer_memory(spec, ParallelConfig(dp=dp), Training())
        assert rank.checkpoint == rank.weights + 12 * rank.parameters // dp
        (whole,) = trainer_memory(
            spec, ParallelConfig(dp=dp), Training(distributed_optimizer=False)
        )
        assert whole.checkpoint == whole.weights + 12 * whole.parameters


def test_an_fp32_head_of_bf16_weights_takes_its_casts() -> None:
    spec, layout = spec_of("qwen3-30b-a3b"), ParallelConfig()
    (plain,) = trainer_memory(spec, layout, Training())
    (wide,) = trainer_memory(spec, layout, Training(fp32_head=True))
    casts = 2 * 8192 * spec.hidden + 2 * 4 * 16384 * spec.hidden  # of tokens, of entries copied
    assert wide.head - plain.head == casts == wide.total - plain.total
    fp32 = [trainer_memory(spec, layout, Training("fp32", fp32_head=on)) for on in (False, True)]
    assert fp32[0] == fp32[1], "it is in fp32 already"


def test_a_publish_takes_two_buckets_on_either_side_and_a_version_of_the_host() -> None:
    spec, layout = spec_of("qwen3-30b-a3b"), ParallelConfig(tp=4, ep=4)
    (rank,) = trainer_memory(spec, layout, Training(bucket=1000))
    (without,) = trainer_memory(spec, layout, Training())
    assert rank.total == without.total + 2000
    assert rank.snapshot == rank.host - rank.checkpoint == rank.weights
    engine = engine_memory(spec, EngineLayout(2, 2), 5e9, 0, "bfloat16", bucket=1000)
    assert (engine.update, engine.host) == (2000, 5e9)
    staged = engine_memory(
        spec, EngineLayout(2, 2), 5e9, 0, "bfloat16", bucket=1000, stages_on_device=True
    )
    assert (staged.update, staged.host) == (5e9, 0)
    assert staged.total == engine.total == 5e9
