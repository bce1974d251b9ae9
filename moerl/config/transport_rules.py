"""Which transports a configuration can use, and which one `sync.transport: auto` means.

    one machine             cuda_ipc where the plan shows that a second copy of an engine rank's
                            weights fits its GPU, else shm
    GPUs on all nodes       nccl
    RDMA cards, no GPUs     mooncake, where it is installed
    otherwise               gloo

`auto` needs shapes for cuda_ipc: `moerl.planning.publish_forecast` has them and asks first.
Rejected: mooncake as the default between GPUs (no token, and a package of its own on every node).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import get_args

from moerl.config.clusters import is_local, nodes, takes_turns
from moerl.config.rules import Rows, refuse
from moerl.config.schema import SAME_MACHINE, Config, NodeGroup, Role, TransportName
from moerl.config.validate import either

PROTOCOL, DEVICES = "MOERL_MOONCAKE_PROTOCOL", "MOERL_MOONCAKE_DEVICES"
CUMEM = "NCCL_CUMEM_ENABLE"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # of torch, two names of it
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
NAMES: tuple[TransportName, ...] = tuple(n for n in get_args(TransportName) if n != "auto")
_ROLES = ("engine", "trainer")


@dataclass(frozen=True, slots=True)
class TransportChoice:
    """A transport and the reason for its choice."""

    name: TransportName
    reason: str


def default_transport(config: Config) -> TransportChoice:
    """Meaning of `sync.transport: auto`, as far as it follows from the cluster."""
    if is_local(config.cluster):
        return TransportChoice("shm", "trainer and engines are processes of one machine")
    if not why_not(config, "nccl"):
        cards = sorted({card for group in _groups(config) for card in group.rdma})
        over = f"over {', '.join(cards)}" if cards else "over the cards that NCCL finds"
        return TransportChoice("nccl", f"every engine and trainer rank has a GPU; {over}")
    if mooncake_protocol(config) == "rdma":
        if importlib.util.find_spec("mooncake") is not None:
            return TransportChoice("mooncake", "all nodes name RDMA cards, and not all have GPUs")
        return TransportChoice("gloo", "RDMA without GPUs needs pip install '.[mooncake-cpu]'")
    return TransportChoice("gloo", "not all nodes have GPUs, or RDMA cards in cluster.nodes.*.rdma")


def check_transport(config: Config) -> None:
    """Raises ConfigError for a transport that cannot work with the other settings."""
    refuse(config, _transport(config))


def _transport(config: Config) -> Rows:
    sync = config.sync
    if sync.transport != "auto" and (cause := why_not(config, sync.transport)):
        yield "sync.transport", cause
    is_rdma = (sync.transport, sync.mooncake_protocol) == ("mooncake", "rdma")
    if is_rdma and not all(group.rdma for group in _groups(config)):
        yield (
            "sync.mooncake_protocol",
            "name the cards of every engine and trainer node in cluster.nodes.*.rdma, or "
            "use auto or tcp",
        )


def why_not(config: Config, name: TransportName) -> str:
    """Why a transport cannot work here, with a transport that can; empty when it can."""
    if name in SAME_MACHINE and not is_local(config.cluster):
        others = either(tuple(n for n in NAMES if n not in SAME_MACHINE))
        return f"it ends at the machine; use {others}"
    if takes_turns(config.cluster) and name != "shm":
        return "only shm was tried where engines and trainer take turns; use shm"
    if name == "nccl" and (colocated := config.cluster.colocated) != "none":
        others = "cuda_ipc or shm" if colocated == "shared" else "shm"
        return f"NCCL has no two ranks on one GPU (cluster.colocated={colocated}); use {others}"
    if name == "nccl" and not _on_gpus(config, placed=False):
        others = "shm or gloo" if is_local(config.cluster) else "gloo or mooncake"
        return f"it needs a GPU for every engine and trainer rank; use {others}"
    return _why_not_ipc(config) if name == "cuda_ipc" else ""


def _why_not_ipc(config: Config) -> str:
    if not _on_gpus(config, placed=True):
        return "it needs cluster.nodes.*.devices for every engine and trainer rank; use shm"
    if config.sync.delta:
        return "the CPU applies deltas, and it stages on the GPU; use shm, or sync.delta=false"
    if config.sync.direct:
        return "an engine does not see another one's GPUs; use sync.direct=0, or shm"
    return ""


def _on_gpus(config: Config, *, placed: bool) -> bool:
    """Whether engines and trainer run on GPUs.  placed: the nodes' GPUs are in the settings too."""
    platforms = {config.engine.platform, config.trainer.platform}
    devices = all(group.devices for group in _groups(config))
    return "cpu" not in platforms and (devices or (platforms == {"cuda"} and not placed))


def _groups(config: Config) -> Iterator[NodeGroup]:
    """Groups of nodes that hold engine or trainer ranks."""
    seen = []
    for node in nodes(config.cluster):
        if any(node.has(role) for role in _ROLES) and node.group not in seen:
            seen.append(node.group)
            yield node.group


# --- environment ----------------------------------------------------------------------------------
def mooncake_protocol(config: Config) -> str:
    """rdma or tcp; `auto` is rdma where every engine and trainer node names its cards."""
    if config.sync.mooncake_protocol != "auto":
        return config.sync.mooncake_protocol
    return "rdma" if all(group.rdma for group in _groups(config)) else "tcp"


def transport_environment(config: Config, group: NodeGroup) -> dict[str, str]:
    """All variables of NCCL, gloo and Mooncake of an engine, trainer or reference process.

    group: of its node.  The settings alone decide, since the shells of two nodes may differ.
    Without an interface NCCL listens on the first one that is not loopback, on one machine too.
    """
    found = dict.fromkeys(INTERFACES, config.cluster.interface)
    if group.rdma:
        found["NCCL_IB_HCA"] = ",".join(group.rdma)
    found |= config.cluster.environment
    if config.sync.transport == "nccl":
        found |= _as_sglang_sets(config)
    if config.sync.transport == "mooncake":
        protocol = mooncake_protocol(config)
        found |= {PROTOCOL: protocol, DEVICES: ",".join(group.rdma) if protocol == "rdma" else ""}
    return found


def _as_sglang_sets(config: Config) -> dict[str, str]:
    """Variables that SGLang sets in its processes, for the other end of a NCCL group.

    NCCL's own default of CUMEM is on; SGLang turns it off where nothing is set.
    Read at sglang 0.5.23: srt/entrypoints/engine.py (_set_envs_and_config),
    srt/arg_groups/attention_hook.py (_handle_deterministic_inference).
    """
    engine, found = config.engine, {CUMEM: config.cluster.environment.get(CUMEM, "0")}
    if engine.args.get("enable_symm_mem"):
        found[CUMEM] = "1"
    if engine.args.get("enable_deterministic_inference") and max(engine.sizes.values()) > 1:
        found["NCCL_ALGO"] = "allreduce:tree"
    return found


def first_group(config: Config, role: Role) -> NodeGroup:
    """Of the nodes with that role."""
    return next(node.group for node in nodes(config.cluster) if node.has(role))


def with_transport(config: Config, choice: TransportChoice) -> Config:
    return replace(config, sync=replace(config.sync, transport=choice.name))
