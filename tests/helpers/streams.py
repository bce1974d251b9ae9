"""A small stream of random rollouts, written as a controller does, and changes in a copy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from moerl.controller.journal.stream_writer import StreamWriter
from moerl.core.messages import Hello, StepDone
from moerl.core.serialization import decode_value, encode_value
from moerl.core.types import (
    Episode,
    EpisodeGroup,
    ModelShape,
    PolicyVersion,
    Prompt,
    SamplingParams,
    Score,
    Turn,
)
from moerl.data.batching import plan_batch
from moerl.records import BlobStore
from moerl.records.blob_copies import copied_blobs_of, seal
from moerl.records.stream_files import StreamDir
from tests.helpers.synthetic import RolloutSpec, random_rollout

SHAPE = ModelShape(50, 2, (0, 1), 8, top_k=2)
SETTINGS = {"replay": {"routing": "R3"}, "trainer": {"packing": True}}
START = PolicyVersion(0, 0)


def group_of(
    group_id: int, blobs: BlobStore, version: PolicyVersion, life: int = 0
) -> EpisodeGroup:
    """Two siblings with routes, masks and rewards."""
    rng = np.random.default_rng([group_id, life])
    prompt = np.array([1, 2, 3], np.int32)
    sampling = SamplingParams(6, top_k=8)
    spec = RolloutSpec(SHAPE, 6, sampling, versions=(version,))
    episodes = []
    for sibling in range(2):
        name = f"{group_id}.{sibling}"
        rollout = random_rollout(blobs, rng, f"{name}-{life}", prompt, spec)
        episodes.append(Episode(name, (Turn(rollout),), Score(float(sibling))))
    return EpisodeGroup(group_id, Prompt(group_id, (1, 2, 3), "p", None, {}), tuple(episodes))


class Writing:
    """A controller's part: trainers begin, steps of two groups are trained."""

    def __init__(self, root: Path, keep_steps: int = -1) -> None:
        self.folder = StreamDir(root / "stream")
        self.blobs = BlobStore(root / "blobs", "n")
        self.keep_steps = keep_steps
        self.open()

    def open(self) -> None:
        self.writer = StreamWriter(
            self.folder, self.blobs, SHAPE, SETTINGS, keep_steps=self.keep_steps, sync=False
        )

    def begin(self, *begins: PolicyVersion) -> None:
        self.writer.began(Hello(1, 1, begins[-1], (), begins, weights=f"w{begins[-1].step}"))

    async def plan(self, version: PolicyVersion, life: int = 0) -> list[EpisodeGroup]:
        ids = (2 * version.step, 2 * version.step + 1)
        groups = [group_of(group_id, self.blobs, version, life) for group_id in ids]
        plan = plan_batch(
            version.step, version, groups, dp_size=1, max_tokens_per_microbatch=64, packed=True
        )
        self.writer.prepare(plan)
        await self.writer.sealed(version.step)
        return groups

    async def train(self, version: PolicyVersion, life: int = 0) -> list[EpisodeGroup]:
        groups = await self.plan(version, life)
        await self.report(version, groups)
        return groups

    async def report(self, version: PolicyVersion, groups: list[EpisodeGroup]) -> None:
        after = replace(version, step=version.step + 1)
        done = StepDone(version.step, after, {"loss/grad_norm": 1.0}, "", f"w{after.step}")
        if not self.writer.has(after):
            self.writer.add(await self.writer.done(done, groups))


def small_stream(root: Path, steps: int = 3, keep_steps: int = -1) -> Writing:
    """Steps of one trainer, from the first weights on."""
    writing = Writing(root, keep_steps)
    writing.begin(START)

    async def train() -> None:
        for step in range(steps):
            await writing.train(PolicyVersion(0, step))

    asyncio.run(train())
    return writing


Content = tuple[EpisodeGroup, dict[str, bytes]]


def change_group(
    path: Path, group_id: int, change: Callable[[EpisodeGroup, dict[str, bytes]], Content]
) -> None:
    """Change a group in a step file and seal the file again, in its form."""
    parts = []
    for name, part in (copied_blobs_of(path) or {}).items():
        data = part.read()
        if name == f"group {group_id}":
            value = decode_value(zstandard.decompress(data), tuple[EpisodeGroup, dict[str, bytes]])
            changed = encode_value(change(*value))
            data = zstandard.ZstdCompressor(write_checksum=True).compress(changed)
        parts.append((name, data))
    seal(path, parts)


def remove_group(path: Path, group_id: int) -> None:
    """Seal a step file again without a group."""
    parts = {name: part.read() for name, part in (copied_blobs_of(path) or {}).items()}
    del parts[f"group {group_id}"]
    seal(path, list(parts.items()))


def with_rollout(group: EpisodeGroup, **changes: Any) -> EpisodeGroup:
    """The group with other fields of its first rollout."""
    episode = group.episodes[0]
    turn = episode.turns[0]
    changed = replace(turn, rollout=replace(turn.rollout, **changes))
    return replace(group, episodes=(replace(episode, turns=(changed,)), *group.episodes[1:]))
