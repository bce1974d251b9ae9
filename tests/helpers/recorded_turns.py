"""Turns of an episode made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moerl.core.types import Finish, PolicyVersion, SamplingParams, Segment
from moerl.episodes.finished_episode import RecordedTurn
from moerl.episodes.turn import SampledTurn

V0 = PolicyVersion(0, 0)


def turn(prompt: Sequence[int], said: Sequence[int], version: PolicyVersion = V0) -> SampledTurn:
    segment = Segment(
        "7.0.t0",
        np.asarray(said, np.int32),
        np.full(len(said), -0.1, np.float32),
        version,
        Finish.STOP,
        None, None, None, 0, 0, 0.0, 0.0,
    )  # fmt: skip
    return SampledTurn(np.asarray(prompt, np.int32), (segment,), SamplingParams(4))


def recorded(
    number: int, sampled: SampledTurn, before: RecordedTurn | None = None, origin: str = ""
) -> RecordedTurn:
    """A turn that continues `before`."""
    inherited = before.num_tokens if before else 0
    return RecordedTurn(before, inherited, origin, f"7.0.t{number}", sampled)
