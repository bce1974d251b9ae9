"""The part of `moerl doctor` that runs on a node: `python -m moerl.doctor.node JOB ARGUMENTS`.

    facts WORD              print the node's facts as JSON; WORD is a packed `Request`
    hold-lock FOLDER        lock a new file in FOLDER or its nearest parent, and print its name
    try-lock FILE           print `refused` if another process has the lock, `granted` or `missing`
    hold-port               listen on a port that only this node's engines need, and print it
    try-port HOST PORT      print `open` or `closed`
    link RANK WORLD HOST:PORT INTERFACE SECONDS
                            all-reduce, then 8 MiB to the next rank; print the speed as JSON

The two `hold` jobs end when their input says so, or after a while.  No job changes the node or uses
a GPU.  Versions are read from installed distributions and from nvidia-smi; the CUDA compiler proves
itself on one kernel.
"""

from __future__ import annotations

import base64
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import re
import select
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from moerl.core.errors import ModelError
from moerl.core.json_files import read_json
from moerl.runtime.cuda_folder import compiler_environment
from moerl.runtime.file_systems import file_system
from moerl.runtime.machine import torch_cuda

PACKAGES = ("moerl", "torch", "sglang", "megatron-core", "ray", "transformers", "numpy")
GPU_PACKAGES = {  # by purpose; for the CUDA that torch is built for
    "cuDNN": "nvidia-cudnn-cu{major}",
    "NCCL": "nvidia-nccl-cu{major}",
    "Transformer Engine": "transformer-engine",
    "Transformer Engine core": "transformer-engine-cu{major}",
    "Transformer Engine torch": "transformer-engine-torch",
}
FIRST_PORT, LAST_PORT = 20000, 31999  # `moerl.engine.host.sglang_server.free_port`
END = "end\n"  # ends a `hold` job
_HOLD_S, _CONNECT_S, _PROGRAM_S = 20.0, 3.0, 20.0  # nvidia-smi wakes an idle driver
_LINK_BYTES = 8 * 2**20
# As SGLang builds its kernels.  The header refuses a compiler that is not of the headers' version.
_KERNEL = """#include <cuda/std/cstdint>
__global__ void add_one(cuda::std::int32_t* numbers) { ++numbers[threadIdx.x]; }
extern "C" void launch(cuda::std::int32_t* numbers) { add_one<<<1, 32>>>(numbers); }
"""
_BUILD = """rule compile
  command = {home}/bin/nvcc -std=c++20 -arch=sm_90a -Xcompiler -fPIC -c $in -o $out
rule link
  command = c++ $in -shared -L{home}/lib64 -lcudart -o $out
build kernel.o: compile kernel.cu
build kernel.so: link kernel.o
"""


@dataclass(frozen=True)
class Request:
    """Folders and ports of the roles of a node, that are inspected on it."""

    interface: str
    folders: dict[str, str]  # purpose: path
    ports: dict[str, int]  # purpose: number
    model: str = ""
    is_gpu: bool = False  # look for the parts that GPUs need
    tries_sandbox: bool = False  # start a sandbox, as rewards and tools do


@dataclass(frozen=True)
class DiskFacts:
    path: str
    kind: str  # of the file system: ext4, nfs4, tmpfs
    free: int  # bytes; -1 = not writable


@dataclass(frozen=True)
class GpuFacts:
    """Versions; an empty version was not found."""

    driver: str = ""
    driver_cuda: str = ""  # newest CUDA that the driver runs
    torch_cuda: str = ""  # CUDA that torch is built for; empty for a CPU build
    nvcc: str = ""
    compile_error: str = ""  # why a kernel could not be compiled and linked
    missing_header: str = ""  # path of Python.h, with which Triton compiles its launchers
    memory: list[tuple[int, int]] = field(default_factory=list)  # free, total of each GPU; bytes
    libraries: dict[str, str] = field(default_factory=dict)  # by purpose


@dataclass(frozen=True)
class NodeFacts:
    """Answer of one node."""

    time_s: float
    versions: dict[str, str]
    addresses: dict[str, str]  # IPv4 by interface
    gpus: int
    disks: dict[str, DiskFacts]
    ports_taken: dict[str, str]  # purpose: reason
    missing: list[str]  # files of the model
    gpu: GpuFacts | None  # of a node that should have GPUs
    sandbox: str  # "holds", or the reason that none can be made; empty: not tried


def packed(request: Request) -> str:
    """One word of letters, digits, - and _, which every remote command passes on unchanged."""
    return base64.urlsafe_b64encode(json.dumps(asdict(request)).encode()).decode().rstrip("=")


