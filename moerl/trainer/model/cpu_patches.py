"""Changes that an unmodified megatron-core needs without CUDA or Transformer Engine: one table.

megatron-core 0.19.2 assumes CUDA in about ten places.  Each row of `PATCHES` replaces the symbols
that it names, in torch or in megatron-core, before the rest of megatron is imported; `apply` runs
the rows for absent parts.
patches/megatron/README.md has an entry per row: its test, and when it can be removed;
tests/unit/test_patches.py compares that page with this table and with the replaced symbols.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")
_applied = False

Absent = Literal["cuda", "te"]  # te: Transformer Engine, and with it the layer spec made of it


@dataclass(frozen=True, slots=True)
class Patch:
    """One reason to replace symbols of torch or megatron-core."""

    replace: Callable[[], None]
    why: str  # behaviour of megatron-core that fails without it
    symbols: tuple[str, ...]  # dotted paths that `replace` assigns
    without: Absent = "cuda"  # the part whose absence needs this row


def apply(*absent: Absent) -> None:
    """Run rows of `PATCHES` for absent parts, once, before megatron is imported."""
    global _applied
    if _applied:
        return
    early = [name for name in sys.modules if name.split(".")[0] == "megatron"]
    assert not early, f"platform.prepare must run before megatron is imported, found {early[0]}"
    for patch in PATCHES:
        if patch.without in absent:
            patch.replace()
    _applied = True


class _Idle:
    """Everything on the CPU is already complete."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def synchronize(self, *_args: Any) -> None:
        pass

    def query(self) -> bool:
        return True


class _Event(_Idle):
    """Stands in for torch.cuda.Event."""

    record = wait = _Idle.synchronize

    def elapsed_time(self, _other: Any) -> float:
        return 0.0


class _Stream(_Idle):
    """Stands in for torch.cuda.Stream: one queue, always drained."""

    wait_stream = wait_event = __exit__ = _Idle.synchronize

    def record_event(self, *_args: Any) -> _Event:
        return _Event()

    def __enter__(self) -> _Stream:
        return self


def _patch_device() -> None:
    setattr(torch.cuda, "current_device", lambda: _CPU)  # noqa: B010


def _patch_streams() -> None:
    stream = _Stream()
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda *_args, **_kwargs: stream
    cuda.stream = lambda _stream: contextlib.nullcontext()
    cuda.synchronize = lambda *_args, **_kwargs: None


