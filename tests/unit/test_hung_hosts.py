"""An engine host that answers nothing any more, and calls whose asker is gone.

Neither stops the others, and no record stays in a store that nobody names.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from moerl.controller import engine_calls, engine_pool
from moerl.core.errors import EngineError
from moerl.core.messages import AbortUpdate
from moerl.core.types import PolicyVersion
from moerl.records import BlobStore
from moerl.records.header_check import group_uris
from tests.helpers.controllers import CONFIG, make, running, train
from tests.helpers.patience import patience
from tests.helpers.stub_engine import SealingEngine, StubEngine


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_calls, "ANSWER_S", 0.05)


async def test_a_host_that_hangs_does_not_stop_the_trainer(tmp_path: Path) -> None:
    hung = StubEngine(number=1)
    controller, reports = make(tmp_path, StubEngine(), more_engines=(hung,))

    async def work() -> list:
        await train(controller, 1)
        # it has nothing that would be waited for
        controller.context.pool.engines[1].draining = True
        hung.is_hung = True
        return await train(controller, 4, start=PolicyVersion(1, 1), consumed=(0, 1))

    plans = await running(controller, work())
    assert len(plans) == 3
    assert [report.step for report in reports] == [0, 1, 2, 3]


async def test_a_message_to_a_host_that_hangs_has_a_deadline(tmp_path: Path) -> None:
    hung = StubEngine(number=1)
    controller, _ = make(tmp_path, StubEngine(), more_engines=(hung,))

    async def work() -> None:
        hung.is_hung = True
        message = AbortUpdate(1, PolicyVersion(0, 1), "no more", timeout_s=0.05)
        with pytest.raises(EngineError, match="engine 1: no answer to AbortUpdate within"):
            await controller.handle(message)

    await running(controller, work())


async def test_a_new_controller_does_not_wait_for_a_host_that_hangs(tmp_path: Path) -> None:
    hung = StubEngine(number=1)
    hung.is_hung = True
    controller, _ = make(tmp_path, StubEngine(), more_engines=(hung,), trainer_alive=True)
    await asyncio.wait_for(controller.rejoin(()), patience(5.0))
    assert controller.context.pool.engines[1].phase == engine_pool.EnginePhase.RESTING
    await controller.stop()


def nameless(store: BlobStore, *controllers) -> set[str]:
    """Blobs that no group names, in the line, planned or trained."""
    groups = [group for controller in controllers for group in controller._availability.trainable()]
    kept = {uri.rpartition("/")[2] for group in groups for uri in group_uris(group)}
    return {path.name for path in store.root.iterdir()} - kept


@pytest.mark.parametrize("how", ["late", "refused"])
async def test_records_that_are_not_taken_leave_the_store(tmp_path: Path, how: str) -> None:
    store = BlobStore(tmp_path / "blobs", "n")
    wrong_id = None if how == "late" else lambda segment: replace(segment, rollout_id="another")
    engine = SealingEngine(store, spoil=wrong_id, num_spoiled=1)
    rollout = replace(CONFIG.rollout, progress_timeout_s=0.2)
    config = replace(CONFIG, rollout=rollout)
    controller, reports = make(tmp_path, engine, config, blobs=store, moe_layers=1)
    if how == "late":
        engine.open.clear()
        asyncio.get_running_loop().call_later(0.5, engine.open.set)

    async def work() -> None:
        await train(controller, 4)
        while nameless(store, controller):
            await asyncio.sleep(0.01)

    with contextlib.suppress(TimeoutError):
        await running(controller, asyncio.wait_for(work(), patience(5.0)))
    assert not nameless(store, controller)
    assert len(reports) == 4
    assert how == "late" or reports[-1].metrics["refused/rollout_id"] == 1


async def test_a_new_controller_says_which_records_it_knows(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs", "n")
    engine = SealingEngine(store)
    first, _ = make(tmp_path, engine, blobs=store, moe_layers=1)
    await running(first, train(first, 2))
    second, _ = make(tmp_path, engine, blobs=store, moe_layers=1, trainer_alive=True)
    await second.rejoin(())
    known = {uri for group in second._availability.trainable() for uri in group_uris(group)}
    assert known
    assert set(engine.kept or ()) == known
    await second.stop()
