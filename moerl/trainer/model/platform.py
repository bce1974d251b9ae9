"""Where the trainer runs: CUDA with Transformer Engine, or an unmodified megatron-core on the CPU.

megatron-core 0.16.1 assumes CUDA in about ten places.  On a machine without CUDA `prepare` replaces
exactly those places, before megatron is imported; on CUDA it changes nothing, so the same program
runs on both.  Two modules complete the local (non Transformer Engine) layer spec: an RMSNorm that
may be sequence parallel (which MoE with tensor parallelism requires) and a causal attention.

Rejected: a fork of megatron-core (it would have to be carried), and a per-call `if cpu` in our own
code (the CUDA assumptions are inside megatron).  Each patch names what fails without it; the list
is that of the 0.16.1 wheel, so another version is refused unless it is allowed explicitly.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

from moerl.errors import ConfigError, ModelError
from moerl.layout.placement import MEGATRON_VERSION

_CPU = torch.device("cpu")
_applied = False


@dataclass(frozen=True, slots=True)
class Platform:
    """Set by `prepare`, read by everything that places a tensor or opens a group."""

    name: str  # cpu | cuda
    device: torch.device
    backend: str  # gloo | nccl


def prepare(requested: str = "auto", *, local_rank: int = 0, any_version: bool = False) -> Platform:
    """Choose the platform and make megatron-core importable on it.

    Call it before any module that imports megatron.  The launcher sets OMP_NUM_THREADS,
    GLOO_SOCKET_IFNAME and, on the CPU, TORCHDYNAMO_DISABLE (megatron would compile its expert-bias
    update: a compiler and 20 s cold).  Raises ConfigError for a platform this
    machine does not have, ModelError for a megatron-core version the patches were not tested with.
    """
    version = importlib.metadata.version("megatron-core")
    if version != MEGATRON_VERSION and not any_version:
        raise ModelError(
            f"megatron-core {version} is installed and only {MEGATRON_VERSION} is proven; "
            "allow another version explicitly to try it"
        )
    has_cuda = torch.cuda.is_available()
    name = requested if requested != "auto" else ("cuda" if has_cuda else "cpu")
    if name == "cuda":
        if not has_cuda:
            raise ConfigError("trainer.platform", "cuda", "no CUDA device is visible; use cpu")
        torch.cuda.set_device(local_rank)
        return Platform("cuda", torch.device("cuda", local_rank), "nccl")
    if name != "cpu":
        raise ConfigError("trainer.platform", requested, "use auto, cpu or cuda")
    if has_cuda:
        raise ConfigError("trainer.platform", "cpu", "hide the GPUs first (CUDA_VISIBLE_DEVICES=)")
    _apply_cpu_patches()
    return Platform("cpu", _CPU, "gloo")


def _apply_cpu_patches() -> None:
    global _applied
    if _applied:
        return
    early = [name for name in sys.modules if name.split(".")[0] == "megatron"]
    assert not early, f"platform.prepare must run before megatron is imported, found {early[0]}"
    for patch in _PATCHES:
        patch()
    _applied = True


# --- the patches, in the order they are applied -------------------------------------------------
class _Event:
    """Stands in for torch.cuda.Event: everything on the CPU is already complete."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def record(self, *_args: Any) -> None:
        pass

    def wait(self, *_args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: Any) -> float:
        return 0.0


class _Stream:
    """Stands in for torch.cuda.Stream: one queue, always drained."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def wait_stream(self, *_args: Any) -> None:
        pass

    def wait_event(self, *_args: Any) -> None:
        pass

    def record_event(self, *_args: Any) -> _Event:
        return _Event()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_exc: Any) -> None:
        pass


def _patch_device() -> None:
    """`torch.cuda.current_device()` is used as a tensor's device (param_and_grad_buffer.py)."""
    setattr(torch.cuda, "current_device", lambda: _CPU)  # noqa: B010


def _patch_streams() -> None:
    """The MoE dispatcher and the gradient reduction create side streams and events."""
    stream = _Stream()
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda *_args, **_kwargs: stream
    cuda.stream = lambda _stream: contextlib.nullcontext()
    cuda.synchronize = lambda *_args, **_kwargs: None


def _patch_random() -> None:
    """The RNG tracker and activation recompute save and restore the CUDA generator."""

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


