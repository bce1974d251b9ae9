"""Start of a trainer on its own nodes: torchrun passes only the run directory.

The endpoints folder of the run says where the controller is.  Rank 0 then takes the next
incarnation and the newest checkpoint and broadcasts them, at every start of the trainer: torchrun
restarts all ranks with the first command line when a rank ends or a node returns.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from moerl.config.schema import Config
from moerl.records.remote_blobs import cluster_reader
from moerl.rpc import Keys
from moerl.run_dir import RunDir, next_incarnation
from moerl.trainer.model.parallel import Parallel
from moerl.trainer.train_loop import RankContext


def read_endpoints(run: RunDir, config: Config) -> tuple[RankContext, str]:
    """(context, name of this opening of the endpoints folder), without incarnation and checkpoint.

    Raises TrainerError when the folder names no controller within trainer.step_timeout_s.
    """
    controller, token, start = run.endpoints.read(config.trainer.step_timeout_s)
    keys, blobs = Keys.read(run.endpoints.keys), cluster_reader(config, run, token)
    return RankContext(run, controller, keys, -1, blobs, None), start


def join_run(context: RankContext, parallel: Parallel) -> RankContext:
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
