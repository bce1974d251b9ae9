"""FP8 blocks on CUDA: bitwise those of the CPU, near the weight, multiplied by Hopper's product."""

from __future__ import annotations

import time

import pytest
import torch

from moerl.weight_sync.wire_formats import BLOCK, FP8_BLOCKS
from tests.helpers.device_figures import Figure, on_double

STEP = 2.0**-4  # half a step of e4m3's three bits, of a number that is not subnormal
SMALLEST = 2.0**-10  # half of e4m3's smallest step


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (300, 1000), (1, 200, 129)], ids=str)
def test_blocks_are_those_of_the_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape, dtype=dtype) * torch.logspace(-3, 3, shape[-1], dtype=dtype)
    weight[..., :BLOCK] = 0 if shape[-1] > BLOCK else weight[..., :BLOCK]
    want, got = FP8_BLOCKS.pack(weight), FP8_BLOCKS.pack(weight.cuda())
    assert torch.equal(got[0].cpu().view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(got[1].cpu(), want[1])
    values, scale = (part.float() for part in got)
    wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    wide = wide[: values.shape[0], : values.shape[1]]
    matrix = weight.cuda().float().view(values.shape)
    bound = torch.maximum(STEP * matrix.abs(), SMALLEST * wide)
    assert bool(((values * wide - matrix).abs() <= bound * 1.001).all())


def test_product_of_blocks(figure: Figure) -> None:
    """cuBLAS multiplies activations in rows of 128 with a weight in our blocks, by our scales."""
    if on_double() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("fp8 products by blocks are of capability 9.0")
    torch.manual_seed(0)
    weight = (
        torch.randn(768, 1024, device="cuda") * torch.logspace(-2, 2, 768, device="cuda")[:, None]
    )
    weight_q, weight_scale = FP8_BLOCKS.pack(weight)
    x = torch.randn(512, 1024, device="cuda").unflatten(1, (-1, BLOCK))
    x_scale = x.abs().amax(-1) / 448
    x_q = (x / x_scale[..., None]).flatten(1).to(torch.float8_e4m3fn)
    scale = weight_scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    wide = (x_q.double().unflatten(1, (-1, BLOCK)) * x_scale[..., None]).flatten(1)
    want = wide @ (weight_q.double() * scale).T
    kind, plain = torch.nn.functional.ScalingType, torch.nn.functional.SwizzleType.NO_SWIZZLE
    for name, by in (("fp8 product", weight_scale), ("wrong scales", weight_scale.roll(1, 0))):
        found = torch.nn.functional.scaled_mm(
            x_q, weight_q.T, x_scale.T.contiguous().T, kind.BlockWise1x128, by.T,
            kind.BlockWise128x128, swizzle_a=plain, swizzle_b=plain, output_dtype=torch.bfloat16,
        )  # fmt: skip
        error = float((found - want).norm() / want.norm())
        figure(f"{name}, from its own blocks in fp64", error, "relative")
        assert (error < 2.0**-8) is (by is weight_scale), "bf16 rounds the result; control: more"


def test_speed_of_blocks(figure: Figure, tiny: bool) -> None:
    rows, cols = (256, 384) if tiny else (16_384, 7168)
    weight = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    FP8_BLOCKS.pack(weight)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(5):
        FP8_BLOCKS.pack(weight)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / 5
    figure("fp8 blocks, bytes of bf16 read", weight.nbytes / seconds / 1e9, "GB/s")