def _patch_random() -> None:
    def get(*_args: Any, **_kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def put(state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
        torch.set_rng_state(state)

    cuda: Any = torch.cuda
    cuda.get_rng_state, cuda.set_rng_state = get, put
    cuda.manual_seed = torch.manual_seed
    import megatron.core.tensor_parallel.random as megatron_random

    megatron_random._get_cuda_rng_state = get
    megatron_random._set_cuda_rng_state = put


_FACTORIES = (
    "tensor", "zeros", "ones", "empty", "full", "arange",
    "empty_like", "zeros_like", "rand", "randn",
)  # fmt: skip


def _patch_factories() -> None:
    # torch remembers, at the first `with torch.device(..)`, which functions make tensors.  It must
    # see its own functions: with ours the block has no effect, and transformers loads a model
    # without its rotary table (wrong from the second token on, without an error)
    _device_constructors()

    def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def make(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("pin_memory", None)
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = _CPU
            return factory(*args, **kwargs)

        return make

    for name in _FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    stay: Any = lambda self, *_args, **_kwargs: self  # noqa: E731
    setattr(torch.Tensor, "cuda", stay)  # noqa: B010
    setattr(torch.nn.Module, "cuda", stay)  # noqa: B010


def _patch_tensor_type() -> None:
    original = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(result, str) and caller.startswith("megatron."):
            result = result.replace("torch.", "torch.cuda.", 1)
        return result

    setattr(torch.Tensor, "type", type_)  # noqa: B010


def _patch_split_sizes() -> None:
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = move


def _patch_uneven_collectives() -> None:
    import megatron.core.tensor_parallel.mappings as mappings

    even_gather = mappings._gather_along_first_dim
    even_scatter = mappings._reduce_scatter_along_first_dim

    def gather(
        x: torch.Tensor,
        group: Any,
        output_split_sizes: Any = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        world = group.size()
        if world == 1 or output_split_sizes is None:
            whole: torch.Tensor = even_gather(x, group, output_split_sizes, use_global_buffer)
            return whole
        sizes = [int(size) for size in output_split_sizes]
        out = x.new_empty((sum(sizes), *x.shape[1:]))
        # every peer receives the same piece
        dist.all_to_all_single(out, torch.cat([x] * world), sizes, [len(x)] * world, group=group)
        return out

    def scatter(
        x: torch.Tensor,
        group: Any,
        input_split_sizes: Any = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        world = group.size()
        if world == 1 or input_split_sizes is None:
            part: torch.Tensor = even_scatter(x, group, input_split_sizes, use_global_buffer)
            return part
        sizes = [int(size) for size in input_split_sizes]
        mine = sizes[group.rank()]
        pieces = x.new_empty((mine * world, *x.shape[1:]))
        dist.all_to_all_single(pieces, x.contiguous(), [mine] * world, sizes, group=group)
        total: torch.Tensor = pieces.unflatten(0, (world, mine)).sum(0)
        return total

    mappings._gather_along_first_dim = gather
    mappings._reduce_scatter_along_first_dim = scatter


def _patch_local_spec() -> None:
    from megatron.core.models import backends
    from megatron.core.models.gpt import gpt_layer_specs

    from moerl.trainer.model.local_modules import CausalAttention, RMSNorm

    backends.LocalSpecProvider.layer_norm = lambda self, *_args, **_kwargs: RMSNorm
    backends.LocalSpecProvider.core_attention = lambda self: CausalAttention
    gpt_layer_specs.LNImpl = RMSNorm


def _patch_duplicated_linear() -> None:
    import megatron.core.transformer.experimental_attention_variant.absorbed_mla as absorbed_mla
    import megatron.core.transformer.multi_latent_attention as latent_attention

    from moerl.trainer.model.family_modules import DuplicatedLinear

    latent_attention.TELinear = absorbed_mla.TELinear = DuplicatedLinear


def _unit_length(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6).to(x.dtype)


def _patch_delta_net() -> None:
    from megatron.core.ssm.gated_delta_net import common

    common.HAVE_FLA, common.l2norm = True, _unit_length


PATCHES = (
    Patch(
        _patch_device,
        "gradient buffers are allocated on torch.cuda.current_device()",
        ("torch.cuda.current_device",),
    ),
    Patch(
        _patch_streams,
        "the MoE dispatcher and the gradient reduction create side streams and events",
        (
            "torch.cuda.Stream",
            "torch.cuda.Event",
            "torch.cuda.current_stream",
            "torch.cuda.default_stream",
            "torch.cuda.stream",
            "torch.cuda.synchronize",
        ),
    ),
    Patch(
        _patch_random,
        "the RNG tracker and activation recompute save and restore the CUDA generator",
        (
            "torch.cuda.get_rng_state",
            "torch.cuda.set_rng_state",
            "torch.cuda.manual_seed",
            "megatron.core.tensor_parallel.random._get_cuda_rng_state",
            "megatron.core.tensor_parallel.random._set_cuda_rng_state",
        ),
    ),
    Patch(
        _patch_factories,
        'tensors are made with a literal device="cuda", pinned, or moved with .cuda()',
        (
            *(f"torch.{name}" for name in _FACTORIES),
            "torch.Tensor.cuda",
            "torch.nn.Module.cuda",
        ),
    ),
    Patch(
        _patch_tensor_type,
        "the optimizers require that Tensor.type() says torch.cuda.*; only megatron sees that",
        ("torch.Tensor.type",),
    ),
    Patch(
        _patch_split_sizes,
        "the dispatcher keeps split sizes as tensors; all_to_all_single takes lists and arrays",
        ("megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",),
    ),
    Patch(
        _patch_uneven_collectives,
        "expert tensor parallelism gathers and scatters unequal pieces; gloo requires equal ones",
        (
            "megatron.core.tensor_parallel.mappings._gather_along_first_dim",
            "megatron.core.tensor_parallel.mappings._reduce_scatter_along_first_dim",
        ),
    ),
    Patch(
        _patch_local_spec,
        "the local norm and attention lack sequence parallelism, packing and a fused kernel",
        (
            "megatron.core.models.backends.LocalSpecProvider.layer_norm",
            "megatron.core.models.backends.LocalSpecProvider.core_attention",
            "megatron.core.models.gpt.gpt_layer_specs.LNImpl",
        ),
        without="te",
    ),
    Patch(
        _patch_delta_net,
        "a gated delta net wants a package of Triton kernels, also where it runs torch code",
        (
            "megatron.core.ssm.gated_delta_net.common.HAVE_FLA",
            "megatron.core.ssm.gated_delta_net.common.l2norm",
        ),
        without="te",
    ),
    Patch(
        _patch_duplicated_linear,
        'latent attention passes parallel_mode="duplicated" to one class only, TELinear',
        (
            "megatron.core.transformer.multi_latent_attention.TELinear",
            "megatron.core.transformer.experimental_attention_variant.absorbed_mla.TELinear",
        ),
        without="te",
    ),
)
