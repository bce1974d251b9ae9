"""One SGLang server for the files that play scenarios on the same settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.helpers.replay_scenario import World
    from tests.helpers.warm_engines import WarmEngines


@pytest.fixture(scope="session")
def warm_engines() -> Iterator[WarmEngines]:
    """A process that has SGLang loaded, for servers that are forks of it."""
    from tests.helpers.warm_engines import WarmEngines

    warm = WarmEngines()
    yield warm
    warm.close()


@pytest.fixture(scope="session")
def engine_world(
    tmp_path_factory: pytest.TempPathFactory, warm_engines: WarmEngines
) -> Iterator[World]:
    """A server of three versions of a tiny model; take `fresh()` of it."""
    from moerl.config.schema import EngineConfig
    from tests.helpers import late_scheduler
    from tests.helpers.replay_scenario import CHUNK, LATE, A, World

    root = tmp_path_factory.mktemp("engine_world")
    args = {"chunked_prefill_size": CHUNK}
    world = World(root, EngineConfig(args=args, max_total_tokens=16384))
    try:
        with pytest.MonkeyPatch.context() as patch, warm_engines.serving():
            patch.setenv(late_scheduler.VARIABLE, str(root / LATE))
            world.run(world.host.start(A), 240.0)
        yield world
    finally:
        world.run(world.host.stop())
        world.loop.close()
