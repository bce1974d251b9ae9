"""The controller keeps the records of a step that is not finite, and says where."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from moerl.audit.dumps import groups_in
from moerl.controller import trainer_handler
from moerl.core.messages import BadStep, Ok
from moerl.records import BlobStore
from tests.helpers.controllers import CONFIG, make, running, train
from tests.helpers.stub_engine import SealingEngine


@pytest.mark.parametrize("case", ["named", "unknown", "failing"])
def test_the_groups_of_a_bad_step_are_kept(case: str, tmp_path: Path) -> None:
    asyncio.run(keep(case, tmp_path))


async def keep(case: str, tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path / "blobs", "n")
    controller, reports = make(tmp_path, SealingEngine(blobs), CONFIG, blobs=blobs, moe_layers=1)
    folder = tmp_path / "run" / "bad_steps"
    if case == "failing":
        folder.parent.write_text("a file in the way")
    handler = controller.trainer
    handler._services = replace(handler._services, bad_steps=folder)
    planned: list[int] = []

    async def ends(step: int) -> None:
        if step != 1:
            return
        groups = controller.context.batches.planned[step]
        planned.extend(group.group_id for group in groups)
        rollouts = (groups[0].rollouts()[0].rollout_id,) if case == "named" else ()
        bad = BadStep(step, 1, "step 1: the loss is nan", rollouts)
        assert await controller.handle(bad) == Ok()

    await running(controller, train(controller, 4, ends=ends))
    assert [report.step for report in reports] == [0, 1, 2, 3], "the run goes on"
    said = controller.take_notices()
    path = folder / "0.000001.1.step"
    if case == "failing":
        assert [line.startswith("the records of a bad step failed") for line in said] == [
            True,
            False,
        ]
        assert said[1] == "step 1: the loss is nan"
        return
    assert said == [f"step 1: the loss is nan; for `moerl mismatch --records`: {path}"]
    contents = groups_in(path)
    assert len(planned) > 1
    kept = [content.group.group_id for content in contents]
    assert kept == (planned[:1] if case == "named" else planned)
    assert all(content.blobs for content in contents), "with their routes"


def test_text_that_cannot_be_shown_costs_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ValueError("a token without text")

    monkeypatch.setattr(trainer_handler, "samples_of", fails)
    blobs = BlobStore(tmp_path / "blobs", "n")

    async def body() -> list[str]:
        controller, reports = make(
            tmp_path, SealingEngine(blobs), CONFIG, blobs=blobs, moe_layers=1
        )
        await running(controller, train(controller, 3))
        assert [report.step for report in reports] == [0, 1, 2]
        return controller.take_notices()

    said = asyncio.run(body())
    assert len(said) == 1
    assert "the text of sample rollouts failed: ValueError: a token without text" in said[0]
