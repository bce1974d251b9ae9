"""Episodes of several turns with random replies of an engine, sealed in a real blob store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moerl.core.types import Finish, PolicyVersion, Prompt
from moerl.records.blob_store import BlobStore
from tests.helpers.scripted_episode import ScriptedEpisode
from tests.helpers.synthetic import RolloutSpec, random_reply

V0 = PolicyVersion(0, 0)


@dataclass(frozen=True, slots=True)
class Call:
    """One engine call: tokens sampled under a version; a call that is aborted is resumed."""

    num_sampled: int
    version: PolicyVersion = V0
    aborted: bool = False


def random_episode(
    store: BlobStore,
    name: str,
    prompt: Prompt,
    turns: Sequence[Sequence[Call]],
    spec: RolloutSpec,
    *,
    audit: bool = False,
    num_reply: int = 3,
) -> ScriptedEpisode:
    """A finished episode; the environment says `num_reply` tokens between turns."""
    rng = np.random.default_rng([len(name), *name.encode()])
    episode = ScriptedEpisode(name, prompt, spec.sampling, audit=audit)
    for number, calls in enumerate(turns):
        if number:
            episode.reply(rng.integers(0, spec.shape.vocab_size, num_reply).tolist())
        for call in calls:
            own = replace(spec, num_sampled=call.num_sampled, versions=(call.version,))
            finish = Finish.ABORT if call.aborted else Finish.STOP
            episode.add(random_reply(store, rng, episode.request(), own, finish))
    assert episode.turn.finished
    return episode
