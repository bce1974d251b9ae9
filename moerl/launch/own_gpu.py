"""Recipes for a laptop on a machine with a GPU: they use it unless the user says otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moerl.config import Config, load_config
from moerl.config.clusters import is_local
from moerl.runtime.machine import torch_cuda, visible_gpus

_PLACES = ("cluster", "engine.platform", "trainer.platform")  # settings that say where


def use_own_gpu(recipe: str, overrides: Sequence[str]) -> tuple[list[str], str]:
    """The overrides of a start on this machine, and a sentence about them; "" = unchanged.

    Clusters and platforms that the user names are kept.  Raises ConfigError as `load_config`.
    """
    kept = list(overrides)
    if any(word.startswith((f"{name}=", f"{name}.")) for word in kept for name in _PLACES):
        return kept, ""
    if load_config(recipe, kept).cluster.name != "laptop" or not (gpus := visible_gpus()):
        return kept, ""
    found = "this machine has " + ("a GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs")
    if not torch_cuda():
        return kept, f"{found}, but torch is installed for CPUs, which the run uses"
    own = [f"cluster.nodes.all.device_gb={gpus[0] / 1e9:.1f}"] if gpus[0] else []
    use = "it" if len(gpus) == 1 else "one"
    return (
        ["cluster=gpu1", *own, *kept],
        f"{found}: the run uses {use} (cluster=gpu1); cluster=laptop is the CPU",
    )


def lacks_gpus(config: Config) -> str:
    """Why a local run on GPUs cannot start on this machine; empty where it can."""
    needed = max(group.devices for group in config.cluster.nodes.values())
    if not (is_local(config.cluster) and needed and config.engine.platform == "cuda"):
        return ""
    found = len(visible_gpus()) or len(list(Path("/dev").glob("nvidia[0-9]*")))
    if found < needed:
        return f"it needs {needed} GPU(s) and this machine has {found}; cluster=laptop is the CPU"
    return "" if torch_cuda() else "torch is installed for CPUs: tools/setup.sh --gpu"
