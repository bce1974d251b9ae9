"""An engine that answers a new controller late deletes nothing that was sealed for that controller.

Two engines of one machine share a store; the first one's server is slow, so the controller
continues without it, and the second one seals records that are admitted and planned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from moerl.config.schema import EngineConfig, ReplayConfig
from moerl.core.errors import EngineError
from moerl.core.ids import life_of, name_rollout
from moerl.core.types import Segment
from moerl.engine.host import health as gate_module
from moerl.engine.host import host as host_module
from moerl.engine.host.host import EngineContext, EngineHost
from moerl.records.blob_store import BlobStore
from moerl.records.header_check import blob_uris
from moerl.runtime.run_dir import RunDir
from tests.helpers.patience import patience
from tests.helpers.scripted_host import SHAPE, V0, ScriptedClient, ScriptedServer, ask, script

Play = Callable[[Callable[["World"], Awaitable[None]]], None]


class SlowClient(ScriptedClient):
    """Answers `abort_all` when it is allowed to."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.may_abort = asyncio.Event()
        self.may_abort.set()

    async def abort_all(self) -> None:
        await self.may_abort.wait()
        await super().abort_all()


class World:
    """Two engines and their store."""

    def __init__(self, folder: Path, run: RunDir) -> None:
        self.folder = folder
        context = EngineContext(folder, SHAPE, ReplayConfig(), run, "t")
        stores = (BlobStore(folder / "blobs", "n") for _ in range(2))
        self.slow, self.quick = (
            EngineHost(index, EngineConfig(), context, store) for index, store in enumerate(stores)
        )

    async def sealed(self, host: EngineHost, name: str) -> str:
        (segment,) = await host.generate([ask(name)])
        assert isinstance(segment, Segment)
        (uri,) = blob_uris(segment)
        return uri

    def names(self) -> set[str]:
        return {f"blob://n/{path.name}" for path in (self.folder / "blobs").iterdir()}


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    monkeypatch.setattr(host_module, "EngineServer", ScriptedServer)
    monkeypatch.setattr(host_module, "EngineClient", SlowClient)
    for module in (host_module, gate_module):
        monkeypatch.setattr(module, "WATCH_S", 0.01)
    run = RunDir(tmp_path)
    run.create()

    async def main(scenario: Callable[[World], Awaitable[None]]) -> None:
        world = World(tmp_path, run)
        for host in (world.slow, world.quick):
            await host.start(V0)
        try:
            await asyncio.wait_for(scenario(world), patience(10))
        finally:
            for host in (world.slow, world.quick):
                await host.stop()

    return lambda scenario: asyncio.run(main(scenario))


def test_a_slow_interrupt(play: Play) -> None:
    """The sweep comes after the second engine has sealed for the new controller."""

    async def scenario(world: World) -> None:
        known = await world.sealed(world.quick, name_rollout(0, 0))
        await world.sealed(world.quick, name_rollout(1, 0))  # of a group that was being made
        script(world.slow).may_abort.clear()
        late = asyncio.create_task(world.slow.forget([known], 1))
        await asyncio.sleep(0)
        await world.quick.forget([known], 1)
        fresh = await world.sealed(world.quick, name_rollout(1, 0, life=1))
        again = await world.sealed(world.quick, name_rollout(0, 0, life=0, tries=7))
        script(world.slow).may_abort.set()
        await late
        assert world.names() == {known, fresh, again}, "only what was there when it was asked"

    play(scenario)


def test_a_message_that_arrives_late(play: Play) -> None:
    """The whole host was stopped: even the listing is taken after the second engine has sealed."""

    async def scenario(world: World) -> None:
        known = await world.sealed(world.quick, name_rollout(0, 0))
        await world.sealed(world.quick, name_rollout(1, 0))
        fresh = await world.sealed(world.quick, name_rollout(1, 0, life=1))
        (world.folder / "blobs" / ".1.0.r1-0-s0.4.ab12").write_bytes(b"half of a blob")
        (world.folder / "blobs" / ".1.0-s0.4.cd34").write_bytes(b"half of an old blob")
        await world.slow.forget([known], 1)
        assert world.names() == {known, fresh, "blob://n/.1.0.r1-0-s0.4.ab12"}

    play(scenario)


def test_a_message_of_an_earlier_controller_is_ignored(play: Play) -> None:
    async def scenario(world: World) -> None:
        await world.slow.forget([], 2)
        fresh = await world.sealed(world.slow, name_rollout(1, 0, life=2))
        older = await world.sealed(world.slow, name_rollout(1, 0, life=0))
        call = asyncio.create_task(world.sealed(world.slow, name_rollout(2, 0, life=2)))
        await world.slow.forget([], 1)
        assert {fresh, older} <= world.names()
        assert await call in world.names(), "the call of the newest controller was ended"
        await world.slow.forget([], 2)
        assert older not in world.names(), "the same one may ask again"

    play(scenario)


def test_a_controller_without_a_journal_starts_from_an_empty_store(play: Play) -> None:
    """It counts from 0 again, and would ask for names that exist."""

    async def scenario(world: World) -> None:
        await world.slow.forget([], 3)
        await world.sealed(world.slow, name_rollout(1, 0, life=3))
        await world.sealed(world.slow, name_rollout(2, 0))
        await world.slow.forget([], 0)
        assert world.names() == set()

    play(scenario)


def test_a_server_that_hangs_is_not_waited_for(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "_INTERRUPT_S", 0.05)

    async def scenario(world: World) -> None:
        await world.sealed(world.slow, name_rollout(1, 0))
        script(world.slow).may_abort.clear()
        await asyncio.wait_for(world.slow.forget([], 1), patience(5))
        assert world.names() == set(), "what is dead is deleted all the same"
        with pytest.raises(EngineError, match=r"engine 0: no interrupt in 0\.05 s"):
            await world.slow.interrupt()

    play(scenario)


def test_kept_records_are_not_deleted(play: Play) -> None:
    async def scenario(world: World) -> None:
        sealed = {await world.sealed(world.slow, name_rollout(group, 0)) for group in range(3)}
        await world.slow.forget(None, 1)
        assert world.names() == sealed

    play(scenario)


def test_the_life_is_in_the_name() -> None:
    assert name_rollout(5, 2) == "5.2"
    assert name_rollout(-6, 2, 0, 3) == "-6.2.r0-3"
    for life in (0, 1, 1_764_000_000):
        assert life_of(f"blob://10.0.0.1:80/{name_rollout(7, 1, life, 2)}-s3.17") == life
    assert life_of("blob://n/eval-0.5-3.0-s0.0") == 0
