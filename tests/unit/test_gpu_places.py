"""GPUs and cores of a process: numbers of the table to variables, and to cores near the GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moerl.config import load_config
from moerl.config.clusters import VISIBLE, engine_gpus, placement, visible_devices
from moerl.core.errors import ConfigError
from moerl.distributed import numa
from moerl.launch.run_context import rank_environment
from moerl.launch.supervision.actors import EngineGpus
from moerl.planning.dry_run import device_lines

ADDRESSES = ("0000:1b:00.0", "0000:43:00.0", "0000:9b:00.0", "0000:c3:00.0")


def test_numbers_count_in_the_list_of_the_process_that_starts() -> None:
    assert visible_devices((), {}) == {}
    assert visible_devices((4, 5), {})[VISIBLE] == "4,5"
    four = {VISIBLE: "GPU-a,GPU-b,6,7"}
    assert visible_devices((1, 2), four)[VISIBLE] == "GPU-b,6"
    with pytest.raises(ConfigError, match="GPU 5 of the node is needed"):
        visible_devices((4, 5), four)
    with pytest.raises(ConfigError, match="GPU 0 of the node"):
        visible_devices((0,), {VISIBLE: ""})


def test_an_engine_that_joins_gets_free_gpus_only() -> None:
    """Two engines of two on a node of eight whose trainer has the last three."""
    config = load_config("quickstart", ("cluster=node8", "trainer.parallel={dp: 3, ep: 3}"))
    gpus = EngineGpus(config)
    assert gpus.take(0, 2) == gpus.take(0, 2) == (0, 1)
    with pytest.raises(ConfigError, match="1 GPUs of this machine are free"):
        gpus.take(2, 2)  # engine 1 has its own before it starts
    assert gpus.take(1, 2) == (2, 3)
    assert gpus.take(3, 1) == (7,)
    gpus.give_back(0)
    assert gpus.take(4, 2) == (0, 1)
    assert EngineGpus(load_config("quickstart")).take(7, 4) == ()


def test_ranks_see_the_engines_gpus_behind_their_own() -> None:
    """With cuda_ipc alone; the table still names what a rank computes on."""
    overrides = ("cluster=node8", "sync.transport=cuda_ipc")
    config = load_config("quickstart", overrides)
    placed = placement(config)
    (slot,) = placed.trainers
    assert rank_environment(config, slot)[VISIBLE] == "4,5,6,7,0,1,2,3"
    assert numa.of_rank(3, rank_environment(config, slot)) == ["7"]
    lines = device_lines(config, placed)
    assert "  trainer ranks on all: 4,5,6,7; local rank 0 has the first" in lines
    assert lines[-1].startswith("  trainer ranks also see 0,1,2,3 behind their own")
    other = load_config("quickstart", ("cluster=node8", "sync.transport=shm"))
    assert rank_environment(other, placement(other).trainers[0])[VISIBLE] == "4,5,6,7"
    assert not any("also see" in line for line in device_lines(other, placement(other)))


def test_ray_gets_the_gpus_of_engines_alone() -> None:
    """On a node with both roles the trainer's GPUs are not Ray's to deal."""
    group = "{roles: [controller, engine, trainer], count: 1, devices: 8, hosts: [10.9.0.1]}"
    overrides = ("cluster=node8", "cluster.launcher=hosts", f"cluster.nodes.all={group}")
    placed = placement(load_config("quickstart", overrides))
    assert engine_gpus(placed, placed.nodes[0]) == (0, 1, 2, 3)
    assert placed.trainers[0].devices == (4, 5, 6, 7)


# --- cores ---------------------------------------------------------------------------------------
def machine(root: Path, nodes: dict[int, str], node_of: tuple[int, ...]) -> Path:
    """A /sys with these lists of cores, and a GPU per entry of node_of."""
    for node, cores in nodes.items():
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    for address, node in zip(ADDRESSES, node_of, strict=False):
        folder = root / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return root


def stub_smi(folder: Path, lines: list[str]) -> str:
    """A PATH whose nvidia-smi prints these lines."""
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(lines) + "\nEND\n")
    program.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


SMI = [f"{i}, GPU-{i}, 0000{address.upper()}" for i, address in enumerate(ADDRESSES)]


def test_cores_are_those_of_the_node_of_each_gpu(tmp_path: Path) -> None:
    sys_folder = machine(tmp_path, {0: "0-3,8-11", 1: "4-7,12"}, (0, 0, 1, -1))
    addresses = {str(i): address for i, address in enumerate(ADDRESSES)}
    assert numa.near(["0", "1"], addresses, sys_folder) == {0, 1, 2, 3, 8, 9, 10, 11}
    assert numa.near(["2"], addresses, sys_folder) == {4, 5, 6, 7, 12}
    assert numa.near(["1", "2"], addresses, sys_folder) == {*range(13)}
    assert not numa.near(["3"], addresses, sys_folder), "Linux does not know its node"
    assert not numa.near(["0", "9"], addresses, sys_folder), "one of them is not known"
    assert not numa.near([], addresses, sys_folder)


BOUND = """
import os, sys, threading
from pathlib import Path
from moerl.distributed import numa
stop, ready, seen = threading.Event(), threading.Event(), []
def other():
    ready.set()
    stop.wait()
    seen.append(os.sched_getaffinity(0))
thread = threading.Thread(target=other)
thread.start()
ready.wait()
cores = numa.bind(sys.argv[2].split(","), Path(sys.argv[1]))
stop.set()
thread.join()
print(sorted(cores), sorted(os.sched_getaffinity(0)), sorted(seen[0]))
"""


@pytest.mark.parametrize("named", ["1", "GPU-1"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_all_threads_are_bound_and_none_with_one_node(
    tmp_path: Path, nodes: int, named: str
) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    assert len(allowed) > 1, "needs two cores"
    lists = {0: str(allowed[0]), 1: f"{allowed[1]},4000"}
    lists = lists if nodes == 2 else {0: f"{allowed[0]}-{allowed[-1]}"}
    folder = machine(tmp_path / "sys", lists, (0, nodes - 1))
    done = subprocess.run(
        [sys.executable, "-c", BOUND, str(folder), named],
        env=os.environ | {"PATH": stub_smi(tmp_path / "bin", SMI)},
        capture_output=True,
        text=True,
        check=True,
    )
    bound = [allowed[1]] if nodes == 2 else allowed
    cores = bound if nodes == 2 else []
    assert done.stdout.strip() == f"{cores} {bound} {bound}"


def test_without_nvidia_smi_nothing_is_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    before = os.sched_getaffinity(0)
    assert not numa.bind(["0"], machine(tmp_path / "sys", {0: "0", 1: "1"}, (0, 1)))
    assert os.sched_getaffinity(0) == before


def test_a_rank_is_bound_near_its_own_gpu() -> None:
    assert numa.of_rank(1, {VISIBLE: "4,5,6"}) == ["5"]
    assert numa.of_rank(1, {}) == ["1"]
    assert numa.of_rank(3, {VISIBLE: "4,5,6"}) == []
