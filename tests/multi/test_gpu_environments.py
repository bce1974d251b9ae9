"""The environment of every process that a run starts, against the printed table.

The runs are real up to the processes that need GPUs: engine servers and trainer ranks write their
environment (`tests/helpers/recorded_environments`) and wait.  So no GPU is needed, and each
variable is what the real process would get.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moerl.config import load_config, resolve
from moerl.planning.dry_run import describe
from tests.helpers import cluster_runs
from tests.helpers.network_hosts import Host, hosts_or_skip
from tests.helpers.patience import Patience, patience

pytestmark = pytest.mark.full

START_S = 240.0  # of Ray and its actors, on a loaded machine
HOOK = Path(__file__).parents[1] / "helpers" / "recorded_environments"
ROOT = Path(__file__).parents[2]
PLACES = (("engine", 1, 2), ("trainer", 3, 4))
NODE8 = ("cluster=node8", "engine.platform=auto", "run.console=lines")


def printed(recipe: str, overrides: tuple[str, ...]) -> dict[str, list[str]]:
    """GPUs by process, from the text of the dry run."""
    text = describe(resolve(load_config(recipe, overrides)), [])
    lines = text.split("devices, as CUDA_VISIBLE_DEVICES:\n")[1].splitlines()
    found = {}
    for line in lines:
        match = re.match(r"  ([\w. -]+): ([\d,]+)(;|$)", line)
        if not match:
            break
        found[match[1]] = match[2].split(",")
    return found


def own_gpu(environment: dict[str, str]) -> str:
    """The GPU that a rank selects (`platform.prepare`)."""
    return environment["CUDA_VISIBLE_DEVICES"].split(",")[int(environment["LOCAL_RANK"])]


def recording(folder: Path) -> dict[str, str]:
    """Variables by which a run's servers and ranks are replaced."""
    path = os.pathsep.join((str(HOOK), str(ROOT)))
    return {"PYTHONPATH": path, "MOERL_TEST_ENVIRONMENTS": str(folder)}


def environments(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in folder.glob(f"{kind}-*.json")]


def wait_for(folder: Path, wanted: dict[str, int], run: subprocess.Popen[bytes], log: Path) -> None:
    limit = Patience(START_S)
    while any(len(environments(folder, kind)) < count for kind, count in wanted.items()):
        assert run.poll() is None, log.read_text()[-3000:]
        assert not limit.over(), log.read_text()[-3000:]
        time.sleep(0.1)