def read_facts(data: dict[str, Any]) -> NodeFacts:
    disks = {name: DiskFacts(**value) for name, value in data["disks"].items()}
    gpu = GpuFacts(**data["gpu"]) if data["gpu"] else None
    return NodeFacts(**data | {"disks": disks, "gpu": gpu})


# --- facts ---------------------------------------------------------------------------------------
def node_facts(request: Request) -> NodeFacts:
    addresses = {
        name: str(entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }
    return NodeFacts(
        time_s=time.time(),
        versions={"python": platform.python_version()}
        | {name: _version(name) or "missing" for name in PACKAGES},
        addresses=addresses,
        gpus=len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
        disks={purpose: _disk(Path(path)) for purpose, path in request.folders.items()},
        ports_taken=_taken(addresses.get(request.interface, ""), request.ports),
        missing=_missing_files(Path(request.model)) if request.model else [],
        gpu=gpu_facts() if request.is_gpu else None,
        sandbox=_try_sandbox() if request.tries_sandbox else "",
    )


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _nearest(folder: Path) -> Path:
    """The folder or the closest parent that exists."""
    return next(path for path in (folder, *folder.resolve().parents) if path.is_dir())


def _disk(folder: Path) -> DiskFacts:
    there = _nearest(folder)
    is_writable = os.access(there, os.W_OK)
    free = psutil.disk_usage(str(there)).free if is_writable else -1
    return DiskFacts(str(folder), file_system(there), free)


def _missing_files(folder: Path) -> list[str]:
    """Files of a model that are missing or unreadable, also files that only its index names."""
    try:
        read_json(folder / "config.json")
    except ModelError:
        return ["config.json"]
    index = folder / "model.safetensors.index.json"
    names = set(read_json(index).get("weight_map", {}).values()) if index.is_file() else set()
    if not names and not list(folder.glob("*.safetensors")):
        return ["*.safetensors"]
    return sorted(name for name in names if not (folder / name).is_file())


def _taken(address: str, ports: dict[str, int]) -> dict[str, str]:
    """A port is tested by binding it."""
    taken = {}
    for purpose, port in ports.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError as error:
                taken[purpose] = f"port {port}: {error.strerror}"
    return taken


def _try_sandbox() -> str:
    from moerl.sandbox.limits import NoSandbox  # takes half a second
    from moerl.sandbox.sandbox import SandboxFactory

    try:
        SandboxFactory()
    except NoSandbox as error:
        return str(error)
    return "holds"


# --- GPU parts -----------------------------------------------------------------------------------
def gpu_facts() -> GpuFacts:
    smi, built_for, home = _output("nvidia-smi"), torch_cuda(), _cuda_home()
    header = Path(sysconfig.get_path("include"), "Python.h")
    major = built_for.partition(".")[0]
    libraries = {use: _version(name.format(major=major)) for use, name in GPU_PACKAGES.items()}
    return GpuFacts(
        driver=_match(r"Driver Version: ([\d.]+)", smi),
        driver_cuda=_match(r"CUDA Version: ([\d.]+)", smi),
        torch_cuda=built_for,
        nvcc=_match(r"release ([\d.]+)", _output(f"{home}/bin/nvcc", "--version")),
        compile_error=compile_error(home),
        missing_header="" if header.is_file() else str(header),
        memory=_memory(),
        libraries=libraries,
    )


def _memory() -> list[tuple[int, int]]:
    told = _output("nvidia-smi", "--query-gpu=memory.free,memory.total", "--format=csv,noheader")
    pairs = re.findall(r"^(\d+) MiB, (\d+) MiB$", told, re.MULTILINE)
    return [(int(free) * 2**20, int(total) * 2**20) for free, total in pairs]


def _cuda_home() -> str:
    """Folder of the compiler that an engine of this environment takes."""
    found = os.environ | compiler_environment(os.environ)
    nvcc = shutil.which("nvcc", path=found["PATH"]) or "/usr/local/cuda/bin/nvcc"
    return found.get("CUDA_HOME") or found.get("CUDA_PATH") or str(Path(nvcc).parents[1])


def compile_error(home: str) -> str:
    """Why CUDA's compiler in a folder cannot compile and link one kernel; empty when it can."""
    environment = os.environ | compiler_environment(os.environ)
    ninja = shutil.which("ninja", path=environment["PATH"])
    if ninja is None:
        return "ninja is not on PATH"
    with tempfile.TemporaryDirectory(prefix="moerl-doctor-") as folder:
        Path(folder, "kernel.cu").write_text(_KERNEL)
        Path(folder, "build.ninja").write_text(_BUILD.format(home=home))
        try:
            done = subprocess.run(
                [ninja, "-C", folder], env=environment, capture_output=True, text=True,
                timeout=_PROGRAM_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"nothing was compiled in {_PROGRAM_S:g} s"
    if not done.returncode:
        return ""
    said = done.stdout.partition("FAILED:")[2].splitlines()[2:]  # behind target and command
    lines = [line for line in said if re.search("error|cannot|not found", line)]
    return (lines or said or [f"ninja ended with {done.returncode}"])[0]


def _match(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROGRAM_S)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


# --- locks and ports -----------------------------------------------------------------------------
def _hold(line: str) -> None:
    """Print the line and return when the input says `END`, or after a while."""
    deadline = time.monotonic() + _HOLD_S
    print(line, flush=True)
    select.select([sys.stdin], [], [], _HOLD_S)
    if sys.stdin.readline() != END:  # kubectl passes no input: its end is not the end
        time.sleep(max(0.0, deadline - time.monotonic()))


def hold_lock(folder: str) -> None:
    handle, name = tempfile.mkstemp(prefix=".moerl-doctor-", dir=_nearest(Path(folder)))
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _hold(name)
    finally:
        Path(name).unlink(missing_ok=True)


def try_lock(file: str) -> str:
    os.listdir(Path(file).parent)  # a network file system looks again
    try:
        handle = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return "missing"
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "refused"
    finally:
        os.close(handle)
    return "granted"


def hold_port() -> None:
    """Listen on every interface, as SGLang's store does."""
    ports = list(range(FIRST_PORT, LAST_PORT + 1))
    random.SystemRandom().shuffle(ports)
    for port in ports:
        with socket.socket() as listener:
            try:
                listener.bind(("0.0.0.0", port))
            except OSError:
                continue
            listener.listen()
            return _hold(str(port))
    raise OSError(f"no free port between {FIRST_PORT} and {LAST_PORT}")


def try_port(host: str, port: str) -> str:
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except OSError:
        return "closed"
    return "open"


# --- links ---------------------------------------------------------------------------------------
def link(rank: int, world: int, store_address: str, interface: str, seconds: float) -> str:
    """Speed that this rank sees over gloo, on the ports that gloo and NCCL would use.

    The first line of standard input is a token that all ranks share; rank 0 serves their store
    behind it.  seconds: wait for the other ranks.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    import torch
    import torch.distributed as dist

    from moerl.distributed.store_server import StoreServer
    from moerl.distributed.token_server import ServerAddress
    from moerl.distributed.token_store import TokenStore

    wait, (host, _, port) = timedelta(seconds=seconds), store_address.rpartition(":")
    server = ServerAddress(host, int(port), sys.stdin.readline().strip())
    if not server.token:
        sys.exit("link: the first line of standard input must be the token of all ranks")
    if rank == 0:
        _server = StoreServer(host, port=server.port, token=server.token)  # until this rank ends
    store = TokenStore(server, wait)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=wait)
    numbers = torch.ones(1024)
    dist.all_reduce(numbers)  # connects all pairs
    assert numbers[0] == world, "the sum over the nodes is wrong"
    begin = time.perf_counter()
    dist.all_reduce(numbers)
    reduce_s = time.perf_counter() - begin
    data, room = (torch.zeros(_LINK_BYTES, dtype=torch.uint8) for _ in range(2))
    begin = time.perf_counter()
    pending = dist.isend(data, (rank + 1) % world)
    dist.recv(room, (rank - 1) % world)
    assert pending is not None, "gloo gives a handle"
    pending.wait()
    transfer_s = time.perf_counter() - begin
    dist.barrier()
    dist.destroy_process_group()
    return json.dumps({"reduce_ms": reduce_s * 1e3, "gb_s": _LINK_BYTES / transfer_s / 1e9})


def main() -> None:
    job, *words = sys.argv[1:]
    if job == "facts":
        request = json.loads(base64.urlsafe_b64decode(words[0] + "=" * (-len(words[0]) % 4)))
        print(json.dumps(asdict(node_facts(Request(**request)))))
    elif job == "hold-lock":
        hold_lock(*words)
    elif job == "try-lock":
        print(try_lock(*words))
    elif job == "hold-port":
        hold_port()
    elif job == "try-port":
        print(try_port(*words))
    else:
        rank, world, address, interface, seconds = words
        print(link(int(rank), int(world), address, interface, float(seconds)), flush=True)


if __name__ == "__main__":
    main()
