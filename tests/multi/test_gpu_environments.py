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
from pathlib import Path
from typing import Any

import pytest

from moerl.config import load_config, resolve
from moerl.planning.dry_run import describe

START_S = 240.0  # of Ray and its actors, on a loaded machine
HOOK = Path(__file__).parents[1] / "helpers" / "recorded_environments"
ROOT = Path(__file__).parents[2]
NODE8 = ("cluster=node8", "engine.platform=auto", "run.console=lines")


def printed(recipe: str, overrides: tuple[str, ...]) -> dict[str, list[str]]:
    """GPUs by process, from the text of the dry run."""
    text = describe(resolve(load_config(recipe, overrides)), [])
    lines = text.split("devices, as CUDA_VISIBLE_DEVICES:\n")[1].splitlines()
    found = {}
    for line in lines:
        match = re.match(r"  ([\w ]+): ([\d,]+)(;|$)", line)
        if not match:
            break
        found[match[1]] = match[2].split(",")
    return found


def environments(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in folder.glob(f"{kind}-*.json")]


def wait_for(folder: Path, wanted: dict[str, int], run: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while any(len(environments(folder, kind)) < count for kind, count in wanted.items()):
        assert run.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.1)


def test_every_process_of_one_node_has_the_printed_gpus(tmp_path: Path) -> None:
    seen, log = tmp_path / "seen", tmp_path / "log.txt"
    seen.mkdir()
    settings = (*NODE8, f"run.root={tmp_path}")
    table = printed("quickstart-smoke", settings)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(HOOK), str(ROOT))),
        "MOERL_TEST_ENVIRONMENTS": str(seen),
    }
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    command = [sys.executable, "-m", "moerl", "train", "quickstart-smoke", *settings, "--run", "a"]
    with log.open("wb") as output:
        run = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        wait_for(seen, {"engine": 2, "trainer": 4}, run, log)
        servers, ranks = environments(seen, "engine"), environments(seen, "trainer")
    finally:
        run.send_signal(signal.SIGTERM)
        run.wait(120)
    assert set(table) == {"engine 0", "engine 1", "trainer ranks on all"}
    found = sorted(one["environment"]["CUDA_VISIBLE_DEVICES"] for one in servers)
    assert found == [",".join(table["engine 0"]), ",".join(table["engine 1"])]
    assert {len(names.split(",")) for names in found} == {servers[0]["job"]["args"]["tp_size"]}
    every = ",".join(table["trainer ranks on all"])
    for rank in ranks:
        assert rank["environment"]["CUDA_VISIBLE_DEVICES"] == every
    assert sorted(rank["environment"]["LOCAL_RANK"] for rank in ranks) == ["0", "1", "2", "3"]
    used = [gpu for names in (*found, every) for gpu in names.split(",")]
    assert sorted(used) == [str(gpu) for gpu in range(8)], "no GPU is used twice"
    order = {one["environment"]["CUDA_DEVICE_ORDER"] for one in (*servers, *ranks)}
    assert order == {"PCI_BUS_ID"}


@pytest.mark.parametrize("devices", [0, 8])
def test_a_machine_without_gpus_names_none(devices: int) -> None:
    settings = ("cluster=node8", f"cluster.nodes.all.devices={devices}")
    text = describe(resolve(load_config("quickstart-smoke", settings)), [])
    assert ("CUDA_VISIBLE_DEVICES" in text) is bool(devices)
