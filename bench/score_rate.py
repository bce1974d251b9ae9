"""Scores per second of a trivial reward, in each isolation.

    python bench/score_rate.py [--repeats 5] [--scores 2000]

The kinds take turns, so that a busy machine slows all of them; a line holds the median and the
range.  `bwrap` is left out where it cannot be had.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Literal

from moerl.config.schema import TaskConfig
from moerl.core.errors import ConfigError
from moerl.core.types import Episode, Prompt
from moerl.scoring import ProcessScorer

GROUP = 8
IN_FLIGHT = 32  # groups
PROMPT = Prompt(1, (1,), "4827=", "2478", {})


def rate(isolation: Literal["process", "bwrap"], scores: int) -> float:
    """Scores per second of one worker, without its start."""
    scorer = ProcessScorer(TaskConfig(isolation=isolation), 1, 10.0)

    async def group() -> None:
        await scorer.score(PROMPT, [Episode("", ())] * GROUP, [["2478"]] * GROUP)

    async def measure() -> float:
        await group()  # starts the worker
        rounds = max(1, scores // (GROUP * IN_FLIGHT))
        start = time.perf_counter()
        for _ in range(rounds):
            await asyncio.gather(*(group() for _ in range(IN_FLIGHT)))
        return rounds * GROUP * IN_FLIGHT / (time.perf_counter() - start)

    try:
        return asyncio.run(measure())
    finally:
        scorer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scores", type=int, default=2000)
    options = parser.parse_args()
    rates: dict[Literal["process", "bwrap"], list[float]] = {"process": [], "bwrap": []}
    for _ in range(options.repeats):
        for kind, found in rates.items():
            try:
                found.append(rate(kind, options.scores))
            except ConfigError as error:
                print(f"{kind}: {error}")
    for kind, found in rates.items():
        if found:
            median = statistics.median(found)
            print(f"{kind:8} {median:6.0f} scores/s ({min(found):.0f} .. {max(found):.0f})")


if __name__ == "__main__":
    main()
