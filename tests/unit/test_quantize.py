"""FP8 blocks of the sender against a loop, the reader of released files, and a plan's pieces."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moerl.config.schema import ParallelConfig
from moerl.core.types import PolicyVersion
from moerl.layout import at, hf_shapes, megatron_tiles, model_spec
from moerl.trainer.hf_io.hf_folder import Fp8Block
from moerl.weight_sync.buckets import WirePolicy
from moerl.weight_sync.held_shards import EngineLayout
from moerl.weight_sync.packed_buckets import BucketPacker
from moerl.weight_sync.sender import Destination, WeightSender
from moerl.weight_sync.snapshot import WeightSnapshot
from moerl.weight_sync.transfer_plan import TransferPlan
from moerl.weight_sync.transports.base import Link
from moerl.weight_sync.wire_formats import FP8_BLOCKS, engine_wants

CONFIG = {
    "model_type": "deepseek_v3",
    "vocab_size": 64,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,  # kv_a has 192 rows: its last blocks have 64
    "v_head_dim": 128,
    "max_position_embeddings": 64,
}


def by_loop(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, cols = weight.shape
    scale = torch.ones(math.ceil(rows / 128), math.ceil(cols / 128))
    out = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            box = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            if weight[box].any():
                scale[i, j] = weight[box].abs().max() / 448
            out[box] = (weight[box] / scale[i, j]).to(torch.float8_e4m3fn)
    return out, scale


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def read(values: Tensor, scale: Tensor) -> Tensor:
    """As the trainer reads released files."""
    whole = tuple(range(n) for n in values.shape)
    return Fp8Block(lambda box: values[at(box)], lambda box: scale[at(box)], (128, 128))(whole)


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (130, 257), (384, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_what_a_loop_makes_and_come_back_close(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight[:, 0] *= 100  # one loud column must not blur the other blocks
    weight[-1] = 0
    values, scale = FP8_BLOCKS.pack(weight)
    want, want_scale = by_loop(weight.float())
    assert torch.equal(bits(values), bits(want))
    assert torch.equal(scale, want_scale)
    error = (read(values, scale) - weight.float()).abs()
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    # three bits of mantissa: half a unit of 2^-3, below 2^-6 half a step of 2^-9
    assert (error <= (weight.float().abs() / 16 + spread / 1024) * 1.001).all()


def test_a_box_of_whole_blocks_is_the_same_alone() -> None:
    weight = torch.randn(320, 256, generator=torch.Generator().manual_seed(2))
    values, scale = FP8_BLOCKS.pack(weight)
    part, part_scale = FP8_BLOCKS.pack(weight[128:320, 128:])
    assert torch.equal(bits(part), bits(values[128:320, 128:]))
    assert torch.equal(part_scale, scale[1:, 1:])
    inside, _ = FP8_BLOCKS.pack(weight[64:192, 128:])  # why a plan never cuts inside a block
    assert not torch.equal(bits(inside), bits(values[64:192, 128:]))


class Memory(Link):
    """An engine rank's staging buffer in this process."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer

    def view(self, offset: int, num_bytes: int) -> Tensor:
        return self.buffer[offset : offset + num_bytes]

    def put(self, offset: int, data: Tensor, deadline: float) -> None:
        raise AssertionError("the buffer is mapped")

    def flush(self, deadline: float) -> None: ...

    def close(self) -> None: ...


class Memories:
    def __init__(self, buffers: dict[bytes, Tensor]) -> None:
        self.buffers = buffers

    def connect(self, endpoint: bytes, deadline: float) -> Memory:
        return Memory(self.buffers[endpoint])


def test_a_publish_in_blocks_is_the_whole_model_quantised() -> None:
    """Sent by trainer ranks that hold parts, equal to quantising every Hugging Face tensor."""
    spec, policy = model_spec(CONFIG), WirePolicy("bfloat16", "fp8_block", bucket_bytes=2**16)
    trainer, engine = ParallelConfig(tp=2, ep=2, vocab_divisible_by=8), EngineLayout(2, 2)
    generator = torch.Generator().manual_seed(3)
    hf = {n: torch.randn(shape, generator=generator) for n, shape in hf_shapes(spec).items()}
    plan = TransferPlan(spec, trainer, engine, 1, policy)
    receivers = [plan.receiver(rank) for rank in range(engine.tp)]
    staging = {b"%d" % r.rank: torch.zeros(r.staging_bytes, dtype=torch.uint8) for r in receivers}
    for rank in range(trainer.world_size):
        live = {}
        for name, local in megatron_tiles(spec, trainer, rank).items():
            live[name] = torch.zeros(local.shape)
            for tile in local.tiles:
                live[name][at(tile.box)] = hf[tile.hf][at(tile.hf_box)]
        shard = WeightSnapshot()
        shard.store(live, PolicyVersion(0, 1))
        destinations = {
            r.rank: Destination(b"%d" % r.rank, start)
            for r in receivers
            for region, start in zip(r.regions, r.starts, strict=True)
            if region.src == rank
        }
        sender = WeightSender(BucketPacker(plan.sender(rank), shard), Memories(staging))
        sender.send(destinations, deadline=0.0)
    kinds = set()
    for receiver in receivers:
        for region, start in zip(receiver.regions, receiver.starts, strict=True):
            for p in region.pieces:
                data = staging[b"%d" % receiver.rank][start + p.offset :][: p.num_bytes]
                want = hf[p.hf]
                if p.is_scale:
                    blocks = tuple(slice(r.start // 128, -(-r.stop // 128)) for r in p.hf_box)
                    want = FP8_BLOCKS.pack(want)[1][blocks]
                elif p.dtype == "float8_e4m3fn":
                    want = FP8_BLOCKS.pack(want)[0][at(p.hf_box)]
                else:
                    want = want[at(p.hf_box)].to(getattr(torch, p.dtype))
                assert torch.equal(data, bits(want).view(-1)), p
                kinds.add((p.dtype, p.is_scale))
    assert kinds == {
        ("float8_e4m3fn", False),
        ("float32", True),
        ("float32", False),
        ("bfloat16", False),
    }


def test_senders_quantise_for_engines_of_fp8_blocks() -> None:
    stored = {"quantization_config": {"quant_method": "fp8"}}
    assert engine_wants(None, stored) == engine_wants("fp8", {}) == "fp8_block"
    assert engine_wants(None, {}) == engine_wants("none", {}) == "none"
    assert engine_wants(None, {"quantization_config": {"quant_method": "mxfp4"}}) == "none"
