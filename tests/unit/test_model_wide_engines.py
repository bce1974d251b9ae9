"""Engines that span nodes: placement, refusals, arguments of each node, and where ranks meet."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import rendezvous

from moerl.config import load_config, resolve
from moerl.config.checks import check
from moerl.config.clusters import placement
from moerl.config.schema import EngineConfig, ReplayConfig
from moerl.core.errors import EngineError
from moerl.core.messages import Message, Ok
from moerl.core.types import PolicyVersion
from moerl.distributed.store_server import StoreServer
from moerl.engine import node_span
from moerl.engine.host import host as host_module
from moerl.engine.host.host import EngineContext, EngineHost
from moerl.engine.node_span import ALONE, NodeSpan
from moerl.planning.dry_run import process_table
from moerl.records.blob_store import BlobStore
from moerl.runtime.run_dir import RunDir
from tests.helpers.patience import patience
from tests.helpers.scripted_host import SHAPE, V0, ScriptedClient, ScriptedServer

WIDE = ("engine.count=3", "engine.tp=8", "engine.nodes=2", "cluster.nodes.engine.count=4")


def test_equal_parts_lie_on_different_nodes() -> None:
    config = resolve(load_config("qwen3-30b-a3b", WIDE))
    check(config, starts=False)
    slots = placement(config).engines
    assert [(slot.engine, slot.part, slot.node.name, slot.devices) for slot in slots] == [
        (0, 0, "engine-0", (0, 1, 2, 3)),
        (0, 1, "engine-1", (0, 1, 2, 3)),
        (1, 0, "engine-0", (4, 5, 6, 7)),
        (1, 1, "engine-1", (4, 5, 6, 7)),
        (2, 0, "engine-2", (0, 1, 2, 3)),
        (2, 1, "engine-3", (0, 1, 2, 3)),
    ]
    table = str(process_table(config, placement(config)))
    assert "tp 8 over 2 nodes" in table
    assert "part (Ray)" in table


def test_every_node_starts_its_ranks_of_one_process_group() -> None:
    assert (ALONE.arguments(), ALONE.environment()) == ({}, {})
    assert list(ALONE.ranks(4)) == [0, 1, 2, 3]
    server = StoreServer("127.0.0.1")
    try:
        head = NodeSpan(0, 2, "10.0.0.1:29000", server.server_address)
        second = replace(head, node=1)
        assert [list(span.ranks(4)) for span in (head, second)] == [[0, 1], [2, 3]]
        assert [span.arguments()["node_rank"] for span in (head, second)] == [0, 1]
        assert head.environment() == second.environment()
        assert "10.0.0.1" not in json.dumps(head.environment()), "torch's own store is not used"
    finally:
        server.close()


def test_ranks_meet_in_the_store_of_the_host() -> None:
    server = StoreServer("127.0.0.1")
    try:
        environment = NodeSpan(0, 2, "h:1", server.server_address).environment()
        node_span.register(environment)
        url = environment["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"]
        found = [next(iter(rendezvous(url, rank, 2))) for rank in range(2)]
        assert [(rank, size) for _, rank, size in found] == [(0, 2), (1, 2)]
        found[0][0].set("address", "there")
        assert found[1][0].get("address") == b"there"
    finally:
        server.close()
    assert "MOERL_ENGINE_STORE" not in os.environ


# --- the host and its other nodes -----------------------------------------------------------------
class Node:
    """A follower whose server lives until `dead` is set."""

    def __init__(self, *, starts: bool = True) -> None:
        self.starts, self.spans, self.stops = starts, [], 0
        self.dead = asyncio.Event()

    async def start(self, _version: PolicyVersion, span: NodeSpan) -> None:
        self.spans.append(span)
        if not self.starts:
            raise EngineError("no room on this node")

    async def receive(self, _message: Message) -> list[Message]:
        return [Ok()]

    async def watch(self) -> None:
        await self.dead.wait()
        raise EngineError("on node 1: server was killed by signal 9")

    async def stop(self) -> None:
        self.stops += 1


@pytest.fixture
def host_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Sequence[Node]], EngineHost]:
    monkeypatch.setattr(host_module, "EngineServer", ScriptedServer)
    monkeypatch.setattr(host_module, "EngineClient", ScriptedClient)
    monkeypatch.setattr(host_module, "WATCH_S", 0.01)
    run = RunDir(tmp_path)
    run.create()
    context = EngineContext(tmp_path, SHAPE, ReplayConfig(), run, "t")
    store = BlobStore(tmp_path / "blobs", "n")
    return lambda nodes: EngineHost(0, EngineConfig(), context, store, nodes)


async def test_the_death_of_any_node_ends_the_engine(host_of: Callable[..., EngineHost]) -> None:
    nodes = [Node(), Node()]
    host = host_of(nodes)
    await host.start(V0)
    assert [span.node for node in nodes for span in node.spans] == [1, 2]
    nodes[1].dead.set()
    with pytest.raises(EngineError, match="on node 1: server was killed by signal 9"):
        await asyncio.wait_for(host.watch(), patience(5))
    before = [node.stops for node in nodes]
    nodes[1].dead.clear()
    await host.start(V0)
    assert [node.stops for node in nodes] == [stops + 1 for stops in before]
    first, second = (node.spans[1].store for node in nodes)
    assert first == second != nodes[0].spans[0].store, "ranks of an older start are elsewhere"
    await host.stop()


async def test_no_node_keeps_a_server_when_one_does_not_start(
    host_of: Callable[..., EngineHost],
) -> None:
    nodes = [Node(), Node(starts=False)]
    with pytest.raises(EngineError, match="no room on this node"):
        await host_of(nodes).start(V0)
    assert all(node.stops for node in nodes)
