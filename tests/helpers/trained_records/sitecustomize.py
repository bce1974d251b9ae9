"""Copies the records of each trained step, before the controller deletes them.

Python imports a module of this name at its start when its folder is on PYTHONPATH, so a test needs
no setting of the run.  `MOERL_TEST_TRAINED` names the folder; below it, for each run:

    RUN/INCARNATION/step-N.msgpack   groups of a step
    RUN/blobs/NAME                   their blobs, unchanged
    RUN/unnamed.jsonl                after each step: blobs in the store, and those without a group
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType

FOLDER = os.environ.get("MOERL_TEST_TRAINED", "")
HOOKED = "moerl.controller.trainer_handler"


def hook(module: ModuleType) -> None:
    added = module.TrainerHandler._add_row

    async def add_row(self, report) -> None:  # type: ignore[no-untyped-def]
        await added(self, report)
        if groups := self._batches.planned.get(report.step):  # not the row of an evaluation
            copy(self, report.step, groups)

    module.TrainerHandler._add_row = add_row


def copy(handler, step: int, groups: list) -> None:  # type: ignore[no-untyped-def]
    from moerl.core.serialization import encode_value
    from moerl.records.header_check import group_uris

    run, blobs = Path(FOLDER) / handler._config.run.name, handler._services.blobs
    folder = run / str(handler._pool.incarnation)
    for made in (folder, run / "blobs"):
        made.mkdir(parents=True, exist_ok=True)
    for uri in group_uris(*groups):
        (run / "blobs" / uri.rpartition("/")[2]).write_bytes(blobs.read(uri))
    (folder / f"step-{step:06d}.msgpack").write_bytes(encode_value(groups))
    with (run / "unnamed.jsonl").open("a") as file:
        file.write(json.dumps(left(handler, blobs)) + "\n")


def left(handler, blobs) -> dict[str, object]:  # type: ignore[no-untyped-def]
    """Blobs in the store of this machine, and the names of those that no group refers to."""
    from moerl.records.header_check import group_uris

    partials = (*handler._producer.episodes(), *handler._scoring_stage.episodes())
    uris = group_uris(*handler._availability.trainable())
    uris = uris.union(*(partial.blob_uris() for partial in partials))
    uris |= handler._services.journal.turns.uris
    there = {path.name for path in blobs.root.iterdir()} if blobs.node else set()
    named = {uri.rpartition("/")[2] for uri in uris}
    return {"there": len(there), "unnamed": sorted(there - named)}


if FOLDER:
    from tests.helpers.after_import import after_import

    after_import(HOOKED, hook)
if os.environ.get("MOERL_TEST_LIVE"):
    from tests.helpers.live_weights import install

    install()
