"""Placement of the processes of a run: engines and trainer ranks on the nodes of a cluster.

`placement` is a pure function of the configuration, so a login node can print it (`--dry-run`),
Ray gets exactly these requests, and torchrun's ranks follow from it.

- One engine stays on one node (its ranks communicate in every layer), or spans `engine.nodes` of
  them with equal parts; nodes with GPUs are filled in order, nodes without GPUs take turns.
- Trainer ranks are spread evenly: the same number on every trainer node, as torchrun requires.
- On a node with several roles, engines take its first GPUs, the trainer the next GPUs, and the
  reference ranks (`ref_models.placement: separate`) the GPUs after these.
- With `cluster.colocated: shared` the trainer begins at the first GPU, too.  Of each GPU the engine
  has `engine.mem_fraction_static` for weights and KV cache, and a tenth for everything else; the
  trainer has the rest.
- With `cluster.colocated: turns` it begins there, too, and either side gives its memory back while
  the other works; engines on GPUs that the trainer lacks do not.

Rejected: placement by Ray's scheduler (a printed table could differ; trainer nodes have no Ray).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import psutil

from moerl.config.rules import Rows, refuse
from moerl.config.schema import (
    ClusterConfig,
    Config,
    EngineConfig,
    NodeGroup,
    ParallelConfig,
    ParkedPart,
    Role,
    TrainerConfig,
)
from moerl.core.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
_GPU_VARIABLES = {VISIBLE, "CUDA_DEVICE_ORDER"}
_WITHOUT_COPIES: tuple[ParkedPart, ...] = ("gradients", "kv_cache", "engine_weights")
_ALONE = 0.95  # of what is free: in turns engine.max_total_tokens alone bounds an engine
_OF_TRANSFORMER_ENGINE = {  # by section of the trainer
    "megatron": (
        *("fp8", "fp4", "fp8_param", "use_te_activation_func", "use_transformer_engine_op_fuser"),
        *("moe_grouped_gemm", "moe_permute_fusion", "apply_rope_fusion", "tp_comm_overlap"),
    ),
    "optimizer_args": ("use_precision_aware_optimizer",),
}
_BESIDE = 0.1  # of a shared GPU: an engine's context, graphs, activations and buckets


@dataclass(frozen=True, slots=True)
class Node:
    name: str  # GROUP-NUMBER; on one machine: the group
    address: str  # empty: known when the scheduler starts the run
    group: NodeGroup

    def has(self, role: str) -> bool:
        return role in self.group.roles


@dataclass(frozen=True, slots=True)
class EngineSlot:
    """One node's part of an engine."""

    engine: int
    node: Node
    devices: tuple[int, ...]  # GPUs of the node; empty on a CPU
    part: int = 0  # SGLang's node rank


@dataclass(frozen=True, slots=True)
class TrainerSlot:
    """One node's part of the trainer, or of the reference ranks."""

    node: Node
    node_rank: int  # torchrun's
    ranks: tuple[int, ...]
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    nodes: tuple[Node, ...]
    controller: Node
    engines: tuple[EngineSlot, ...]
    trainers: tuple[TrainerSlot, ...]
    ref_models: tuple[TrainerSlot, ...] = ()  # with ref_models.placement: separate


def placement(config: Config) -> Placement:
    """Assign processes to nodes.  Raises ConfigError when a role has no node or too few."""
    found = nodes(config.cluster)
    engines = _place_engines(config, [node for node in found if node.has("engine")])
    before = () if config.cluster.colocated != "none" else engines
    trainers = _place_trainer(config, "trainer", config.trainer.parallel, found, before)
    ref_models: tuple[TrainerSlot, ...] = ()
    if config.ref_models.placement == "separate":
        ref_models = _place_trainer(
            config, "ref_models", config.ref_models.parallel, found, (*before, *trainers)
        )
    return Placement(found, _controller(found), engines, trainers, ref_models)


def nodes(cluster: ClusterConfig) -> tuple[Node, ...]:
    """All nodes, group by group; a cluster without groups is this machine."""
    if not cluster.nodes:
        return (Node("all", cluster.address, NodeGroup(roles=list(get_args(Role)))),)
    found = []
    for name, group in cluster.nodes.items():
        for index in range(group.count):
            address = group.hosts[index] if index < len(group.hosts) else cluster.address
            alone = cluster.launcher == "local" and group.count == 1
            found.append(Node(name if alone else f"{name}-{index}", address, group))
    return tuple(found)


