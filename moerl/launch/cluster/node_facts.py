"""Facts about one node: `python -m moerl.launch.cluster.node_facts REQUEST`, JSON in and out.

`moerl doctor` runs it on every node; REQUEST is one word of letters and digits.  It changes
nothing, imports neither torch nor Ray, and takes about a second.  Versions come from the installed
distributions, model shards are compared by size and by their first and last MiB, a port is tested
by binding it.
"""

from __future__ import annotations

import base64
import importlib.metadata
import json
import os
import platform
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import xxhash

from moerl.core.errors import ModelError
from moerl.core.json_files import read_json
from moerl.launch.cluster.gpu_facts import GpuFacts, gpu_facts

PACKAGES = ("moerl", "torch", "sglang", "megatron-core", "ray", "transformers", "numpy")
NETWORK_FILE_SYSTEMS = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p", "afs")
) | {"fuse.sshfs", "fuse.glusterfs", "fuse.ceph"}
_ENDS = 2**20  # bytes at each end of a shard that its checksum covers


@dataclass(frozen=True)
class Request:
    """Paths and ports of the node's roles, which the node is to inspect."""

    interface: str
    folders: dict[str, str]  # purpose: path
    ports: dict[str, int]  # purpose: number
    model: str = ""
    is_gpu: bool = False  # look for what GPUs need
    tries_box: bool = False  # try a sandbox, as rewards and tools have it


@dataclass
class DiskFacts:
    path: str
    kind: str  # of the file system: ext4, nfs4, tmpfs
    free: int  # bytes; -1 = not writable
    error: str = ""


@dataclass
class NodeFacts:
    """Answer of one node."""

    time_s: float
    versions: dict[str, str]
    addresses: dict[str, str]  # IPv4 by interface
    rdma: dict[str, str]  # port state by device
    gpus: int
    environment: dict[str, str]  # NCCL_*, UCX_*, GLOO_*
    memory_free: int
    locked_memory: int  # ulimit -l, bytes; -1 = unlimited
    disks: dict[str, DiskFacts] = field(default_factory=dict)
    ports_taken: dict[str, str] = field(default_factory=dict)  # purpose: reason
    model: dict[str, str] = field(default_factory=dict)  # file: checksum or "missing"
    gpu: GpuFacts | None = None  # on a node that should have GPUs
    sandbox: str = ""  # "holds", or why none can be made; empty: not tried


def look(request: Request) -> NodeFacts:
    """Collect all facts of this node."""
    import resource

    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    addresses = {
        name: str(entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }
    return NodeFacts(
        time_s=time.time(),
        versions=versions(),
        addresses=addresses,
        rdma={path.parts[-3]: _line(path) for path in _glob("/sys/class/infiniband/*/ports/*")},
        gpus=len(_glob("/proc/driver/nvidia/gpus/*")),
        environment={
            name: value
            for name, value in os.environ.items()
            if name.startswith(("NCCL_", "UCX_", "GLOO_"))
        },
        memory_free=psutil.virtual_memory().available,
        locked_memory=-1 if locked == resource.RLIM_INFINITY else locked,
        disks={name: disk(Path(path)) for name, path in request.folders.items()},
        ports_taken=_taken(addresses.get(request.interface, ""), request.ports),
        model=shards(Path(request.model)) if request.model else {},
        gpu=gpu_facts() if request.is_gpu else None,
        sandbox=_tried_box() if request.tries_box else "",
    )


def _tried_box() -> str:
    from moerl.sandbox.limits import NoSandbox  # takes half a second
    from moerl.sandbox.sandbox import SandboxFactory

    try:
        SandboxFactory()
    except NoSandbox as error:
        return str(error)
    return "holds"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def disk(folder: Path) -> DiskFacts:
    """Kind and free bytes of the file system of a folder, which need not exist yet."""
    there = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    kind = file_system(there)
    if not os.access(there, os.W_OK):
        return DiskFacts(str(folder), kind, -1, f"{there} is not writable")
    return DiskFacts(str(folder), kind, psutil.disk_usage(str(there)).free)


def file_system(folder: Path) -> str:
    """Type of the file system of a folder, which need not exist yet: ext4, nfs4, ..."""
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    folder = folder.resolve()
    return next((mounts[one] for one in (folder, *folder.parents) if one in mounts), "")


def shards(folder: Path) -> dict[str, str]:
    """{file: checksum} of a model folder; "missing" for files that only its index names."""
    try:
        read_json(folder / "config.json")
    except ModelError as error:
        return {"config.json": f"unreadable: {error}"}
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        return {"*.safetensors": "missing"}
    return {name: _checksum(folder / name) for name in ("config.json", *names)}


def _checksum(path: Path) -> str:
    if not path.is_file():
        return "missing"
    size = path.stat().st_size
    digest = xxhash.xxh3_64(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(_ENDS))
        file.seek(max(0, size - _ENDS))
        digest.update(file.read(_ENDS))
    return digest.hexdigest()


def _taken(address: str, ports: dict[str, int]) -> dict[str, str]:
    found = {}
    for purpose, port in ports.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError as error:
                found[purpose] = f"port {port}: {error.strerror}"
    return found


def _glob(pattern: str) -> list[Path]:
    return sorted(Path("/").glob(pattern.lstrip("/")))


def _line(port: Path) -> str:
    state = port / "state"
    return state.read_text(encoding="utf-8").strip() if state.is_file() else "unknown"


def read_facts(data: dict[str, Any]) -> NodeFacts:
    disks = {name: DiskFacts(**value) for name, value in data.pop("disks").items()}
    gpu = data.pop("gpu")
    return NodeFacts(**data, disks=disks, gpu=GpuFacts(**gpu) if gpu else None)


def main() -> None:
    word = sys.argv[1]  # base64 without its padding (`moerl.doctor.remote_command`)
    request = json.loads(base64.urlsafe_b64decode(word + "=" * (-len(word) % 4)))
    print(json.dumps(asdict(look(Request(**request)))))


if __name__ == "__main__":
    main()
