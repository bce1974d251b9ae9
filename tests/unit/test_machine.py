"""This machine's own memory and GPUs, from a /proc and an nvidia-smi of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moerl.config.schema import TrainerConfig
from moerl.runtime.machine import host_memory, visible_gpus
from moerl.trainer.model import platform
from moerl.trainer.model.platform import Platform, rank_threads

GIB = 2**30
V2, V1 = "0::/pod/run\n", "4:memory:/pod/run\n1:cpu:/\n0::/\n"


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemFree: 5 kB\nMemTotal:       {64 * 2**20} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "files", "gib"),
    [
        (V2, {}, 64),
        (V2, {"pod/run/memory.max": "max\n"}, 64),
        (V2, {"pod/run/memory.max": f"{16 * GIB}\n"}, 16),
        (V2, {"pod/run/memory.max": "max\n", "pod/memory.max": f"{8 * GIB}\n"}, 8),
        ("0::/\n", {"memory.max": f"{4 * GIB}\n"}, 4),
        (V1, {"memory/pod/run/memory.limit_in_bytes": f"{2 * GIB}\n"}, 2),
        (V1, {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 64),
        (V1, {"memory.max": f"{2 * GIB}\n"}, 2),
        (V1, {"cpu/memory.max": "1\n"}, 64),
    ],
)
def test_host_memory_is_the_lowest_limit(
    tmp_path: Path, cgroup: str, files: dict[str, str], gib: int
) -> None:
    assert host_memory(machine(tmp_path, cgroup, files)) == gib * GIB


def test_gpus_are_those_that_a_process_would_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus({}) == []
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho '0, GPU-a, 81559'\necho '1, GPU-b, 24564'\necho '2, GPU-c, [N/A]'\n"
    )
    program.chmod(0o755)
    sizes = [81559 * 2**20, 24564 * 2**20, 0]
    assert visible_gpus({}) == sizes
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}) == sizes[1:2]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-b,0"}) == sizes[1::-1]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    program.write_text("#!/bin/sh\necho 'No devices were found'; exit 6\n")
    assert visible_gpus({}) == []


def test_an_offloaded_optimizer_has_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Controls: without offload, and on a CPU, a rank has the threads that the settings name."""
    monkeypatch.setattr(platform.os, "sched_getaffinity", lambda _: range(56))
    four = {"LOCAL_WORLD_SIZE": "4"}
    cuda = Platform("cuda", torch.device("cuda", 0), "nccl", "te")
    cpu = Platform("cpu", torch.device("cpu"), "gloo", "local")
    offloads = {"optimizer_cpu_offload": True}
    assert rank_threads(TrainerConfig(optimizer_args=offloads), cuda, four) == 14
    assert rank_threads(TrainerConfig(optimizer_args=offloads), cuda, {}) == 56
    assert rank_threads(TrainerConfig(optimizer_args=offloads, cpu_threads=20), cuda, four) == 20
    assert rank_threads(TrainerConfig(), cuda, four) == 1
    assert rank_threads(TrainerConfig(cpu_threads=3), cpu, four) == 3
