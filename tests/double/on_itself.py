"""The double's own test: each blunder of GPU code is noticed, and its sound form is left alone."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.double.watch import PAGEABLE, WAITS, memory, purpose, watch
from tests.helpers.group_calls import NAMES, unknown

LAYERS, ROWS = 8, 64


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_tensors_are_cuda_and_train() -> None:
    x = torch.ones(3, 4, device="cuda:1", requires_grad=True)
    (x * 2).square().sum().backward()
    assert x.grad is not None
    assert (x.is_cuda, x.type(), x.grad.device.index) == (True, "torch.cuda.FloatTensor", 1)
    assert torch.equal(x.grad.cpu(), torch.full((3, 4), 8.0))


def test_host_operands_raise() -> None:
    logits, mask = torch.zeros(4, 8, device="cuda"), torch.ones(4, 8, dtype=torch.bool)
    logits.masked_fill(mask.cuda(), -1.0)
    with pytest.raises(RuntimeError, match="same device"):
        logits.masked_fill(mask, -1.0)


def test_another_device_raises() -> None:
    one = torch.ones(4, device="cuda:0")
    one + one
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(4, device="cuda:1") + one


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        setattr(ctx, "factors", factors)  # noqa: B010
        return x * 2

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * getattr(ctx, "factors"), None  # noqa: B009


def test_a_host_operand_in_backward_raises() -> None:
    x = torch.zeros(4, 8, device="cuda", requires_grad=True)
    _Scale.apply(x, torch.full((8,), 2.0, device="cuda")).sum().backward()
    with pytest.raises(RuntimeError, match="same device"):
        _Scale.apply(x, torch.full((8,), 2.0)).sum().backward()


def test_a_host_tensor_in_a_collective_raises() -> None:
    dist.all_reduce(torch.ones(4, device="cuda"))
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(4))


def test_numpy_of_a_device_tensor_raises() -> None:
    flat = torch.ones(64, dtype=torch.uint8, device="cuda")
    flat.cpu().numpy()
    with pytest.raises(TypeError, match="can't convert cuda"):
        flat.numpy()


def test_values_that_the_host_reads_are_waits() -> None:
    x = torch.arange(ROWS, device="cuda")
    with watch() as sound:
        x.sum()[None].cumsum(0)
        x.repeat_interleave(torch.ones_like(x), output_size=ROWS)
        x.index_select(0, x)
        x.clone()[x > 3] = 0
    assert sound.count(*WAITS) == 0
    blunders = {
        "item": lambda: x[3].item(),
        "bool": lambda: bool((x > 0).all()),
        "nonzero": lambda: x.nonzero(),
        "mask": lambda: x[x > 3],
        "put by mask": lambda: x.index_put_((x > 90,), x[:0]),
        "put a value of the device": lambda: x.index_put_((x > 90,), x[0]),
        "repeat": lambda: x.repeat_interleave(torch.ones_like(x)),
        "cpu": lambda: x.cpu(),
        "tolist": lambda: x.tolist(),
        "stream": lambda: torch.cuda.current_stream().synchronize(),
        "device": lambda: torch.cuda.synchronize(),
    }
    for name, blunder in blunders.items():
        with watch() as seen:
            blunder()
        assert seen.count(*WAITS) >= 1, name


def test_a_wait_is_booked_on_its_line() -> None:
    x = torch.ones(ROWS, device="cuda")
    with watch() as seen:
        for _ in range(LAYERS):
            x.sum().item()
    lines = {event.line for event in seen.seen}
    assert seen.count("sync") == LAYERS
    assert len(lines) == 1
    assert lines.pop().startswith("on_itself.py:")


def test_pinned_and_pageable_copies_differ() -> None:
    ids = torch.zeros(LAYERS, ROWS, dtype=torch.int64)
    with watch() as sound:
        ids.pin_memory().to("cuda", non_blocking=True)
    assert (sound.count("h2d_async"), sound.count(PAGEABLE, *WAITS)) == (1, 0)
    with watch() as seen:
        for layer in ids:
            layer.to("cuda")
    assert seen.count(PAGEABLE) == LAYERS
    with watch() as seen:
        ids.pin_memory().to("cuda")
        ids.to("cuda", non_blocking=True)
    assert (seen.count("h2d_sync"), seen.count(PAGEABLE)) == (1, 1)


def test_a_copy_is_rubbish_until_it_is_waited_for() -> None:
    target = torch.empty(64, pin_memory=True)
    target.copy_(torch.full((64,), 3.0, device="cuda"), non_blocking=True)
    done = torch.cuda.current_stream().record_event()
    assert target.sum() != 192
    done.synchronize()
    assert target.sum() == 192


def test_an_event_of_another_stream_does_not_finish_a_copy() -> None:
    target, side = torch.empty(64, pin_memory=True), torch.cuda.Stream()
    target.copy_(torch.full((64,), 3.0, device="cuda"), non_blocking=True)
    side.synchronize()
    assert target.sum() != 192
    side.wait_stream(torch.cuda.current_stream())
    side.synchronize()
    assert target.sum() == 192


def test_use_ordered_by_events_is_left_alone() -> None:
    weights, side = torch.ones(64, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        copied = weights.clone()
    torch.cuda.current_stream().wait_stream(side)
    weights.add_(copied)


def test_a_read_on_a_stream_that_did_not_wait_raises() -> None:
    weights, side = torch.ones(64, device="cuda"), torch.cuda.Stream()
    with pytest.raises(RuntimeError, match="no event orders them"), torch.cuda.stream(side):
        weights.clone()
    torch.cuda.synchronize()


def test_a_write_under_a_read_of_another_stream_raises() -> None:
    weights, side = torch.ones(64, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        copied = weights.clone()
    with pytest.raises(RuntimeError, match="no event orders them"):
        weights.add_(1.0)
    torch.cuda.synchronize()
    assert float(copied.sum()) == 64


def test_slices_of_one_storage_may_be_used_by_two_streams() -> None:
    buffer, side = torch.zeros(64, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        buffer[:32].add_(1.0)
    buffer[32:].add_(1.0)
    with pytest.raises(RuntimeError, match="no event orders them"):
        buffer[16:48].sum()
    torch.cuda.synchronize()


def test_memory_freed_while_another_stream_uses_it_is_noticed() -> None:
    def copy_on_a_side_stream(*, recorded: bool) -> int:
        side = torch.cuda.Stream()
        with watch() as seen:
            weights, target = torch.ones(64, device="cuda"), torch.empty(64, pin_memory=True)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                target.copy_(weights, non_blocking=True)
            if recorded:
                weights.record_stream(side)
            del weights
        return seen.count("freed_early")

    assert copy_on_a_side_stream(recorded=True) == 0
    assert copy_on_a_side_stream(recorded=False) == 1


def test_a_group_has_every_method_that_torch_calls() -> None:
    """tests/multi/test_gpu_profile.py asks the same of the torch of the GPU profile."""
    source = inspect.getsource(distributed_c10d)
    assert unknown(source) == set()
    assert all(name in vars(dist.ProcessGroupNCCL) for name in NAMES)
    renamed = source.replace("group.all_gather_single(", "group.all_gather_whole(")
    assert unknown(renamed) == {"all_gather_whole"}, "control"


def test_a_collective_is_ordered_by_its_wait() -> None:
    values = torch.ones(64, device="cuda")
    dist.all_reduce(values, async_op=True).wait()
    values.add_(1.0)
    work = dist.all_reduce(values, async_op=True)
    with pytest.raises(RuntimeError, match="no event orders them"):
        values.add_(1.0)
    work.wait()
    values.add_(1.0)


def test_bytes_are_metered_by_purpose() -> None:
    before, size = memory(), LAYERS * (1 << 18)
    torch.ops.device_double.reset_peak(0)
    with purpose("weights"):
        weights = [torch.ones(1 << 16, device="cuda") for _ in range(LAYERS)]
    assert memory("weights").live == size
    with purpose("staging"):
        staged = [one.clone() for one in weights]
    assert (memory("staging").live, memory().live - before.live) == (size, 2 * size)
    del staged
    assert (memory("staging").live, memory("staging").peak) == (0, size)
    assert memory().peak >= before.live + 2 * size
    with contextlib.suppress(KeyError):
        del weights
    assert memory("weights").live == 0
