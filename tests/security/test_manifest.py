"""The Kubernetes manifest: no shell reads a setting, no secret is in it, pods have few rights."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from moerl.config import load_config, resolve
from moerl.core.errors import ConfigError
from moerl.launch.cluster.manifest import manifest

SECRET = "hf_Do_not_show"
RECIPE = ["qwen3-30b-a3b", "cluster=kuberay"]


def objects(*overrides: str) -> tuple[str, dict[str, Any]]:
    settings = [*RECIPE[1:], *overrides, "run.name=a"]
    config = resolve(load_config(RECIPE[0], settings))
    text = manifest(config, [RECIPE[0], *settings])
    return text, {one["kind"]: one for one in yaml.safe_load_all(text)}


def head_command(found: dict[str, Any]) -> Sequence[str]:
    (container,) = found["RayCluster"]["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    command: list[str] = container["lifecycle"]["postStart"]["exec"]["command"]
    return command


def pods(found: dict[str, Any]) -> list[dict[str, Any]]:
    ray = found["RayCluster"]["spec"]
    (workers,) = ray["workerGroupSpecs"]
    return [ray["headGroupSpec"]["template"], workers["template"], found["Job"]["spec"]["template"]]


def test_settings_do_not_pass_through_the_shell(tmp_path: Path) -> None:
    """The hook's command is run here with a `moerl` that writes down its arguments."""
    hostile = f"task.dataset=a'b $(touch {tmp_path}/ran) ; touch {tmp_path}/ran [x] && #"
    _, found = objects(hostile)
    stub = tmp_path / "moerl"
    stub.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{tmp_path}/words\n', encoding="utf-8")
    stub.chmod(0o755)
    command = [word.replace("/proc/1/fd/1", "/dev/null") for word in head_command(found)]
    command[2] += "\nwait"
    subprocess.run(command, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, timeout=20, check=True)
    words = (tmp_path / "words").read_text(encoding="utf-8").splitlines()
    assert words[:2] == ["train", "qwen3-30b-a3b"]
    assert hostile in words
    assert not (tmp_path / "ran").exists()


def test_secrets_come_from_the_secret_of_the_run() -> None:
    text, found = objects(f"cluster.environment.HF_TOKEN={SECRET}", "cluster.environment.A_B=c")
    assert SECRET not in text
    assert text.startswith("# first: kubectl create secret generic moerl-a --namespace=default ")
    assert "--from-file=HF_TOKEN=FILE" in text.splitlines()[0]
    assert "cluster.environment.HF_TOKEN=${oc.env:HF_TOKEN}" in head_command(found)
    for pod in pods(found):
        (container,) = pod["spec"]["containers"]
        env = {one["name"]: one for one in container["env"]}
        named = {"secretKeyRef": {"name": "moerl-a", "key": "HF_TOKEN"}}
        assert env["HF_TOKEN"] == {"name": "HF_TOKEN", "valueFrom": named}
        assert env["A_B"]["value"] == "c"


def test_a_secret_that_has_no_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match="a manifest holds no secret") as refusal:
        objects(f"cluster.environment={{HF_TOKEN: {SECRET}}}")
    assert SECRET not in str(refusal.value)


def test_pods_have_few_rights() -> None:
    _, found = objects()
    for pod in pods(found):
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


def test_root_is_no_user_of_a_pod() -> None:
    for user in ("0", "root", "-1"):
        with pytest.raises(ConfigError, match="a user id above 0"):
            objects(f"cluster.kubernetes.user={user}")


def test_only_pods_of_the_run_reach_its_ports() -> None:
    _, found = objects()
    own = {"matchLabels": {"moerl-run": "moerl-a"}}
    assert all(pod["metadata"]["labels"] == own["matchLabels"] for pod in pods(found))
    spec = found["NetworkPolicy"]["spec"]
    assert spec["podSelector"] == own
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert spec["ingress"] == [{"from": [{"podSelector": own}]}]
    assert [rule.get("ports", [{"port": 0}])[0]["port"] for rule in spec["egress"]] == [0, 53]
    config = resolve(load_config(RECIPE[0], RECIPE[1:]))
    watched = replace(config, observe=replace(config.observe, wandb_project="p"))
    assert "port: 443" in manifest(watched, RECIPE)
