"""`moerl manifest RECIPE`: Kubernetes objects of a run, from its cluster file.

- A RayCluster of KubeRay has the engine nodes; its head pod runs `moerl train`.
- An indexed Job has the trainer nodes; each pod runs tools/launch/torchrun.sh with its index.
- A headless Service names the trainer's first pod for the rendezvous.
- A claim on a shared file system holds the run directories.
- A NetworkPolicy lets the run's pods talk to each other and to DNS only.

Ray's token and the secrets of `cluster.environment` come from a Secret that the user creates.  Pods
run without root, without privileges, without a service account's token, on a read-only root file
system.  No setting passes through a shell.  YAML is printed, nothing is applied.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from moerl.config import Config
from moerl.config.clusters import Node, placement
from moerl.config.secret_values import HIDDEN, hide_override, secrets_of
from moerl.core.errors import ConfigError

Object = dict[str, Any]
_RUNS = "/runs"
_ENVIRONMENT = "cluster.environment."
# A hook has to return: the shell starts its arguments, which it does not read, into the pod's log.
_IN_BACKGROUND = ["sh", "-c", 'nohup "$@" >/proc/1/fd/1 2>&1 &', "moerl"]
_LABEL = "moerl-run"


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
    words = [_without_secret(word) for word in recipe]
    objects = [
        _ray_cluster(config, name, [*words, _trainer_hosts(config, name)]),
        _service(config, name),
        _trainer_job(config, name),
        _network_policy(config, name),
    ]
    keys = ["ray-token", *secrets_of(config.cluster.environment)]
    files = " ".join(f"--from-file={key}=FILE" for key in keys)
    namespace = config.cluster.kubernetes.get("namespace", "default")
    first = f"# first: kubectl create secret generic {name} --namespace={namespace} {files}"
    return f"{first}\n{yaml.safe_dump_all(objects, sort_keys=False)}"


def _without_secret(word: str) -> str:
    """An argument of `moerl train`: a secret of cluster.environment is read in the pod instead."""
    if hide_override(word) == word:
        return word
    key = word.partition("=")[0]
    name = key.removeprefix(_ENVIRONMENT)
    if name == key or not name.isidentifier():
        raise ConfigError(
            key, HIDDEN, f"a manifest holds no secret; set each one as {_ENVIRONMENT}NAME=VALUE"
        )
    return f"{key}=${{oc.env:{name}}}"


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
        "postStart": {"exec": {"command": [*_IN_BACKGROUND, "moerl", "train", *recipe]}}
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


def _service(config: Config, name: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(config, f"{name}-trainer"),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": f"{name}-trainer"},
            "ports": [{"name": "rendezvous", "port": config.cluster.ports.rendezvous}],
        },
    }


def _trainer_job(config: Config, name: str) -> Object:
    trainers = placement(config).trainers
    pod = _pod(config, name, trainers[0].node, "trainer")
    pod["spec"] |= {"restartPolicy": "OnFailure", "subdomain": f"{name}-trainer"}
    run_dir = f"{config.run.root}/{config.run.name}".replace("$(", "$$(")  # Kubernetes expands it
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
    claim = {"claimName": kubernetes.get("claim", "moerl-runs")}
    return {
        "metadata": {"labels": {_LABEL: name}},
        "spec": {
            "automountServiceAccountToken": False,
            "securityContext": _identity(config),
            "containers": [
                {
                    "name": container,
                    "image": kubernetes.get("image", "moerl:latest"),
                    "env": _environment(config, name),
                    "resources": {"limits": limits},
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                        "readOnlyRootFilesystem": True,
                    },
                    "volumeMounts": [
                        {"name": "runs", "mountPath": _RUNS},
                        {"name": "shm", "mountPath": config.cluster.blob_dir},
                        {"name": "tmp", "mountPath": "/tmp"},
                    ],
                }
            ],
            "volumes": [
                {"name": "runs", "persistentVolumeClaim": claim},
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
                {"name": "tmp", "emptyDir": {}},
            ],
        },
    }


def _identity(config: Config) -> Object:
    """User of all pods, who owns the run directories.  Raises ConfigError for root."""
    user = config.cluster.kubernetes.get("user", "1000")
    if not user.isdecimal() or int(user) == 0:
        raise ConfigError("cluster.kubernetes.user", user, "a user id above 0 is needed")
    # no fsGroup: it would make the private folders of a run writable for the group
    ids = {"runAsUser": int(user), "runAsGroup": int(user)}
    return {"runAsNonRoot": True, **ids, "seccompProfile": {"type": "RuntimeDefault"}}


def _environment(config: Config, name: str) -> list[Object]:
    """Variables of a container; secrets are named by their key in the Secret of this run."""
    plain, secret = config.cluster.environment, secrets_of(config.cluster.environment)
    values = {"RAY_AUTH_MODE": "token", "RAY_worker_niceness": "0", "HOME": "/tmp"}
    values |= {key: value for key, value in plain.items() if key not in secret}
    keys = {"RAY_AUTH_TOKEN": "ray-token"} | {key: key for key in secret}
    return [
        *({"name": key, "value": value} for key, value in values.items()),
        *(
            {"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}
            for variable, key in keys.items()
        ),
    ]


def _network_policy(config: Config, name: str) -> Object:
    """Pods of the run reach each other and DNS; with Weights & Biases also HTTPS."""
    own = {"matchLabels": {_LABEL: name}}
    dns = [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]
    egress: list[Object] = [{"to": [{"podSelector": own}]}, {"ports": dns}]
    if config.observe.wandb_project:
        egress.append({"ports": [{"port": 443, "protocol": "TCP"}]})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(config, name),
        "spec": {
            "podSelector": own,
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [{"podSelector": own}]}],
            "egress": egress,
        },
    }


def _metadata(config: Config, name: str) -> Object:
    return {"name": name, "namespace": config.cluster.kubernetes.get("namespace", "default")}
