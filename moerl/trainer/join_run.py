"""Start of a trainer on its own nodes: torchrun passes only the run directory.

The endpoints folder of the run says where the controller is.  Rank 0 then takes the next
incarnation and the newest checkpoint and broadcasts them, at every start of the trainer: torchrun
restarts all ranks with the first command line when a rank ends or a node returns.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from moerl.config.schema import Config
from moerl.config.transport_rules import first_group, transport_environment
from moerl.core.rpc import Keys
from moerl.distributed.object_collectives import broadcast_value
from moerl.records.remote_blobs import cluster_reader
from moerl.runtime.run_dir import RunDir, next_incarnation
from moerl.trainer.checkpoints.checkpoint_files import newest_checkpoint
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
    mine: tuple[int, str] | None = None
    if parallel.is_first:
        found = newest_checkpoint(context.run)
        mine = next_incarnation(context.run, resume=True), str(found) if found else ""
    incarnation, checkpoint = broadcast_value(mine, tuple[int, str], parallel.control)
    newest = Path(checkpoint) if checkpoint else None
    return replace(context, incarnation=incarnation, checkpoint=newest)


def bind(config: Config) -> None:
    """Collectives of this process use the cluster's interface, and its NCCL and UCX settings."""
    interface = config.cluster.interface
    os.environ |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    os.environ |= config.cluster.environment
    os.environ |= transport_environment(config, first_group(config, "trainer"))
