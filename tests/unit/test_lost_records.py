"""An engine's host that is lost takes its records along: their groups are generated again.

With durability `shared` they are read from the run directory instead, and nothing is lost.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moerl.config.schema import SyncConfig
from moerl.controller.controller import Controller
from moerl.controller.journal.shared_groups import SharedGroups
from moerl.core.messages import Plan, TakeRecords
from moerl.core.types import EpisodeGroup
from moerl.records.header_check import group_uris
from moerl.records.range_server import RangeServer
from moerl.records.remote_blobs import ClusterBlobs
from tests.helpers.controllers import CONFIG, PublishingTrainer, make, running, with_ref_models
from tests.helpers.patience import patience
from tests.helpers.stub_engine import SealingEngine

LOST_S = 0.3
# Updates go to the engine that will be lost only, so the groups after them start there: nothing may
# start on the weights of the other one, which are too old.
LOST_ONLY = (0,)


NODE = """
import sys, time
from pathlib import Path
from moerl.records.range_server import RangeServer
print(RangeServer(Path(sys.argv[1]), "127.0.0.1", 0, "t").node, flush=True)
time.sleep(600)
"""


class RecordNode:
    """An engine with a store of its own, which a process of its own serves."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", NODE, str(folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.name = self.process.stdout.readline().strip()
        self.folder, self.store = folder, ClusterBlobs(folder, self.name, "t")
        self.engine = SealingEngine(self.store)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[RecordNode, RecordNode]]:
    """The records of engine 0, which are lost, and of engine 1."""
    made = RecordNode(tmp_path / "0"), RecordNode(tmp_path / "1")
    yield made
    for node in made:
        node.end()


@pytest.mark.parametrize("how", ["node", "store"])
async def test_the_run_goes_on_without_them(
    how: str, tmp_path: Path, nodes: tuple[RecordNode, RecordNode]
) -> None:
    """The node ends, or comes back with an empty store; the other engine finishes the run."""
    lost, kept = nodes
    config = replace(CONFIG, sync=SyncConfig(timeout_s=LOST_S))
    reader = ClusterBlobs(tmp_path / "none", "", "t")
    more = {"more_engines": (kept.engine,), "blobs": reader, "moe_layers": 1}
    controller, reports = make(tmp_path, lost.engine, config, **more)
    trainer = PublishingTrainer(controller, LOST_ONLY)
    planned: set[int] = set()  # before the loss: trained, or planned one step ahead

    async def work() -> None:
        await trainer.hello()
        await trainer.step()
        while not (doomed := at(controller, lost)):
            await asyncio.sleep(0.005)
        planned.update(group.group_id for group in controller.context.batches.groups())
        controller.engine_lost(0)
        trainer.engines = (1,)
        if how == "node":
            lost.end()
        else:
            shutil.rmtree(lost.folder)
        begin = time.monotonic()
        while trainer.version.step < 4:
            await trainer.step()
        assert doomed <= {group.group_id for group in trainer.groups[2:]}
        if how == "node":
            assert time.monotonic() - begin > LOST_S, "it was given no time to come back"

    await running(controller, work())
    ids = [group.group_id for group in trainer.groups]
    assert sorted(ids) == list(range(8)), "each group once, none lost"
    dropped = sum(report.metrics["async/dropped_lost_groups"] for report in reports)
    assert dropped >= 1
    later = [group for group in trainer.groups if group.group_id not in planned]
    assert len(later) >= 4
    named = {uri for group in later for uri in group_uris(group)}
    assert not any(lost.name in uri for uri in named), "a plan names records that are lost"


