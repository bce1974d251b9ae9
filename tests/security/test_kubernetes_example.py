"""examples/kubernetes.yaml follows the cluster file, and its pods have few rights."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml

from moerl.config import load_config, resolve
from moerl.config.clusters import placement

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "examples" / "kubernetes.yaml").read_text(encoding="utf-8")
OBJECTS: dict[str, Any] = {one["kind"]: one for one in yaml.safe_load(TEXT)["items"]}


def pods() -> list[dict[str, Any]]:
    ray = OBJECTS["RayCluster"]["spec"]
    (workers,) = ray["workerGroupSpecs"]
    job = OBJECTS["Job"]["spec"]
    return [ray["headGroupSpec"]["template"], workers["template"], job["template"]]


def head_command() -> list[str]:
    (container,) = pods()[0]["spec"]["containers"]
    command: list[str] = container["lifecycle"]["postStart"]["exec"]["command"]
    return command


def test_the_counts_and_ports_are_those_of_the_cluster_file() -> None:
    recipe, *settings = head_command()[6:-2]
    assert head_command()[-2:] == ["--run", "mine"]
    config = resolve(load_config(recipe, [*settings, "run.name=mine"]))
    placed, ports = placement(config), config.cluster.ports
    ray, job = OBJECTS["RayCluster"]["spec"], OBJECTS["Job"]["spec"]
    engines = [node for node in placed.nodes if node.has("engine")]
    assert 1 + ray["workerGroupSpecs"][0]["replicas"] == len(engines)
    assert job["completions"] == job["parallelism"] == len(placed.trainers)
    assert ray["headGroupSpec"]["rayStartParams"]["port"] == str(ports.ray)
    (port,) = OBJECTS["Service"]["spec"]["ports"]
    assert port["port"] == ports.rendezvous
    hosts = [slot.node.address for slot in placed.trainers]
    names = f"{OBJECTS['Job']['metadata']['name']}-{{}}.{OBJECTS['Service']['metadata']['name']}"
    assert hosts == [names.format(index) for index in range(len(hosts))]
    for pod, node in zip(pods(), (*engines[:2], placed.trainers[0].node), strict=True):
        (container,) = pod["spec"]["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": node.group.devices}


def test_settings_do_not_pass_through_the_shell(tmp_path: Path) -> None:
    """The hook's command is run here with a `moerl` that writes down its arguments."""
    hostile = f"task.reward=a'b $(touch {tmp_path}/ran) ; touch {tmp_path}/ran [x] && #"
    stub = tmp_path / "moerl"
    stub.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{tmp_path}/words\n', encoding="utf-8")
    stub.chmod(0o755)
    command = [word.replace("/proc/1/fd/1", "/dev/null") for word in (*head_command(), hostile)]
    command[2] += "\nwait"
    subprocess.run(command, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, timeout=20, check=True)
    words = (tmp_path / "words").read_text(encoding="utf-8").splitlines()
    assert words[:2] == ["train", "qwen3-30b-a3b"]
    assert hostile in words
    assert not (tmp_path / "ran").exists()


def test_pods_have_few_rights() -> None:
    for pod in pods():
        spec, (container,) = pod["spec"], pod["spec"]["containers"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 1000
        assert "fsGroup" not in spec["securityContext"], "kubelet would open folders to a group"
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
        writable = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert writable == {"/runs", "/dev/shm", "/tmp"}
        env = {one["name"]: one for one in container["env"]}
        assert env["RAY_AUTH_MODE"]["value"] == "token"
        assert "secretKeyRef" in env["RAY_AUTH_TOKEN"]["valueFrom"], "no token in the text"


def test_only_pods_of_the_run_reach_its_ports() -> None:
    own = {"matchLabels": {"moerl-run": "moerl-mine"}}
    assert all(pod["metadata"]["labels"] == own["matchLabels"] for pod in pods())
    spec = OBJECTS["NetworkPolicy"]["spec"]
    assert spec["podSelector"] == own
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert spec["ingress"] == [{"from": [{"podSelector": own}]}]
    assert [rule.get("ports", [{"port": 0}])[0]["port"] for rule in spec["egress"]] == [0, 53]
