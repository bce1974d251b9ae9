"""An episode as the report shows it: each turn with its prompt.

A row that continues another shows only its new tokens, so that each token is shown once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from moerl.core.types import Array, Episode, Rollout

Decode = Callable[[Sequence[int]], str]


def shown_turns(episode: Episode, decode: Decode) -> list[dict[str, object]]:
    """The trained turns in the order of the rows; read by `moerl.observe.episode_section`."""
    forks = iter(episode.score.forks if episode.score else ())
    found: list[dict[str, object]] = []
    before = 0  # sampled tokens of earlier rows
    for place, node in enumerate(episode.turns):
        more: dict[str, object] = {"role": node.role, "fork_at": node.fork_at}
        if node.fork_at >= 0:
            more["reward"] = next(forks, None)
        found += [turn | more for turn in _turns_of(episode, place, before, decode)]
        before += node.rollout.num_sampled
    return found


def shown_graph(episode: Episode) -> list[dict[str, object]]:
    """Every requested turn, trained or not; read by `moerl.observe.episode_section`."""
    return [
        {
            "name": turn.name,
            "parent": turn.parent,
            "role": turn.role,
            "left_out": turn.left_out,
            "versions": [str(version) for version in turn.versions],
            "tokens": turn.num_sampled,
            "tools": turn.tools,
            "fork_at": turn.fork_at,
        }
        for turn in episode.graph
    ]


def _turns_of(
    episode: Episode, place: int, before: int, decode: Decode
) -> Iterator[dict[str, object]]:
    node = episode.turns[place]
    row, sampled = node.rollout, np.flatnonzero(node.rollout.loss_mask)
    continues = node.parents[-1] if node.parents else 0 if node.fork_at >= 0 else None
    parent = None if continues is None else episode.turns[continues].rollout
    shared = shown = 0 if parent is None else min(_shared(row, parent), int(sampled[0]))
    begin = 0
    for number, end in enumerate(row.ends):
        first, stop = int(sampled[begin]), int(sampled[end.end - 1]) + 1
        yield {
            "row": place,
            "continues": continues,
            "shared_tokens": shared,
            "origin": node.origins[number] if number < len(node.origins) else "",
            "context": decode(row.token_ids[shown:first].tolist()),
            "context_tokens": first - shown,
            "answer": decode(row.token_ids[first:stop].tolist()),
            "pieces": _pieces(row, begin, end.end, first, decode),
            "steps": _steps(episode, before + begin, row.token_ids[first:stop], decode),
            "finish": end.finish.value,
        }
        shown, begin = stop, end.end


def _steps(episode: Episode, begin: int, said: Array, decode: Decode) -> list[dict[str, object]]:
    """The steps of a turn that sampled the tokens `said` of an episode, from `begin` on."""
    steps = episode.score.steps if episode.score else ()
    mine = [(end + 1 - begin, reward) for end, reward in steps if 0 <= end - begin < len(said)]
    edges = [0, *(end for end, _ in mine)]
    return [
        {"text": decode(said[start:end].tolist()), "reward": reward}
        for start, (end, reward) in zip(edges, mine, strict=False)
    ]


def _shared(row: Rollout, parent: Rollout) -> int:
    """Leading tokens that both rows have."""
    size = min(row.num_tokens, parent.num_tokens)
    differ = np.flatnonzero(row.token_ids[:size] != parent.token_ids[:size])
    return int(differ[0]) if len(differ) else size


def _pieces(
    row: Rollout, begin: int, end: int, first: int, decode: Decode
) -> list[dict[str, object]]:
    """Sampled tokens begin..end, the first of which is token `first` of the row, by version."""
    edges = [begin, *(span.first for span in row.versions if begin < span.first < end), end]
    spans = [[span for span in row.versions if span.first <= at][-1] for at in edges[:-1]]
    return [
        {
            "version": str(span.version),
            "kept_kv": span.kept_kv,
            "tokens": stop - at,
            "text": decode(row.token_ids[first + at - begin : first + stop - begin].tolist()),
        }
        for span, (at, stop) in zip(spans, pairwise(edges), strict=True)
    ]