def recorded(
    tmp_path: Path, settings: tuple[str, ...], wanted: dict[str, int]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Environments of engine servers and trainer ranks of a run on this machine."""
    seen, log = tmp_path / "seen", tmp_path / "log.txt"
    seen.mkdir()
    environment = os.environ | recording(seen)
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    command = [sys.executable, "-m", "moerl", "train", "quickstart-smoke", *settings, "--run", "a"]
    with log.open("wb") as output:
        run = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        wait_for(seen, wanted, run, log)
        return environments(seen, "engine"), environments(seen, "trainer")
    finally:
        run.send_signal(signal.SIGTERM)
        run.wait(patience(120))


def test_engine_and_trainer_share_one_gpu(tmp_path: Path) -> None:
    settings = ("cluster=gpu1", *NODE8[1:], f"run.root={tmp_path}")
    table = printed("quickstart-smoke", settings)
    assert table == {"engine 0": ["0"], "trainer ranks on all": ["0"]}
    (server,), (rank,) = recorded(tmp_path, settings, {"engine": 1, "trainer": 1})
    for process in (server, rank):
        assert process["environment"]["CUDA_VISIBLE_DEVICES"] == "0"
    assert own_gpu(rank["environment"]) == "0"
    assert server["job"]["args"]["mem_fraction_static"] == 0.8, "of what a trainer leaves"


def test_every_process_of_one_node_has_the_printed_gpus(tmp_path: Path) -> None:
    settings = (*NODE8, f"run.root={tmp_path}")
    table = printed("quickstart-smoke", settings)
    servers, ranks = recorded(tmp_path, settings, {"engine": 2, "trainer": 4})
    assert set(table) == {"engine 0", "engine 1", "trainer ranks on all"}
    found = sorted(one["environment"]["CUDA_VISIBLE_DEVICES"] for one in servers)
    assert found == [",".join(table["engine 0"]), ",".join(table["engine 1"])]
    assert {len(names.split(",")) for names in found} == {servers[0]["job"]["args"]["tp_size"]}
    computes_on = [own_gpu(rank["environment"]) for rank in ranks]
    assert sorted(computes_on) == table["trainer ranks on all"]
    for rank in ranks:  # cuda_ipc: what they see beyond that is the engines'
        seen_gpus = rank["environment"]["CUDA_VISIBLE_DEVICES"].split(",")
        assert seen_gpus == table["trainer ranks on all"] + [*",".join(found).split(",")]
    assert sorted(rank["environment"]["LOCAL_RANK"] for rank in ranks) == ["0", "1", "2", "3"]
    used = [*computes_on, *",".join(found).split(",")]
    assert sorted(used) == [str(gpu) for gpu in range(8)], "no GPU is used twice"
    order = {one["environment"]["CUDA_DEVICE_ORDER"] for one in (*servers, *ranks)}
    assert order == {"PCI_BUS_ID"}


SEVERAL = (
    *("cluster.nodes.engine.devices=4", "cluster.nodes.trainer.devices=2"),
    *("engine.count=4", "engine.tp=2", "trainer.parallel={dp: 4, ep: 4}"),
)


@pytest.fixture
def four() -> Iterator[list[Host]]:
    with hosts_or_skip(4) as made:
        yield made


@pytest.mark.timeout(900)
def test_every_process_of_several_nodes_has_the_printed_gpus(
    four: list[Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engine nodes of 4 GPUs, on which Ray deals 2 to each engine, and two trainer nodes."""
    seen = tmp_path / "seen"
    seen.mkdir()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(cluster_runs, "copying_records", lambda _: recording(seen))
    with cluster_runs.cluster_run(four, tmp_path, *SEVERAL, engines=2) as run:
        run.wait_for(
            lambda: all(len(environments(seen, kind)) == 4 for kind in ("engine", "trainer"))
        )
        servers, ranks = environments(seen, "engine"), environments(seen, "trainer")
    by_host: dict[str, list[str]] = {}
    for server in servers:
        gpus = server["environment"]["CUDA_VISIBLE_DEVICES"].split(",")
        assert len(gpus) == 2
        by_host.setdefault(server["job"]["args"]["host"], []).extend(gpus)
    hosts = {host.address for host in four[:2]}
    assert by_host.keys() == hosts
    named = [f"cluster.nodes.{g}.hosts=[10.9.0.{a},10.9.0.{b}]" for g, a, b in PLACES]
    settings = ("cluster=hosts", *SEVERAL, "cluster.nodes.engine.count=2", *named)
    table = printed("quickstart", settings)
    engines, trainers = "engines on engine-0 .. engine-1", "trainer ranks on trainer-0 .. trainer-1"
    assert set(table) == {engines, trainers}
    for gpus in by_host.values():
        assert sorted(gpus) == table[engines], "each GPU has one engine"
    for rank in ranks:
        own = rank["environment"]["CUDA_VISIBLE_DEVICES"].split(",")
        assert own == table[trainers]
    assert sorted(rank["environment"]["LOCAL_RANK"] for rank in ranks) == ["0", "0", "1", "1"]


@pytest.mark.parametrize("devices", [0, 8])
def test_a_machine_without_gpus_names_none(devices: int) -> None:
    settings = ("cluster=node8", f"cluster.nodes.all.devices={devices}")
    text = describe(resolve(load_config("quickstart-smoke", settings)), [])
    assert ("CUDA_VISIBLE_DEVICES" in text) is bool(devices)
