"""`moerl doctor [CLUSTER]`: find on every node the faults that stop a first start.

Each node runs `moerl.doctor.node`; this file compares the answers with each other and with the
configuration, one rule per function, and then tries locks, ports and links between nodes.  A node
is reached by `cluster.remote` ("ssh {host}", "srun ... --nodelist={host}").  All nodes are checked
at once, each with a timeout, so any number of nodes takes less than a minute.
"""

from __future__ import annotations

import io
import json
import secrets
import select
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from moerl.config import Config
from moerl.config.clusters import Node, Placement, is_local, placement
from moerl.config.task_mixture import longest_row
from moerl.core.errors import ConfigError
from moerl.doctor.node import (
    END,
    FIRST_PORT,
    LAST_PORT,
    GpuFacts,
    NodeFacts,
    Request,
    packed,
    read_facts,
)
from moerl.runtime.file_systems import NETWORK_FILE_SYSTEMS

SETUP = "run tools/setup.sh --gpu there"
_ANSWER_S, _LINK_S = 25.0, 25.0
_SKEW_S = 2.0  # clock difference that is a fault
_FREE = 0.95  # of a GPU's memory, at least, before a start
_SHARED, _JOURNAL, _BLOBS = "runs (shared)", "journal (local)", "records (local)"
_TRIES_SANDBOX = True  # takes about a second
_SHELLS = ("ssh", "gsissh")  # programs that hand a line to a shell
_LOCKS = {
    "refused": "a lock is seen on both nodes",
    "granted": "both nodes hold the same lock",
    "missing": "a new file is not seen there",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the table.  An empty remedy means that nothing is wrong."""

    check: str
    node: str
    what: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    node: Node
    facts: NodeFacts | None
    error: str  # the reason why there are no facts
    skew_s: float  # clock difference to this node, beyond the call's duration


Rule = Callable[[Config, Answer, NodeFacts], Iterator[Finding]]


def examine(config: Config) -> list[Finding]:
    """All findings, good and bad.  Every process that it starts ends with it."""
    placed = placement(config)
    with ThreadPoolExecutor(max_workers=64) as pool:
        answers = list(pool.map(lambda node: _ask(config, placed, node), placed.nodes))
    found = list(_reachable(config, answers))
    present = [answer for answer in answers if answer.facts is not None]
    if present:
        found += _versions(present)
        for rule in RULES:
            for answer in present:
                if answer.facts is not None:
                    found += rule(config, answer, answer.facts)
    if len(present) == len(answers) > 1:
        found += [*_locks(config, present), *_firewall(config, present), *_links(config, present)]
    return found


def describe(found: Sequence[Finding]) -> str:
    """A table, bad findings first."""
    table = Table(title="moerl doctor")
    for column in ("", "check", "node", "found", "do"):
        table.add_column(column)
    for finding in sorted(found, key=lambda finding: not finding.remedy):
        mark = "!!" if finding.remedy else "ok"
        table.add_row(mark, finding.check, finding.node, finding.what, finding.remedy)
    out = io.StringIO()
    Console(file=out, width=140, force_terminal=False, color_system=None).print(table)
    return out.getvalue()


# --- asking --------------------------------------------------------------------------------------
def on_node(config: Config, node: Node, arguments: Sequence[str]) -> list[str]:
    """Command that runs this Python with arguments on a node.

    `srun` and `kubectl exec` pass words on as they are.  For ssh, the words are quoted: it joins
    them with spaces, and a shell on the other machine reads the line; a question, such as for a
    password, is an error.
    """
    command = [sys.executable, *arguments]
    if is_local(config.cluster) or not config.cluster.remote:
        return command
    host = node.address or node.name
    if host.startswith("-"):
        raise ConfigError("cluster.nodes.*.hosts", host, "an option is no address")
    program, *words = shlex.split(config.cluster.remote)
    words = [word.replace("{host}", host) for word in words]
    if Path(program).name in _SHELLS:
        return [program, "-o", "BatchMode=yes", *words, shlex.join(command)]
    return [program, *words, *command]


def _job(config: Config, node: Node, *words: str) -> list[str]:
    return on_node(config, node, ["-m", "moerl.doctor.node", *words])


def _run(command: Sequence[str], seconds: float) -> tuple[str, str]:
    """(last line of its output, last line of its errors); the latter says so after a timeout."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer in {seconds:g} s"
    except OSError as error:
        return "", str(error)
    out, err = ((text.strip().splitlines() or [""])[-1] for text in (done.stdout, done.stderr))
    return out, err or "no readable answer"


def _ask(config: Config, placed: Placement, node: Node) -> Answer:
    begin = time.time()
    command = _job(config, node, "facts", packed(_request(config, placed, node)))
    out, error = _run(command, _ANSWER_S)
    try:
        facts = read_facts(json.loads(out))
    except (ValueError, TypeError, KeyError):
        return Answer(node, None, error, 0.0)
    early, late = facts.time_s - begin, facts.time_s - time.time()
    return Answer(node, facts, "", early if early < 0 else max(0.0, late))


def _request(config: Config, placed: Placement, node: Node) -> Request:
    ports, folders = {}, {_SHARED: config.run.root}
    numbers = config.cluster.ports
    if node.has("engine"):
        folders[_BLOBS] = config.cluster.blob_dir
    if node is placed.controller:
        folders[_JOURNAL] = config.rollout.journal_dir or config.run.root
    if not is_local(config.cluster):
        if node is placed.controller:
            ports = {"controller": numbers.controller, "Ray": numbers.ray}
        for slot in placed.engines:
            if slot.node is node and slot.part == 0:
                ports[f"records of engine {slot.engine}"] = numbers.blobs + slot.engine
        if node is placed.trainers[0].node:
            ports["rendezvous"] = numbers.rendezvous
    return Request(
        config.cluster.interface,
        folders,
        ports,
        config.model.path,
        is_gpu=node.group.devices > 0,
        tries_sandbox=_TRIES_SANDBOX and node is placed.controller,  # rewards and tools run there
    )


def _reachable(config: Config, answers: Sequence[Answer]) -> Iterator[Finding]:
    program = "" if is_local(config.cluster) else (shlex.split(config.cluster.remote) or [""])[0]
    count = f"{sum(answer.facts is not None for answer in answers)} of {len(answers)}"
    if program and shutil.which(program) is None:
        remedy = f"run moerl doctor where {program} is, such as a login node, or set cluster.remote"
        yield Finding("answers", "", f"{count}: this machine has no {program}", remedy)
        return
    for answer in answers:
        if answer.facts is None:
            by_hand = shlex.join(on_node(config, answer.node, ["--version"]))
            yield Finding("answers", answer.node.name, answer.error, f"try by hand: {by_hand}")
    silent = any(answer.facts is None for answer in answers)
    remedy = "repair the way to the other nodes: cluster.remote, cluster.nodes.*.hosts"
    yield Finding("answers", "", count, remedy if silent else "")


# --- rules ---------------------------------------------------------------------------------------
def _versions(present: Sequence[Answer]) -> Iterator[Finding]:
    """All nodes need the version that most nodes have."""
    versions = {one.node.name: one.facts.versions for one in present if one.facts}
    for name in next(iter(versions.values())):
        common = Counter(each[name] for each in versions.values()).most_common(1)[0][0]
        for node, each in versions.items():
            if each[name] != common:
                remedy = f"install {name} {common} there, or use one environment on a shared disk"
                what = f"{name} {each[name]}, the others have {common}"
                yield Finding("versions", node, what, remedy)
        if common == "missing":
            what = f"{name} is installed nowhere"
            yield Finding("versions", "", what, "run tools/setup.sh on each node")
    shown = ", ".join(f"{name} {v}" for name, v in next(iter(versions.values())).items())
    yield Finding("versions", "", shown)


def _interface(config: Config, answer: Answer, facts: NodeFacts) -> Iterator[Finding]:
    name = config.cluster.interface
    if name in facts.addresses:
        yield Finding("interface", answer.node.name, f"{name} {facts.addresses[name]}")
        return
    what = f"no IPv4 address on {name}; there are {', '.join(facts.addresses)}"
    remedy = "set cluster.interface to the interface that connects the nodes"
    yield Finding("interface", answer.node.name, what, remedy)


def _gpus(config: Config, answer: Answer, facts: NodeFacts) -> Iterator[Finding]:
    node, wanted = answer.node.name, answer.node.group.devices
    if facts.gpus < wanted:
        remedy = "see nvidia-smi there, or lower cluster.nodes.*.devices"
        yield Finding("GPUs", node, f"{facts.gpus} of {wanted}", remedy)
    if facts.gpu is not None:
        libraries = facts.gpu.libraries
        if config.trainer.transformer_impl == "local":
            libraries = {n: v for n, v in libraries.items() if not n.startswith("Transformer")}
        for part, what, remedy in check_gpu(replace(facts.gpu, libraries=libraries)):
            yield Finding(part, node, what, remedy)
        for what, remedy in check_memory(facts.gpu, answer.node.group.device_gb):
            yield Finding("GPU memory", node, what, remedy)


def check_memory(facts: GpuFacts, device_gb: float) -> Iterator[tuple[str, str]]:
    """Shares of engine and trainer are planned for `device_gb`, and SGLang takes its of what is
    free.
    """
    for number, (free, total) in enumerate(facts.memory):
        what = f"GPU {number}: {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
        remedy = ""
        if total < 0.95 * device_gb * 1e9:
            remedy = f"set cluster.nodes.*.device_gb={total // 10**9}, which is {device_gb:g}"
        elif free < _FREE * total:
            remedy = "end what else holds it (nvidia-smi)"
        yield what, remedy


def check_gpu(facts: GpuFacts) -> Iterator[tuple[str, str, str]]:
    """(part, finding, remedy) of each part that engine and trainer need on a GPU node."""
    cuda, libraries = facts.torch_cuda, facts.libraries
    if not facts.driver:
        yield "driver", "nvidia-smi does not answer", "install NVIDIA's driver, or repair it"
    else:
        is_old = facts.driver_cuda and _major(facts.driver_cuda) < _major(cuda)
        what = f"{facts.driver}, for CUDA up to {facts.driver_cuda or 'an unknown version'}"
        remedy = f"install a driver for CUDA {cuda}, which torch is built for"
        yield "driver", what, remedy if is_old else ""
    if not cuda:
        yield "CUDA", "torch is missing or built for the CPU", SETUP
        return
    for name in (name for name, version in libraries.items() if not version):
        is_layers = name.startswith("Transformer")
        remedy = f"{SETUP}, or set trainer.transformer_impl=local" if is_layers else SETUP
        yield name, f"missing for CUDA {cuda}", remedy
    present = [f"{name} {version}" for name, version in libraries.items() if version]
    parts = {name: v for name, v in libraries.items() if name.startswith("Transformer") and v}
    if len(set(parts.values())) > 1:
        named = ", ".join(f"{name} {version}" for name, version in parts.items())
        yield "Transformer Engine", f"versions differ: {named}", SETUP
    yield "libraries", f"torch for CUDA {cuda}, {', '.join(present)}", ""
    if facts.missing_header:
        remedy = "install the headers of this Python (python3-dev): Triton compiles with them"
        yield "Python.h", f"{facts.missing_header} is missing", remedy
    if facts.compile_error:  # engines compile at their start
        yield "CUDA compiler", facts.compile_error, f"{SETUP}, or install CUDA's compiler"
    elif _major(facts.nvcc) != _major(cuda):
        remedy = f"put nvcc of CUDA {_major(cuda)} first on PATH"
        yield "CUDA compiler", f"{facts.nvcc}, torch is built for CUDA {cuda}", remedy
    else:
        yield "CUDA compiler", f"{facts.nvcc} compiles and links", ""


def _major(version: str) -> int:
    number = version.partition(".")[0]
    return int(number) if number.isdecimal() else 0


def _sandbox(config: Config, answer: Answer, facts: NodeFacts) -> Iterator[Finding]:
    """A task with isolation bwrap, and tools of agents, need a working sandbox."""
    if facts.sandbox == "holds":
        yield Finding("sandbox", answer.node.name, "bubblewrap holds what runs in it")
    elif facts.sandbox:
        what = f"none for rewards and tools: {facts.sandbox}"
        remedy = "allow user namespaces there (docs/sandbox.md), or run it as root"
        needed = config.task.isolation == "bwrap"
        yield Finding("sandbox", answer.node.name, what, remedy if needed else "")


def _model(config: Config, answer: Answer, facts: NodeFacts) -> Iterator[Finding]:
    for name in facts.missing:
        remedy = "copy the file again, or mount the folder"
        yield Finding("model", answer.node.name, f"{config.model.path}/{name}: missing", remedy)
    if config.model.path and not facts.missing:
        yield Finding("model", answer.node.name, config.model.path)


def _disks(config: Config, answer: Answer, facts: NodeFacts) -> Iterator[Finding]:
    rows = config.rollout.groups_per_step * config.rollout.group_size * longest_row(config)
    for purpose, disk in facts.disks.items():
        needed = 1e9 if purpose == _SHARED else 0.2e9 + 64 * rows
        what, remedy = f"{disk.free / 1e9:.1f} GB free", ""
        if disk.free < 0:
            what, remedy = "not writable", "make it writable"
        elif disk.free < needed:
            what = f"{disk.free / 1e9:.2f} GB free, {needed / 1e9:.2f} are needed"
            remedy = (
                "remove files, or name another folder (run.root, cluster.blob_dir, "
                "rollout.journal_dir)"
            )
        elif purpose != _SHARED and disk.kind in NETWORK_FILE_SYSTEMS:
            what = "a network file system"
            remedy = "name a folder on a disk of the node: databases and shared memory need it"
        where = f"{purpose} {disk.path} on {disk.kind}"
        yield Finding("disk", answer.node.name, f"{where}: {what}", remedy)


def _ports(_config: Config, answer: Answer, facts: NodeFacts) -> Iterator[Finding]:
    for purpose, why in facts.ports_taken.items():
        remedy = "end what listens there (ss -ltnp), or set cluster.ports"
        yield Finding("ports", answer.node.name, f"{purpose}, {why}", remedy)
    if not facts.ports_taken:
        yield Finding("ports", answer.node.name, "all free")


def _clock(_config: Config, answer: Answer, _facts: NodeFacts) -> Iterator[Finding]:
    is_off = abs(answer.skew_s) > _SKEW_S
    remedy = "start chrony or ntpd there: traces and deadlines compare clocks" if is_off else ""
    yield Finding("clock", answer.node.name, f"{answer.skew_s:+.1f} s", remedy)


RULES: tuple[Rule, ...] = (_interface, _gpus, _sandbox, _model, _disks, _ports, _clock)


# --- between nodes -------------------------------------------------------------------------------
def _tried(holder: list[str], tries: Sequence[Callable[[str], list[str]]]) -> list[str]:
    """Last line of each of the commands that run while the holder holds.

    holder: command that prints a line when it holds; tries: make the other commands of that line.
    """
    deadline = time.monotonic() + _ANSWER_S
    child = subprocess.Popen(
        holder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdout is not None
    try:
        select.select([child.stdout], [], [], _ANSWER_S)
        if child.poll() is not None or not (line := child.stdout.readline().strip()):
            return [f"nothing was held within {_ANSWER_S:g} s"] * len(tries)
        seconds = max(0.1, deadline - time.monotonic())
        with ThreadPoolExecutor(max_workers=64) as pool:
            results = pool.map(lambda make: _run(make(line), seconds), tries)
            return [out or error for out, error in results]
    finally:
        try:
            child.communicate(END, timeout=5.0)
        except subprocess.TimeoutExpired:  # a remote that passes no input on
            child.kill()
            child.wait()


def _locks(config: Config, present: Sequence[Answer]) -> Iterator[Finding]:
    """A lock that the first node holds in a shared folder is refused on every other node.

    A run locks its directory.  Some mounts, such as Lustre with `localflock`, keep locks on the
    machine: then two nodes hold the same lock.
    """
    first, *others = [answer.node for answer in present]
    folders = {"run.root": config.run.root}
    if config.sync.transport == "disk":
        folders["sync.folder"] = config.sync.folder
    for name, folder in folders.items():
        tries = [partial(_job, config, node, "try-lock") for node in others]
        found = _tried(_job(config, first, "hold-lock", folder), tries)
        for node, result in zip(others, found, strict=True):
            what = f"{name}: {_LOCKS.get(result, result)}"
            remedy = "mount it on all nodes with flock, not localflock"
            pair = f"{first.name} -> {node.name}"
            yield Finding("locks", pair, what, "" if result == "refused" else remedy)


def _firewall(config: Config, present: Sequence[Answer]) -> list[Finding]:
    """A port of each node that only the node itself needs is tried from the next node."""
    with ThreadPoolExecutor(max_workers=64) as pool:
        pairs = zip(present, [*present[1:], present[0]], strict=True)
        return list(pool.map(lambda pair: _try_node(config, *pair), pairs))


def _try_node(config: Config, listening: Answer, trying: Answer) -> Finding:
    assert listening.facts is not None
    address = listening.facts.addresses.get(config.cluster.interface, "")
    holder = _job(config, listening.node, "hold-port")
    (result,) = _tried(holder, [partial(_job, config, trying.node, "try-port", address)])
    what = f"ports {FIRST_PORT}-{LAST_PORT}: {result}"
    remedy = "run tools/launch/firewall.sh --apply there"
    is_needed = config.cluster.firewall
    return Finding(
        "firewall",
        f"{trying.node.name} -> {listening.node.name}",
        what if is_needed else f"{what} (cluster.firewall is off)",
        remedy if is_needed and result != "closed" else "",
    )


def _links(config: Config, present: Sequence[Answer]) -> list[Finding]:
    """One all-reduce over all nodes, and a transfer along each link of a ring of all nodes."""
    interface, nodes = config.cluster.interface, [answer.node for answer in present]
    addresses = [a.facts.addresses.get(interface, "") for a in present if a.facts is not None]
    if not all(addresses):
        return []
    store = f"{addresses[0]}:{config.cluster.ports.rendezvous}"
    words, token = (str(len(nodes)), store, interface, str(_LINK_S)), secrets.token_hex(16)
    children = [
        subprocess.Popen(
            _job(config, node, "link", str(rank), *words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, node in enumerate(nodes)
    ]
    for child in children:
        assert child.stdin is not None
        child.stdin.write(f"{token}\n")
        child.stdin.flush()  # `communicate` closes it
    found, deadline = [], time.monotonic() + _LINK_S
    for node, after, child in zip(nodes, [*nodes[1:], nodes[0]], children, strict=True):
        what, remedy = "", ""
        try:
            out, _ = child.communicate(timeout=max(0.1, deadline - time.monotonic()))
            speed = json.loads(out.splitlines()[-1])
            what = f"all-reduce {speed['reduce_ms']:.1f} ms, {speed['gb_s']:.2f} GB/s"
        except (subprocess.TimeoutExpired, ValueError, IndexError, KeyError):
            child.kill()
            _, err = child.communicate()
            what = (err.strip().splitlines() or [f"no answer in {_LINK_S:g} s"])[-1][:120]
            remedy = f"open the ports between the nodes on {interface}, or name another interface"
        found.append(Finding("link", f"{node.name} -> {after.name}", what, remedy))
    return found
