"""Episodes as a reward sees them, from the texts of their turns."""

from __future__ import annotations

from moerl.core.episode_view import EpisodeView, TurnView


def view(*texts: str, name: str = "0.0") -> EpisodeView:
    """A chain of turns with these responses; token k of each is number k."""
    turns = []
    for place, text in enumerate(texts):
        parent = turns[-1].name if turns else ""
        ids = tuple(range(len(text)))
        turns.append(TurnView(f"{name}.t{place}", parent, "", text, ids, "stop"))
    return EpisodeView(name, tuple(turns))