def _patch_factories() -> None:
    """Tensors made with a literal device="cuda", pinned, or moved with .cuda().

    torch remembers, at the first `with torch.device(..)`, which functions make tensors.  It must
    see its own: with ours it would let every such block pass without effect, and transformers would
    load a model without its rotary table (wrong from the second token on, and nothing fails).
    """
    _device_constructors()

    def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def make(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("pin_memory", None)
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = _CPU
            return factory(*args, **kwargs)

        return make

    for name in (
        "tensor", "zeros", "ones", "empty", "full", "arange",
        "empty_like", "zeros_like", "rand", "randn",
    ):  # fmt: skip
        setattr(torch, name, on_cpu(getattr(torch, name)))
    stay: Any = lambda self, *_args, **_kwargs: self  # noqa: E731
    setattr(torch.Tensor, "cuda", stay)  # noqa: B010
    setattr(torch.nn.Module, "cuda", stay)  # noqa: B010


def _patch_tensor_type() -> None:
    """The optimizers require `Tensor.type()` to say torch.cuda.*; only megatron is told so."""
    original = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(result, str) and caller.startswith("megatron."):
            result = result.replace("torch.", "torch.cuda.", 1)
        return result

    setattr(torch.Tensor, "type", type_)  # noqa: B010


def _patch_router_gemm() -> None:
    """moe_utils reads a name that is bound only when Transformer Engine is installed."""
    import megatron.core.transformer.moe.moe_utils as moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _patch_latent_attention() -> None:
    """It takes Transformer Engine for installed when only the wrappers' names can be imported."""
    import megatron.core.transformer.multi_latent_attention as latent_attention

    if not isinstance(latent_attention.TELinear, type):  # a mock without Transformer Engine
        latent_attention.HAVE_TE = False


def _patch_split_sizes() -> None:
    """The dispatcher leaves split sizes as tensors; all_to_all_single takes lists and arrays."""
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = move


def _patch_uneven_collectives() -> None:
    """Expert tensor parallelism gathers and scatters unequal pieces; gloo wants equal ones."""
    import megatron.core.tensor_parallel.mappings as mappings

    even_gather: Callable[..., torch.Tensor] = mappings._gather_along_first_dim
    even_scatter: Callable[..., torch.Tensor] = mappings._reduce_scatter_along_first_dim

    def gather(
        x: torch.Tensor,
        group: Any,
        output_split_sizes: Any = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        world = group.size()
        if world == 1 or output_split_sizes is None:
            return even_gather(x, group, output_split_sizes, use_global_buffer)
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
            return even_scatter(x, group, input_split_sizes, use_global_buffer)
        sizes = [int(size) for size in input_split_sizes]
        mine = sizes[group.rank()]
        pieces = x.new_empty((mine * world, *x.shape[1:]))
        dist.all_to_all_single(pieces, x.contiguous(), [mine] * world, sizes, group=group)
        summed: torch.Tensor = pieces.unflatten(0, (world, mine)).sum(0)
        return summed

    mappings._gather_along_first_dim = gather
    mappings._reduce_scatter_along_first_dim = scatter


def _patch_adam_step() -> None:
    """torch Adam keeps `step` per parameter, which a resharded optimizer checkpoint lacks.

    It comes back through the parameter groups; hand in the live one so that the loader copies it
    onto itself.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def load(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> Any:
        group, index = self.model_param_group_index_map[model_param]
        live = self.optimizer.state[self.optimizer.param_groups[group]["params"][index]]
        if "step" in live and "step" not in tensors:
            tensors = tensors | {"step": live["step"]}
        return original(self, model_param, tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = load


def _patch_barrier() -> None:
    """`barrier(device_ids=...)` means nothing to gloo."""
    original = dist.barrier

    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return original(group=group, async_op=async_op)

    setattr(dist, "barrier", barrier)  # noqa: B010


def _patch_local_spec() -> None:
    """Norm and attention of the local layer spec: sequence parallel, grouped queries, SDPA."""
    from megatron.core.models import backends
    from megatron.core.models.gpt import gpt_layer_specs

    from moerl.trainer.model.local_modules import CausalAttention, RMSNorm

    backends.LocalSpecProvider.layer_norm = lambda self, rms_norm=False, for_qk=False: RMSNorm
    backends.LocalSpecProvider.core_attention = lambda self: CausalAttention
    gpt_layer_specs.LNImpl = RMSNorm


_PATCHES: tuple[Callable[[], None], ...] = (
    _patch_device,
    _patch_streams,
    _patch_random,
    _patch_factories,
    _patch_tensor_type,
    _patch_router_gemm,
    _patch_latent_attention,
    _patch_split_sizes,
    _patch_uneven_collectives,
    _patch_adam_step,
    _patch_barrier,
    _patch_local_spec,
)