def starts_on_cuda(config: Config, placed: Placement) -> bool:
    """Whether engines run on GPUs, as far as the configuration says."""
    named = config.engine.platform == "cuda"
    return named or (config.engine.platform == "auto" and any(s.devices for s in placed.engines))


def engine_gpus(placed: Placement, node: Node) -> tuple[int, ...]:
    """GPUs of a node that are for engines; its trainer has the others."""
    slots = [slot for slot in placed.engines if slot.node.name == node.name]
    return tuple(gpu for slot in slots for gpu in slot.devices)


def mapped_gpus(config: Config, placed: Placement, slot: TrainerSlot) -> tuple[int, ...]:
    """GPUs of engines that these ranks map to write into, without computing on them."""
    if config.sync.transport != "cuda_ipc" or slot not in placed.trainers:
        return ()
    return tuple(gpu for gpu in engine_gpus(placed, slot.node) if gpu not in slot.devices)


def is_shared(cluster: ClusterConfig) -> bool:
    """Whether engines and trainer are on the same GPUs."""
    return cluster.colocated == "shared"


def takes_turns(cluster: ClusterConfig) -> bool:
    """Whether engines sleep while the trainer trains."""
    return cluster.colocated == "turns"


def sleeping_engines(config: Config) -> frozenset[int]:
    """Engines with memory that the trainer has in its turn: on one of its GPUs, or on a CPU."""
    placed = placement(config)
    used = {(slot.node.name, device) for slot in placed.trainers for device in slot.devices}
    return frozenset(
        slot.engine
        for slot in placed.engines
        if not slot.devices or any((slot.node.name, device) in used for device in slot.devices)
    )


def moved_parts(config: Config) -> tuple[ParkedPart, ...]:
    """The parts that give their memory back in a turn.

    Without sizes of the devices: what costs no copy.  With adapters the engine's base stays.
    """
    if config.turn.moves:
        return tuple(config.turn.moves)
    return ("gradients", "kv_cache") if config.lora.rank else _WITHOUT_COPIES


def trainer_share(config: Config) -> float:
    """Largest share of its GPU's memory that a trainer rank may allocate."""
    if not is_shared(config.cluster):
        return 1.0
    return 1.0 - _BESIDE - config.engine.mem_fraction_static


def engine_of(config: Config, tp: int) -> EngineConfig:
    """Settings of an engine of this size, as SGLang understands them.

    Its share is of what is free when it starts: on a shared GPU all, or what a running or parked
    trainer leaves.  A share that holds the same bytes there is larger; max_total_tokens bounds it.
    """
    engine = replace(config.engine, tp=tp)
    if takes_turns(config.cluster):
        return replace(engine, mem_fraction_static=_ALONE)
    if not is_shared(config.cluster):
        return engine
    share = engine.mem_fraction_static
    return replace(engine, mem_fraction_static=round(share / (share + _BESIDE), 3))


def is_local(cluster: ClusterConfig) -> bool:
    """Whether `moerl train` starts everything itself, on this machine."""
    return cluster.launcher == "local"


def check_cluster(config: Config) -> None:
    """Every rule about `cluster`.  Raises ConfigError naming field, value and allowed values."""
    refuse(config, _cluster(config))
    placement(config)


def _cluster(config: Config) -> Rows:
    cluster = config.cluster
    for name in sorted(_GPU_VARIABLES & cluster.environment.keys()):
        yield (
            f"cluster.environment.{name}",
            "each process gets its own; set cluster.nodes.*.devices, or set it for moerl train",
        )
    for name, group in cluster.nodes.items():
        field = f"cluster.nodes.{name}"
        if group.hosts and len(group.hosts) != group.count:
            yield f"{field}.hosts", group.hosts, f"name as many as {field}.count = {group.count}"
        if cluster.launcher == "hosts" and not group.hosts:
            allowed = "cluster.launcher = hosts needs the address of each node"
            yield f"{field}.hosts", group.hosts, allowed
    on_gpus = any(group.devices for group in cluster.nodes.values() if "trainer" in group.roles)
    if config.trainer.platform == "cpu" or not on_gpus:
        if config.trainer.transformer_impl == "transformer_engine":
            yield "trainer.transformer_impl", "the trainer has no GPU: use auto or local"
    elif config.trainer.transformer_impl == "local":
        yield from _without_transformer_engine(config.trainer)
    if is_shared(cluster):
        yield from _shared(config)
    if takes_turns(cluster):
        yield from _turns(config)
    if not is_local(cluster):
        yield from _network(config)
        return
    if sum(group.count for group in cluster.nodes.values()) > 1:
        yield "cluster.launcher", "it is for one machine; use hosts, slurm or kuberay"
    # Processes on GPUs that nobody has dealt would each take the first ones
    for side in ("engine", "trainer"):
        groups = [group for group in cluster.nodes.values() if side in group.roles]
        on_cuda = getattr(config, side).platform == "cuda"
        if on_cuda and not any(group.devices for group in groups):
            allowed = "cluster.nodes.*.devices names no GPU: name their number, or use cluster=gpu1"
            yield f"{side}.platform", allowed


