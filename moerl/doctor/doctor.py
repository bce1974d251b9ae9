"""`moerl doctor [CLUSTER]`: checks every node before a run, and says how to repair it.

Each node runs `moerl.launch.cluster.node_facts`; this file compares the answers with each other and
with the configuration, one rule per function, then sends bytes along every link
(`moerl.doctor.link_check`).  A node is reached by `cluster.remote` ("ssh {host}", "srun ...
--nodelist={host}"), which is also what tests replace.  All nodes run at once, each with a timeout,
so the check takes less than a minute on any number of nodes.
"""

from __future__ import annotations

import io
import json
import secrets
import shlex
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial

from rich.console import Console
from rich.table import Table

from moerl.config import Config
from moerl.config.clusters import Node, Placement, is_local, placement
from moerl.config.task_mixture import longest_row
from moerl.doctor import firewall_check, gpu_check, pair_check
from moerl.doctor.remote_command import on_node, packed
from moerl.launch.cluster.node_facts import NETWORK_FILE_SYSTEMS, NodeFacts, Request, read_facts

_ANSWER_S = 25.0
_LINK_S = 25.0
_SKEW_S = 2.0
_SHARED = "runs (shared)"
_JOURNAL = "journal (local)"
_BLOBS = "records (local)"
_TRIES_BOX = True  # takes about a second
_LOCK_CHECK = ("-m", "moerl.doctor.lock_check")
_PORT_CHECK = ("-m", "moerl.doctor.firewall_check")
_LOCKS = {
    "refused": "a lock is seen on both nodes",
    "granted": "both nodes hold the same lock",
    "missing": "a new file is not seen there",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the table; without a remedy it is good news."""

    check: str
    node: str
    what: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    node: Node
    facts: NodeFacts | None
    error: str  # why there are no facts
    skew_s: float  # clock difference to this node, beyond the call's duration


Rule = Callable[[Config, Sequence[Answer]], Iterator[Finding]]


def examine(config: Config) -> list[Finding]:
    """All findings, good and bad; every process it starts ends with it."""
    placed = placement(config)
    with ThreadPoolExecutor(max_workers=64) as pool:
        answers = list(pool.map(lambda node: _ask(config, placed, node), placed.nodes))
    present = [answer for answer in answers if answer.facts is not None]
    rules = RULES if present else RULES[:1]  # without answers only reachability is checked
    found = [finding for rule in rules for finding in rule(config, answers)]
    if len(present) == len(answers) > 1:
        found += _locks(config, present)
        found += _firewall(config, present)
        found += _links(config, placed, present)
    return found


def describe(found: Sequence[Finding]) -> str:
    """A table, bad findings first."""
    table = Table(title="moerl doctor")
    for column in ("", "check", "node", "found", "do"):
        table.add_column(column)
    for finding in sorted(found, key=lambda one: not one.remedy):
        mark = "!!" if finding.remedy else "ok"
        table.add_row(mark, finding.check, finding.node, finding.what, finding.remedy)
    out = io.StringIO()
    Console(file=out, width=140, force_terminal=False, color_system=None).print(table)
    return out.getvalue()


# --- asking --------------------------------------------------------------------------------------
def _ask(config: Config, placed: Placement, node: Node) -> Answer:
    request = packed(asdict(_request(config, placed, node)))
    begin = time.time()
    try:
        done = subprocess.run(
            on_node(config, node, ["-m", "moerl.launch.cluster.node_facts", request]),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            check=False,
        )
        facts = read_facts(json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return Answer(node, None, f"no answer in {_ANSWER_S:g} s", 0.0)
    except (OSError, ValueError, TypeError, KeyError, IndexError):
        lines = done.stderr.strip().splitlines() if "done" in locals() else []
        return Answer(node, None, lines[-1] if lines else "no readable answer", 0.0)
    end = time.time()
    early, late = facts.time_s - begin, facts.time_s - end
    return Answer(node, facts, "", early if early < 0 else max(0.0, late))


def _request(config: Config, placed: Placement, node: Node) -> Request:
    ports, folders = {}, {_SHARED: config.run.root}
    numbers = config.cluster.ports
    if node.has("engine"):
        folders[_BLOBS] = config.cluster.blob_dir
    if node is placed.controller:
        folders[_JOURNAL] = _journal_dir(config)
    if not is_local(config.cluster):
        if node is placed.controller:
            ports = {"controller": numbers.controller, "Ray": numbers.ray}
        for slot in placed.engines:
            if slot.node is node and slot.part == 0:
                ports[f"records of engine {slot.engine}"] = numbers.blobs + slot.engine
        if node is placed.trainers[0].node:
            ports["rendezvous"] = numbers.rendezvous
    is_gpu = node.group.devices > 0
    return Request(
        config.cluster.interface,
        folders,
        ports,
        config.model.path,
        is_gpu,
        tries_box=_TRIES_BOX and node is placed.controller,  # rewards and tools run there
    )


def _journal_dir(config: Config) -> str:
    return config.rollout.journal_dir or config.run.root


# --- rules ---------------------------------------------------------------------------------------
def _reachable(config: Config, answers: Sequence[Answer]) -> Iterator[Finding]:
    for answer in answers:
        if answer.facts is None:
            yield Finding(
                "answers",
                answer.node.name,
                answer.error,
                f"try by hand: {shlex.join(on_node(config, answer.node, ['--version']))}",
            )
    yield Finding("answers", "", f"{sum(a.facts is not None for a in answers)} of {len(answers)}")


def _versions(_config: Config, answers: Sequence[Answer]) -> Iterator[Finding]:
    """Rule: all nodes have the version that most have."""
    present = _present(answers)
    names = sorted({name for facts in present.values() for name in facts.versions})
    for name in names:
        counts = Counter(facts.versions.get(name, "missing") for facts in present.values())
        common = counts.most_common(1)[0][0]
        for node, facts in present.items():
            if (found := facts.versions.get(name, "missing")) != common:
                yield Finding(
                    "versions",
                    node,
                    f"{name} {found}, the others have {common}",
                    f"install {name} {common} there, or use one environment on a shared disk",
                )
        if common == "missing":
            yield Finding(
                "versions", "", f"{name} is installed nowhere", "run tools/setup.sh on each node"
            )
    yield Finding("versions", "", _list(next(iter(present.values())).versions) if present else "-")


def _interfaces(config: Config, answers: Sequence[Answer]) -> Iterator[Finding]:
    name = config.cluster.interface
    for node, facts in _present(answers).items():
        if name not in facts.addresses:
            yield Finding(
                "interface",
                node,
                f"no IPv4 address on {name}; there are {', '.join(facts.addresses)}",
                "set cluster.interface to the one that the nodes reach each other by",
            )
        else:
            yield Finding("interface", node, f"{name} {facts.addresses[name]}")


def _cards(config: Config, answers: Sequence[Answer]) -> Iterator[Finding]:
    """GPUs and RDMA cards that the cluster file promises."""
    for answer in answers:
        if (facts := answer.facts) is None:
            continue
        group, node = answer.node.group, answer.node.name
        if facts.gpus < group.devices:
            yield Finding(
                "GPUs",
                node,
                f"{facts.gpus} of {group.devices}",
                "see nvidia-smi there, or lower cluster.nodes.*.devices",
            )
        down = [card for card in group.rdma if "ACTIVE" not in facts.rdma.get(card, "missing")]
        if down:
            yield Finding(
                "RDMA",
                node,
                f"{', '.join(down)}: not active ({_list(facts.rdma) or 'no card'})",
                "see ibstat there, or leave the card out of cluster.nodes.*.rdma",
            )
        elif config.sync.transport in ("nccl", "mooncake"):
            yield Finding("RDMA", node, _list(facts.rdma) or "no card: TCP is used")
        if config.sync.transport == "mooncake" and facts.rdma and facts.locked_memory >= 0:
            yield Finding(
                "RDMA",
                node,
                f"ulimit -l is {facts.locked_memory} bytes",
                "set it to unlimited: RDMA cannot pin its buffers otherwise",
            )


def _gpu_software(_config: Config, answers: Sequence[Answer]) -> Iterator[Finding]:
    for node, facts in _present(answers).items():
        if facts.gpu is not None:
            for part, found, remedy in gpu_check.check_gpu(facts.gpu):
                yield Finding(part, node, found, remedy)


def _variables(config: Config, answers: Sequence[Answer]) -> Iterator[Finding]:
    """Rule: variables of NCCL equal those of the cluster file and those of other nodes."""
    for node, facts in _present(answers).items():
        foreign = {
            name: value
            for name, value in facts.environment.items()
            if config.cluster.environment.get(name, value) != value
            or (
                (name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"))
                and value != config.cluster.interface
            )
        }
        if foreign:
            yield Finding(
                "variables",
                node,
                _list(foreign),
                "unset them there: cluster.environment and cluster.interface decide",
            )


def _sandbox(config: Config, answers: Sequence[Answer]) -> Iterator[Finding]:
    """Rule: a task that asks for bwrap, and tools of agents, need boxes that hold."""
    for node, facts in _present(answers).items():
        if facts.sandbox == "holds":
            yield Finding("sandbox", node, "bubblewrap holds what runs in it")
        elif facts.sandbox:
            needed = config.task.isolation == "bwrap"
            yield Finding(
                "sandbox",
                node,
                f"none for rewards and tools: {facts.sandbox}",
                "allow user namespaces there (docs/isolation.md), or run it as root"
                if needed
                else "",
            )


def _disks(config: Config, answers: Sequence[Answer]) -> Iterator[Finding]:
    for node, facts in _present(answers).items():
        for purpose, disk in facts.disks.items():
            where = f"{purpose} {disk.path} on {disk.kind}"
            if disk.error:
                yield Finding("disk", node, f"{where}: {disk.error}", "make it writable")
            elif disk.free < _room(config, purpose):
                yield Finding(
                    "disk",
                    node,
                    f"{where}: {disk.free / 1e9:.2f} GB free, {_room(config, purpose) / 1e9:.2f} "
                    "are needed",
                    "remove what is not needed, or name another folder (run.root, "
                    "cluster.blob_dir, rollout.journal_dir)",
                )
            elif purpose in (_JOURNAL, _BLOBS) and disk.kind in NETWORK_FILE_SYSTEMS:
                yield Finding(
                    "disk",
                    node,
                    f"{where}: a network file system",
                    "name a folder on a disk of the node: databases and shared memory do not "
                    "survive there",
                )
            else:
                yield Finding("disk", node, f"{where}: {disk.free / 1e9:.1f} GB free")


def _room(config: Config, purpose: str) -> float:
    """Bytes that a folder should have free before a start."""
    tokens = longest_row(config)
    rows = config.rollout.groups_per_step * config.rollout.group_size * tokens
    return 1e9 if purpose == _SHARED else 0.2e9 + 64 * rows


def _ports(_config: Config, answers: Sequence[Answer]) -> Iterator[Finding]:
    for node, facts in _present(answers).items():
        for purpose, why in facts.ports_taken.items():
            yield Finding(
                "ports",
                node,
                f"{purpose}, {why}",
                "end what listens there (ss -ltnp), or set cluster.ports",
            )
    taken = sum(len(facts.ports_taken) for facts in _present(answers).values())
    yield Finding("ports", "", f"{taken} taken")


def _clocks(_config: Config, answers: Sequence[Answer]) -> Iterator[Finding]:
    for answer in answers:
        if answer.facts is not None and abs(answer.skew_s) > _SKEW_S:
            yield Finding(
                "clock",
                answer.node.name,
                f"{answer.skew_s:+.1f} s",
                "start chrony or ntpd there: traces and deadlines compare clocks",
            )
    yield Finding("clock", "", f"largest skew {max(abs(a.skew_s) for a in answers):.1f} s")


def _memory(config: Config, answers: Sequence[Answer]) -> Iterator[Finding]:
    for answer in answers:
        if (facts := answer.facts) is None:
            continue
        free, wanted = facts.memory_free / 1e9, 0.7 * answer.node.group.memory_gb
        if free < wanted or free < 1:
            yield Finding(
                "memory",
                answer.node.name,
                f"{free:.1f} GB free, {max(1.0, wanted):.0f} expected",
                "end other jobs, and processes that an earlier job left",
            )
        else:
            yield Finding("memory", answer.node.name, f"{free:.1f} GB free")


def _model(config: Config, answers: Sequence[Answer]) -> Iterator[Finding]:
    if not config.model.path:
        return
    present = _present(answers)
    names = sorted({name for facts in present.values() for name in facts.model})
    bad = set()
    for name in names:
        sums = Counter(facts.model.get(name, "missing") for facts in present.values())
        common = next((c for c, _ in sums.most_common() if c != "missing"), "missing")
        for node, facts in present.items():
            found = facts.model.get(name, "missing")
            if found == "missing" or found.startswith("unreadable"):
                bad.add(name)
                what = f"{config.model.path}/{name}: {found}"
                yield Finding("model", node, what, "copy the file again, or mount the folder")
            elif found != common:
                bad.add(name)
                what = f"{config.model.path}/{name} differs from the other nodes'"
                yield Finding("model", node, what, "copy the file again from a good node")
    if whole := len(names) - len(bad):
        yield Finding("model", "", f"{whole} files of {config.model.path}")


RULES: tuple[Rule, ...] = (
    _reachable,
    _versions,
    _interfaces,
    _cards,
    _gpu_software,
    _variables,
    _sandbox,
    _disks,
    _ports,
    _clocks,
    _memory,
    _model,
)


def _present(answers: Sequence[Answer]) -> dict[str, NodeFacts]:
    return {answer.node.name: answer.facts for answer in answers if answer.facts is not None}


def _list(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


# --- locks ---------------------------------------------------------------------------------------
def _locks(config: Config, present: Sequence[Answer]) -> Iterator[Finding]:
    """A lock that the first node holds in a shared folder is refused on every other node."""
    first, *others = [answer.node for answer in present]
    folders = {"run.root": config.run.root}
    if config.sync.transport == "disk":
        folders["sync.folder"] = config.sync.folder
    for field, folder in folders.items():
        tries = [partial(_try_lock, config, node) for node in others]
        holder = on_node(config, first, [*_LOCK_CHECK, "hold", folder])
        for node, said in zip(others, pair_check.answers(holder, tries, _ANSWER_S), strict=True):
            what = f"{field}: {_LOCKS.get(said, said)}"
            remedy = "" if said == "refused" else "mount it on all nodes with flock, not localflock"
            yield Finding("locks", f"{first.name} -> {node.name}", what, remedy)


def _try_lock(config: Config, node: Node, path: str) -> list[str]:
    return on_node(config, node, [*_LOCK_CHECK, "try", path])


# --- firewall ------------------------------------------------------------------------------------
def _firewall(config: Config, present: Sequence[Answer]) -> list[Finding]:
    """A port of each node that only the node itself needs is tried from the next node."""
    with ThreadPoolExecutor(max_workers=64) as pool:
        pairs = zip(present, [*present[1:], present[0]], strict=True)
        return list(pool.map(lambda pair: _try_node(config, *pair), pairs))


def _try_node(config: Config, listening: Answer, trying: Answer) -> Finding:
    assert listening.facts is not None
    address = listening.facts.addresses.get(config.cluster.interface, "")
    holder = on_node(config, listening.node, [*_PORT_CHECK, "listen"])
    connect = partial(_try_port, config, trying.node, address)
    (said,) = pair_check.answers(holder, [connect], _ANSWER_S)
    wanted = config.cluster.firewall
    return Finding(
        "firewall",
        f"{trying.node.name} -> {listening.node.name}",
        f"ports {firewall_check.FIRST}-{firewall_check.LAST}: {said}"
        + ("" if wanted else " (cluster.firewall is off)"),
        "run tools/launch/firewall.sh --apply there" if wanted and said != "closed" else "",
    )


def _try_port(config: Config, node: Node, address: str, port: str) -> list[str]:
    return on_node(config, node, [*_PORT_CHECK, "connect", address, port])


# --- links ---------------------------------------------------------------------------------------
def _links(config: Config, placed: Placement, answers: Sequence[Answer]) -> list[Finding]:
    """One all-reduce over all nodes, and a transfer along each link of a ring of all nodes."""
    interface = config.cluster.interface
    addresses = [a.facts.addresses.get(interface, "") for a in answers if a.facts is not None]
    if not all(addresses):
        return []
    nodes = [answer.node for answer in answers]
    command = [
        "-m",
        "moerl.doctor.link_check",
        "--world",
        str(len(nodes)),
        "--interface",
        interface,
    ]
    command += ["--master", f"{addresses[0]}:{config.cluster.ports.rendezvous}"]
    command += ["--wait-s", str(_LINK_S)]
    token = secrets.token_hex(16)
    children = [
        subprocess.Popen(
            on_node(config, node, [*command, "--rank", str(rank)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, node in enumerate(nodes)
    ]
    for child in children:
        assert child.stdin is not None, "asked for"
        child.stdin.write(f"{token}\n")
        child.stdin.flush()  # `communicate` closes it
    found, deadline = [], time.monotonic() + _LINK_S
    for node, after, child in zip(nodes, [*nodes[1:], nodes[0]], children, strict=True):
        link = f"{node.name} -> {after.name}"
        try:
            out, err = child.communicate(timeout=max(0.1, deadline - time.monotonic()))
            speed = json.loads(out.splitlines()[-1])
            what = f"all-reduce {speed['reduce_ms']:.1f} ms, {speed['gb_s']:.2f} GB/s"
            found.append(Finding("link", link, what))
        except (subprocess.TimeoutExpired, ValueError, IndexError, KeyError):
            child.kill()
            _, err = child.communicate()
            lines = err.strip().splitlines() or [f"no answer in {_LINK_S:g} s"]
            remedy = f"open the ports between the nodes on {interface}, or name another interface"
            found.append(Finding("link", link, lines[-1][:120], remedy))
    return found
