"""A trainer on nodes of its own finds its place: torchrun gave it the run directory and nothing
else.

The endpoints folder of the run says where the controller is.  Rank 0 then takes the next
incarnation and the newest checkpoint and tells the others, at every start of the trainer: torchrun
starts all ranks again when one ends or a node comes back, with the command line of the first time.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from moerl.config.schema import Config
from moerl.records.remote_blobs import cluster_reader
from moerl.run_dir import RunDir, next_incarnation
from moerl.trainer.model.parallel import Parallel
from moerl.trainer.train_loop import RankContext


def read_endpoints(run: RunDir, config: Config) -> tuple[RankContext, str]:
    """(post, name of this opening of the endpoints folder); incarnation and checkpoint are still
    open.

    Raises TrainerError when no controller is posted within trainer.step_timeout_s.
    """
    controller, token, start = run.endpoints.read(config.trainer.step_timeout_s)
    return RankContext(run, controller, token, -1, cluster_reader(config, run, token), None), start


def set_engines(context: RankContext, parallel: Parallel) -> RankContext:
    """Collective: the next incarnation of the trainer, from the newest checkpoint."""
    holder: list[Any] = [None]
    if parallel.is_first:
        found = context.run.latest_checkpoint()
        holder = [(next_incarnation(context.run, resume=True), found[1] if found else None)]
    dist.broadcast_object_list(holder, src=0, group=parallel.control)
    incarnation, checkpoint = holder[0]
    return replace(context, incarnation=incarnation, checkpoint=checkpoint)


def bind(config: Config) -> None:
    """Collectives of this process use the cluster's interface, and its NCCL and UCX settings."""
    interface = config.cluster.interface
    os.environ |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    os.environ |= config.cluster.environment
