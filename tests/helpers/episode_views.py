"""Episodes as a reward sees them, from the texts of their turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from moerl.core.episode_view import EpisodeView, ScoreRequest, TurnView
from moerl.core.errors import ScoreError
from moerl.core.types import Prompt, Score
from moerl.scoring import ProcessScorer


def view(*texts: str, name: str = "0.0") -> EpisodeView:
    """A chain of turns with these responses; token k of each is number k."""
    turns = []
    for place, text in enumerate(texts):
        parent = turns[-1].name if turns else ""
        ids = tuple(range(len(text)))
        turns.append(TurnView(f"{name}.t{place}", parent, "", text, ids, "stop"))
    return EpisodeView(name, tuple(turns))


def score_each(scorer: ProcessScorer, prompt: Prompt, *texts: str) -> list[Score | ScoreError]:
    """Scores of responses of one turn."""
    return asyncio.run(scorer.score(asked(prompt, [view(text) for text in texts])))


def asked(prompt: Prompt, episodes: Sequence[EpisodeView]) -> list[ScoreRequest]:
    """Questions about whole episodes."""
    return [ScoreRequest(episode.name, prompt, episode) for episode in episodes]
