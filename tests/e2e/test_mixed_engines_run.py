"""Engines of different tensor-parallel sizes in one run, real Megatron ranks and SGLang servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from moerl.core.types import PolicyVersion
from tests.helpers.sync_world import World

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]


def test_each_size_holds_what_sglang_would_have_loaded(tmp_path: Path) -> None:
    """One publish to tp 1 and tp 2; the oracle is SGLang's own loader at either size."""
    world = World(tmp_path, engines=2, tp=1, tp_each=(1, 2))
    try:
        start = [world.checksums(engine) for engine in (0, 1)]
        assert [len(ranks) for ranks in start] == [1, 2]
        world.done(world.publish())
        last = world.publish()
        metrics = world.done(last)
        assert metrics["async/sync_engines_behind"] == 0
        for engine in (0, 1):
            assert world.holds(engine).version == last.version
            assert world.generate(engine).version == last.version
            served = world.checksums(engine)
            assert served != start[engine]
            assert world.load_folder(engine, PolicyVersion(0, 1)) != served, "the oracle sees it"
            assert world.load_folder(engine, last.version) == served
    finally:
        world.end()