@pytest.mark.parametrize("how", ["node", "store"])
async def test_shared_records_outlive_their_node(
    how: str, tmp_path: Path, nodes: tuple[RecordNode, RecordNode]
) -> None:
    """The same loss with durability `shared`: no group is generated again, all can be read."""
    lost, kept = nodes
    folder = tmp_path / "segments"
    config = replace(CONFIG, sync=SyncConfig(timeout_s=600.0))  # nobody waits that long
    reader = ClusterBlobs(tmp_path / "none", "", "t", copies=folder)
    more = {"more_engines": (kept.engine,), "blobs": reader, "moe_layers": 1}
    controller, reports = make(tmp_path, lost.engine, config, segments=SharedGroups(folder), **more)
    trainer = PublishingTrainer(controller, LOST_ONLY)
    rank = ClusterBlobs(tmp_path / "rank", "", "t", copies=folder)

    async def work() -> None:
        await trainer.hello()
        await trainer.step()
        stage = controller.scoring_stage
        while not (doomed := ready_at(controller, lost)) or stage.finishing:
            await asyncio.sleep(0.001)  # what is being copied would wait for its node
        sealed = {uri: lost.store.read(uri) for g in doomed.values() for uri in group_uris(g)}
        controller.engine_lost(0)
        trainer.engines = (1,)
        if how == "node":
            lost.end()
        shutil.rmtree(lost.folder)
        assert {uri: await asyncio.to_thread(rank.read, uri) for uri in sealed} == sealed
        for rollout in (rollout for group in doomed.values() for rollout in group.rollouts()):
            rows = await asyncio.to_thread(rank.load, rollout.routing[0].ids)
            assert rows[..., 1].all()
        while trainer.version.step < 4:
            await trainer.step()
        trained = {group.group_id: group for group in trainer.groups}
        assert doomed.keys() <= trained.keys()
        assert all(trained[i] is group for i, group in doomed.items()), "generated again"

    await running(controller, work())
    assert sorted(group.group_id for group in trainer.groups) == list(range(8))
    rows = [report.metrics for report in reports]
    assert sum(row["async/dropped_lost_groups"] for row in rows) == 0
    assert sum(row["async/copied_groups"] for row in rows) >= 1
    assert rows[0]["async/copied_groups"] == 0


async def test_reference_ranks_are_not_given_what_is_lost(
    tmp_path: Path, nodes: tuple[RecordNode, RecordNode]
) -> None:
    lost, kept = nodes
    config = replace(with_ref_models(tmp_path), sync=SyncConfig(timeout_s=LOST_S))
    reader = ClusterBlobs(tmp_path / "none", "", "t")
    more = {"more_engines": (kept.engine,), "blobs": reader, "moe_layers": 1}
    controller, _ = make(tmp_path, lost.engine, config, **more)
    trainer = PublishingTrainer(controller, (0, 1))

    async def work() -> None:
        await trainer.hello()
        while not (doomed := at(controller, lost)):
            await asyncio.sleep(0.005)
        controller.engine_lost(0)
        lost.end()
        reply = await controller.handle(TakeRecords(0, 1, 20.0))
        assert isinstance(reply, Plan)
        named = {uri for group in reply.plan.groups for uri in group_uris(group)}
        assert named
        assert not any(lost.name in uri for uri in named)
        assert not at(controller, lost), f"{doomed} are generated again"

    await running(controller, work())


def at(controller: Controller, node: RecordNode) -> set[int]:
    """Groups in the line with records in the store of a node."""
    return set(ready_at(controller, node))


def ready_at(controller: Controller, node: RecordNode) -> dict[int, EpisodeGroup]:
    prefix = f"blob://{node.name}/"
    return {
        group.group_id: group
        for group in controller.context.buffer.ready()
        if any(uri.startswith(prefix) for uri in group_uris(group))
    }


def test_a_node_that_comes_back_in_time_loses_nothing(tmp_path: Path) -> None:
    server = RangeServer(tmp_path / "node", "127.0.0.1", 0, "t")
    (ref,) = ClusterBlobs(tmp_path / "node", server.node, "t").seal("a", [np.zeros(9, np.uint8)])
    reader = ClusterBlobs(tmp_path / "none", "", "t")
    host, _, port = server.node.rpartition(":")
    server.close()
    back = threading.Timer(0.5, lambda: RangeServer(tmp_path / "node", host, int(port), "t"))
    back.start()
    assert reader.missing([ref.uri], patience_s=30.0) == set()
    begin = time.monotonic()
    gone = "blob://127.0.0.1:9/x"
    assert reader.missing([gone, ref.uri], patience_s=0.5) == {gone}
    assert time.monotonic() - begin >= 0.5
    begin = time.monotonic()
    assert reader.missing([gone], patience_s=600.0) == {gone}
    assert time.monotonic() - begin < patience(300), "it was waited for again"