def _without_transformer_engine(trainer: TrainerConfig) -> Rows:
    """Settings whose kernels are Transformer Engine's; megatron-core's layers lack them."""
    for section, names in _OF_TRANSFORMER_ENGINE.items():
        for name in names:
            if getattr(trainer, section).get(name) not in (None, False):
                yield f"trainer.{section}.{name}", "it needs trainer.transformer_impl=auto"


def _shared(config: Config) -> Rows:
    """Settings for which the shares of a GPU do not hold."""
    if not is_local(config.cluster):
        yield "cluster.colocated", "it is for one machine: use none"
    if not any(group.devices for group in config.cluster.nodes.values()):
        yield "cluster.colocated", "name the GPUs in cluster.nodes.*.devices, or use none"
    yield from _tokens(config)
    if config.engine.mem_fraction_static > 0.8:
        yield "engine.mem_fraction_static", "the trainer shares the GPU: use at most 0.8"


def _tokens(config: Config) -> Rows:
    if not config.engine.max_total_tokens:
        yield (
            "engine.max_total_tokens",
            "SGLang would fill what is free with its KV cache, and the trainer shares the GPU: "
            "name a number of tokens",
        )


def _turns(config: Config) -> Rows:
    """Settings under which a sleep would lose something, or a turn never ends."""
    if not is_local(config.cluster):
        yield "cluster.colocated", "it is for one machine: use none"
    if any(group.devices for group in config.cluster.nodes.values()):
        yield from _tokens(config)
    if config.rollout.in_flight_mode not in ("abort_resume", "retract"):
        allowed = "a sleep drops the KV cache of running rollouts: use abort_resume or retract"
        yield "rollout.in_flight_mode", allowed
    use = "with cluster.colocated=turns use"
    if config.sync.delta:
        yield "sync.delta", f"{use} false: weights are written in place, from no base"
    if config.sync.direct:
        yield "sync.direct", f"{use} 0: an engine keeps no version to send on"
    if any(teacher.follows for teacher in config.algorithm.teachers):
        allowed = "a teacher that follows the policy copies weights that may be parked"
        yield "cluster.colocated", allowed
    moves = list(moved_parts(config))
    if "kv_cache" not in moves:
        yield "turn.moves", moves, "kv_cache must be in it: engines sleep by it"
    if config.lora.rank and "engine_weights" in moves:
        allowed = "without engine_weights: only factors are published, and the base would be lost"
        yield "turn.moves", moves, allowed


def _network(config: Config) -> Rows:
    """Settings that work, or are safe, on one machine only."""
    cluster, ports = config.cluster, config.cluster.ports
    if cluster.address:
        yield "cluster.address", "several nodes bind to their own: leave it empty"
    if cluster.interface == "lo":
        yield "cluster.interface", "name the interface that the nodes reach each other by"
    names = ["controller", "blobs", "ray", "rendezvous"]
    if config.ref_models.placement == "separate":
        names.append("ref_models")
        if cluster.launcher == "kuberay":
            yield "ref_models.placement", "Kubernetes starts one trainer: use trainer"
    numbers = [getattr(ports, name) for name in names]
    for name, port in zip(names, numbers, strict=True):
        field = f"cluster.ports.{name}"
        if not 1024 <= port <= 65535 or numbers.count(port) > 1:
            yield field, "a port of its own from 1024 to 65535 is needed"
        if name != "blobs" and ports.blobs < port < ports.blobs + config.engine.count:
            engine = port - ports.blobs
            yield field, f"engine {engine} serves its records there: raise cluster.ports.blobs"


def _controller(nodes: tuple[Node, ...]) -> Node:
    """The first node of the role; it needs Ray, so an engine node or a node without other roles."""
    for node in nodes:
        if node.has("controller"):
            return node
    raise ConfigError("cluster.nodes", [n.name for n in nodes], "one needs the role controller")


