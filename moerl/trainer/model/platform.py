"""The trainer's platform: CUDA, or unmodified megatron-core on the CPU.

megatron-core 0.19.2 assumes CUDA in about ten places.  On a machine without CUDA `prepare` replaces
exactly those places, before megatron is imported (`cpu_patches`); on CUDA with Transformer Engine
it changes nothing, so the same program runs on both.  Layers come from Transformer Engine on CUDA,
and from megatron-core's local spec on the CPU or where CUDA has no Transformer Engine (by name
only, as they are slow on CUDA).  Two modules complete the local (non Transformer Engine) layer
spec: an RMSNorm that may be sequence parallel (which MoE with tensor parallelism requires) and a
causal attention.

The patches fit the 0.19.2 wheel, so other versions are refused unless allowed explicitly.
Rejected: a fork of megatron-core, `if cpu` at our own calls (the assumptions are inside megatron).
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from moerl.config.schema import TrainerConfig
from moerl.core.errors import ConfigError, ModelError
from moerl.distributed import numa
from moerl.layout import LayerSpec
from moerl.trainer.model import cpu_patches

MEGATRON_VERSION = "0.19.2"  # also in requirements/cpu.lock and pyproject.toml


@dataclass(frozen=True, slots=True)
class Platform:
    """Set by `prepare`, read by everything that places a tensor or opens a group."""

    name: str  # cpu | cuda
    device: torch.device
    backend: str  # gloo | nccl
    layers: LayerSpec  # te | local


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
    requested: str = "auto", *, local_rank: int = 0, layers: LayerSpec = "te", share: float = 1.0
) -> Platform:
    """Choose the platform and make megatron-core importable on it.

    Call it before any module that imports megatron.  The launcher sets OMP_NUM_THREADS and
    GLOO_SOCKET_IFNAME.  On the CPU nothing is compiled (megatron would compile its expert-bias
    update: a compiler and 20 s cold); on CUDA its fusions are.  layers: on CUDA; the CPU has local
    layers.  share: of the GPU's memory, the most that torch allocates.
    Raises ConfigError for a platform this machine does not have, ModelError for a megatron-core
    version the patches were not tested with.
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
        if layers == "local":
            cpu_patches.apply("te")
        return Platform("cuda", torch.device("cuda", local_rank), "nccl", layers)
    if name != "cpu":
        raise ConfigError("trainer.platform", requested, "use auto, cpu or cuda")
    if has_cuda:
        raise ConfigError("trainer.platform", "cpu", "hide the GPUs first (CUDA_VISIBLE_DEVICES=)")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # torch reads it when megatron decorates
    cpu_patches.apply("cuda", "te")
    return Platform("cpu", torch.device("cpu"), "gloo", "local")
