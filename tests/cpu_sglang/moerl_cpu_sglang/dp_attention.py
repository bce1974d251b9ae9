"""Data-parallel attention on a plain CPU: what SGLang has for GPUs only, over gloo.

Each data-parallel rank attends to its own requests; for the experts the ranks gather their tokens,
and each takes its own rows of the sum.  SGLang moves the rows with Triton kernels, pinned memory
and NCCL.  It still batches, pads, routes and records; only these movements are replaced.
Registered for an engine with attn_dp_size > 1.

Read at sglang 0.5.23: srt/layers/dp_attention.py, srt/distributed/parallel_state.py,
srt/model_executor/forward_batch_info.py, srt/managers/scheduler_components/idle_sleeper.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

_IDLE_MS = 20  # longest sleep of a rank without requests

T = TypeVar("T")


class _Unpinned(TorchFunctionMode):
    """Tensors are made in plain memory, also where pinned memory is asked."""

    def __torch_function__(
        self, func: Callable[..., T], types: object, args: Any = (), kwargs: Any = None
    ) -> T:
        options = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return func(*args, **options)


def prepare(original: Callable[..., None], *args: object) -> None:
    """AROUND ForwardBatch.prepare_mlp_sync_batch: the ranks' numbers of tokens."""
    with _Unpinned():
        original(*args)


def padded_length(_backend: object) -> int:
    """REPLACE AttentionBackend.get_cuda_graph_seq_len_fill_value: tokens of a padding request."""
    return 1


def copy_rows(
    target: Tensor, source: Tensor, _dim: int, offset: Tensor, size: Tensor, offset_source: bool
) -> None:
    """REPLACE memcpy_triton: copy `size` rows from, or to, row `offset`."""
    first = int(offset)
    rows = min(int(size), len(source), len(target))
    if offset_source:
        target[:rows].copy_(source[first : first + rows])
    else:
        target[first : first + rows].copy_(source[:rows])


def gather_equal(group: Any, output: Tensor, input: Tensor) -> None:
    """REPLACE GroupCoordinator.all_gather_into_tensor, in SGLang's form for its own CPU build."""
    group._all_gather_into_tensor(output, input.contiguous())


def sum_equal(group: Any, output: Tensor, input: Tensor) -> None:
    """REPLACE GroupCoordinator.reduce_scatter_tensor."""
    group._deterministic_reduce_scatterv(input, output, None)


def sum_parts(
    group: Any, input_: Tensor, output: Tensor | None = None, sizes: list[int] | None = None
) -> Tensor:
    """REPLACE GroupCoordinator.reduce_scatterv: SGLang's deterministic form needs no NCCL."""
    found: Tensor = group._deterministic_reduce_scatterv(input_, output, sizes)
    return found


def gather_parts(
    group: Any,
    input_: Tensor | Sequence[Tensor],
    sizes: Sequence[int] | None = None,
    output: Tensor | None = None,
) -> Tensor | list[Tensor]:
    """REPLACE GroupCoordinator.all_gatherv: parts of `sizes` rows, gathered in padded form."""
    if not isinstance(input_, Tensor):
        return [_gathered(group, part, sizes) for part in input_]
    found = _gathered(group, input_, sizes)
    return found if output is None else output.copy_(found)


def _gathered(group: Any, own: Tensor, sizes: Sequence[int] | None) -> Tensor:
    sizes = sizes or [len(own)] * group.world_size
    padded = own.new_zeros(max(sizes), *own.shape[1:])
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def nap(sleeper: Any) -> None:
    """REPLACE IdleSleeper.maybe_sleep.

    Ranks run every step together, and a request wakes only the rank that it is sent to: the others
    would sleep on for up to a second.
    """
    sleeper.poller.poll(_IDLE_MS)
