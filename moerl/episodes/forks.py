"""Forks: other continuations of an answer, from some of its tokens on (VinePPO, pivot resampling).

The first tokens of the answer are context of its continuations.  They are prefilled again where the
prefix cache lost them, so all rows of a continuation come from the weights that sampled it.  All
continuations of one pivot have one version, or the pivot is given up.

Steps of a text, and the tokens with which they end.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

from moerl.config.schema import ForkConfig
from moerl.episodes.finished_episode import Decode, RecordedTurn
from moerl.episodes.open_episode import OpenEpisode, VersionGone


def step_ends(text: str, begin: int, separator: str, *, is_over: bool) -> list[int]:
    """Characters of a text before the end of each whole step behind `begin`.

    is_over: the rest of the text is a step, too.
    """
    found, end = [], begin
    while (at := text.find(separator, end)) >= 0:
        end = at + len(separator)
        found.append(end)
    if is_over and (end < len(text) or not text):
        found.append(len(text))
    return found


def last_token_of(ids: Sequence[int], end: int, decode: Callable[[Sequence[int]], str]) -> int:
    """The token that holds the last of the first `end` characters."""
    return bisect_left(range(1, len(ids)), end, key=lambda count: len(decode(ids[:count])))


_TRIES = 3  # of a pivot, each under the weights that are current then


def pivots_of(ids: Sequence[int], settings: ForkConfig, decode: Decode) -> list[int]:
    """Numbers of sampled tokens of an answer that its pivots keep, ascending.

    Whether a token is a pivot is known from the tokens up to it: a choice by later tokens, such as
    the length of the answer, would bias the values.
    """
    if settings.every:
        found = list(range(settings.every, len(ids), settings.every))
    else:
        ends = step_ends(decode(ids), 0, settings.separator, is_over=False)
        found = [last_token_of(ids, end, decode) + 1 for end in ends]
    return [at for at in found if at < len(ids)][: settings.pivots]


async def fork_answer(
    episode: OpenEpisode, settings: ForkConfig, decode: Decode
) -> Mapping[str, float]:
    """Sample the continuations of a single answer.  Returns counts of the episode.

    Raises as `OpenEpisode.sample`, but for VersionGone.
    """
    answer = episode.turns[-1]
    pivots = pivots_of(answer.output_ids.tolist(), settings, decode)
    works = [_continue(episode, answer, at, settings.continuations) for at in pivots]
    are_whole = await asyncio.gather(*works)
    return {"forks_given_up": float(are_whole.count(False))}


async def _continue(episode: OpenEpisode, answer: RecordedTurn, at: int, count: int) -> bool:
    """Sample the continuations of one pivot; False: its weights were replaced at each try."""
    for _ in range(_TRIES):
        wanted = episode.fork(answer, at, count)
        found = await asyncio.gather(*map(episode.sample, wanted), return_exceptions=True)
        turns = [one for one in found if isinstance(one, RecordedTurn)]
        if len(turns) == count:
            return True
        for error in found:
            if isinstance(error, BaseException) and not isinstance(error, VersionGone):
                raise error
        for turn in turns:
            episode.leave_out(turn.name, "version_gone")
    return False
