"""An engine host that answers nothing any more, and calls whose asker is gone.

Neither stops the others, and no record stays in a store that nobody names.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moerl.controller import engine_calls, engine_pool
from moerl.controller.rollout_builder import group_uris
from moerl.core.errors import EngineError, RecordError
from moerl.core.messages import AbortUpdate, EngineStatus, EngineVersion, SessionMessage
from moerl.core.types import GenerateRequest, PolicyVersion, RoutingBlob, Segment
from moerl.records import BlobStore
from tests.helpers.patience import patience
from tests.unit.test_controller import CONFIG, StubEngine, make, running, train


class Hung(StubEngine):
    """Answers nothing at all once `hangs` is set."""

    hangs = False

    async def _maybe(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Segment | RecordError]:
        await self._maybe()
        return await super().generate(requests)

    async def status(self) -> EngineStatus:
        await self._maybe()
        return replace(await super().status(), engine=1)

    async def session(self, message: SessionMessage) -> EngineVersion:
        await self._maybe()
        return EngineVersion(self.version, "")

    async def interrupt(self) -> None:
        await self._maybe()

    async def forget(self, kept: Sequence[str] | None, life: int) -> None:
        await self._maybe()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (engine_pool, engine_calls):
        monkeypatch.setattr(module, "ANSWER_S", 0.05)


def test_a_host_that_hangs_does_not_stop_the_trainer(tmp_path: Path) -> None:
    async def body() -> None:
        hung = Hung()
        controller, reports = make(tmp_path, StubEngine(), more_engines=(hung,))

        async def work() -> list:
            await train(controller, 1)
            # it has nothing that would be waited for
            controller.context.pool.members[1].draining = True
            hung.hangs = True
            return await train(controller, 4, start=PolicyVersion(1, 1), consumed=(0, 1))

        plans = await running(controller, work())
        assert len(plans) == 3
        assert [report.step for report in reports] == [0, 1, 2, 3]

    asyncio.run(body())


def test_a_message_to_a_host_that_hangs_has_a_deadline(tmp_path: Path) -> None:
    async def body() -> None:
        hung = Hung()
        controller, _ = make(tmp_path, StubEngine(), more_engines=(hung,))

        async def work() -> None:
            hung.hangs = True
            message = AbortUpdate(1, PolicyVersion(0, 1), "no more", timeout_s=0.05)
            with pytest.raises(EngineError, match="engine 1: no answer to AbortUpdate within"):
                await controller.handle(message)

        await running(controller, work())

    asyncio.run(body())


def test_a_new_controller_does_not_wait_for_a_host_that_hangs(tmp_path: Path) -> None:
    async def body() -> None:
        hung = Hung()
        hung.hangs = True
        controller, _ = make(tmp_path, StubEngine(), more_engines=(hung,), trainer_alive=True)
        await asyncio.wait_for(controller.rejoin(()), patience(5.0))
        assert controller.context.pool.members[1].phase == engine_pool.EnginePhase.RESTING
        await controller.stop()

    asyncio.run(body())


class Sealing(StubEngine):
    """Seals one routing record per reply in the store that the controller reads."""

    def __init__(self, store: BlobStore) -> None:
        super().__init__()
        self.store, self.wrong = store, False

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Segment | RecordError]:
        # as a host in a process of its own: an asker that does not wait ends nothing there
        return await asyncio.shield(asyncio.ensure_future(super().generate(requests)))

    def _reply(self, request: GenerateRequest, version: PolicyVersion) -> Segment:
        segment = super()._reply(request, version)
        assert isinstance(segment, Segment)
        begin, end = request.rows_from, request.num_tokens + len(segment.output_ids) - 1
        rows = np.zeros((1, end - begin, 2), np.uint8)
        rows[..., 1] = 1
        (ref,) = self.store.seal(f"{request.rollout_id}-{len(self.requests)}-{begin}", [rows])
        name = "another" if self.wrong else segment.rollout_id
        self.wrong = False
        blob = RoutingBlob(ref, begin, end, version, (0,), 4)
        return replace(segment, rollout_id=name, routing=blob)


def nameless(store: BlobStore, *controllers) -> set[str]:
    """Blobs that no group names, in the line, planned or trained."""
    groups = [group for controller in controllers for group in controller._availability.trainable()]
    kept = {uri.rpartition("/")[2] for group in groups for uri in group_uris(group)}
    return {path.name for path in store.root.iterdir()} - kept


@pytest.mark.parametrize("how", ["late", "refused"])
def test_records_that_are_not_taken_leave_the_store(tmp_path: Path, how: str) -> None:
    async def body() -> None:
        store = BlobStore(tmp_path / "blobs", "n")
        engine = Sealing(store)
        rollout = replace(CONFIG.rollout, progress_timeout_s=0.2)
        config = replace(CONFIG, rollout=rollout)
        controller, reports = make(tmp_path, engine, config, blobs=store, moe_layers=1)
        if how == "late":
            engine.open.clear()
            asyncio.get_running_loop().call_later(0.5, engine.open.set)
        else:
            engine.wrong = True

        async def work() -> None:
            await train(controller, 4)
            while nameless(store, controller):
                await asyncio.sleep(0.01)

        with contextlib.suppress(TimeoutError):
            await running(controller, asyncio.wait_for(work(), patience(5.0)))
        assert not nameless(store, controller)
        assert len(reports) == 4
        assert how == "late" or reports[-1].metrics["refused/rollout_id"] == 1

    asyncio.run(body())


def test_a_new_controller_says_which_records_it_knows(tmp_path: Path) -> None:
    async def body() -> None:
        store = BlobStore(tmp_path / "blobs", "n")
        engine = Sealing(store)
        first, _ = make(tmp_path, engine, blobs=store, moe_layers=1)
        await running(first, train(first, 2))
        second, _ = make(tmp_path, engine, blobs=store, moe_layers=1, trainer_alive=True)
        await second.rejoin(())
        known = {uri for group in second._availability.trainable() for uri in group_uris(group)}
        assert known
        assert set(engine.kept or ()) == known
        await second.stop()

    asyncio.run(body())
