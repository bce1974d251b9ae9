"""A publish on one GPU: snapshot and packing beside training, verify, commit, deltas."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from moerl.core.types import PolicyVersion
from tests.helpers.device_figures import Figure, on_double
from tests.helpers.device_publish import OneRank
from tests.helpers.device_trainer import LARGE, TINY, Size, make_learner, make_plan, seconds_of

V1, V2 = PolicyVersion(0, 1), PolicyVersion(0, 2)


class World:
    """A learner that has made a step, with the tensors that it publishes."""

    def __init__(self, size: Size, folder: Path) -> None:
        self.size, self.learner = size, make_learner(size, folder)
        self.plan = make_plan(size, self.learner)
        seconds_of(self.learner, self.plan, 1)
        self.live = self.learner.model.tensors

    def copy(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.live.items()}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(TINY if on_double() else LARGE, tmp_path_factory.mktemp("world"))


def test_snapshot_and_packing_beside_a_step(world: World, figure: Figure) -> None:
    """The version is that of its moment, whatever the step changes after it."""
    ends = OneRank(world.size.spec(), "shm")
    alone, _ = seconds_of(world.learner, world.plan, 1)
    for name in ("first snapshot, with the page-locking of its memory", "snapshot"):
        begin = time.perf_counter()
        ends.snapshot.store(world.live, V1)
        ends.snapshot.wait()
        figure(name, time.perf_counter() - begin, "s")
    num_bytes = sum(tensor.nbytes for tensor in world.live.values())
    figure("snapshot, bytes", num_bytes / 1e9, "GB")
    before = world.copy()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    ends.snapshot.store(world.live, V2)
    world.learner.gradients(world.plan)
    ends.snapshot.before_write()
    world.learner.optimizer.step()
    torch.cuda.synchronize()
    figure("a step alone", alone, "s")
    figure("a step with a snapshot beside it", time.perf_counter() - begin, "s")
    published = ends.publish()
    assert ends.differing(before) == []
    assert ends.differing(world.live), "control: the step changed the weights"
    figure("packed and sent", published.num_bytes / published.send_s / 1e9, "GB/s")
    ends.close()


def test_commit(world: World, figure: Figure) -> None:
    """Staged bytes become the served weights in one pause."""
    ends = OneRank(world.size.spec(), "shm")
    ends.snapshot.store(world.live, V1)
    ends.publish()
    seconds_of(world.learner, world.plan, 1)
    ends.snapshot.store(world.live, V2)
    again = ends.publish()  # into a known staging buffer, as in every step of a run
    assert ends.differing(world.live) == []
    figure("bytes", again.num_bytes / 1e9, "GB")
    figure("send", again.send_s, "s")
    figure("verify", again.verify_s, "s")
    figure("pause of the commit", again.commit_s, "s")
    ends.close()


def test_delta(world: World, figure: Figure) -> None:
    """The second version travels as what one step changed in bf16."""
    ends = OneRank(world.size.spec(), "shm", delta=True)
    ends.snapshot.store(world.live, V1)
    whole = ends.publish()
    seconds_of(world.learner, world.plan, 1)
    ends.snapshot.store(world.live, V2)
    delta = ends.publish()
    assert ends.differing(world.live) == []
    assert delta.num_bytes < whole.num_bytes
    figure("a delta, of all bytes", 100 * delta.num_bytes / whole.num_bytes, "%")
    figure("send of a delta", delta.send_s, "s")
    figure("verify of a delta", delta.verify_s, "s")
    ends.close()