def _place_engines(config: Config, nodes: list[Node]) -> tuple[EngineSlot, ...]:
    count = config.engine.count
    if count and not nodes:
        raise ConfigError("cluster.nodes", "no engine", "a group needs the role engine")
    free = {node.name: list(range(node.group.devices)) for node in nodes}
    slots = []
    span = config.engine.nodes
    for engine, tp in config.engine.sizes.items():
        each = tp // span
        fits = [n for n in nodes if not n.group.devices or len(free[n.name]) >= each]
        if len(fits) < span:
            total = sum(node.group.devices for node in nodes)
            on = "one node" if span == 1 else f"{span} nodes"
            raise ConfigError(
                "engine.count",
                count,
                f"{count} engines of tp {tp}, each on {on}, do not fit {len(nodes)} nodes "
                f"with {total} GPUs",
            )
        bare = all(not node.group.devices for node in fits)
        for part in range(span):
            node = fits[(engine * span + part) % len(fits)] if bare else fits[part]
            devices = tuple(free[node.name][:each])
            free[node.name] = free[node.name][each:]
            slots.append(EngineSlot(engine, node, devices, part))
    return tuple(slots)


def _place_trainer(
    config: Config,
    role: str,
    parallel: ParallelConfig,
    everywhere: tuple[Node, ...],
    before: tuple[EngineSlot | TrainerSlot, ...],
) -> tuple[TrainerSlot, ...]:
    """The same number of ranks on every node of the role, on GPUs that are still free."""
    world, field = parallel.world_size, f"{role}.parallel"
    found = [node for node in everywhere if node.has(role)]
    if not found:
        raise ConfigError("cluster.nodes", f"no {role}", f"a group needs the role {role}")
    each, rest = divmod(world, len(found))
    if rest:
        raise ConfigError(field, world, f"its ranks must divide over {len(found)} {role} nodes")
    slots = []
    for index, node in enumerate(found):
        taken = sum(len(slot.devices) for slot in before if slot.node is node)
        devices = tuple(range(node.group.devices))[taken : taken + each]
        if node.group.devices and len(devices) < each:
            allowed = f"{each} ranks do not fit the {node.group.devices - taken} free GPUs of a "
            allowed += f"{node.name} node"
            if is_local(config.cluster) and before and each <= node.group.devices:
                allowed += "; cluster.colocated=shared lets trainer and engines share GPUs"
            raise ConfigError(field, world, allowed)
        ranks = tuple(range(index * each, (index + 1) * each))
        slots.append(TrainerSlot(node, index, ranks, devices))
    return tuple(slots)


# --- settings of a process on its node ------------------------------------------------------------
def own_address(cluster: ClusterConfig) -> str:
    """`cluster.address`, else this node's IPv4 address on `cluster.interface`.

    Raises ConfigError when the interface does not exist or has no address.
    """
    if cluster.address:
        return cluster.address
    found = psutil.net_if_addrs()
    for entry in found.get(cluster.interface, ()):
        if entry.family == socket.AF_INET:
            return str(entry.address)
    raise ConfigError(
        "cluster.interface",
        cluster.interface,
        f"this node has no IPv4 address there; its interfaces are {', '.join(sorted(found))}",
    )


def bind_node_address(config: Config) -> Config:
    """The configuration as this node's processes use it: bound to its own address."""
    if config.cluster.address:
        return config
    address = own_address(config.cluster)
    return replace(
        config,
        cluster=replace(config.cluster, address=address),
        engine=replace(config.engine, host=address),
    )


def visible_devices(
    devices: Sequence[int], environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Variables of a process on these GPUs of its node; none for a process without GPUs.

    The GPUs of a node count from 0.  A process that starts others may have CUDA_VISIBLE_DEVICES
    itself (a scheduler or a person set it): then they count in that list.
    environment: of the process that starts this process.  Raises ConfigError when it sees too few.
    """
    if not devices:
        return {}
    inherited = environment.get(VISIBLE)
    if inherited is None:
        named = [str(device) for device in devices]
    else:
        seen = [entry for entry in inherited.split(",") if entry]
        if len(seen) <= max(devices):
            raise ConfigError(
                VISIBLE,
                inherited,
                f"GPU {max(devices)} of the node is needed, counted from 0 in this list; unset it, "
                "or set cluster.nodes.*.devices to the number of GPUs in it",
            )
        named = [seen[device] for device in devices]
    # nvidia-smi counts in this order too; CUDA's own puts the fastest GPU first
    return {VISIBLE: ",".join(named), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
