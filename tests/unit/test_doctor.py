"""`moerl doctor` names each fault with its node and a remedy, and nothing when all is well."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from moerl.config import Config, load_config, resolve
from moerl.planning.doctor import Finding, describe, examine

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Ward:
    """Two nodes that are this machine, seen through `tests/helpers/fake_remote.py`."""

    config: Config
    faults: Path
    model: Path

    def examine(self, faults: dict[str, dict[str, object]] | None = None) -> list[Finding]:
        """faults: of host-0, which has the engine, and host-1, by number."""
        named = {f"host-{number}": fault for number, fault in (faults or {}).items()}
        self.faults.write_text(json.dumps(named))
        return examine(self.config)

    def wrong(self, faults: dict[str, dict[str, object]] | None = None) -> list[Finding]:
        return [finding for finding in self.examine(faults) if finding.remedy]


@pytest.fixture
def ward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_port: Callable[[], int]) -> Ward:
    monkeypatch.setenv("FAULTS", str(tmp_path / "faults.json"))
    for limit in ("_ANSWER_S", "_LINK_S"):  # a loaded machine is not a fault of the link
        monkeypatch.setattr(f"moerl.planning.doctor.{limit}", 250.0)
    for name in [name for name in os.environ if name.startswith(("NCCL_", "GLOO_", "UCX_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "runs-journal").mkdir()
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    shards = {f"layer{i}": f"model-{i}.safetensors" for i in range(2)}
    for shard in shards.values():
        (model / shard).write_bytes(os.urandom(2_500_000))
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    remote = f"{sys.executable} {ROOT / 'tests/helpers/fake_remote.py'} {{host}}"
    config = resolve(
        load_config(
            "quickstart",
            (
                *("cluster=hosts", "cluster.interface=lo", f"cluster.remote={remote}"),
                *("cluster.nodes.engine.hosts=[host-0]", "cluster.nodes.trainer.count=1"),
                *("cluster.nodes.trainer.hosts=[host-1]", f"model.path={model}"),
                *(f"run.root={tmp_path / 'runs-journal'}", f"cluster.blob_dir={tmp_path}"),
                *(f"cluster.ports.{p}={free_port()}" for p in ("controller", "ray", "blobs")),
                f"cluster.ports.rendezvous={free_port()}",
            ),
        )
    )
    return Ward(config, tmp_path / "faults.json", model)


def test_nothing_is_called_right_where_nobody_answers(ward: Ward) -> None:
    config = replace(ward.config, cluster=replace(ward.config.cluster, remote="false {host}"))
    found = examine(config)
    assert {finding.check for finding in found} == {"answers"}
    assert sum(bool(finding.remedy) for finding in found) == 2


def test_a_model_without_weights_has_no_file_that_is_right(
    ward: Ward, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moerl.planning.doctor._links", lambda *_: [])
    for path in ward.model.iterdir():
        path.unlink()
    found = [finding for finding in ward.examine() if finding.check == "model"]
    assert found
    assert all(finding.remedy for finding in found)


def test_healthy_nodes_have_no_finding_with_a_remedy(ward: Ward) -> None:
    """Negative control of all others; the links are real gloo."""
    found = ward.examine()
    assert [finding for finding in found if finding.remedy] == []
    assert {"versions", "ports", "clock", "disk", "model", "memory"} <= {f.check for f in found}
    links = [finding for finding in found if finding.check == "link"]
    assert [link.node for link in links] == ["engine-0 -> trainer-0", "trainer-0 -> engine-0"]
    assert all("GB/s" in link.what for link in links)
    assert "moerl doctor" in describe(found)


@pytest.mark.parametrize(
    ("faults", "check", "node", "what", "remedy"),
    [
        ({"1": {"sglang": "0.4.1"}}, "versions", "trainer-0", "sglang 0.4.1", "install sglang"),
        ({"1": {"skew": 5000}}, "clock", "trainer-0", "+", "chrony"),
        ({"0": {"skew": -5000}}, "clock", "engine-0", "-", "chrony"),
        ({"0": {"file_system": "nfs4"}}, "disk", "engine-0", "network file system", "of the node"),
        ({"0": {"free": 1000}}, "disk", "engine-0", "0.00 GB free", "remove"),
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
    monkeypatch.setattr("moerl.planning.doctor._links", lambda *_: [])
    wrong = ward.wrong(faults)
    assert any(
        f.check == check and f.node == node and what in f.what and remedy in f.remedy for f in wrong
    ), wrong
    assert {f.check for f in wrong} == {check}, "and nothing else is blamed"


def test_a_blocked_port_and_a_missing_shard(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moerl.planning.doctor._links", lambda *_: [])
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
    done = subprocess.run(
        [sys.executable, "-m", "moerl", "doctor", "laptop", f"run.root={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "moerl doctor" in done.stdout, done.stderr
    assert done.returncode == int("!!" in done.stdout), done.stdout
    missing = subprocess.run(
        [sys.executable, "-m", "moerl", "doctor", "laptop", f"model.path={tmp_path}/none"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert missing.returncode == 1
    assert "copy the file again" in missing.stdout
