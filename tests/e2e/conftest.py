"""One SGLang server for the files that play scenarios on the same settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.helpers.replay_scenario import World

_HOOK = Path(__file__).parents[1] / "helpers" / "late_scheduler"


@pytest.fixture(scope="session")
def engine_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A server of three versions of a tiny model; take `fresh()` of it."""
    from moerl.config.schema import EngineConfig
    from tests.helpers.replay_scenario import CHUNK, LATE, A, World

    root = tmp_path_factory.mktemp("engine_world")
    args = {"chunked_prefill_size": CHUNK}
    world = World(root, EngineConfig(args=args, max_total_tokens=16384))
    folders = [str(_HOOK), str(_HOOK.parents[2]), os.environ.get("PYTHONPATH", "")]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
            patch.setenv("MOERL_TEST_LATE", str(root / LATE))
            world.run(world.host.start(A), 240.0)
        yield world
    finally:
        world.run(world.host.stop())
        world.loop.close()
