"""`moerl manifest RECIPE`: Kubernetes objects of a run, from its cluster file.

- A RayCluster of KubeRay has the engine nodes; its head pod runs `moerl train`.
- An indexed Job has the trainer nodes; each pod runs tools/launch/torchrun.sh with its index.
- A headless Service names the trainer's first pod for the rendezvous.
- A claim on a shared file system holds the run directories.

Ray's token authentication is on; the user creates its Secret separately.  YAML is printed, nothing
is applied.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from moerl.config import Config
from moerl.config.clusters import Node, placement
from moerl.errors import ConfigError

Object = dict[str, Any]
_RUNS = "/runs"


def manifest(config: Config, recipe: Sequence[str]) -> str:
    """YAML of all objects.  Raises ConfigError for a cluster of another launcher."""
    if config.cluster.launcher != "kuberay":
        raise ConfigError("cluster.launcher", config.cluster.launcher, "add cluster=kuberay")
    if not re.fullmatch(r"[a-z0-9-]{1,40}", config.run.name):
        raise ConfigError(
            "run.name",
            config.run.name,
            "it is part of Kubernetes names: at most 40 of a-z, 0-9 and -",
        )
    name = f"moerl-{config.run.name}"
    objects = [
        _ray_cluster(config, name, [*recipe, _trainer_hosts(config, name)]),
        _service(name, config.cluster.ports.rendezvous),
        _trainer_job(config, name),
    ]
    secret = f"# first: kubectl create secret generic {name} --from-file=ray-token=FILE"
    return f"{secret}\n{yaml.safe_dump_all(objects, sort_keys=False)}"


def _trainer_hosts(config: Config, name: str) -> str:
    """Setting with the DNS names of the indexed Job's pods."""
    slots = placement(config).trainers
    hosts = [f"{name}-trainer-{slot.node_rank}.{name}-trainer" for slot in slots]
    return f"cluster.nodes.{slots[0].node.name.rpartition('-')[0]}.hosts=[{','.join(hosts)}]"


def _ray_cluster(config: Config, name: str, recipe: Sequence[str]) -> Object:
    placed = placement(config)
    engines = [node for node in placed.nodes if node.has("engine")]
    head, *workers = engines
    slots = {
        node.name: sum(slot.node.name == node.name for slot in placed.engines) for node in engines
    }
    command = ["moerl", "train", *recipe]
    groups = []
    if workers:
        groups.append(
            {
                "groupName": "engines",
                "replicas": len(workers),
                "minReplicas": len(workers),
                "maxReplicas": len(workers),
                "rayStartParams": _ray_params(slots[workers[0].name]),
                "template": _pod(config, name, workers[0], "ray-worker"),
            }
        )
    template = _pod(config, name, head, "ray-head")
    template["spec"]["containers"][0]["lifecycle"] = {
        "postStart": {"exec": {"command": ["sh", "-c", f"nohup {' '.join(command)} &"]}}
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": _metadata(config, name),
        "spec": {
            "headGroupSpec": {
                "rayStartParams": _ray_params(slots[head.name])
                | {"port": str(config.cluster.ports.ray), "dashboard-host": "127.0.0.1"},
                "template": template,
            },
            "workerGroupSpecs": groups,
        },
    }


def _ray_params(slots: int) -> Object:
    return {"num-cpus": "0", "resources": f'"{{\\"engine\\": {slots}}}"'}


def _service(name: str, port: int) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{name}-trainer"},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": f"{name}-trainer"},
            "ports": [{"name": "rendezvous", "port": port}],
        },
    }


def _trainer_job(config: Config, name: str) -> Object:
    trainers = placement(config).trainers
    pod = _pod(config, name, trainers[0].node, "trainer")
    pod["spec"] |= {"restartPolicy": "OnFailure", "subdomain": f"{name}-trainer"}
    run_dir = f"{config.run.root}/{config.run.name}"
    index = "$(JOB_COMPLETION_INDEX)"
    pod["spec"]["containers"][0]["command"] = ["tools/launch/torchrun.sh", run_dir, index]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(config, f"{name}-trainer"),
        "spec": {
            "completionMode": "Indexed",
            "completions": len(trainers),
            "parallelism": len(trainers),
            "template": pod,
        },
    }


def _pod(config: Config, name: str, node: Node, container: str) -> Object:
    kubernetes, group = config.cluster.kubernetes, node.group
    limits = {"nvidia.com/gpu": group.devices} if group.devices else {}
    token = {"secretKeyRef": {"name": name, "key": "ray-token"}}
    env: list[Object] = [
        {"name": "RAY_AUTH_MODE", "value": "token"},
        {"name": "RAY_AUTH_TOKEN", "valueFrom": token},
        {"name": "RAY_worker_niceness", "value": "0"},
        *({"name": key, "value": value} for key, value in config.cluster.environment.items()),
    ]
    return {
        "spec": {
            "containers": [
                {
                    "name": container,
                    "image": kubernetes.get("image", "moerl:latest"),
                    "env": env,
                    "resources": {"limits": limits},
                    "volumeMounts": [
                        {"name": "runs", "mountPath": _RUNS},
                        {"name": "shm", "mountPath": config.cluster.blob_dir},
                    ],
                }
            ],
            "volumes": [
                {
                    "name": "runs",
                    "persistentVolumeClaim": {"claimName": kubernetes.get("claim", "moerl-runs")},
                },
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
            ],
        }
    }


def _metadata(config: Config, name: str) -> Object:
    return {"name": name, "namespace": config.cluster.kubernetes.get("namespace", "default")}
