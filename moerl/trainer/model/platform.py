"""The trainer's platform: CUDA, or unmodified megatron-core on the CPU.

megatron-core 0.19.2 assumes CUDA in about ten places.  On a machine without CUDA `prepare` replaces
exactly those places, before megatron is imported (`cpu_patches`); on CUDA with Transformer Engine
it changes nothing, so the same program runs on both.  Layers come from Transformer Engine on CUDA,
and from megatron-core's local spec on the CPU or by `trainer.transformer_impl=local`; never from
one because the other is missing.  Modules of ours complete the local layer spec: an RMSNorm that
may be sequence parallel (which MoE with tensor parallelism requires), a causal attention, and on
CUDA experts by grouped products (`grouped_experts`).

The patches fit the 0.19.2 wheel, so other versions are refused unless allowed explicitly.
Rejected: a fork of megatron-core, `if cpu` at our own calls (the assumptions are inside megatron).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch

from moerl.config.schema import TrainerConfig, TransformerImpl
from moerl.core.errors import ConfigError, ModelError
from moerl.distributed import numa
from moerl.layout import LayerSpec, layers_of
from moerl.trainer.model import cpu_patches

MEGATRON_VERSION = "0.19.2"  # also in requirements/cpu.lock and pyproject.toml


@dataclass(frozen=True, slots=True)
class Platform:
    """Set by `prepare`, read by everything that places a tensor or opens a group."""

    name: str  # cpu | cuda
    device: torch.device
    backend: str  # gloo | nccl
    layers: LayerSpec  # te | local
    grouped: bool = False  # local experts in bf16 are computed by grouped products


def rank_threads(
    trainer: TrainerConfig, place: Platform, environment: Mapping[str, str] = os.environ
) -> int:
    """Threads of a rank's host computations, once it is bound to its cores.

    An offloaded optimizer computes Adam on the host: then a rank has its share of the cores.
    """
    if place.name == "cpu" or not trainer.optimizer_args.get("optimizer_cpu_offload"):
        return trainer.cpu_threads
    ranks = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    return max(trainer.cpu_threads, len(os.sched_getaffinity(0)) // ranks)


def prepare(
    requested: str = "auto",
    *,
    local_rank: int = 0,
    impl: TransformerImpl = "auto",
    share: float = 1.0,
) -> Platform:
    """Choose the platform and make megatron-core importable on it.

    Call it before any module that imports megatron.  The launcher sets OMP_NUM_THREADS and
    GLOO_SOCKET_IFNAME.  On the CPU nothing is compiled (megatron would compile its expert-bias
    update: a compiler and 20 s cold); on CUDA its fusions are.  impl: `trainer.transformer_impl`;
    with local layers Transformer Engine is hidden, so that half of one does not end the import of
    megatron.  share: of the GPU's memory, the most that torch allocates.
    Raises ConfigError for a platform or layers that this machine does not have, ModelError for a
    megatron-core version the patches were not tested with.
    """
    version = importlib.metadata.version("megatron-core")
    if version != MEGATRON_VERSION:
        raise ModelError(
            f"megatron-core {version} is installed and only {MEGATRON_VERSION} is proven"
        )
    has_cuda = torch.cuda.is_available()
    name = requested if requested != "auto" else ("cuda" if has_cuda else "cpu")
    if name == "cuda":
        if not has_cuda:
            raise ConfigError("trainer.platform", "cuda", "no CUDA device is visible; use cpu")
        numa.bind(numa.of_rank(local_rank))
        torch.cuda.set_device(local_rank)
        if share < 1.0:
            torch.cuda.set_per_process_memory_fraction(share)
        device = torch.device("cuda", local_rank)
        if layers_of(impl, gpu=True) == "te":
            need_transformer_engine(impl)
            return Platform("cuda", device, "nccl", "te")
        cast("dict[str, object]", sys.modules)["transformer_engine"] = None  # an ImportError
        cpu_patches.apply("te")
        return Platform("cuda", device, "nccl", "local", grouped=True)
    if name != "cpu":
        raise ConfigError("trainer.platform", requested, "use auto, cpu or cuda")
    if has_cuda:
        raise ConfigError("trainer.platform", "cpu", "hide the GPUs first (CUDA_VISIBLE_DEVICES=)")
    if impl == "transformer_engine":
        raise ConfigError("trainer.transformer_impl", impl, "it needs a GPU; use auto or local")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # torch reads it when megatron decorates
    cpu_patches.apply("cuda", "te")
    return Platform("cpu", torch.device("cpu"), "gloo", "local")


def need_transformer_engine(impl: TransformerImpl) -> None:
    """Raises ConfigError where it is missing, or its core is there without its torch part."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # of a half installed one: FileNotFoundError, OSError, RuntimeError
        said = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            "trainer.transformer_impl",
            impl,
            f"Transformer Engine is not whole here ({type(error).__name__}: {said}); install it "
            "(tools/setup.sh --gpu), or set trainer.transformer_impl=local",
        ) from error
